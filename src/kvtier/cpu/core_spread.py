"""Threads that work on one transfer move apart when they find themselves on the same core.

It knows no transfer and ties nobody to a core: the system may move a thread again at once. The kernel of a virtual
machine takes a core that its host has put to sleep for a busy one, and wakes a second thread beside the first; there
it waits for time slices of 4 ms, as a rule, while the other core sleeps on.

A thread that was moved may afterwards run on the cores that it could run on just then: of cores that its control group
is given later it learns only if it has never been moved.
"""

import ctypes
import os
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass


def _find_get_core() -> Callable[[], int] | None:
    # Called with the interpreter's lock held: letting go of it is what wakes threads.
    get_core: Callable[[], int] | None = getattr(ctypes.PyDLL(None), "sched_getcpu", None)
    return get_core


@dataclass(frozen=True, slots=True)
class CoreCalls:
    """What the system is asked, of the calling thread.

    Attributes:
        get_core: the core that it runs on; negative when the system cannot tell, None where nobody can.
        get_allowed: the cores that it may run on.
        set_allowed: lets it run on these cores only.
    """

    get_core: Callable[[], int] | None
    get_allowed: Callable[[], AbstractSet[int]]
    set_allowed: Callable[[AbstractSet[int]], None]


REAL_CALLS = CoreCalls(
    _find_get_core(), lambda: os.sched_getaffinity(0), lambda cores: os.sched_setaffinity(0, cores)
)


class CoreSpread:
    """The cores that the threads of one transfer began on.

    Thread: any; ``join`` is called by each of them, with the interpreter's lock held throughout.

    Args:
        calls: the system.
    """

    def __init__(self, calls: CoreCalls = REAL_CALLS) -> None:
        self._calls = calls
        self._taken: set[int] = set()

    def join(self) -> None:
        """Take the calling thread's core; move it to another one first if that is taken and others are not."""
        if self._calls.get_core is None:
            return
        with suppress(OSError):  # a sandbox that forbids it; the thread stays where it is
            if self._calls.get_core() in self._taken:
                self._move()
            self._taken.add(self._calls.get_core())

    def _move(self) -> None:
        allowed = self._calls.get_allowed()
        free = allowed - self._taken
        if free:
            self._calls.set_allowed(free)
            self._calls.set_allowed(allowed)
