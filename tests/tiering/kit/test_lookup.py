"""Questions about keys are asked in batches by another thread, and every one of them gets an answer."""

import queue
import random
import threading
from collections.abc import Collection, Iterator, Sequence

import pytest

from kvtier.base import OffloadKey
from kvtier.testing.clock import ManualClock
from kvtier.tiering.kit.lookup import AsyncLookup

HANG_GUARD_S = 60.0


def key(number: int) -> OffloadKey:
    """Return the key of block ``number``."""
    return OffloadKey(number.to_bytes(36, "big"))


class Disk:
    """Answers when told to: each batch waits for a permit."""

    def __init__(self) -> None:
        self.held: set[OffloadKey] = set()
        self.batches: list[list[OffloadKey]] = []
        self.error: Exception | None = None
        self._permits: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._entered = threading.Semaphore(0)

    def ask(self, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        """Answer one batch."""
        self._entered.release()
        self._permits.get()
        self.batches.append(list(keys))
        answer = [key for key in keys if key in self.held]
        if self.error is not None:
            raise self.error
        return answer

    def permit(self) -> None:
        """Let one batch through."""
        self._permits.put(None)

    def await_call(self) -> None:
        """Block until one more batch is being asked."""
        assert self._entered.acquire(timeout=HANG_GUARD_S)


class Rig:
    """A lookup, its disk and its clock."""

    def __init__(self, **options: float) -> None:
        self.clock = ManualClock()
        self.disk = Disk()
        self.lookup = AsyncLookup(
            "test",
            self.disk.ask,
            clock=self.clock,
            positive_ttl_s=options.get("positive_ttl_s", 10.0),
            negative_ttl_s=options.get("negative_ttl_s", 2.0),
            max_answers=int(options.get("max_answers", 100)),
            max_outstanding_keys=int(options.get("max_outstanding_keys", 100)),
            timeout_s=options.get("timeout_s", 30.0),
        )

    def ask(self, *numbers: int) -> None:
        """Ask in a step of its own; nothing is known of these blocks yet."""
        for number in numbers:
            assert self.lookup.lookup(key(number)) is None
        self.lookup.flush()

    def answer(self, number: int) -> bool:
        """Let one batch through and return the answer that comes of it."""
        self.lookup.flush()
        self.disk.permit()
        return self.await_answer(number)

    def await_answer(self, number: int) -> bool:
        """Ask again until there is an answer."""
        pause = threading.Event()
        for _ in range(int(HANG_GUARD_S * 1000)):
            answer = self.lookup.lookup(key(number))
            if answer is not None:
                return answer
            pause.wait(0.001)
        pytest.fail("no answer came")


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A rig that ends its thread."""
    rig = Rig()
    yield rig
    rig.disk.permit()
    assert rig.lookup.shutdown(HANG_GUARD_S)


def close(rig: Rig) -> None:
    """End a rig's thread however many batches wait."""
    for _ in range(100):
        rig.disk.permit()
    assert rig.lookup.shutdown(HANG_GUARD_S)


def test_a_lookup_never_waits_and_the_answer_follows(rig: Rig) -> None:
    rig.disk.held = {key(1)}
    assert rig.lookup.lookup(key(1)) is None
    assert rig.lookup.lookup(key(2)) is None
    assert rig.answer(1) is True
    assert rig.await_answer(2) is False


def test_the_questions_of_a_step_are_one_batch_without_repeats(rig: Rig) -> None:
    for number in (1, 2, 1, 3):
        rig.lookup.lookup(key(number))
    rig.answer(3)
    assert rig.disk.batches == [[key(1), key(2), key(3)]]


def test_nothing_is_asked_before_the_step_ends(rig: Rig) -> None:
    rig.lookup.lookup(key(1))
    assert rig.lookup.stats()["sent"] == 0
    rig.lookup.flush()
    assert rig.lookup.stats()["sent"] == 1


def test_a_negative_answer_is_kept_for_its_time_and_then_asked_again(rig: Rig) -> None:
    rig.lookup.lookup(key(1))
    assert rig.answer(1) is False
    rig.clock.advance(1.9)
    assert rig.lookup.lookup(key(1)) is False
    rig.clock.advance(0.2)
    rig.disk.held = {key(1)}
    assert rig.lookup.lookup(key(1)) is None
    assert rig.answer(1) is True


def test_a_positive_answer_is_believed_for_its_own_time(rig: Rig) -> None:
    rig.disk.held = {key(1)}
    rig.lookup.lookup(key(1))
    assert rig.answer(1) is True
    rig.clock.advance(9.9)
    assert rig.lookup.lookup(key(1)) is True
    rig.clock.advance(0.2)
    assert rig.lookup.lookup(key(1)) is None


def test_an_answer_that_is_kept_no_time_is_still_heard_once() -> None:
    rig = Rig(positive_ttl_s=0.0, negative_ttl_s=0.0)
    rig.lookup.lookup(key(1))
    assert rig.answer(1) is False
    assert rig.lookup.lookup(key(1)) is None
    close(rig)


def test_an_answer_that_nobody_heard_does_not_hold_for_ever(rig: Rig) -> None:
    rig.disk.held = {key(2)}
    rig.lookup.lookup(key(1))
    rig.lookup.lookup(key(2))
    assert rig.answer(2) is True
    rig.clock.advance(1000.0)
    assert rig.lookup.lookup(key(1)) is None


def test_a_failing_question_is_answered_false_and_counted(rig: Rig) -> None:
    rig.disk.error = OSError("broken")
    rig.disk.held = {key(1)}
    rig.lookup.lookup(key(1))
    assert rig.answer(1) is False
    assert rig.lookup.stats()["failed"] == 1


def test_after_a_failing_question_the_next_one_is_answered(rig: Rig) -> None:
    rig.disk.error = OSError("broken")
    rig.lookup.lookup(key(1))
    rig.answer(1)
    rig.disk.error = None
    rig.disk.held = {key(2)}
    rig.lookup.lookup(key(2))
    assert rig.answer(2) is True


def test_more_open_questions_than_allowed_are_answered_false_and_counted() -> None:
    rig = Rig(max_outstanding_keys=2)
    assert [rig.lookup.lookup(key(number)) for number in range(4)] == [None, None, False, False]
    assert rig.lookup.stats()["overflow"] == 2
    close(rig)


def test_a_question_that_hangs_is_answered_false_after_its_time(rig: Rig) -> None:
    rig.lookup.lookup(key(1))
    rig.lookup.flush()
    rig.clock.advance(29.9)
    assert rig.lookup.lookup(key(1)) is None
    rig.clock.advance(0.2)
    assert rig.lookup.lookup(key(1)) is False
    assert rig.lookup.stats()["overdue"] == 1
    assert rig.lookup.drain_answered() == {key(1)}


def test_an_overdue_answer_still_counts_when_it_comes(rig: Rig) -> None:
    rig.disk.held = {key(1)}
    rig.lookup.lookup(key(1))
    rig.lookup.flush()
    rig.clock.advance(31.0)
    assert rig.lookup.lookup(key(1)) is False
    rig.clock.advance(5.0)
    rig.disk.permit()
    assert rig.await_answer(1) is True


def test_questions_to_a_disk_that_hangs_stay_bounded_however_often_they_are_asked() -> None:
    rig = Rig(max_outstanding_keys=3)
    for _ in range(10):
        assert rig.lookup.lookup(key(1)) in {None, False}
        rig.lookup.flush()
        rig.clock.advance(40.0)
        assert rig.lookup.lookup(key(1)) is False
        rig.clock.advance(40.0)
    assert rig.lookup.stats()["sent"] == 3
    assert rig.lookup.stats()["overflow"] > 0
    close(rig)


def test_each_answered_key_is_named_once(rig: Rig) -> None:
    assert rig.lookup.drain_answered() == set()
    rig.disk.held = {key(1)}
    rig.lookup.lookup(key(1))
    rig.lookup.lookup(key(2))
    assert rig.lookup.drain_answered() == set()
    rig.answer(1)
    assert rig.lookup.drain_answered() == {key(1), key(2)}
    assert rig.lookup.drain_answered() == set()


def test_answered_keys_that_nobody_asks_about_are_not_remembered_for_ever() -> None:
    rig = Rig(max_outstanding_keys=3)
    for first in (0, 3):
        for number in range(first, first + 3):
            rig.lookup.lookup(key(number))
        rig.answer(first)
    assert rig.lookup.drain_answered() is None
    assert rig.lookup.drain_answered() == set()
    close(rig)


def test_verdicts_are_bounded_and_the_oldest_goes_first() -> None:
    rig = Rig(max_answers=2)
    for number in range(3):
        rig.lookup.lookup(key(number))
    assert rig.answer(2) is False
    assert rig.lookup.lookup(key(1)) is False
    assert rig.lookup.lookup(key(0)) is None
    close(rig)


def test_what_was_learned_otherwise_replaces_a_verdict(rig: Rig) -> None:
    rig.disk.held = {key(1)}
    rig.lookup.lookup(key(1))
    assert rig.answer(1) is True
    rig.lookup.report([key(1)], is_held=False, generation=rig.lookup.generation)
    assert rig.lookup.lookup(key(1)) is False


def test_what_was_learned_before_a_clear_says_nothing_afterwards(rig: Rig) -> None:
    generation = rig.lookup.generation
    rig.lookup.clear()
    rig.lookup.report([key(1)], is_held=True, generation=generation)
    assert rig.lookup.lookup(key(1)) is None


def test_an_answer_to_a_question_from_before_a_clear_is_ignored(rig: Rig) -> None:
    rig.disk.held = {key(1)}
    rig.ask(1)
    rig.disk.await_call()
    rig.lookup.clear()
    rig.ask(2)
    rig.disk.permit()
    assert rig.answer(2) is False  # questions are answered in order, so the one before the clear was too
    assert rig.lookup.drain_answered() == {key(2)}
    assert rig.lookup.lookup(key(1)) is None


def test_steps_that_wait_for_a_call_to_end_are_asked_together(rig: Rig) -> None:
    rig.disk.held = {key(3), key(4)}
    rig.ask(1)
    rig.disk.await_call()
    for numbers in ((2,), (3, 5), (4,)):
        rig.ask(*numbers)
    rig.disk.permit()
    rig.disk.permit()
    assert [rig.await_answer(number) for number in (1, 2, 3, 4, 5)] == [False, False, True, True, False]
    assert rig.disk.batches == [[key(1)], [key(2), key(3), key(5), key(4)]]


def test_what_waited_when_everything_was_forgotten_is_not_asked_and_what_came_later_is(rig: Rig) -> None:
    rig.disk.held = {key(2), key(3)}
    rig.ask(1)
    rig.disk.await_call()
    rig.ask(2)
    rig.lookup.clear()
    rig.ask(3)
    rig.disk.permit()
    rig.disk.permit()
    assert rig.await_answer(3) is True
    assert rig.disk.batches == [[key(1)], [key(3)]]
    assert rig.lookup.drain_answered() == {key(3)}
    assert rig.lookup.lookup(key(2)) is None


def test_a_key_that_is_asked_again_behind_a_hung_call_is_asked_for_once_more_and_counted_twice() -> None:
    rig = Rig(max_outstanding_keys=4)
    rig.ask(1)
    rig.disk.await_call()
    rig.ask(2)
    rig.clock.advance(40.0)
    assert rig.lookup.lookup(key(2)) is False  # overdue
    rig.clock.advance(40.0)
    rig.ask(2, 3)
    assert rig.lookup.lookup(key(4)) is False  # four questions are open, whatever they are about
    rig.disk.permit()
    rig.disk.permit()
    assert rig.await_answer(3) is False
    assert rig.disk.batches == [[key(1)], [key(2), key(3)]]
    assert_room_for(rig, 4)
    close(rig)


def assert_room_for(rig: Rig, num_questions: int) -> None:
    """Assert that no question is open: exactly so many more may be."""
    answers = [rig.lookup.lookup(key(1_000_000 + number)) for number in range(num_questions + 1)]
    assert answers == [None] * num_questions + [False]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_every_question_is_answered_and_none_is_counted_for_ever(seed: int) -> None:
    rng = random.Random(seed)
    num_outstanding = 12
    rig = Rig(max_outstanding_keys=num_outstanding, negative_ttl_s=3.0, positive_ttl_s=3.0)
    rig.disk.held = {key(number) for number in range(0, 40, 2)}
    for _ in range(200):
        action = rng.randrange(8)
        if action < 4:
            number = rng.randrange(40)
            assert rig.lookup.lookup(key(number)) in (
                {None, False, True} if number % 2 == 0 else {None, False}
            )
        elif action == 4:
            rig.lookup.flush()
        elif action == 5:
            rig.disk.permit()
        elif action == 6:
            rig.clock.advance(rng.choice([0.5, 5.0, 31.0]))
        else:
            rng.choice([rig.lookup.clear, rig.lookup.drain_answered])()
    rig.lookup.clear()
    for _ in range(500):
        rig.disk.permit()
    pause = threading.Event()
    for _ in range(int(HANG_GUARD_S * 1000)):
        if rig.lookup.lookup(key(500)) is None:  # False as long as what was forgotten is being answered
            break
        pause.wait(0.001)
    assert rig.answer(500) is False
    assert rig.lookup.stats()["outstanding"] == 0
    assert_room_for(rig, num_outstanding)
    close(rig)


def test_after_shutdown_every_answer_is_false() -> None:
    rig = Rig()
    rig.lookup.lookup(key(1))
    assert rig.lookup.shutdown(HANG_GUARD_S)
    assert rig.lookup.lookup(key(1)) is False
    rig.lookup.flush()
    assert rig.lookup.shutdown(HANG_GUARD_S)


def test_shutdown_says_when_a_question_still_hangs() -> None:
    rig = Rig()
    rig.ask(1)
    rig.disk.await_call()
    rig.ask(2)
    assert not rig.lookup.shutdown(0.01)
    rig.disk.permit()
    assert rig.lookup.shutdown(HANG_GUARD_S)
    assert rig.disk.batches == [[key(1)]]  # nobody would hear the answer to the other


def test_no_thread_is_started_before_something_is_asked() -> None:
    before = threading.active_count()
    rig = Rig()
    rig.lookup.flush()
    assert threading.active_count() == before
    assert rig.lookup.shutdown(HANG_GUARD_S)
