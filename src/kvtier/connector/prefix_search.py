"""How much of a request's prefix can be loaded.

It reads the manager's answers and changes nothing of its own. A full-attention group needs its leading run of
hits. A sliding-window group needs only the blocks its window covers, so it is searched from the right. Several
groups must agree on one end: full-attention groups set the upper bound, window groups may lower it, and are asked
again until none does; the end only shrinks, so this terminates.
"""

from collections.abc import Callable, Sequence

from kvtier.base import OffloadingManager, OffloadKey, ReqContext
from kvtier.connector.groups import GroupLayout, common_block_tokens

PrefixLookup = Callable[[Sequence[OffloadKey]], int | None]
WindowLookup = Callable[[Sequence[OffloadKey], int], int | None]


def maximal_prefix_lookup(
    manager: OffloadingManager, keys: Sequence[OffloadKey], req_context: ReqContext
) -> int | None:
    """Return the length of the leading run of hits.

    A key that is in flight counts as a hit while scanning, so that the keys behind it are asked for too, and
    makes the answer None.
    """
    is_pending = False
    for num_hits, key in enumerate(keys):
        answer = manager.lookup(key, req_context)
        if answer is None:
            is_pending = True
        elif not answer:
            return None if is_pending else num_hits
    return None if is_pending else len(keys)


def sliding_window_lookup(
    manager: OffloadingManager, keys: Sequence[OffloadKey], num_window_blocks: int, req_context: ReqContext
) -> int | None:
    """Return the end of the right-most run of ``num_window_blocks`` hits, else the leading run's length.

    None when any key that was met is in flight. Such a key counts as a hit while scanning: what lies left of
    a window that is coming is not needed, and asking for it would promote it for nothing.
    """
    is_pending = False
    run_length = 0
    for position in range(len(keys) - 1, -1, -1):
        answer = manager.lookup(keys[position], req_context)
        is_pending |= answer is None
        run_length = 0 if answer is False else run_length + 1
        if run_length == num_window_blocks:
            return None if is_pending else position + num_window_blocks
    return None if is_pending else run_length


def find_loadable_end(
    layouts: Sequence[GroupLayout],
    keys: Sequence[Sequence[OffloadKey]],
    num_local_tokens: int,
    max_end_tokens: int,
    look_up_prefix: PrefixLookup,
    look_up_window: WindowLookup,
) -> int | None:
    """Return how many tokens of the prefix device memory and the tiers hold together.

    Args:
        layouts: the KV groups.
        keys: for each group the keys of the request's full blocks.
        num_local_tokens: tokens that device memory holds.
        max_end_tokens: tokens beyond which nothing may be loaded.
        look_up_prefix: leading run of hits.
        look_up_window: end of the right-most run of so many hits, or the leading run.

    Returns:
        Whole blocks of every group; ``num_local_tokens`` when nothing can be loaded; None when a block that
        decides is in flight.
    """
    granularity = common_block_tokens(layouts)
    end = max_end_tokens // granularity * granularity
    is_pending = False
    full, windows = split_by_need(layouts)
    for layout in full:
        first = num_local_tokens // layout.block_tokens
        found = look_up_prefix(keys[layout.idx][first : max(first, end // layout.block_tokens)])
        is_pending |= found is None
        if found is not None:
            end = min(end, (first + found) * layout.block_tokens) // granularity * granularity
    bound = None
    while windows and end != bound and end > num_local_tokens:
        bound = end
        for layout in windows:
            first = num_local_tokens // layout.block_tokens
            window = keys[layout.idx][first : max(first, end // layout.block_tokens)]
            found = look_up_window(window, layout.num_tail_blocks or 1)
            is_pending |= found is None
            if found is not None:
                end = min(end, (first + found) * layout.block_tokens) // granularity * granularity
    if end <= num_local_tokens:
        return num_local_tokens
    return None if is_pending else end


def split_by_need(layouts: Sequence[GroupLayout]) -> tuple[list[GroupLayout], list[GroupLayout]]:
    """Return the groups that need a whole prefix, and those that need only its tail. Pure."""
    full = [layout for layout in layouts if layout.num_tail_tokens is None]
    return full, [layout for layout in layouts if layout.num_tail_tokens is not None]
