"""What is kept about blocks that come and go: their tenants' counts, when they are over, why they are gone."""

from collections.abc import Callable, Collection, Iterable, Sequence

from kvtier.base import OffloadKey
from kvtier.departed import DepartedBlocks, Loss
from kvtier.tiering.fs.expiry import SlotExpiry
from kvtier.tiering.kit.eviction_log import EvictionLog
from kvtier.tiering.kit.tenant_counts import TenantCounts


class BlockAccounts:
    """The accounts of one tier; the slot table's lock guards them.

    Args:
        emit_events: whether blocks that are gone are kept for ``drain``.
        losses: remembers why blocks are gone.
        expiry: which own blocks are over; None: none ever is.
        tenant_counts: counts the namespace's blocks by tenant; None where there are no tenants.
    """

    def __init__(
        self,
        *,
        emit_events: bool = False,
        losses: DepartedBlocks | None = None,
        expiry: SlotExpiry | None = None,
        tenant_counts: TenantCounts | None = None,
    ) -> None:
        self.expiry = expiry
        self._losses = losses
        self._tenant_counts = tenant_counts
        self._gone = EvictionLog() if emit_events else None
        self._num_of: dict[Loss, int] = {Loss.EVICTED: 0, Loss.EXPIRED: 0}

    def clear(self) -> None:
        """Forget every block."""
        if self._gone is not None:
            self._gone.clear()
        if self.expiry is not None:
            self.expiry.clear()
        if self._tenant_counts is not None:
            self._tenant_counts.clear()

    def add(self, keys: Iterable[OffloadKey]) -> None:
        """Count blocks that were not held."""
        if self._tenant_counts is not None:
            self._tenant_counts.add(keys)

    def record_store(self, key: OffloadKey, stored_s: float) -> None:
        """Note when an own block was stored."""
        if self.expiry is not None:
            self.expiry.record(key, stored_s)

    def remove(self, keys: Collection[OffloadKey], loss: Loss | None = None) -> None:
        """Uncount own blocks; with a ``loss`` they are not held any more, and that is why."""
        if self.expiry is not None:
            for key in keys:
                self.expiry.forget(key)
        if self._tenant_counts is not None:
            self._tenant_counts.remove(keys)
        if loss is not None:
            if loss in self._num_of:
                self._num_of[loss] += len(keys)
            self.report_gone(keys, loss)

    def remove_neighbours(self, keys: Collection[OffloadKey]) -> None:
        """Uncount blocks of neighbours."""
        if self._tenant_counts is not None:
            self._tenant_counts.remove(keys)

    def report_gone(self, keys: Collection[OffloadKey], loss: Loss) -> None:
        """Remember why blocks are not held any more."""
        if self._losses is not None:
            self._losses.report(list(keys), loss)
        if self._gone is not None:
            for key in keys:
                self._gone.add(key)

    def report_foreign(self, keys: Collection[OffloadKey]) -> None:
        """Remember that blocks are there and cannot be read; they stay."""
        if keys and self._losses is not None:
            self._losses.report(list(keys), Loss.FOREIGN)

    def rank_beyond(self, added: Sequence[OffloadKey]) -> tuple[list[tuple[int, int]], int]:
        """Return which tenants beyond their quotas give first where a store needs room, as ``TenantCounts`` does.

        Each comes with the number of blocks that it is beyond, of those that are there.
        """
        counts = self._tenant_counts
        if counts is None or not counts.has_quotas:
            return [], 0
        ranked, num_beyond = counts.rank_beyond(added)
        return [(number, min(excess, counts.num_blocks[number])) for number, excess in ranked], num_beyond

    def drain(
        self, being_stored: Collection[OffloadKey], is_held: Callable[[OffloadKey], bool]
    ) -> list[OffloadKey] | None:
        """Return the blocks that are gone since the last call and are not back, as ``EvictionLog.take``."""
        return [] if self._gone is None else self._gone.take(being_stored, is_held)

    def stats(self) -> dict[str, float]:
        """Return how many blocks went, and whose blocks there are."""
        counts: dict[str, float] = {"evicted_blocks": self._num_of[Loss.EVICTED]}
        if self.expiry is not None:
            counts["expired_blocks"] = self._num_of[Loss.EXPIRED]
        if self._tenant_counts is not None:
            counts |= self._tenant_counts.stats()
        return counts
