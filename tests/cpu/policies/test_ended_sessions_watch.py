"""Blocks of ended sessions leave first only while that finds more: a large cache does not pay for wrong hints."""

from kvtier.base import OffloadKey
from kvtier.cpu.policies.ended_sessions import (
    LEAST_COUNTED,
    SAMPLE_MASK,
    TURN_SHARE,
    EndedSessions,
    ReturnWatch,
)
from kvtier.cpu.policies.learning import ArrivedRequest
from kvtier.hints.values import parse_hints

CAPACITY = 64
TURN = round(TURN_SHARE * CAPACITY)


def keys_of(begin: int, num: int) -> list[OffloadKey]:
    """Return keys that are in the sample."""
    found: list[OffloadKey] = []
    number = begin * 1000
    while len(found) < num:
        key = OffloadKey(number.to_bytes(8, "big") + bytes(4))
        if is_sampled(key):
            found.append(key)
        number += 1
    return found


def is_sampled(key: OffloadKey) -> bool:
    watch = ReturnWatch(CAPACITY)
    watch.on_ended([key])
    return len(watch) == 1


def run(watch: ReturnWatch, *, ended_return: float, oldest_return: float) -> None:
    """Let so large a share of each kind come back, in as many turns as a verdict needs."""
    for turn in range(2 * int(LEAST_COUNTED)):
        ended, oldest = keys_of(2 * turn, 4), keys_of(2 * turn + 1, TURN)
        watch.on_ended(ended)
        watch.on_named(ended[: round(4 * ended_return)])
        watch.on_evicted(oldest)
        watch.on_named(oldest[: round(TURN * oldest_return)])


def test_nothing_moves_before_there_are_verdicts() -> None:
    watch = ReturnWatch(CAPACITY)
    assert not watch.favours_ended
    watch.on_ended(keys_of(0, 4))
    watch.on_evicted(keys_of(1, TURN))
    assert not watch.favours_ended


def test_hints_are_followed_where_the_oldest_blocks_come_back_more_often() -> None:
    watch = ReturnWatch(CAPACITY)
    run(watch, ended_return=0.25, oldest_return=0.5)
    assert watch.favours_ended


def test_hints_that_are_mostly_right_are_not_followed_where_old_blocks_rarely_come_back() -> None:
    watch = ReturnWatch(CAPACITY)
    run(watch, ended_return=0.25, oldest_return=0.1)
    assert not watch.favours_ended


def test_a_change_of_the_traffic_is_noticed() -> None:
    watch = ReturnWatch(CAPACITY)
    run(watch, ended_return=0.25, oldest_return=0.1)
    for _ in range(4):
        run(watch, ended_return=0.0, oldest_return=1.0)
    assert watch.favours_ended


def test_what_is_watched_is_bounded_by_a_turn() -> None:
    watch = ReturnWatch(CAPACITY)
    for turn in range(50):
        watch.on_ended(keys_of(2 * turn, 8))
        watch.on_evicted(keys_of(2 * turn + 1, TURN))
    assert len(watch) <= 2 * (TURN + 8)


def test_one_block_in_eight_is_watched() -> None:
    watch = ReturnWatch(10**6)
    watch.on_ended(OffloadKey(number.to_bytes(8, "big") + bytes(4)) for number in range(8000))
    assert 800 < len(watch) < 1200
    assert SAMPLE_MASK == 7


def test_without_hints_nothing_is_watched() -> None:
    ended = EndedSessions((), CAPACITY)
    keys = keys_of(0, 4)
    ended.note(ArrivedRequest("a", (keys,), 0.0))
    assert ended.watch is None
    ended.note(ArrivedRequest("b", (keys,), 0.0, hints=parse_hints({"session": "s", "continues": False})))
    assert ended.watch is not None
    assert ended.finish("b") == ()


def test_a_low_priority_is_no_forecast_and_needs_no_proof() -> None:
    keys = keys_of(0, 4)
    held: set[OffloadKey] = set()
    ended = EndedSessions(held, CAPACITY)
    ended.note(ArrivedRequest("a", (keys,), 0.0, hints=parse_hints({"session": "s", "priority": -1})))
    held.update(keys)
    assert ended.finish("a") == keys
