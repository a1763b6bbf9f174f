"""Threads of production code, run one at a time: a seed decides which, and a manual clock is their time.

Each simulated thread is a thread of the system that runs only while it holds the baton. It passes the baton on where it
waits, and sometimes where it takes a lock or calls a simulated disk or server. Waits end on the simulated clock, so a
hang of a minute costs nothing. ``installed`` puts these threads in the place of ``threading``, ``queue`` and ``time``
in the modules of the tiers; no production code changes for it.
"""

import queue
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from kvtier.testing.clock import ManualClock

PREEMPT_RATIO = 0.03
"""How often a thread that takes a lock lets others run first. More finds races sooner and costs a switch each."""

WALL_START_S = 4_000_000_000.0
"""The simulated wall clock's first reading. Later than any real one, so that no age depends on how fast the run is."""

SIMULATED_PACKAGES = ("kvtier.tiering.",)


class ThreadKilledError(BaseException):
    """Raised in a simulated thread whose process has been killed. No handler of ``Exception`` catches it."""


class DeadlockError(AssertionError):
    """Every simulated thread waits, and no time-out will end any of the waits."""


class SimThreads:
    """Runs threads one at a time.

    Args:
        rng: chooses who runs next.
        clock: the time of all waits; moved when everything waits.

    Attributes:
        clock: the same.
        current: the thread that runs now.
    """

    def __init__(self, rng: random.Random, clock: ManualClock) -> None:
        self.clock = clock
        self._rng = rng
        self._main = SimThread(self, name="engine")
        self.current = self._main
        self._background: list[SimThread] = []
        self._num_slices = 0
        self._is_killing = False
        self._is_deadlocked = False
        self.namespace = SimModules(self)

    def run(self, num_slices: int) -> None:
        """Let background threads run, until they have passed the baton on ``num_slices`` times or all wait."""
        if self.current is self._main and any(each.is_ready() for each in self._background):
            self._num_slices = num_slices
            self._switch(self._pick(wants_main=False))

    def run_until_idle(self, max_slices: int = 2000) -> None:
        """Let background threads run until all wait."""
        self.run(max_slices)

    def pause(self) -> None:
        """Let others run before the current thread goes on: called by simulated disks and servers."""
        me = self.current
        me.require_alive()
        if me is self._main:
            if self._rng.random() < PREEMPT_RATIO:
                self.run(1 + int(self._rng.random() * 4))
            return
        self._num_slices -= 1
        self._switch(self._pick())

    def may_pause(self) -> None:
        """Pause now and then: called where a thread takes a lock."""
        if self._rng.random() < PREEMPT_RATIO and not self._is_killing:
            self.pause()

    def block(self, until: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Let others run until ``until`` or for ``timeout_s``; return whether it was ``until``."""
        me = self.current
        me.require_alive()
        if until():
            return True
        me.until = until
        me.deadline_s = None if timeout_s is None or timeout_s < 0 else self.clock() + timeout_s
        self._num_slices -= 1
        self._switch(self._pick())
        me.until, me.deadline_s = None, None
        if self._is_deadlocked and me is self._main:
            self._is_deadlocked = False
            raise DeadlockError("every thread waits for ever")
        return until()

    def sleep(self, seconds: float) -> None:
        """Wait on the simulated clock."""
        self.block(lambda: False, max(0.0, seconds))

    def start(self, thread: "SimThread") -> None:
        """Make a thread ready; it runs when it is its turn."""
        self._background.append(thread)

    def kill(self) -> None:
        """End every background thread where it is, as a killed process does. Called by the engine's thread."""
        self._is_killing = True
        for thread in list(self._background):
            thread.is_killed = True
            self._switch(thread)
        self._is_killing = False
        assert not self._background, "a killed thread is still there"

    def on_ended(self, thread: "SimThread") -> None:
        """Pass the baton on for the last time."""
        self._background.remove(thread)
        self._num_slices -= 1
        successor = self._pick()
        self.current = successor
        successor.baton.release()

    def num_alive(self) -> int:
        """Return how many background threads have not ended."""
        return len(self._background)

    def _pick(self, *, wants_main: bool = True) -> "SimThread":
        main = self._main
        if self._is_killing:
            return main
        while True:
            if wants_main and self._num_slices <= 0 and main.is_ready():
                return main
            ready = [each for each in self._background if each.is_ready()]
            if main.until is not None and main.is_ready():
                ready.append(main)
            if ready:
                return ready[int(self._rng.random() * len(ready))]
            if main.is_ready():
                return main
            ends = [each.deadline_s for each in (main, *self._background) if each.deadline_s is not None]
            if not ends:
                self._is_deadlocked = True
                return main
            self.clock.advance(max(0.0, min(ends) - self.clock()) + 1e-6)

    def _switch(self, successor: "SimThread") -> None:
        me = self.current
        if successor is not me:
            self.current = successor
            successor.baton.release()
            me.baton.acquire()
        me.require_alive()


class SimThread:
    """What production code gets for a ``threading.Thread``.

    Attributes:
        baton: acquired until it is the thread's turn.
        until: what it waits for; None when it waits for nothing.
        deadline_s: when the wait ends anyway; None for never.
        is_killed: whether its process is gone.
        ident: None before it is started.
    """

    def __init__(
        self,
        threads: SimThreads,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Sequence[Any] = (),  # Any: whatever the thread's function takes
        *,
        daemon: bool | None = None,
    ) -> None:
        del group, daemon
        self.name = name or "thread"
        self.baton = threading.Lock()
        self.baton.acquire()
        self.until: Callable[[], bool] | None = None
        self.deadline_s: float | None = None
        self.is_killed = False
        self.ident: int | None = None
        self._threads = threads
        self._target = target
        self._args = args
        self._has_ended = False

    def start(self) -> None:
        """Begin, when it is the thread's turn."""
        self.ident = id(self)
        threading.Thread(target=self._work, name=f"storm-{self.name}", daemon=True).start()
        self._threads.start(self)

    def is_alive(self) -> bool:
        """Return whether it has begun and not ended."""
        return self.ident is not None and not self._has_ended

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        self._threads.block(lambda: self._has_ended, timeout)

    def is_ready(self) -> bool:
        """Return whether it can go on now."""
        if self.until is None:
            return True
        return (self.deadline_s is not None and self._threads.clock() >= self.deadline_s) or self.until()

    def require_alive(self) -> None:
        """Do nothing unless the thread's process is gone."""
        if self.is_killed:
            raise ThreadKilledError

    def _work(self) -> None:
        self.baton.acquire()
        try:
            if not self.is_killed and self._target is not None:
                self._target(*self._args)
        except ThreadKilledError:
            pass
        finally:
            self._has_ended = True
            self._threads.on_ended(self)


class SimLock:
    """A lock, or a re-entrant one."""

    def __init__(self, threads: SimThreads, *, is_reentrant: bool = False) -> None:
        self._threads = threads
        self._is_reentrant = is_reentrant
        self._owner: SimThread | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; return whether it was taken."""
        threads = self._threads
        if self._owner is threads.current and self._is_reentrant:
            self._depth += 1
            return True
        threads.may_pause()
        me = threads.current
        if self._owner is not None and not me.is_killed:
            if not blocking:
                return False
            if not threads.block(lambda: self._owner is None, timeout):
                return False
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        """Give the lock back."""
        self._depth -= 1
        if self._depth <= 0:
            self._owner = None

    def locked(self) -> bool:
        """Return whether a thread has it."""
        return self._owner is not None

    def give_up(self) -> int:
        """Give the lock back however often it was taken; return how often."""
        depth, self._owner, self._depth = self._depth, None, 0
        return depth

    def take_again(self, depth: int) -> None:
        """Take the lock back after ``give_up``."""
        me = self._threads.current
        if self._owner is not None and not me.is_killed:
            self._threads.block(lambda: self._owner is None)
        self._owner, self._depth = me, depth

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class SimCondition:
    """A condition variable."""

    def __init__(self, threads: SimThreads, lock: SimLock | None = None) -> None:
        self._threads = threads
        self._lock = lock or SimLock(threads, is_reentrant=True)
        self._waiters: deque[list[bool]] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notification; return whether one came."""
        waiter = [False]
        self._waiters.append(waiter)
        depth = self._lock.give_up()
        try:
            self._threads.block(lambda: waiter[0], timeout)
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            self._lock.take_again(depth)
        return waiter[0]

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until ``predicate`` holds; return whether it does."""
        end_s = None if timeout is None else self._threads.clock() + timeout
        while not (is_true := predicate()):
            left_s = None if end_s is None else end_s - self._threads.clock()
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return is_true

    def notify(self, n: int = 1) -> None:
        """Wake some of those who wait."""
        for waiter in list(self._waiters)[:n]:
            waiter[0] = True
            self._waiters.remove(waiter)

    def notify_all(self) -> None:
        """Wake all."""
        self.notify(len(self._waiters))

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


class SimEvent:
    """A flag that threads wait for."""

    def __init__(self, threads: SimThreads) -> None:
        self._threads = threads
        self._is_set = False

    def is_set(self) -> bool:
        """Return the flag."""
        return self._is_set

    def set(self) -> None:
        """Raise it."""
        self._is_set = True

    def clear(self) -> None:
        """Take it down."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it; return it."""
        return self._is_set or self._threads.block(self.is_set, timeout)


class SimQueue:
    """A queue between threads."""

    def __init__(self, threads: SimThreads) -> None:
        self._threads = threads
        self._items: deque[object] = deque()

    def put(self, item: object) -> None:
        """Append an item."""
        self._items.append(item)

    def get(self) -> object:
        """Wait for an item and take it."""
        self._threads.block(lambda: bool(self._items))
        return self._items.popleft()

    def get_nowait(self) -> object:
        """Take an item that is there."""
        if not self._items:
            raise queue.Empty
        return self._items.popleft()


class SimModules:
    """What stands for the modules ``threading``, ``queue`` and ``time`` in production code."""

    def __init__(self, threads: SimThreads) -> None:
        self.threading = _Overlay(
            threading,
            Thread=lambda *args, **options: SimThread(threads, *args, **options),
            Lock=lambda: SimLock(threads),
            RLock=lambda: SimLock(threads, is_reentrant=True),
            Condition=lambda lock=None: SimCondition(threads, lock),
            Event=lambda: SimEvent(threads),
        )
        self.queue = _Overlay(queue, SimpleQueue=lambda: SimQueue(threads))
        self.time = _Overlay(
            time,
            monotonic=threads.clock,
            time=lambda: WALL_START_S + threads.clock(),
            time_ns=lambda: (
                0
            ),  # folders have real times: what has changed is looked at each time, fast run or slow
            sleep=threads.sleep,
        )


class _Overlay:
    """A module, some names of which are others."""

    def __init__(self, module: object, **names: object) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


@contextmanager
def installed(threads: SimThreads, packages: Sequence[str] = SIMULATED_PACKAGES) -> Iterator[None]:
    """Let the modules below ``packages`` that are loaded now use ``threads`` and their clock.

    Args:
        threads: what they get.
        packages: beginnings of names of modules; an author of a tier adds the package that holds it.
    """
    overlays = threads.namespace
    places: dict[object, object] = {threading: overlays.threading, queue: overlays.queue, time: overlays.time}
    replaced: list[tuple[dict[str, object], str, object]] = []
    for name, module in list(sys.modules.items()):
        if not name.startswith(tuple(packages)):
            continue
        for attribute in ("threading", "queue", "time"):
            found = getattr(module, attribute, None)
            if found in (threading, queue, time):
                replaced.append((vars(module), attribute, found))
                vars(module)[attribute] = places[found]
    try:
        yield
    finally:
        for names, attribute, found in replaced:
            names[attribute] = found
