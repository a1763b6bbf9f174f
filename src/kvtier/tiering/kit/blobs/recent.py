"""Blobs that were there a moment ago, so that they are not sent again."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

MAX_REMEMBERED = 16_384
"""Blobs remembered that were just written or found whole, some 250 bytes each. Fewer upload again, for a server to
refuse, what was written a moment ago; more take memory for blobs that are not stored again."""

REMEMBERED_S = 60.0
"""Seconds for which they are taken to be there still. Longer stores nothing for longer where another has deleted them;
shorter uploads more of what is there."""

REMEMBERED_RATIO = 0.1
"""The same as a share of the time to live, which a store that was left out does not renew. More believes in blobs
that have expired by then; less uploads more where the time to live is short."""


class RecentBlobs:
    """Names of blobs that were written or found whole within the last minute, so that they are not uploaded again.

    Mutable are the names, each with the time of that, the oldest first. ``_lock`` guards them.

    Args:
        clock: seconds, monotonic.
        ttl_s: seconds that blobs live; None: without an end.
    """

    def __init__(self, clock: Callable[[], float], ttl_s: float | None = None) -> None:
        self._clock = clock
        self._believed_s = REMEMBERED_S if ttl_s is None else min(REMEMBERED_S, REMEMBERED_RATIO * ttl_s)
        self._lock = threading.Lock()
        self._held_s: OrderedDict[str, float] = OrderedDict()

    def add(self, names: Iterable[str]) -> None:
        """Remember that blobs are there now."""
        now_s = self._clock()
        with self._lock:
            for name in names:
                self._held_s[name] = now_s
                self._held_s.move_to_end(name)
            while len(self._held_s) > MAX_REMEMBERED:
                self._held_s.popitem(last=False)

    def discard(self, names: Iterable[str]) -> None:
        """Forget blobs that are gone."""
        with self._lock:
            for name in names:
                self._held_s.pop(name, None)

    def has(self, name: str) -> bool:
        """Return whether a blob was there within the last minute."""
        held_s = self._held_s.get(name)
        return held_s is not None and self._clock() - held_s < self._believed_s

    def choose(self, num_names: int) -> list[str]:
        """Return some of those that are remembered, also from before the last minute, of all ages."""
        with self._lock:
            names = list(self._held_s)
        return names[:: max(1, len(names) // num_names)][:num_names]

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._held_s.clear()
