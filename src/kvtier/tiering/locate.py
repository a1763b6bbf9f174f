"""Where the blocks of a prefix are, before any of them is promoted.

A lookup that finds a block in a tier promotes it. The connector calls the locator first when it may want only a part of
a run: it decides how much to load, and looks up no more than that. A request waits for a pending answer of a tier as it
does in a lookup. A slow tier whose blocks are not wanted is probed now and then, to notice when it is fast again.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from kvtier.base import OffloadKey, ReqContext
from kvtier.cpu.manager import CPUPrimaryTierOffloadingManager
from kvtier.cpu.waiting import WaitingRequests
from kvtier.locations import IN_HOST, BlockLocator, BlockPlace, LocatedRun, TierLoad
from kvtier.tiering.guard import GuardedTier
from kvtier.tiering.transfers import TierTransfers

PROBE = ReqContext("probe")
"""The request of loads that only measure a tier; no engine knows it."""


class StepMoment(NamedTuple):
    """Where a manager is.

    Attributes:
        step: its present step.
        now_s: the clock's reading when that began.
    """

    step: int
    now_s: float


class TierBlockLocator(BlockLocator):
    """Locates blocks in the primary tier and in the secondary ones.

    How fast a tier loads is unknown, and no tier is probed, unless the manager measures loads.

    Args:
        tiers: the secondary tiers, in the order of lookups; the manager's own list.
        primary: host memory.
        waiting: the requests that wait.
        transfers: what is planned and in flight.
        deadline_s: seconds that a request may wait for its blocks.
        open_step: polls the tiers, unless that was done in this step, and returns where the manager is.
    """

    def __init__(
        self,
        tiers: Sequence[GuardedTier],
        primary: CPUPrimaryTierOffloadingManager,
        waiting: WaitingRequests,
        transfers: TierTransfers,
        deadline_s: float,
        open_step: Callable[[], StepMoment],
    ) -> None:
        self._tiers = tiers
        self._primary = primary
        self._waiting = waiting
        self._transfers = transfers
        self._deadline_s = deadline_s
        self._open_step = open_step

    def locate(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LocatedRun | None:
        step, now_s = self._open_step()
        waiting = self._waiting
        waiter = waiting.by_request.get(req_context)
        is_expired = waiter is not None and waiter.is_expired
        if waiter is not None and not (
            is_expired or waiter.search_step == step or waiting.begin_search(waiter, step)
        ):
            return None
        places: list[BlockPlace] = []
        is_unanswered = False
        for key in keys:
            is_ready = self._primary.find(key, req_context)
            if is_ready:
                places.append(IN_HOST)
                waiting.on_found(key, req_context)
            elif is_expired:
                break
            elif is_ready is None:
                places.append(self._place_of_coming(key))
            else:
                answer, position = self._lookup_in_tiers(key, req_context)
                if position is not None:
                    places.append(BlockPlace(position))
                elif answer is None:
                    waiting.wait_for(key, req_context, now_s, step, has_slot=False)
                    is_unanswered = True
                else:
                    break
        return None if is_unanswered else LocatedRun(places, self._describe(places), self._deadline_s)

    def probe(self, tier: int, keys: Iterable[OffloadKey]) -> None:
        self._open_step()
        guarded_tier, table = self._tiers[tier], self._primary.table
        if self._transfers.num_planned_blocks(guarded_tier):
            return
        load_times = guarded_tier.load_times
        num_rows = 0 if load_times is None else load_times.plan_probe(guarded_tier.row_bytes)
        for key in islice(keys, num_rows):
            if table.get_block(key) is not None or not guarded_tier.lookup(key, PROBE):
                continue
            if not self._transfers.prepare_promotion(guarded_tier, key, PROBE, ()):
                return
            if load_times is not None:
                load_times.on_probe()
            guarded_tier.num_probe_blocks += 1

    def end_wait(self, req_context: ReqContext) -> None:
        self._waiting.end_wait(req_context)

    def _lookup_in_tiers(self, key: OffloadKey, req_context: ReqContext) -> tuple[bool | None, int | None]:
        """Look ``key`` up in the tiers in order; return the answer, and the position of the first that has it."""
        found: bool | None = False
        for position, tier in enumerate(self._tiers):
            answer = tier.lookup(key, req_context)
            if answer:
                return True, position
            found = None if answer is None else found
        return found, None

    def _place_of_coming(self, key: OffloadKey) -> BlockPlace:
        tier = self._transfers.promoting.get(key)
        return IN_HOST if tier is None else BlockPlace(self._tiers.index(tier), is_coming=True)

    def _describe(self, places: Sequence[BlockPlace]) -> list[TierLoad]:
        used = {place.tier for place in places}
        return [
            tier.load_times.describe(tier.name, tier.row_bytes, self._transfers.num_planned_blocks(tier))
            if position in used and tier.load_times is not None
            else TierLoad(tier.name, tier.row_bytes)
            for position, tier in enumerate(self._tiers)
        ]
