"""Simulated threads: one runs at a time, in an order that the seed decides, and waits end on the simulated clock."""

import queue
import random
import threading
import time

import pytest
from tests.storm.threads import (
    DeadlockError,
    SimCondition,
    SimEvent,
    SimLock,
    SimQueue,
    SimThread,
    SimThreads,
    installed,
)

from kvtier.testing.clock import ManualClock
from kvtier.tiering.kit import io_pool, lookup


def make_threads(seed: int = 1) -> SimThreads:
    """Return simulated threads that no other test shares."""
    return SimThreads(random.Random(seed), ManualClock())


def interleave(seed: int) -> list[str]:
    """Return in which order two threads ran that pause after each letter."""
    threads, order = make_threads(seed), list[str]()

    def write(letters: str) -> None:
        for letter in letters:
            order.append(letter)
            threads.pause()

    for letters in ("abcdef", "uvwxyz"):
        SimThread(threads, target=write, args=(letters,)).start()
    threads.run_until_idle()
    return order


def test_a_seed_gives_the_same_order_again_and_another_seed_another_one() -> None:
    assert interleave(1) == interleave(1)
    assert len({tuple(interleave(seed)) for seed in range(10)}) > 5


def test_a_wait_ends_on_the_simulated_clock_and_takes_no_time() -> None:
    threads = make_threads()
    event = SimEvent(threads)
    began_s = time.monotonic()
    assert not event.wait(3600.0)
    assert threads.clock() >= 3600.0
    assert time.monotonic() - began_s < 60.0


def test_a_background_wait_ends_only_when_the_clock_is_advanced() -> None:
    threads, order = make_threads(), list[str]()

    def sleep() -> None:
        threads.sleep(5.0)
        order.append("awake")

    SimThread(threads, target=sleep).start()
    threads.run_until_idle()
    assert not order
    threads.clock.advance(5.0)
    threads.run_until_idle()
    assert order == ["awake"]


def test_a_condition_hands_an_item_over() -> None:
    threads, items, taken = make_threads(), list[int](), list[int]()
    changed = SimCondition(threads)

    def take() -> None:
        with changed:
            changed.wait_for(lambda: bool(items))
            taken.append(items.pop())

    thread = SimThread(threads, target=take)
    thread.start()
    threads.run_until_idle()
    with changed:
        items.append(7)
        changed.notify_all()
    thread.join()
    assert taken == [7]
    assert not thread.is_alive()


def test_threads_that_wait_for_each_other_for_ever_are_a_deadlock() -> None:
    threads = make_threads()
    with pytest.raises(DeadlockError):
        SimQueue(threads).get()


def test_a_lock_keeps_a_second_thread_out_while_the_first_pauses() -> None:
    threads, inside = make_threads(), list[int]()
    lock = SimLock(threads)

    def enter(number: int) -> None:
        with lock:
            inside.append(number)
            for _ in range(5):
                threads.pause()
            inside.append(number)

    for number in range(4):
        SimThread(threads, target=enter, args=(number,)).start()
    threads.run_until_idle()
    assert inside[::2] == inside[1::2]
    assert sorted(inside[::2]) == [0, 1, 2, 3]


def test_killed_threads_end_where_they_are() -> None:
    threads, done = make_threads(), list[str]()
    event = SimEvent(threads)

    def work() -> None:
        try:
            event.wait()
        except Exception:  # noqa: BLE001  # what the top of a thread does
            done.append("caught")
        done.append("went on")

    SimThread(threads, target=work).start()
    SimThread(threads, target=work).start()
    threads.run_until_idle()
    threads.kill()
    assert threads.num_alive() == 0
    assert not done


def test_modules_get_simulated_threads_and_get_theirs_back() -> None:
    threads = make_threads()
    with installed(threads):
        assert vars(io_pool)["threading"] is threads.namespace.threading
        assert vars(lookup)["queue"] is threads.namespace.queue
    assert vars(io_pool)["threading"] is threading
    assert vars(lookup)["queue"] is queue
