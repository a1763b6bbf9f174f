"""Blocks that requests have had: what is remembered, what is forgotten, and that it is said."""

import pytest

from kvtier.keys import OffloadKey
from kvtier.seen import GENERATION_BLOCKS, MAX_GENERATIONS, SeenBlocks
from kvtier.testing.clock import ManualClock


def keys_of(first: int, num: int) -> list[OffloadKey]:
    return [OffloadKey(b"%032d" % number) for number in range(first, first + num)]


def test_what_was_added_is_remembered_and_little_else() -> None:
    seen = SeenBlocks()
    for first in range(0, 20_000, 700):
        seen.add(keys_of(first, 700))

    assert all(map(seen.has, keys_of(0, 20_000)))
    assert sum(map(seen.has, keys_of(10**6, 20_000))) < 20
    assert seen.known_s is None


def test_a_full_filter_takes_few_new_blocks_for_known() -> None:
    seen = SeenBlocks(generation_blocks=2**14, max_generations=2)
    seen.add(keys_of(0, 2**14))

    num_taken = sum(map(seen.has, keys_of(10**6, 50_000)))
    assert num_taken < 50_000 / 1000


def test_the_oldest_are_forgotten_and_for_how_long_the_rest_is_known_is_said() -> None:
    clock = ManualClock(100.0)
    seen = SeenBlocks(clock, generation_blocks=4096, max_generations=2)
    for generation in range(3):
        seen.add(keys_of(generation * 4096, 4096))
        clock.advance(10.0)

    assert sum(map(seen.has, keys_of(0, 4096))) < 10
    assert all(map(seen.has, keys_of(4096, 2 * 4096)))
    assert seen.known_s == 20.0


def test_what_comes_again_takes_no_room() -> None:
    seen = SeenBlocks(generation_blocks=4096, max_generations=2)
    for _ in range(20):
        seen.add(keys_of(0, 4000))

    assert seen.known_s is None
    assert seen.num_bytes == 4096 * 4


@pytest.mark.parametrize("num_blocks", [1, GENERATION_BLOCKS])
def test_memory_is_taken_as_traffic_comes(num_blocks: int) -> None:
    seen = SeenBlocks()
    assert seen.num_bytes == 0
    seen.add(keys_of(0, num_blocks))
    seen.has(OffloadKey(b"any"))

    assert seen.num_bytes <= 2 * GENERATION_BLOCKS * 4 < MAX_GENERATIONS * GENERATION_BLOCKS * 4
