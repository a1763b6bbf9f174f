"""Belady's bound: the most hits that any order of eviction can reach on a known stream of accesses.

The bound needs the future: when room is needed it evicts the block whose next access is farthest away, and no other
choice loses fewer hits. Chained blocks need no special rule: in each request a block is accessed after those before it,
so its next access is later than theirs, and the tail of a prefix is evicted first.

Source: L. A. Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer", IBM Systems Journal, 1966.
"""

import heapq
from collections.abc import Hashable, Sequence

from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.request import SimulatedRequest


def count_belady_hits(
    accesses: Sequence[Hashable], cache_capacity: int, is_counted: Sequence[bool] | None = None
) -> int:
    """Return how many of ``accesses`` find their block in the cache, at best. Pure.

    Every miss inserts its block, as a store before the next access does. Time grows with the length times its
    logarithm, memory with the length.

    Args:
        accesses: block names in the order of access.
        cache_capacity: blocks in the cache, at most.
        is_counted: for each access whether a hit counts; None: each does. The others insert their block like any
            miss, and no block is worth keeping for them.

    Raises:
        ValueError: ``cache_capacity`` is below one.
    """
    if cache_capacity < 1:
        raise ValueError(f"cache_capacity is {cache_capacity}, expected at least one block")
    counted = [True] * len(accesses) if is_counted is None else is_counted
    never = len(accesses)
    next_accesses = [at if at < never and counted[at] else never for at in list_next_accesses(accesses)]
    # The last access of each cached block. An entry of the heap for an earlier access is outdated.
    last_of: dict[Hashable, int] = {}
    farthest: list[tuple[int, int]] = []  # as negated positions
    num_hits = 0
    for position, (key, is_hit_counted) in enumerate(zip(accesses, counted, strict=True)):
        if key in last_of:
            num_hits += is_hit_counted
        elif len(last_of) == cache_capacity:
            victim = heapq.heappop(farthest)[1]
            while last_of.get(accesses[victim]) != victim:
                victim = heapq.heappop(farthest)[1]
            del last_of[accesses[victim]]
        last_of[key] = position
        heapq.heappush(farthest, (-next_accesses[position], position))
    return num_hits


def list_next_accesses(accesses: Sequence[Hashable]) -> list[int]:
    """Return for each access the position of the next one to the same block, or the length when there is none. Pure."""
    next_accesses = [0] * len(accesses)
    seen: dict[Hashable, int] = {}
    for position in range(len(accesses) - 1, -1, -1):
        key = accesses[position]
        next_accesses[position] = seen.get(key, len(accesses))
        seen[key] = position
    return next_accesses


def count_bound_tokens(
    admitted: Sequence[SimulatedRequest], engine: EngineModel, host: HostModel | None
) -> int:
    """Return the most prompt tokens that need not have been computed. Pure.

    A prompt of whole blocks that is held in full counts with its last token, although that one is always computed: the
    bound is too high by at most a token for each such prompt.

    Args:
        admitted: the requests in the order of their admission.
        engine: its device cache.
        host: host memory and the tiers behind it; None: the device cache alone.
    """
    num_blocks = engine.num_device_blocks
    if host is not None:
        num_blocks += host.num_blocks + sum(tier.num_blocks for tier in host.tiers)
    asked = [block_hash for request in admitted for block_hash in request.block_hashes]
    # On a device that computes the last block of a prompt again only a load saves that block.
    num_computed = int(host is None and engine.is_last_block_computed)
    is_hit_possible = [
        position < (request.num_prompt_tokens - num_computed) // engine.block_tokens
        for request in admitted
        for position in range(len(request.block_hashes))
    ]
    return engine.block_tokens * count_belady_hits(asked, num_blocks, is_hit_possible)
