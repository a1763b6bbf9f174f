"""Belady's bound: the most hits that any order of eviction can reach on a stream of accesses known in advance.

It is no policy: it looks into the future. When room is needed the held block leaves whose next access is farthest away;
no other choice, made with whatever knowledge, loses fewer hits. On the keys of chained blocks the bound needs no word about
prefixes: in each request a block is accessed after those before it, so its next access is later than theirs, and of one prefix
the tail leaves first.

Source: L. A. Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer", IBM Systems Journal, 1966.
"""

import heapq
from collections.abc import Hashable, Sequence


def count_belady_hits(accesses: Sequence[Hashable], cache_capacity: int) -> int:
    """Return how many of ``accesses`` find their block held, at best. Pure.

    Every miss takes its block in, as it must when a store comes before the next access. Time grows with the length
    times its logarithm, memory with the length.

    Args:
        accesses: block names in the order in which they are asked for.
        cache_capacity: blocks that are held at most.

    Raises:
        ValueError: ``cache_capacity`` is below one.
    """
    if cache_capacity < 1:
        raise ValueError(f"cache_capacity is {cache_capacity}, expected at least one block")
    next_accesses = list_next_accesses(accesses)
    next_of: dict[Hashable, int] = {}
    # Farthest first, as negated positions. A block that was used since it was entered leaves an entry of the past behind,
    # which can never be met: the entries of the future are farther and of held blocks alone.
    farthest: list[tuple[int, int]] = []
    num_hits = 0
    for position, key in enumerate(accesses):
        if key in next_of:
            num_hits += 1
        elif len(next_of) == cache_capacity:
            _, last_access = heapq.heappop(farthest)
            del next_of[accesses[last_access]]
        next_of[key] = next_accesses[position]
        heapq.heappush(farthest, (-next_accesses[position], position))
    return num_hits


def list_next_accesses(accesses: Sequence[Hashable]) -> list[int]:
    """Return for each access the position of the next one of the same block; the length when there is none. Pure."""
    next_accesses = [0] * len(accesses)
    seen: dict[Hashable, int] = {}
    for position in range(len(accesses) - 1, -1, -1):
        key = accesses[position]
        next_accesses[position] = seen.get(key, len(accesses))
        seen[key] = position
    return next_accesses
