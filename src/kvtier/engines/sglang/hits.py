"""How long a prefix SGLang may load: which of its ends every pool can serve.

Keys and values decide how long it can be at most; every other pool strikes out ends. Pure.

Source: the hit policies of ``PoolHitPolicy`` in SGLang 0.5.23.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

FindHeld = Callable[[str, Sequence[str]], list[bool]]
"""Returns for each of some pages whether a pool's part of it is held: given the pool's name and the keys."""


class HitPolicy(Enum):
    """Which pages of a pool a prefix needs; the values are SGLang's."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass(frozen=True, slots=True)
class PoolNeed:
    """What SGLang asks of a pool beside that of keys and values.

    Attributes:
        name: of the pool.
        policy: which pages a prefix needs.
        keys: the keys that SGLang names for the pool.
        block_pages: pages of keys and values that a block covers; of BLOCK_GROUPS.
        group_pages: keys of one group; likewise.
    """

    name: str
    policy: HitPolicy
    keys: tuple[str, ...] = ()
    block_pages: int = 0
    group_pages: int = 0


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What can be loaded.

    Attributes:
        num_pages: pages of the longest prefix that all pools can serve.
        by_pool: pages up to which each pool that was asked can serve; a pool without any is left out.
        ends: every length in pages that all pools can serve, rising.
    """

    num_pages: int
    by_pool: dict[str, int]
    ends: list[int]


def find_hit(
    kv_pool: str, num_kv_pages: int, keys: Sequence[str], needs: Sequence[PoolNeed], find: FindHeld
) -> PrefixHit:
    """Return what can be loaded of a prefix.

    Args:
        kv_pool: name of the pool of keys and values.
        num_kv_pages: leading pages that it holds.
        keys: those of the prefix's pages.
        needs: the other pools.
        find: looks pages of a pool up.
    """
    by_pool = {kv_pool: num_kv_pages} if num_kv_pages else {}
    ends = list(range(1, num_kv_pages + 1))
    for need in needs:
        if not ends:
            break
        if need.policy is HitPolicy.BLOCK_GROUPS:
            boundary = min(count_group_pages(need, keys[:num_kv_pages], find), num_kv_pages)
        else:
            held = find(need.name, keys[:num_kv_pages])
            window = 1 if need.policy is HitPolicy.ALL_PAGES else max(1, len(need.keys))
            own = find_ends(held, window, needs_all=need.policy is HitPolicy.ALL_PAGES)
            boundary = max(own, default=0)
            ends = [end for end in ends if end in own]
        if boundary:
            by_pool[need.name] = boundary
    return PrefixHit(ends[-1] if ends else 0, by_pool, ends)


def find_ends(held: Sequence[bool], window: int, *, needs_all: bool) -> frozenset[int]:
    """Return the lengths at which a pool can serve a prefix.

    Args:
        held: of each page whether it is held.
        window: how many of the last pages must be held.
        needs_all: whether all pages must be.
    """
    ends, run = set(), 0
    for end, is_held in enumerate(held, start=1):
        run = run + 1 if is_held else 0
        if run >= (end if needs_all else min(window, end)):
            ends.add(end)
    return frozenset(ends)


def count_group_pages(need: PoolNeed, keys: Sequence[str], find: FindHeld) -> int:
    """Return the pages that the leading complete groups of a pool cover.

    A group belongs to a block of ``block_pages`` pages and has ``group_pages`` keys: of those that SGLang names for the
    pool, in their order; where it names none, of the last pages of the block.
    """
    if need.block_pages < 1 or need.group_pages < 1:
        return 0
    num_blocks = len(keys) // need.block_pages
    if need.keys:
        wanted = list(need.keys[: num_blocks * need.group_pages])
    else:
        ends = (number * need.block_pages for number in range(1, num_blocks + 1))
        wanted = [key for end in ends for key in keys[max(0, end - need.group_pages) : end]]
    held = find(need.name, wanted)
    num_leading = held.index(False) if False in held else len(held)
    return num_leading // need.group_pages * need.block_pages
