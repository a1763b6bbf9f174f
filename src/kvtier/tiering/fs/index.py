"""Which blocks of one namespace are on the disk, as far as this process knows.

It asks no disk. A key in it was seen or written by this process and may have been evicted by another one since;
a key missing from it may have been written by another one. Both errors cost a hit, neither gives wrong bytes.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from itertools import islice

from kvtier.base import OffloadKey
from kvtier.tiering.kit.eviction_log import EvictionLog

BATCH_KEYS = 1024
"""Keys added under one hold of the lock, some 100 us; more would keep the scheduler's lookups waiting."""


class KeyIndex:
    """A bounded set of keys, and which of them were evicted.

    Mutable are the keys, those evicted and whether the first scan has ended. ``_lock`` guards them; it is held for
    a thousand operations at most, because the scheduler's thread looks keys up under it.

    Args:
        max_keys: keys kept; the one added first goes first. The directory holds no more blocks than that,
            so what is beyond it are keys whose files are gone.
        is_complete: whether there was nothing to scan in the first place.
        tells_evicted: whether anybody will ask what was evicted; asked with each eviction.
    """

    def __init__(
        self, max_keys: int, *, is_complete: bool, tells_evicted: Callable[[], bool] = lambda: False
    ) -> None:
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._keys: OrderedDict[OffloadKey, None] = OrderedDict()
        self._evicted = EvictionLog(tells_evicted)
        self._complete = threading.Event()
        if is_complete:
            self._complete.set()

    def add(self, keys: Iterable[OffloadKey]) -> None:
        """Note that the blocks of ``keys`` are on the disk."""
        rest = iter(keys)
        while batch := list(islice(rest, BATCH_KEYS)):
            with self._lock:
                self._keys.update(dict.fromkeys(batch))
                while len(self._keys) > self._max_keys:
                    self._keys.popitem(last=False)

    def evict(self, keys: Iterable[OffloadKey]) -> None:
        """Note that this process has removed the blocks of ``keys``; those it knew of are told to whoever asks."""
        with self._lock:
            for key in keys:
                if key in self._keys:
                    del self._keys[key]
                    self._evicted.add(key)

    def lose(self, prefix: bytes = b"") -> int:
        """Note that somebody has removed the files of all keys that begin so; return how many were known.

        Nobody else tells of them, as a process does that evicts: they count as evicted by this one.
        """
        with self._lock:
            known = list(self._keys)
        lost = iter([key for key in known if key.startswith(prefix)] if prefix else known)
        num_lost = 0
        while batch := list(islice(lost, BATCH_KEYS)):
            self.evict(batch)
            num_lost += len(batch)
        return num_lost

    def drain_evicted(self, being_stored: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return what was evicted and is not back, each once; what is in ``being_stored`` waits for a later call."""
        with self._lock:
            return self._evicted.take(being_stored, self._keys.__contains__)

    def discard(self, keys: Iterable[OffloadKey]) -> None:
        """Note that the blocks of ``keys`` are gone, somebody else's doing."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    @property
    def is_complete(self) -> bool:
        """Whether everything that was on the disk at the start has been seen."""
        return self._complete.is_set()

    def set_complete(self) -> None:
        """Note that the first scan has ended."""
        self._complete.set()

    def wait_complete(self, timeout_s: float) -> bool:
        """Block until the first scan has ended; False when ``timeout_s`` passed first."""
        return self._complete.wait(timeout_s)

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._keys

    def __len__(self) -> int:
        with self._lock:
            return len(self._keys)
