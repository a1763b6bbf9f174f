"""Values that are leased to a reader, and are removed when their leases have ended."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

LEASE_S = 6.0
"""Seconds after which a lease has ended that nothing renews: 5, unless the master says otherwise. So long after a try
to remove what is leased comes the next."""

MAX_NAMES = 4096
"""Names that wait for their removal. One that is dropped is found damaged again by the next load."""


class DeferredDeletes:
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
        """Add ``names``; their next removal is due after a lease."""
        due_s = self._clock() + LEASE_S
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
        """Return which of ``names`` wait for their removal."""
        if not self._due_s:  # read without the lock: the usual case, and a late answer costs one lookup
            return frozenset()
        with self._lock:
            return frozenset(name for name in names if name in self._due_s)

    def take_due(self) -> list[str]:
        """Return the names whose removal is due; until the next try they are not due for other threads."""
        if not self._due_s:  # as above
            return []
        now_s = self._clock()
        with self._lock:
            due = [name for name, due_s in self._due_s.items() if due_s <= now_s]
            for name in due:
                self._due_s[name] = now_s + LEASE_S
        return due

    def __len__(self) -> int:
        return len(self._due_s)
