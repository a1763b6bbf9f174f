"""Where the blocks of a prefix are, and what loading them would take.

The contract between what holds blocks in several tiers and what decides how much of a prefix to load. A lookup of a
block in a tier starts its promotion; locating it starts nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.cost_model import LinkRate
from kvtier.keys import OffloadKey, ReqContext


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where a block is.

    Attributes:
        tier: position of the tier that has it; None when it is in host memory, or on its way there from the device.
        is_coming: whether that tier is already promoting it.
    """

    tier: int | None = None
    is_coming: bool = False


IN_HOST = BlockPlace()


@dataclass(frozen=True, slots=True)
class TierLoad:
    """What a load from a tier would cost now.

    Attributes:
        name: the tier's type.
        row_bytes: bytes of a row, in the unit of ``rate``.
        rate: how fast the tier loads; None while that is not known.
        queue_s: seconds until the loads that the tier has accepted have ended.
        num_queued: how many loads those are.
    """

    name: str
    row_bytes: int
    rate: LinkRate | None = None
    queue_s: float = 0.0
    num_queued: int = 0

    def own_s(self, num_rows: float) -> float:
        """Return the seconds in which an idle tier loads so many rows. Pure."""
        return 0.0 if self.rate is None else self.rate.time_s(num_rows * self.row_bytes)

    def time_s(self, num_rows: float) -> float:
        """Return the seconds until so many more rows are loaded; for 0 rows, until the queue is empty. Pure."""
        return 0.0 if self.rate is None else self.queue_s + self.own_s(num_rows)


@dataclass(frozen=True, slots=True)
class LocatedRun:
    """The leading run of a prefix that is held somewhere.

    Attributes:
        places: where each block is; it ends before the first block that no tier holds.
        tiers: what a load from each tier would cost, by position.
        deadline_s: seconds that a request may wait for its blocks.
    """

    places: Sequence[BlockPlace]
    tiers: Sequence[TierLoad]
    deadline_s: float


class BlockLocator(Protocol):
    """Lookup without side effects: nothing is promoted. Used from the manager's thread."""

    def locate(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LocatedRun | None:
        """Return where the leading blocks of ``keys`` are.

        Returns:
            None while the answer of a tier is pending: the request waits for it, call again.

        Effects: Blocks found in host memory are held for a waiting request, as in a lookup.
        """

    def probe(self, tier: int, keys: Iterable[OffloadKey]) -> None:
        """Promote a few of ``keys``, which a slow tier holds, to measure whether the tier is still slow.

        Args:
            tier: its position.
            keys: blocks that the tier held when they were located; those it has lost since are left out.

        Effects: None unless the tier is idle, also in this step, and was not measured for a while. No request waits
        for these blocks.
        """

    def end_wait(self, req_context: ReqContext) -> None:
        """End the wait of a request that starts without a load; blocks held for it may be evicted again."""
