"""Names of damaged values that could not be removed yet, because somebody has just read them.

It removes nothing itself. Until a damaged value is gone nothing can be stored in its place, since the store keeps
the older of two values; meanwhile its name is not asked for, which would renew the lease that protects it.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

RETRY_S = 6.0
"""Seconds until a removal is tried again: the store's leases last 5 unless its master says otherwise."""

MAX_NAMES = 4096
"""Names kept in mind. A forgotten one is found damaged again by the next load."""


class Doomed:
    """A bounded set of names, each with the time of its next removal.

    Mutable is the set. ``_lock`` guards it.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._due_s: OrderedDict[str, float] = OrderedDict()

    def add(self, names: Iterable[str]) -> None:
        """Keep ``names`` in mind; the next removal is due after a lease."""
        due_s = self._clock() + RETRY_S
        with self._lock:
            for name in names:
                self._due_s[name] = due_s
                self._due_s.move_to_end(name)
            while len(self._due_s) > MAX_NAMES:
                self._due_s.popitem(last=False)

    def discard(self, names: Iterable[str]) -> None:
        """Forget ``names``."""
        with self._lock:
            for name in names:
                self._due_s.pop(name, None)

    def among(self, names: Collection[str]) -> frozenset[str]:
        """Return which of ``names`` are doomed."""
        if not self._due_s:  # read without the lock: the usual case, and a late answer costs one lookup
            return frozenset()
        with self._lock:
            return frozenset(name for name in names if name in self._due_s)

    def take_due(self) -> list[str]:
        """Return the names whose removal is due, and put it off for everybody else."""
        now_s = self._clock()
        with self._lock:
            due = [name for name, due_s in self._due_s.items() if due_s <= now_s]
            for name in due:
                self._due_s[name] = now_s + RETRY_S
        return due

    def __len__(self) -> int:
        return len(self._due_s)
