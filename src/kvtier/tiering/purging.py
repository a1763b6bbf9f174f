"""What a purge of a living engine does, step by step: every tier that was named drops its blocks, for good.

States of a tier: waiting, while jobs of it are open -> under way, its backend removes -> ended. From the first moment
until it has ended, no lookup finds a block in it and none is stored: so nothing comes back that was just removed, and
the tier has no job in flight while it removes. What it was still to get is lost to it. Host memory is purged at once,
and again at the end, for what a tier has delivered meanwhile.

A purge may be of one tenant's blocks. A tier is left out as a whole all the same while it removes them, but what it was
still to get of other tenants waits. Purges of different tenants are not one: the second is refused.

A purge goes on when its client has hung up: a half-purged tier is of no use to anyone.
"""

from collections.abc import Collection, Sequence

from kvtier.base import OffloadKey
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.errors import ControlError, UnknownNameError
from kvtier.misses import HOST_ORIGIN
from kvtier.operating import Purge, PurgedBlocks
from kvtier.tiering.base import PurgeOutcome
from kvtier.tiering.cascade import CascadePlanner
from kvtier.tiering.guard import GuardedTier
from kvtier.tiering.transfers import TierTransfers


class TierPurges:
    """The purge that is under way, if any. Used on the manager's thread.

    Args:
        primary: host memory.
        tiers: the secondary tiers, in the order of lookups; the manager's own list.
        cascades: what they are still to get.
        transfers: their open jobs.

    Attributes:
        is_under_way: whether ``advance`` has something to do.
    """

    def __init__(
        self,
        primary: CPUOffloadingManager,
        tiers: Sequence[GuardedTier],
        cascades: CascadePlanner,
        transfers: TierTransfers,
    ) -> None:
        self.is_under_way = False
        self._primary = primary
        self._tiers = tiers
        self._cascades = cascades
        self._transfers = transfers
        self._purge = Purge()
        self._blocks = PurgedBlocks()
        self._tenant: int | None = None
        self._waiting: list[GuardedTier] = []
        self._begun: dict[GuardedTier, int] = {}

    def begin(self, names: Collection[str] | None, tenant: int | None = None) -> Purge:
        """Begin a purge, or add tiers to the one that is under way; see ``PurgingManager``.

        Raises:
            ControlError: that one is of other blocks; nothing has changed.
            UnknownNameError: there is no such tier; nothing has changed.
        """
        known = [HOST_ORIGIN, *(tier.name for tier in self._tiers)]
        wanted = known if names is None else list(names)
        for name in wanted:
            if name not in known:
                raise UnknownNameError("tier", name, known)
        if not self.is_under_way:
            self._purge, self._blocks, self._tenant = Purge(), PurgedBlocks(), tenant
            self.is_under_way = True
        elif tenant != self._tenant:
            raise ControlError("a purge of other blocks is under way: try again when it has ended")
        for tier in self._tiers:
            if tier.name in wanted and not tier.is_purging:
                tier.is_purging = True
                self._waiting.append(tier)
                self._cascades.drop_pending(tier, tenant)
        if HOST_ORIGIN in wanted:
            self._purge_host()
        self.advance()
        return self._purge

    def advance(self) -> None:
        """Go on with the purge: called at the end of a step. Never blocks."""
        for tier in list(self._waiting):
            # An open job may still write what was just removed, or read it.
            if self._transfers.jobs.of_tier[tier] or self._transfers.num_planned_blocks(tier):
                continue
            self._waiting.remove(tier)
            outcome = tier.begin_purge(self._tenant)
            if outcome is None:
                self._begun[tier] = 0
            else:
                self._on_ended(tier, outcome)
        for tier in list(self._begun):
            found = tier.poll_purge()
            if isinstance(found, PurgeOutcome):
                del self._begun[tier]
                self._on_ended(tier, found)
            else:
                self._begun[tier] = found
        self._purge.num_removed = sum(self._begun.values()) + sum(self._blocks.num_purged.values())
        if self._waiting or self._begun:
            return
        if HOST_ORIGIN in self._blocks.num_purged:
            self._purge_host()
        self.is_under_way = False
        self._purge.result = self._blocks

    def _purge_host(self) -> None:
        keys: list[OffloadKey] = self._primary.purge_blocks(self._tenant)
        self._cascades.forget(keys)
        counts = self._blocks.num_purged
        counts[HOST_ORIGIN] = counts.get(HOST_ORIGIN, 0) + len(keys)
        self._blocks.num_in_use[HOST_ORIGIN] = self._primary.count_held(self._tenant)

    def _on_ended(self, tier: GuardedTier, outcome: PurgeOutcome) -> None:
        tier.is_purging = False
        if outcome.error:
            self._blocks.unable[tier.name] = outcome.error
        if outcome.num_blocks or not outcome.error:
            counts = self._blocks.num_purged
            counts[tier.name] = counts.get(tier.name, 0) + outcome.num_blocks
