"""Which blocks of one namespace are on the disk, as far as this process knows.

A key in it was seen or written by this process and may have been evicted by another one since; a key missing from it
may have been written by another one. Both errors cost a hit, neither gives wrong bytes.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from itertools import islice

from kvtier.base import OffloadKey
from kvtier.departed import DepartedBlocks, Loss
from kvtier.tenants import get_tenant_part
from kvtier.tiering.kit.eviction_log import EvictionLog
from kvtier.tiering.kit.tenant_counts import TenantCounts

BATCH_KEYS = 1024
"""Keys added before the lock is released, some 100 us; more would keep the scheduler's lookups waiting."""


class KeyIndex:
    """A bounded set of keys, and which of them were evicted.

    Mutable are the keys, those evicted and whether the first scan has ended. ``_lock`` guards the first two. The
    scheduler's thread looks keys up under it, so ``add`` and ``forget_prefix`` change a thousand keys at most each
    time they take it; ``forget_prefix`` copies the list of all keys before, and ``drain_evicted`` visits each
    unreported eviction.

    Args:
        max_keys: keys kept; the one added first goes first. The directory holds no more blocks than that,
            so what is beyond it are keys whose files are gone.
        is_complete: whether there was nothing to scan in the first place.
        emit_events: whether evictions are recorded for ``drain_evicted``.
        losses: remembers why blocks are gone.
        tenant_counts: counts the keys by tenant; None where there are no tenants.

    Attributes:
        is_complete: whether everything that was on the disk at the start has been seen.
    """

    def __init__(
        self,
        max_keys: int,
        *,
        is_complete: bool,
        emit_events: bool = False,
        losses: DepartedBlocks | None = None,
        tenant_counts: TenantCounts | None = None,
    ) -> None:
        self._tenant_counts = tenant_counts
        self.is_complete = is_complete
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._keys: OrderedDict[OffloadKey, None] = OrderedDict()
        self._losses = losses
        self._evicted = EvictionLog() if emit_events else None
        self._complete = threading.Event()
        if is_complete:
            self._complete.set()

    def add(self, keys: Iterable[OffloadKey]) -> None:
        """Add blocks that are on the disk; where there are too many keys, those go that were added longest ago."""
        rest = iter(keys)
        while batch := list(islice(rest, BATCH_KEYS)):
            with self._lock:
                if self._tenant_counts is not None:
                    self._tenant_counts.add([key for key in dict.fromkeys(batch) if key not in self._keys])
                for key in batch:
                    self._keys[key] = None
                    self._keys.move_to_end(key)  # one that others had evicted is on the disk again
                num_beyond = max(0, len(self._keys) - self._max_keys)
                gone = [self._keys.popitem(last=False)[0] for _ in range(num_beyond)]
                if self._tenant_counts is not None:
                    self._tenant_counts.remove(gone)
                if self._evicted is not None:
                    for key in gone:
                        self._evicted.add(key)
            if gone and self._losses is not None:
                self._losses.report(gone, Loss.EVICTED)

    def evict(self, keys: Iterable[OffloadKey], loss: Loss = Loss.EVICTED) -> None:
        """Remove blocks that this process has lost, and record those it knew of for the next report."""
        lost: list[OffloadKey] = []
        with self._lock:
            for key in keys:
                if key in self._keys:
                    del self._keys[key]
                    lost.append(key)
                    if self._evicted is not None:
                        self._evicted.add(key)
            if self._tenant_counts is not None:
                self._tenant_counts.remove(lost)
        if self._losses is not None:
            self._losses.report(lost, loss)

    def find_prefix(
        self, prefix: bytes = b"", name: Callable[[OffloadKey], bytes] = bytes
    ) -> list[OffloadKey]:
        """Return the keys of the blocks whose names begin with ``prefix``.

        Args:
            prefix: what the names of the blocks begin with.
            name: what a block is called; its key where blocks are plain.
        """
        with self._lock:
            known = list(self._keys)
        return [key for key in known if name(key).startswith(prefix)] if prefix else known

    def forget(self, keys: Iterable[OffloadKey], loss: Loss = Loss.REMOVED) -> None:
        """Remove the keys of blocks whose files were removed.

        No tier reports these blocks as one that evicts them does: they count as evicted by this process.

        Args:
            keys: the blocks.
            loss: why they are gone.
        """
        removed = iter(keys)
        while batch := list(islice(removed, BATCH_KEYS)):
            self.evict(batch, loss)

    def forget_prefix(
        self, prefix: bytes = b"", name: Callable[[OffloadKey], bytes] = bytes, loss: Loss = Loss.REMOVED
    ) -> int:
        """Remove the keys that ``find_prefix`` finds, as ``forget`` does; return their number."""
        found = self.find_prefix(prefix, name)
        self.forget(found, loss)
        return len(found)

    def forget_tenant(self, tenant: int | None, loss: Loss) -> None:
        """Remove the keys of a tenant's blocks, of all for None, as ``forget_prefix`` does."""
        if tenant is None:
            self.forget_prefix(loss=loss)
        else:
            part, digits = get_tenant_part(tenant)
            self.forget_prefix(digits, lambda key: key[part], loss)

    def drain_evicted(self, being_stored: Collection[OffloadKey]) -> list[OffloadKey] | None:
        """Return what was evicted and is not back, each once; what is in ``being_stored`` waits for a later call.

        Returns:
            None when more was evicted than is remembered.
        """
        with self._lock:
            if self._evicted is None:
                return []
            return self._evicted.take(being_stored, self._keys.__contains__)

    def discard(self, keys: Collection[OffloadKey], loss: Loss | None = None) -> None:
        """Remove blocks that were gone, or cannot be read here, which is what ``loss`` says then."""
        if loss is not None and self._losses is not None:
            self._losses.report(tuple(keys), loss)
        with self._lock:
            gone = [key for key in dict.fromkeys(keys) if key in self._keys]
            for key in gone:
                del self._keys[key]
            if self._tenant_counts is not None:
                self._tenant_counts.remove(gone)

    def tenant_stats(self) -> dict[str, float]:
        """Return how many keys each tenant has, where there are tenants."""
        with self._lock:
            return {} if self._tenant_counts is None else self._tenant_counts.stats()

    def set_complete(self) -> None:
        """Record that the first scan has ended."""
        self.is_complete = True
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
