"""What waits is asked in one call: in order, each key once, of one generation, and not too much of it."""

import threading
from collections import deque
from collections.abc import Sequence

import pytest

from kvtier.base import OffloadKey
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import key_of
from kvtier.tiering.kit.lookup import (
    MAX_MERGED_KEYS,
    Generation,
    LookupAnswer,
    LookupBatch,
    LookupWorker,
    keys_of,
    take_mergeable,
)


def question(generation: int, first: int, num_keys: int = 1) -> LookupBatch:
    """A question about ``num_keys`` blocks."""
    return LookupBatch(Generation(generation), [key_of(number) for number in range(first, first + num_keys)])


@pytest.mark.parametrize(
    ("waiting", "num_taken"),
    [
        ([question(0, 1)], 1),
        ([question(0, 1), question(0, 2), question(0, 3)], 3),
        ([question(0, 1), question(1, 2), question(0, 3)], 1),
        ([question(0, 1), question(0, 2), None, question(0, 3)], 2),
        ([None, question(0, 1)], 0),
        ([question(0, 0, MAX_MERGED_KEYS - 1), question(0, 9_000), question(0, 9_001)], 2),
        ([question(0, 0, MAX_MERGED_KEYS), question(0, 9_000)], 1),
        ([question(0, 0, MAX_MERGED_KEYS + 5)], 1),
        ([question(0, 0), question(0, 1, MAX_MERGED_KEYS), question(0, 9_000)], 1),
    ],
    ids=[
        "one",
        "all",
        "another generation",
        "the end",
        "nothing",
        "up to the limit",
        "full",
        "too large",
        "no gap",
    ],
)
def test_what_is_asked_in_one_call(waiting: list[LookupBatch | None], num_taken: int) -> None:
    left = deque(waiting)
    taken = take_mergeable(left)
    assert taken == waiting[:num_taken]
    assert list(left) == waiting[max(num_taken, 1) :]


def test_a_key_of_several_questions_is_asked_for_once() -> None:
    keys = keys_of([question(0, 1, 2), question(0, 2, 2), question(0, 0)])
    assert keys == [key_of(number) for number in (1, 2, 3, 0)]


def test_without_a_thread_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def ask(keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        return keys

    monkeypatch.setattr(threading.Thread, "start", refuse)
    answers: deque[LookupAnswer] = deque()
    worker = LookupWorker("test", ask, answers, ManualClock(7.0))
    asked = question(0, 1, 3)
    worker.send(asked)
    assert list(answers) == [LookupAnswer(Generation(0), asked.keys, (), [asked], asked.sent_s)]
    assert worker.num_failed_keys == 3
    assert worker.end(0.0)
