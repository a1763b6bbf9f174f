"""LRU, ARC and Belady's bound hit as often as another implementation of them on flat streams of blocks.

The other is the public package libcachesim.
"""

import functools
import random
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import OffloadKey
from kvtier.cpu.policies import create_cache_policy
from kvtier.sim.bound import count_belady_hits, list_next_accesses
from kvtier.sim.formats.registry import read_trace
from kvtier.sim.trace import BlockKeys
from kvtier.testing.policy_suite import key_of, make_trace, replay

libcachesim = pytest.importorskip(
    "libcachesim",
    reason="the peer cannot be loaded: pip install libcachesim and apt-get install libglib2.0-0",
    exc_type=ImportError,
)

CONVERSATION = Path(__file__).parents[4] / "shared" / "traces" / "conversation.jsonl.gz"
"""A recorded trace that may lie beside a checkout; it is not part of the project."""

NEVER = 1 << 60
"""What the other package calls the next access of a block that has none."""

PEERS = {"lru": "LRU", "arc": "ARC"}


def count_peer_hits(name: str, accesses: Sequence[Hashable], cache_capacity: int) -> int:
    """Return the hits of the other package's ``name`` with blocks of size one."""
    # Its default table has 2**24 places: 128 MiB for each of these small caches.
    cache: Any = getattr(libcachesim, name)(cache_capacity, hashpower=16)
    request: Any = libcachesim.Request()
    request.obj_size = 1
    numbers: dict[Hashable, int] = {}
    num_hits = 0
    for position, (key, following) in enumerate(zip(accesses, list_next_accesses(accesses), strict=True)):
        request.obj_id = numbers.setdefault(key, len(numbers) + 1)
        request.clock_time = position
        request.next_access_vtime = following if following < len(accesses) else NEVER
        num_hits += cache.get(request)
    return num_hits


@functools.cache
def make_stream(name: str) -> list[OffloadKey]:
    draw = random.Random(11).random
    if name == "skewed":
        return [key_of(int(5_000 * draw() ** 6)) for _ in range(30_000)]
    if name == "even":
        return [key_of(int(1_500 * draw())) for _ in range(30_000)]
    if name == "loops":
        return [key_of(position % (400 + position // 3_000 * 100)) for position in range(30_000)]
    if name == "drift":
        return make_trace(seed=9, length=30_000)
    if not CONVERSATION.exists():
        pytest.skip("the trace is not beside this checkout")
    ids = [hash_id for request in read_trace(CONVERSATION).requests for hash_id in request.hash_ids]
    return BlockKeys().of(ids[:100_000])


STREAMS = ["skewed", "even", "loops", "drift", pytest.param("conversation", marks=pytest.mark.traces)]
CAPACITIES = [100, 777, 3_000]


@functools.cache
def count_hits(policy: str, stream: str, cache_capacity: int) -> int:
    """Return the hits of kvtier's policy; the bound is compared with all of them again."""
    return replay(create_cache_policy(policy, cache_capacity), make_stream(stream))


@pytest.mark.parametrize("cache_capacity", CAPACITIES)
@pytest.mark.parametrize("stream", STREAMS)
def test_hits_of_lru_are_those_of_the_peer(stream: str, cache_capacity: int) -> None:
    expected = count_peer_hits(PEERS["lru"], make_stream(stream), cache_capacity)
    assert count_hits("lru", stream, cache_capacity) == expected


@pytest.mark.parametrize("cache_capacity", CAPACITIES)
@pytest.mark.parametrize("stream", STREAMS)
def test_hits_of_arc_are_within_a_thousandth_of_the_peers(stream: str, cache_capacity: int) -> None:
    found = count_hits("arc", stream, cache_capacity)
    expected = count_peer_hits(PEERS["arc"], make_stream(stream), cache_capacity)
    assert abs(found - expected) <= expected / 1_000


@pytest.mark.parametrize("cache_capacity", CAPACITIES)
@pytest.mark.parametrize("stream", STREAMS)
def test_beladys_bound_is_the_peers(stream: str, cache_capacity: int) -> None:
    accesses = make_stream(stream)
    found = count_belady_hits(accesses, cache_capacity)
    assert found == count_peer_hits("Belady", accesses, cache_capacity)
    assert found >= max(count_hits(name, stream, cache_capacity) for name in PEERS)
