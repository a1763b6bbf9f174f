"""Requests wait for room in host memory in the order in which they came, and none waits forever."""

import random
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.engines.vllm.stock_engine import HAS_DOOR, NO_DOOR, StockEngine, key_of
from vllm.v1.kv_offload.base import LookupResult

from kvtier.engines.vllm.stock_room import RoomQueue
from kvtier.testing.clock import ManualClock

WAIT_S = 2.0


class Searcher:
    """A scheduler's requests, of which each looks for all of its blocks in each step.

    Args:
        num_slots: of host memory.
        wait_s: as for the queue.
    """

    def __init__(self, num_slots: int, wait_s: float = WAIT_S) -> None:
        self.clock = ManualClock()
        self.room = RoomQueue(num_slots, wait_s, self.clock)
        self.num_storing = 0

    def search(self, name: str, num_blocks: int, first: int = 0) -> list[bool | None]:
        """Return what a request is answered for blocks of its own."""
        start = 1000 * sum(map(ord, name))
        return [self.room.answer(key_of(start + number), name) for number in range(first, num_blocks)]

    def step(self, *scheduled: str) -> None:
        self.room.end_step(scheduled, 0, self.num_storing)
        self.clock.advance(0.01)


def test_a_request_that_fits_does_not_wait() -> None:
    searcher = Searcher(12)
    assert searcher.search("a", 12) == [True] * 12
    assert searcher.room.num_waited == 0


def test_the_next_one_waits_until_the_first_is_scheduled_and_is_let_in_whole() -> None:
    searcher = Searcher(12)
    searcher.search("a", 12)
    for _ in range(3):
        assert searcher.search("b", 12) == [None] * 12
        searcher.step()
    searcher.search("b", 12)
    searcher.step("a")
    assert searcher.search("b", 12) == [True] * 12


def test_what_has_room_is_promoted_at_once_and_the_rest_when_others_have_left() -> None:
    searcher = Searcher(12)
    searcher.search("a", 8)
    assert searcher.search("b", 9) == [True] * 4 + [None] * 5
    searcher.step()
    assert searcher.search("b", 9) == [True] * 4 + [None] * 5
    searcher.step("a")
    assert searcher.search("b", 9) == [True] * 9


def test_who_comes_later_does_not_overtake_even_if_it_would_fit() -> None:
    searcher = Searcher(12)
    searcher.search("a", 12)
    searcher.search("b", 12)
    searcher.search("c", 1)
    searcher.step("a")
    assert searcher.search("b", 12) == [True] * 12
    assert searcher.search("c", 1) == [None]
    searcher.step("b")
    assert searcher.search("c", 1) == [True]


def test_an_abort_makes_room() -> None:
    searcher = Searcher(12)
    searcher.search("a", 12)
    searcher.search("b", 12)
    searcher.room.leave("a")
    searcher.step()
    assert searcher.search("b", 12) == [True] * 12


def test_slots_of_unfinished_stores_are_waited_for() -> None:
    searcher = Searcher(12)
    searcher.num_storing = 6
    searcher.step()
    searcher.search("a", 1)
    assert searcher.search("a", 12) == [True] * 6 + [None] * 6
    searcher.step()
    assert searcher.search("a", 12) == [True] * 6 + [None] * 6
    searcher.num_storing = 0
    searcher.step()
    assert searcher.search("a", 12) == [True] * 12


def test_a_request_longer_than_host_memory_gets_what_fits_and_never_its_own_blocks_twice() -> None:
    searcher = Searcher(12)
    assert searcher.search("a", 30) == [True] * 12 + [None] * 18
    searcher.step()
    assert searcher.search("a", 30, first=12) == [False] * 18
    assert searcher.search("a", 1) == [True], "its first block was evicted: once more"
    assert searcher.search("a", 1) == [False]


def test_a_request_waits_no_longer_than_the_limit() -> None:
    searcher = Searcher(12)
    searcher.search("a", 12)
    searcher.search("b", 12)
    searcher.clock.advance(WAIT_S)
    searcher.step()
    assert searcher.search("b", 12) == [True] * 12, (
        "blocks of a request that was never scheduled do not count"
    )
    assert searcher.room.num_given_up == 1


def test_what_a_lookup_has_not_answered_yet_is_waited_for() -> None:
    searcher = Searcher(12)
    searcher.search("a", 12)
    searcher.search("b", 6)
    searcher.room.note_search("b")
    searcher.step("a")
    assert searcher.search("b", 6) == [None] * 6
    searcher.step()
    assert searcher.search("b", 6) == [True] * 6


def test_a_reset_forgets_who_waits() -> None:
    searcher = Searcher(12)
    searcher.search("a", 12)
    searcher.search("b", 12)
    searcher.room.clear()
    assert searcher.search("b", 12) == [True] * 12


@pytest.mark.parametrize("seed", range(60))
def test_walks_end_and_what_is_let_in_fits(seed: int) -> None:
    rng = random.Random(seed)
    num_slots = rng.choice([8, 24, 60])
    searcher = Searcher(num_slots, wait_s=3600.0)
    num_begun = 0
    lengths: dict[str, int] = {}
    for _ in range(3000):
        while len(lengths) < 8 and num_begun < 40:
            name = f"r{num_begun}"
            lengths[name] = rng.choice([1, 4, 12, num_slots // 2, num_slots, num_slots + 7])
            num_begun += 1
        scheduled: list[str] = []
        for name in list(lengths):
            answers = searcher.search(name, lengths[name])
            if None not in answers and len(scheduled) < 2:
                scheduled.append(name)
        visits = searcher.room._visits
        assert sum(len(visits[name].granted) for name in lengths if name in visits) <= num_slots
        searcher.step(*scheduled)
        for name in scheduled:
            del lengths[name]
        if lengths and rng.random() < 0.02:
            name = rng.choice(list(lengths))
            searcher.room.leave(name)
            del lengths[name]
        if not lengths and num_begun == 40:
            break
    assert not lengths, "a request waits forever"
    assert searcher.room._num_used == searcher.room._num_waiting == 0


@pytest.mark.skipif(not HAS_DOOR, reason=NO_DOOR)
def test_without_a_wait_what_has_no_room_is_absent(tmp_path: Path) -> None:
    tier: dict[str, object] = {
        "type": "KVTierFS",
        "module_path": "kvtier.engines.vllm.tiers",
        "root_dir": str(tmp_path),
    }
    tier |= {"capacity_bytes": "64MiB", "model_identity": "main@8cde5ca8", "room_wait_s": 0}
    with StockEngine([tier]) as engine:
        for first in (0, 10):
            engine.store(range(first, first + 6))
            engine.push_out()
        first_request, second_request = engine.new_request(), engine.new_request()
        assert engine.search(range(6), first_request) is None
        answers = [engine.manager.lookup(key_of(number), second_request) for number in range(10, 16)]
        assert answers == [LookupResult.HIT_PENDING] * 2 + [LookupResult.MISS] * 4
