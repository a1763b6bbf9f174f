"""What operators can do to a manager beside the engine's calls: optional contracts, each an ability of its own.

They are called on the manager's thread, between two steps, and do not block.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from kvtier.base import OffloadKey, ReqContext


class PinnedBlocks(NamedTuple):
    """What a pin has done.

    Attributes:
        num_blocks: blocks that are pinned by it, new or renewed.
        num_ready: those of them that are in host memory now; the others are pinned when they come.
        num_pinned: all blocks that have a lease now.
        limit: the most that may have one.
    """

    num_blocks: int
    num_ready: int
    num_pinned: int
    limit: int


@dataclass(frozen=True, slots=True)
class PurgedBlocks:
    """What a purge has done.

    Attributes:
        num_purged: blocks that are gone, by tier.
        num_in_use: blocks that stay because a transfer or a waiting request uses them, by tier.
        unable: tiers that were named and are not purged, or only in part, each with the reason.
    """

    num_purged: dict[str, int] = field(default_factory=dict)
    num_in_use: dict[str, int] = field(default_factory=dict)
    unable: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Purge:
    """A purge that has begun; who called for it looks at it again after each step.

    Attributes:
        result: what it has done; None while tiers are still at it.
        num_removed: blocks that their backends have removed so far.
    """

    result: PurgedBlocks | None = None
    num_removed: int = 0


class DroppedBlocks(NamedTuple):
    """What dropping single blocks has done.

    Attributes:
        in_use: blocks that stay in host memory because a transfer or a waiting request uses them.
        unable: secondary tiers that cannot delete single blocks.
    """

    in_use: tuple[OffloadKey, ...] = ()
    unable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainResult:
    """What a drain has found; true when every block that was stored is where it should be.

    Attributes:
        has_ended: whether all stores and the tiers' jobs ended in time. While they have not, the numbers below go on
            to count for the next drain.
        num_lost_blocks: blocks that were to get into a tier and never will: they left host memory before the tier had
            them, the tier failed to write them, or no host memory was free for them when they were computed. Counted
            since the last drain that has ended, or since the start.
        num_pending_blocks: blocks of host memory that wait for a tier which is left out for now.
    """

    has_ended: bool = True
    num_lost_blocks: int = 0
    num_pending_blocks: int = 0

    def __bool__(self) -> bool:
        return self.has_ended and not self.num_lost_blocks and not self.num_pending_blocks


@runtime_checkable
class DrainingManager(Protocol):
    """A manager with secondary tiers, which may have work after every store has ended, and which counts what is lost.

    Called by the connector and the engine, not only for operators.
    """

    def drain(self, timeout_s: float) -> DrainResult:
        """Wait until the tiers have got and ended what is pending for them, or ``timeout_s`` has passed."""

    def will_have_room(self) -> bool:
        """Return True when a store that had no room may have it in a later step, although no request ends."""

    def on_unstored(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Handle that ``keys`` of a request that has ended had no room, and are not offered again."""


@runtime_checkable
class PinningManager(Protocol):
    """Keeps blocks in host memory for a time."""

    def pin(self, keys: Collection[OffloadKey], lease_s: float) -> PinnedBlocks:
        """Keep ``keys`` from eviction for ``lease_s`` seconds from now, from the moment they are ready.

        A lease that ends later stays as it is. A reset ends every lease.

        Raises:
            PinLimitError: more blocks would be pinned than may be; nothing has changed.
        """

    def unpin(self, keys: Collection[OffloadKey] | None) -> int:
        """End the leases of ``keys``, or all for None; return how many there were."""


@runtime_checkable
class DroppingManager(Protocol):
    """Drops single blocks, because their bytes are wrong."""

    def drop(self, keys: Collection[OffloadKey]) -> DroppedBlocks:
        """Forget ``keys`` in every tier, and end their leases.

        A secondary tier is not asked for them again by this engine. Those that host memory uses stay there: call again
        in a later step, and load them no more until then.
        """


@runtime_checkable
class PurgingManager(Protocol):
    """Forgets blocks, for good."""

    def purge(self, tiers: Collection[str] | None, tenant: int | None = None) -> Purge:
        """Begin to forget every block that is not in use, and end its lease; it goes on whether or not anyone waits.

        While another purge is under way both are one, with the tiers of both.

        Args:
            tiers: names of tiers, "host" for host memory; None: all.
            tenant: number of the tenant of requests whose blocks are to go; None: all.

        Raises:
            ControlError: a purge of other blocks is under way; nothing has changed.
            UnknownNameError: there is no such tier; nothing has changed.
        """
