"""What a tier knows of blocks that are gone from a backend which evicts by itself.

Such a backend reports no eviction. So the tier remembers what it has stored, and when: a block that is missing although
it was stored has expired when its time to live has passed since, and was evicted otherwise.
"""

from collections.abc import Callable, Sequence
from types import MappingProxyType

from kvtier.base import OffloadKey
from kvtier.departed import MIN_REMEMBERED_BLOCKS, DepartedBlocks, Loss, make_losses
from kvtier.misses import Miss, MissCause


class BackendLosses:
    """Why blocks of one tier are missing. Any thread reports; the scheduler's thread asks.

    Args:
        tier: type of the tier.
        clock: seconds, monotonic.
        ttl_s: seconds after its last use that the backend keeps a block; None: it has no time to live.
        renews: whether a use counts; otherwise they count from the store.
        max_blocks: blocks remembered.
    """

    def __init__(
        self,
        tier: str,
        clock: Callable[[], float],
        ttl_s: float | None = None,
        max_blocks: int = MIN_REMEMBERED_BLOCKS,
        *,
        renews: bool = True,
    ) -> None:
        self._renews = renews
        self._ttl_s = ttl_s
        self._blocks: DepartedBlocks = make_losses(tier, max_blocks, clock)
        self._evicted, self._expired = Miss(MissCause.EVICTED, tier), Miss(MissCause.EXPIRED, tier)
        self._stored = self._blocks.add_kind(self._evicted)

    def on_stored(self, keys: Sequence[OffloadKey]) -> None:
        """Remember that the backend holds ``keys`` now. Thread: any."""
        self._blocks.report(keys, self._stored)

    def on_used(self, keys: Sequence[OffloadKey]) -> None:
        """Remember that the time to live of ``keys`` counts from now, where there is one. Thread: any."""
        if self._ttl_s is not None and self._renews:
            self._blocks.report(keys, self._stored)

    def on_expired(self, keys: Sequence[OffloadKey]) -> None:
        """Remember that ``keys`` were found although their time to live is over. Thread: any."""
        self._blocks.report(keys, Loss.EXPIRED)

    def on_damaged(self, keys: Sequence[OffloadKey]) -> None:
        """Remember that ``keys`` were damaged, and are to be removed. Thread: any."""
        self._blocks.report(keys, Loss.DAMAGED)

    def on_foreign(self, keys: Sequence[OffloadKey]) -> None:
        """Remember that ``keys`` are there, and of a version or key that this engine cannot read. Thread: any."""
        self._blocks.report(keys, Loss.FOREIGN)

    def explain(self, key: OffloadKey) -> Miss | None:
        """Return why ``key``, which the backend lacks, is missing; None when nothing is known of it.

        How long ago a block was evicted is not known; one that has expired did so at the end of its time.
        """
        found = self._blocks.find(key)
        if found is None:
            return None
        if found.miss is not self._evicted:
            return found.miss._replace(detail=MappingProxyType({**found.miss.detail, "ago_s": found.ago_s}))
        if self._ttl_s is None or found.ago_s < self._ttl_s:
            return self._evicted
        return self._expired._replace(
            detail=MappingProxyType({"ago_s": round(found.ago_s - self._ttl_s, 1), "ttl_s": self._ttl_s})
        )

    def clear(self) -> None:
        """Forget every block."""
        self._blocks.clear()
