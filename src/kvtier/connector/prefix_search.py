"""How much of a request's prefix can be loaded.

A full-attention group needs its leading run of hits. A sliding-window group needs only the blocks that its window
covers, so it is searched from the right. Several groups must agree on one end: full-attention groups set the upper
bound, window groups may lower it and are searched again until none does. The end only shrinks, so this terminates.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtier.base import OffloadingManager, OffloadKey, ReqContext
from kvtier.connector.groups import GroupLayout
from kvtier.connector.jobs import TransferJobs
from kvtier.connector.planning import iterate_load_keys
from kvtier.connector.request_state import FoundPrefix, RequestState

LONE_BLOCK_TOKENS = 64
"""A last block shorter than this is not loaded alone, when the device holds everything before it: its request would
wait for a further step of the engine, which costs more than so few tokens in a step that computes anyway. Zero delays
such requests by a step; a large value computes whole blocks of 128 tokens that could be loaded."""


class SearchGroups(NamedTuple):
    """The KV groups as a search needs them.

    Attributes:
        full: those that need a whole prefix.
        windows: those that need only its tail.
        common_tokens: the smallest number of tokens that is whole blocks in every group.
        first: the one that is searched first.
    """

    full: tuple[GroupLayout, ...]
    windows: tuple[GroupLayout, ...]
    common_tokens: int
    first: GroupLayout


class PrefixSearch:
    """Searches for the requests of one scheduler half: how far each can be loaded now. Used from one thread.

    It looks up their blocks as far as the engine, the client and the features let them load. Blocks that are being
    loaded for another request are waited for and not loaded twice.

    Args:
        layouts: the KV groups.
        manager: which blocks are held.
        jobs: the open jobs.
        computes_last_token: whether the engine computes the last token of a prompt again that is loaded as a whole.
        limits: how far features let a request load (``RequestFeature.limit``).
    """

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        manager: OffloadingManager,
        jobs: TransferJobs,
        computes_last_token: bool,
        limits: Sequence[Callable[[RequestState, int, int], int | None]],
    ) -> None:
        self._layouts = layouts
        self._groups = split_by_need(layouts)
        self._manager = manager
        self._jobs = jobs
        may_compute_last_token = all(layout.can_compute_last_token for layout in layouts)
        self._computes_last_token = computes_last_token and may_compute_last_token
        self._limits = limits

    def find_end(self, state: RequestState, first_token: int) -> int | None:
        """Return up to which token to load the request; None when it has to wait.

        Args:
            state: the request, its keys grown.
            first_token: leading tokens that the device has.

        Effects:
            ``state.search``. The first end that is found renews the request's blocks.
        """
        if state.load.has_failed:
            return first_token
        # The engine needs a token to compute: without one there is no output to sample from.
        max_end_token = state.request.num_tokens - 1
        if self._computes_last_token:
            max_end_token = find_max_end(self._groups, state.request.num_tokens, first_token)
        search = state.search
        search.max_end_token = max_end_token
        if state.limits.max_load_tokens is not None:
            max_end_token = min(max_end_token, state.limits.max_load_tokens)
        for limit in self._limits:
            limited = limit(state, first_token, max_end_token)
            if limited is None:
                return None
            max_end_token = limited
        found = search.found = find_loadable_end(
            self._groups, self._manager, state.keys, first_token, max_end_token, state.context
        )
        if found is None:
            return None
        if self._jobs.loading and found.end_token > first_token:
            wanted = iterate_load_keys(self._layouts, state.keys, first_token, found.end_token)
            search.blocking_job = self._jobs.find_load_of(wanted)
            if search.blocking_job is not None:
                return None
        if not search.is_touched:
            search.is_touched = True
            state.touch(self._manager, self._layouts, state.request.num_tokens)
        return found.end_token

    def find_shorter(self, state: RequestState, first_token: int, end_token: int) -> int | None:
        """Return up to which token to load the request, at most to one before what was found; None: it has to wait.

        A shorter prefix ends with whole blocks too, and groups that need only a tail need another one for it.
        """
        if self._groups.windows and end_token > first_token:
            found = find_loadable_end(
                self._groups, self._manager, state.keys, first_token, end_token, state.context
            )
            return None if found is None else found.end_token
        common_tokens = self._groups.common_tokens
        return max(first_token, end_token // common_tokens * common_tokens)


def split_by_need(layouts: Sequence[GroupLayout]) -> SearchGroups:
    """Return the groups that need a whole prefix, and those that need only its tail. Pure."""
    full = tuple(layout for layout in layouts if layout.num_tail_tokens is None)
    windows = tuple(layout for layout in layouts if layout.num_tail_tokens is not None)
    common_tokens = math.lcm(*(layout.block_tokens for layout in layouts))
    return SearchGroups(full, windows, common_tokens, (*full, *windows)[0])


def find_max_end(groups: SearchGroups, num_tokens: int, num_local_tokens: int) -> int:
    """Return up to which token to load a prompt at most whose last token the engine computes again. Pure.

    Args:
        groups: the KV groups.
        num_tokens: length of the prompt.
        num_local_tokens: tokens that device memory holds.
    """
    num_missing = num_tokens - num_local_tokens
    is_lone = num_local_tokens > 0 and num_missing <= groups.common_tokens
    return num_tokens - 1 if is_lone and num_missing < LONE_BLOCK_TOKENS else num_tokens


def find_loadable_end(
    groups: SearchGroups,
    manager: OffloadingManager,
    keys: Sequence[Sequence[OffloadKey]],
    num_local_tokens: int,
    max_end_tokens: int,
    req_context: ReqContext,
) -> FoundPrefix | None:
    """Return how many tokens of the prefix device memory and the tiers hold together.

    Args:
        groups: the KV groups.
        manager: which blocks are held.
        keys: for each group the keys of the request's full blocks.
        num_local_tokens: tokens that device memory holds.
        max_end_tokens: tokens beyond which nothing may be loaded.
        req_context: of the request.

    Returns:
        None when a block that decides is in flight.
    """
    common_tokens = groups.common_tokens
    end = max_end_tokens // common_tokens * common_tokens
    first_end, short_group, is_pending = end, groups.first.idx, False
    for layout in groups.full:
        first = num_local_tokens // layout.block_tokens
        leading = keys[layout.idx][first : max(first, end // layout.block_tokens)]
        found = maximal_prefix_lookup(manager, leading, req_context)
        is_pending |= found is None
        reached = _cut(end, layout, first, found, common_tokens)
        if reached < end:
            end, short_group = reached, layout.idx
        if layout is groups.first:
            first_end = end
    bound = None
    while groups.windows and end != bound and end > num_local_tokens:
        bound = end
        for layout in groups.windows:
            first = num_local_tokens // layout.block_tokens
            window = keys[layout.idx][first : max(first, end // layout.block_tokens)]
            found = sliding_window_lookup(manager, window, layout.num_tail_blocks or 1, req_context)
            is_pending |= found is None
            reached = _cut(end, layout, first, found, common_tokens)
            if reached < end:
                end, short_group = reached, layout.idx
    if not groups.full:
        first_end = end
    if end > num_local_tokens and is_pending:
        return None
    return FoundPrefix(max(end, num_local_tokens), max(first_end, num_local_tokens), short_group)


def maximal_prefix_lookup(
    manager: OffloadingManager, keys: Sequence[OffloadKey], req_context: ReqContext
) -> int | None:
    """Return the length of the leading run of hits.

    A key that is in flight counts as a hit while scanning, so that the keys behind it are looked up too, and makes
    the answer None.
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
    a window that is coming is not needed, and looking it up would promote it for nothing.
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


def _cut(
    end_token: int, layout: GroupLayout, first_block: int, num_found: int | None, common_tokens: int
) -> int:
    """Return ``end_token``, or where a group's hits end if that is earlier; None, in flight, cuts nothing. Pure."""
    if num_found is None:
        return end_token
    reached = (first_block + num_found) * layout.block_tokens // common_tokens * common_tokens
    return min(end_token, reached)
