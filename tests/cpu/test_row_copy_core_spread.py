"""Threads that begin on one core end on several, and may run wherever they could before."""

import os
import threading
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import pytest

from kvtier.cpu.row_copy import REAL_CALLS, CoreCalls, CoreSpread

HANG_GUARD_S = 60.0


class FakeThread:
    """A thread on a machine that moves it only when it has to."""

    def __init__(self, core: int, allowed: AbstractSet[int], *, is_forbidden: bool = False) -> None:
        self.core = core
        self.allowed = allowed
        self.num_moves = 0
        self._is_forbidden = is_forbidden

    def set_allowed(self, cores: AbstractSet[int]) -> None:
        """Move to the lowest core that is left, if it must."""
        if self._is_forbidden:
            raise PermissionError("a sandbox")
        self.allowed = cores
        if self.core not in cores:
            self.core = min(cores)
            self.num_moves += 1


class FakeSystem:
    """Asked of the thread that is running just then."""

    def __init__(self, running: FakeThread) -> None:
        self.running = running

    def get_core(self) -> int:
        """Return its core."""
        return self.running.core

    def get_allowed(self) -> AbstractSet[int]:
        """Return where it may run."""
        return self.running.allowed

    def set_allowed(self, cores: AbstractSet[int]) -> None:
        """Say where it may run."""
        self.running.set_allowed(cores)


def join_all(threads: Sequence[FakeThread]) -> None:
    """Let each thread join, one after the other."""
    system = FakeSystem(threads[0])
    spread = CoreSpread(CoreCalls(system.get_core, system.get_allowed, system.set_allowed))
    for thread in threads:
        system.running = thread
        spread.join()


def test_threads_on_one_core_end_on_cores_of_their_own_and_may_run_anywhere() -> None:
    threads = [FakeThread(2, {0, 1, 2, 3}) for _ in range(4)]
    join_all(threads)
    assert {thread.core for thread in threads} == {0, 1, 2, 3}
    assert all(thread.allowed == {0, 1, 2, 3} for thread in threads)


def test_threads_on_cores_of_their_own_are_not_moved() -> None:
    threads = [FakeThread(core, {0, 1, 2}) for core in (1, 0, 2)]
    join_all(threads)
    assert [thread.core for thread in threads] == [1, 0, 2]
    assert not any(thread.num_moves for thread in threads)


def test_with_more_threads_than_cores_the_last_ones_stay() -> None:
    threads = [FakeThread(0, {0, 1}) for _ in range(3)]
    join_all(threads)
    assert [thread.core for thread in threads] == [0, 1, 0]
    assert threads[2].allowed == {0, 1}


def test_where_it_is_forbidden_a_thread_stays_and_works() -> None:
    threads = [FakeThread(0, {0, 1}, is_forbidden=True) for _ in range(2)]
    join_all(threads)
    assert [thread.core for thread in threads] == [0, 0]


def test_where_nobody_can_tell_the_core_nothing_is_done() -> None:
    spread = CoreSpread(CoreCalls(None, frozenset, lambda cores: pytest.fail(f"moved to {cores}")))
    spread.join()
    spread.join()


def test_a_real_thread_leaves_a_core_that_is_taken_and_keeps_its_choice() -> None:
    if REAL_CALLS.get_core is None or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one core, or nobody can tell which one a thread is on")
    allowed = os.sched_getaffinity(0)
    moved_to: list[AbstractSet[int]] = []

    def note_and_move(cores: AbstractSet[int]) -> None:
        REAL_CALLS.set_allowed(cores)
        assert REAL_CALLS.get_core is not None
        moved_to.append({REAL_CALLS.get_core()} & cores)

    def join_all_but_one() -> None:
        spread = CoreSpread(CoreCalls(lambda: min(allowed), REAL_CALLS.get_allowed, note_and_move))
        spread.join()
        spread.join()
        ends.append(os.sched_getaffinity(0))

    ends: list[AbstractSet[int]] = []
    thread = threading.Thread(target=join_all_but_one)
    thread.start()
    thread.join(HANG_GUARD_S)
    assert ends == [allowed]
    assert len(moved_to) == 2
    assert all(moved_to), "a thread runs where it may"
