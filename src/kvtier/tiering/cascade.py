"""Which tiers get a finished store.

It pins and submits nothing. A tier that is left out or whose stores already hold their share of the primary
is passed over for what does not fit: declined and counted, never queued, because a queue of pinned slots
would let the slowest tier take the primary from everybody.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.base import OffloadKey, ReqContext
from kvtier.tiering.guard import TierGuard


@dataclass(frozen=True, slots=True)
class PlannedCascade:
    """What one tier gets of a finished store.

    Attributes:
        guard: the tier.
        keys: what it gets: the leading ones, since a prefix without its head is worth nothing.
        num_declined: how many of the store's keys it does not get.
    """

    guard: TierGuard
    keys: tuple[OffloadKey, ...]
    num_declined: int


def plan_cascades(
    ready: Sequence[OffloadKey], guards: Sequence[TierGuard], req_context: ReqContext
) -> list[PlannedCascade]:
    """Decide what each tier gets of blocks that have just become ready in the primary tier. Pure.

    Args:
        ready: the blocks, in the order of the store.
        guards: the tiers, in their order.
        req_context: the request that stored them.
    """
    planned = []
    for guard in guards:
        is_usable = guard.breaker.allows(req_context) and not guard.is_out_of_service
        num_fitting = guard.budget.room_for(guard.row_bytes) if is_usable else 0
        keys = tuple(ready[:num_fitting])
        planned.append(PlannedCascade(guard, keys, len(ready) - len(keys)))
    return planned
