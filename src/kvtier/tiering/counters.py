"""Counts of what the tier's threads did."""

import threading
from collections import Counter


class Counters:
    """Named counts that any thread may raise.

    Mutable are the counts. ``_lock`` guards them.
    """

    def __init__(self, *names: str) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(names, 0))

    def add(self, **amounts: int) -> None:
        """Raise each named count."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def snapshot(self) -> dict[str, float]:
        """Return the counts by name."""
        with self._lock:
            return dict(self._counts)
