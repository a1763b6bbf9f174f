"""What operators see: the version, and what pinning, purging, dropping and draining have done."""

from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.keys import OffloadKey

__version__ = "0.1.0"
"""The release, as in ``pyproject.toml``; a constant, because a checkout on the search path has no metadata."""


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
