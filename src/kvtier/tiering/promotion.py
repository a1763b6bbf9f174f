"""Which loads are wanted this step, batched per (tier, request).

It reserves and submits nothing. A lookup that finds a block in a tier leaves a wish here, with the slot that
was reserved for it; at the end of the step the wishes come out as one job per tier and request, keys in the
order of the lookups, so that a tier sees a prefix as one batch and not as hundreds of calls.
"""

from dataclasses import dataclass, field

from kvtier.base import OffloadKey, ReqContext
from kvtier.tiering.guard import TierGuard


@dataclass(slots=True)
class PlannedPromotion:
    """One load to submit.

    Attributes:
        guard: the tier to load from.
        req_context: the request whose lookups found the blocks.
        keys: the blocks, in lookup order.
        block_ids: the slots reserved for them, in the same order.
    """

    guard: TierGuard
    req_context: ReqContext
    keys: list[OffloadKey] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


class WantedPromotions:
    """The wishes of the present step."""

    def __init__(self) -> None:
        self._planned: dict[tuple[TierGuard, ReqContext], PlannedPromotion] = {}

    def add(self, guard: TierGuard, req_context: ReqContext, key: OffloadKey, block_id: int) -> None:
        """Wish for ``key`` from ``guard`` into slot ``block_id``."""
        batch = (guard, req_context)
        planned = self._planned.get(batch)
        if planned is None:
            planned = self._planned[batch] = PlannedPromotion(guard, req_context)
        planned.keys.append(key)
        planned.block_ids.append(block_id)

    def num_blocks_of(self, guard: TierGuard) -> int:
        """Return how many blocks are wished for from one tier."""
        return sum(len(planned.keys) for planned in self._planned.values() if planned.guard is guard)

    def take(self) -> list[PlannedPromotion]:
        """Return the batches, oldest first, and forget them."""
        if not self._planned:  # as in most steps
            return []
        planned, self._planned = list(self._planned.values()), {}
        return planned

    def __len__(self) -> int:
        return sum(len(planned.keys) for planned in self._planned.values())
