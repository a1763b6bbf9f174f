"""Where the blocks of a prefix are, before any of them is brought up.

It reserves nothing and starts nothing but loads that only measure. A lookup that finds a block in a tier promotes it;
whoever may not want that asks here first, for the whole run, decides how much of it to load, and looks up no more than
that. A request whose blocks a tier cannot tell of yet waits as it does in a lookup. Blocks that were not wanted because
the tier is slow are how it is found out that it no longer is: some are loaded now and then, and nobody waits for them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvtier.base import OffloadKey, ReqContext
from kvtier.locations import IN_HOST, BlockLocator, BlockPlace, LocatedRun, TierLoad
from kvtier.tiering.guard import GuardedTier
from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager
from kvtier.tiering.transfers import TierTransfers, WantedPromotions
from kvtier.tiering.waiting import WaitingRequests

PROBE = ReqContext("probe")
"""On whose behalf a tier is measured: nobody's."""


@dataclass(frozen=True, slots=True)
class StepMoment:
    """Where a manager is.

    Attributes:
        step: its present step.
        now_s: the clock's reading when that began.
    """

    step: int
    now_s: float


class TierBlockLocator(BlockLocator):
    """Looks without touching. Used from the manager's thread.

    Args:
        guards: the tiers, in the order in which they are asked; the manager's own list.
        primary: host memory.
        waiting: who waits.
        wanted: the loads of the present step.
        transfers: what is in flight.
        deadline_s: seconds that a request may wait for its blocks.
        open_step: polls the tiers, unless that was done in this step, and says where the manager is.
    """

    def __init__(
        self,
        guards: Sequence[GuardedTier],
        primary: CPUPrimaryTierOffloadingManager,
        waiting: WaitingRequests,
        wanted: WantedPromotions,
        transfers: TierTransfers,
        deadline_s: float,
        open_step: Callable[[], StepMoment],
    ) -> None:
        self._guards = guards
        self._primary = primary
        self._waiting = waiting
        self._wanted = wanted
        self._transfers = transfers
        self._deadline_s = deadline_s
        self._open_step = open_step

    def locate(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LocatedRun | None:
        moment = self._open_step()
        waiter = self._waiting.get(req_context)
        is_expired = waiter is not None and waiter.is_expired
        if waiter is not None and not is_expired and not self._waiting.begins_search(waiter, moment.step):
            return None
        places: list[BlockPlace] = []
        is_pending = False
        for key in keys:
            is_ready = self._primary.lookup(key, req_context)
            if is_ready:
                self._waiting.on_found(key, req_context)
                places.append(IN_HOST)
            elif is_expired:
                break
            elif is_ready is None:
                places.append(self._place_of_coming(key))
            else:
                answer, guard = lookup_in_tiers(self._guards, key, req_context)
                if guard is not None:
                    places.append(BlockPlace(self._guards.index(guard)))
                elif answer is None:
                    self._waiting.wait_for(key, req_context, moment.now_s, moment.step, is_held=False)
                    is_pending = True
                else:
                    break
        return None if is_pending else LocatedRun(places, self._describe(places), self._deadline_s)

    def probe(self, tier: int, keys: Iterable[OffloadKey]) -> None:
        self._open_step()
        guard = self._guards[tier]
        if self._wanted.num_blocks_of(guard):
            return
        for key in islice(keys, guard.load_times.plan_probe(guard.row_bytes)):
            if self._primary.is_ready(key) or self._primary.is_in_flight(key) or not guard.lookup(key, PROBE):
                continue
            slot = self._transfers.reserve(guard, key, PROBE, ())
            if slot is None:
                return
            self._wanted.add(guard, PROBE, key, slot)
            guard.load_times.on_probe()
            guard.num_probe_blocks += 1

    def end_wait(self, req_context: ReqContext) -> None:
        self._waiting.end_wait(req_context)

    def _place_of_coming(self, key: OffloadKey) -> BlockPlace:
        guard = self._transfers.promoting.get(key)
        return IN_HOST if guard is None else BlockPlace(self._guards.index(guard), is_coming=True)

    def _describe(self, places: Sequence[BlockPlace]) -> list[TierLoad]:
        used = {place.tier for place in places}
        return [
            guard.load_times.describe(guard.name, guard.row_bytes, self._wanted.num_blocks_of(guard))
            if position in used
            else TierLoad(guard.name, guard.row_bytes)
            for position, guard in enumerate(self._guards)
        ]


def lookup_in_tiers(
    guards: Iterable[GuardedTier], key: OffloadKey, req_context: ReqContext
) -> tuple[bool | None, GuardedTier | None]:
    """Ask the tiers in order; return their answer, None while one cannot tell, and the first that has the block."""
    found: bool | None = False
    for guard in guards:
        answer = guard.lookup(key, req_context)
        if answer:
            return True, guard
        found = None if answer is None else found
    return found, None
