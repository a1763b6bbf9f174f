"""What each tier is still to get of the primary tier.

A block is withheld until the primary has seen it often enough, then pending, and forgotten when it is submitted or
evicted: a block evicted while pending is lost to the tier and counted. A tier with an admission refuses blocks that are
unlikely to be used again; with its next use a refused block is pending again.

Host memory keeps what is pending for a tier that must get every block: it is not evicted until the tier has it. A block
that the tier fails to write is pending again, MAX_WRITES times at most. While the tier is left out nothing is kept for
it, so a tier that fails costs its own blocks and no request.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, islice

from kvtier.base import OffloadKey, ReqContext, get_offload_tenant
from kvtier.config import DEFAULT_MAX_TRACKER_SIZE
from kvtier.cpu.manager import CPUPrimaryTierOffloadingManager
from kvtier.cpu.policies.learning import ReuseForecast, ReuseForecaster, make_arrived
from kvtier.cpu.reuse_filter import MIN_STORE_THRESHOLD, ReuseFilter
from kvtier.cpu.waiting import Holder
from kvtier.errors import InvariantError
from kvtier.tiering.base import CascadeMode, SecondaryTierManager
from kvtier.tiering.departures import TierDeparture
from kvtier.tiering.guard import GuardedTier

AHEAD_DIVISOR = 8
"""Write-back keeps the eighth of the primary that leaves next free or already written. Less is overtaken by a burst of
stores; more writes blocks that are used again before they would have left."""

MAX_AHEAD_BLOCKS = 1024
"""The most blocks that write-back considers in a step, which takes about a tenth of a millisecond; a step of an engine
stores fewer."""

REMEMBERED_PER_BLOCK = 4
"""Blocks that are remembered for each block that a tier with an admission holds. Fewer hide returns of blocks that left
the tier early; more only cost memory."""

MAX_REMEMBERED_BLOCKS = 2**18
"""The most blocks that are remembered to learn which are used again, about 0.4 KB each. Fewer make late reuse look like
none; more serve longer horizons."""


MAX_WRITES = 3
"""How often a block is given to a tier that must get it. Fewer lose blocks to an error that passes; more repeat one
that does not, while the block takes room in host memory."""


class OwnWork(Enum):
    """What the manager stores on behalf of no request: the ``req_id`` that a tier sees then.

    Each time with a ``ReqContext`` of its own, because a breaker that is half open lets one context through.
    """

    BACKLOG = "backlog"
    """What a tier could not take when it was stored: at the end of a step."""

    DRAIN = "drain"
    """The same, while ``drain`` waits for the tiers."""

    FILL = "fill"
    """Blocks of a slower tier, once promoted, for tiers that copy them (``TierSettings.fill``)."""


@dataclass(frozen=True, slots=True)
class PlannedCascade:
    """What one tier gets.

    Attributes:
        tier: the tier.
        keys: blocks that are ready in the primary.
    """

    tier: GuardedTier
    keys: tuple[OffloadKey, ...]


class StoreBacklog:
    """The blocks of the primary tier that wait for one tier.

    Args:
        tier: the tier.
        forecast: estimates how likely blocks are used again; None admits each.
        holder: keeps blocks from eviction, for a tier that must get every block.

    Attributes:
        tier: the same.
        pending: blocks to be stored, those that wait longest first. INVARIANT: each is ready in the
            primary. The same object for the life of this one.
        kept: those of them that are held for the tier.
        is_write_back: whether blocks are stored only shortly before they leave the primary.
        must_write: whether the tier must get every block.
        is_keeping: whether what is pending is held: the tier must get it, and is not left out.
        counts_uses: whether on_used has an effect.
    """

    def __init__(self, tier: GuardedTier, holder: Holder, forecast: ReuseForecast | None = None) -> None:
        settings = tier.tier.settings
        self.tier = tier
        self._holder = holder
        self.pending: dict[OffloadKey, None] = {}
        self.kept: set[OffloadKey] = set()
        self.must_write = settings.cascade is CascadeMode.MUST_WRITE
        self.is_keeping = self.must_write
        self._num_failed_writes: dict[OffloadKey, int] = {}
        self.is_write_back = settings.cascade is CascadeMode.ON_EVICT
        self._withheld: set[OffloadKey] = set()
        self._refused: set[OffloadKey] = set()
        self._forecast = forecast
        self._admission = None if forecast is None else settings.admission
        is_filtering = settings.store_threshold >= MIN_STORE_THRESHOLD
        self._filter = (
            ReuseFilter(settings.store_threshold, DEFAULT_MAX_TRACKER_SIZE) if is_filtering else None
        )
        self.counts_uses = is_filtering or self._admission is not None

    def offer(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Record blocks that have become ready in the primary; the request's use of them counts."""
        if self._filter is None:
            new = dict.fromkeys(keys)
            self.pending.update(new)
            if self.is_keeping:
                self._hold(new)
        else:
            self._withheld.update(keys)
            self.on_used(keys, req_context)

    def on_used(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Count a use of ``keys``, one for each request; those used often enough are pending from now on."""
        if self._filter is None and not self._refused:
            return
        distinct = list(keys)
        if self._refused:
            again = [key for key in distinct if key in self._refused]
            self._refused.difference_update(again)
            self._add_pending(dict.fromkeys(again))
        if self._filter is None:
            return
        for key in distinct:
            self._filter.observe(key, req_context)
        due = {key: None for key in self._filter.admit(distinct) if key in self._withheld}
        self._withheld.difference_update(due)
        self._add_pending(due)

    def take(self, keys: Iterable[OffloadKey]) -> tuple[OffloadKey, ...]:
        """Return those of ``keys`` that are pending, admitted, and fit into the tier's budget; remove them."""
        pending = self.pending
        num_fitting = self.tier.num_storable_rows()
        candidates = filter(pending.__contains__, keys)
        refused: list[OffloadKey] = []
        if self._admission is None:
            taken = list(islice(candidates, num_fitting))
        else:
            taken = []
            # Only as many as fit are estimated at a time, because those that do not fit are estimated again later.
            while batch := list(islice(candidates, num_fitting - len(taken))):
                likely = self._likely(batch)
                taken += likely
                if len(likely) < len(batch):
                    # After an outage that may be all of the primary.
                    admitted = frozenset(likely)
                    refused += [key for key in batch if key not in admitted]
            self._refused.update(refused)
        if len(taken) + len(refused) == len(pending):
            pending.clear()
        else:
            for key in chain(taken, refused):
                del pending[key]
        if self.kept:  # what is taken is pinned by its job before anything can evict it
            self._release(chain(taken, refused))
        return tuple(taken)

    def keep_pending(self) -> None:
        """Hold what is pending for a tier that must get it; nothing while the tier is left out."""
        tier = self.tier
        can_write = tier.breaker.is_closed and not (tier.is_out_of_service or tier.is_purging)
        if can_write == self.is_keeping:
            return
        self.is_keeping = can_write
        if can_write:
            self._hold(self.pending)
        else:
            self._release(tuple(self.kept))

    def on_unwritten(self, keys: Sequence[OffloadKey], why: TierDeparture) -> None:
        """Handle blocks of the primary that the tier was given and has not got: they are pending again, or lost."""
        if self.tier.is_purging:
            return
        lost = keys
        if self.is_keeping and why is TierDeparture.JOB_FAILED:
            counts = self._num_failed_writes
            for key in keys:
                counts[key] = counts.get(key, 0) + 1
            lost = [key for key in keys if counts[key] >= MAX_WRITES]
            self._add_pending({key: None for key in keys if counts[key] < MAX_WRITES})
        for key in lost:
            self._num_failed_writes.pop(key, None)
        self.tier.losses.add(lost, why)

    def wanted(self, keys: Collection[OffloadKey]) -> Collection[OffloadKey]:
        """Return those of ``keys`` that the tier would be given if they were in the primary, in order. Pure."""
        if self.tier.is_out_of_service:
            return ()
        return self._likely(keys if self._filter is None else self._filter.admit(keys))

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Forget blocks that the tier shall not get; they are not lost to it."""
        keys = tuple(keys)
        if self.kept:
            self._release(keys)
        for key in keys:
            self.pending.pop(key, None)
            self._num_failed_writes.pop(key, None)
        self._refused.difference_update(keys)
        self._withheld.difference_update(keys)

    def on_evicted(self, keys: Iterable[OffloadKey]) -> None:
        """Forget blocks that have left the primary; those that were pending are lost to the tier."""
        if not (self.pending or self._refused or self._withheld):
            return
        lost: dict[TierDeparture, list[OffloadKey]] = {}
        for key in keys:
            if key in self.pending:
                del self.pending[key]
                lost.setdefault(TierDeparture.DECLINED, []).append(key)
            elif key in self._refused:
                self._refused.remove(key)
                lost.setdefault(TierDeparture.ADMISSION, []).append(key)
            elif key in self._withheld:
                lost.setdefault(TierDeparture.REUSE_FILTER, []).append(key)
            self._withheld.discard(key)
        tier = self.tier
        tier.losses.add(lost.pop(TierDeparture.DECLINED, ()), TierDeparture.DECLINED)
        tier.num_refused_by_admission += len(lost.get(TierDeparture.ADMISSION, ()))
        for why, lost_keys in lost.items():
            tier.departed.add(lost_keys, why)

    def request_finished(self, req_context: ReqContext) -> None:
        """Forget what the request has used; it stays counted."""
        if self._filter is not None:
            self._filter.request_finished(req_context)

    def clear(self) -> None:
        """Forget everything, as a reset does."""
        self._release(tuple(self.kept))
        self._num_failed_writes.clear()
        self.pending.clear()
        self._withheld.clear()
        self._refused.clear()
        if self._filter is not None:
            self._filter.clear()

    def waiting_keys(self) -> Collection[OffloadKey]:
        """Return every block that the tier may still get."""
        return self.pending.keys() | self._withheld | self._refused

    def stats(self) -> dict[str, float]:
        """Return gauges of blocks that the tier has not been given: those pending, and those refused so far."""
        return {"pending_blocks": float(len(self.pending)), "refused_blocks": float(len(self._refused))}

    def _add_pending(self, keys: dict[OffloadKey, None]) -> None:
        """Make blocks of the primary pending, and keep them there if the tier must get them."""
        if self.is_keeping:
            self._hold(keys)
        self.pending.update(keys)

    def _hold(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            if key not in self.kept:
                self.kept.add(key)
                self._holder.hold(key)

    def _release(self, keys: Iterable[OffloadKey]) -> None:
        released = self.kept.intersection(keys)
        self.kept -= released
        self._holder.release_each(released)

    def _likely(self, keys: Collection[OffloadKey]) -> Collection[OffloadKey]:
        """Return those of ``keys`` that the tier's admission lets through, in order; also those not estimated."""
        admission = self._admission
        if admission is None or self._forecast is None:
            return keys
        probabilities = self._forecast.reuse_probabilities(keys, admission.horizon_s)
        least = admission.min_reuse_probability
        return [
            key for key, found in zip(keys, probabilities, strict=True) if found is None or found >= least
        ]


class CascadePlanner:
    """What each tier is still to get.

    Args:
        tiers: the tiers, fastest first.
        primary: where the blocks are.
        clock: seconds, monotonic; the times of arrival that a forecaster learns from.

    Attributes:
        pending: for each tier the blocks that it is still to get; most steps of an engine have none to plan.
        is_learning: whether note_request has an effect.
        counts_uses: whether on_used has an effect.
        follows_requests: whether request_finished has an effect.
        fills_tiers: whether offer_promoted has an effect.
        is_open: whether the tiers get blocks. Not while those have weights that nothing names: no other engine would
            find them, nor this one after a restart, and they would fill what others share.
    """

    def __init__(
        self,
        tiers: Sequence[GuardedTier],
        primary: CPUPrimaryTierOffloadingManager,
        clock: Callable[[], float],
    ) -> None:
        self._table = primary.table
        self._clock = clock
        self._learner: ReuseForecaster | None = None
        forecast = primary.forecast
        num_remembered = plan_num_remembered([tier.tier for tier in tiers])
        if num_remembered and (forecast is None or forecast.num_remembered_blocks < num_remembered):
            forecast = self._learner = primary.create_forecaster(num_remembered)
        self._backlogs = [StoreBacklog(tier, primary.table, forecast) for tier in tiers]
        self._by_tier = dict(zip(tiers, self._backlogs, strict=True))
        self.pending = tuple(backlog.pending for backlog in self._backlogs)
        self.is_learning = self._learner is not None
        self.counts_uses = any(backlog.counts_uses for backlog in self._backlogs)
        self.follows_requests = self.is_learning or self.counts_uses
        self.fills_tiers = any(tier.tier.settings.fill for tier in tiers)
        self.is_open = True

    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        """Learn from a request that has arrived, where a tier needs to know how likely blocks are used again."""
        if self._learner is not None:
            self._learner.note_request(make_arrived(chains, req_context, self._clock()))

    def offer(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Record blocks that the device has stored and that are ready now."""
        if self._learner is not None:
            self._learner.on_stored(keys, req_context.req_id)
        if not self.is_open:
            return
        for backlog in self._backlogs:
            backlog.offer(keys, req_context)

    def offer_promoted(self, keys: Sequence[OffloadKey], source: GuardedTier) -> None:
        """Record blocks that ``source`` has promoted, for the tiers above it that fill.

        The copy below stays: dropping it would write the block again each time it leaves the primary.
        """
        req_context = ReqContext(OwnWork.FILL.value)
        for backlog in self._backlogs:
            if backlog.tier is source:
                return
            if backlog.tier.tier.settings.fill:
                backlog.offer(keys, req_context)

    def on_used(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Count a use of ``keys`` for the tiers that want blocks used more than once."""
        for backlog in self._backlogs:
            backlog.on_used(keys, req_context)

    def on_evicted(self, keys: Collection[OffloadKey]) -> None:
        """Forget blocks that have left the primary; those that were pending are lost to their tiers."""
        for backlog in self._backlogs:
            backlog.on_evicted(keys)

    def on_unwritten(self, tier: GuardedTier, keys: Sequence[OffloadKey], why: TierDeparture) -> None:
        """Handle blocks that a tier was given and has not got; they are still pinned."""
        self._by_tier[tier].on_unwritten(keys, why)

    def forget(self, keys: Collection[OffloadKey]) -> None:
        """Forget blocks that no tier shall get, because they were purged, are wrong, or their time is over."""
        for backlog in self._backlogs if keys else ():
            backlog.forget(keys)

    def drop_pending(self, tier: GuardedTier, tenant: int | None = None) -> None:
        """Forget what a tier was still to get, or a tenant's part of it; it would be stored again after a purge."""
        backlog = self._by_tier[tier]
        if not backlog.is_write_back:
            backlog.forget(
                [key for key in backlog.pending if tenant is None or get_offload_tenant(key) == tenant]
            )

    def lose_pending(self) -> None:
        """Count as lost what the tiers were still to get when the engine ends, write-back apart."""
        for backlog in self._backlogs:
            if not backlog.is_write_back:
                backlog.tier.losses.add(tuple(backlog.pending), TierDeparture.DECLINED)
                backlog.forget(backlog.pending)

    @property
    def num_pending(self) -> int:
        """Blocks that tiers are still to get, but for those that write-back keeps for their eviction."""
        return sum(len(backlog.pending) for backlog in self._backlogs if not backlog.is_write_back)

    def will_have_room(self) -> bool:
        """Return whether host memory keeps blocks that it can evict when their tiers have them. Pure."""
        return any(
            backlog.kept or (backlog.is_keeping and backlog.tier.in_flight_store_bytes > 0)
            for backlog in self._backlogs
        )

    def count_holds(self) -> dict[OffloadKey, int]:
        """Return for how many tiers host memory keeps each block."""
        return Counter(chain.from_iterable(backlog.kept for backlog in self._backlogs))

    def take(self, req_context: ReqContext, *, is_step_over: bool) -> list[PlannedCascade]:
        """Return what the tiers get now, and remove it from their backlogs.

        Args:
            req_context: on whose behalf; it owns the trial of a tier that is being tried again.
            is_step_over: whether blocks that would leave next are written ahead too.
        """
        planned = []
        for backlog in self._backlogs:
            if backlog.must_write:
                backlog.keep_pending()
            breaker = backlog.tier.breaker
            if not backlog.pending or not (breaker.is_closed or breaker.allows(req_context)):
                continue
            if not backlog.is_write_back:
                keys = backlog.take(backlog.pending)
            else:
                keys = backlog.take(self._leaving(backlog)) if is_step_over else ()
            if keys:
                planned.append(PlannedCascade(backlog.tier, keys))
        return planned

    def wanted(self, keys: Collection[OffloadKey]) -> Collection[OffloadKey]:
        """Return those of ``keys`` that any tier wants. Pure."""
        wanted: set[OffloadKey] = set()
        for backlog in self._backlogs if self.is_open else ():
            if len(wanted) < len(keys):
                wanted.update(backlog.wanted(keys))
        return wanted

    def request_finished(self, req_context: ReqContext) -> None:
        """Forget which blocks the request has used."""
        if self._learner is not None:
            self._learner.on_finished(req_context.req_id)
        for backlog in self._backlogs:
            backlog.request_finished(req_context)

    def clear(self) -> None:
        """Forget everything, as a reset does."""
        for backlog in self._backlogs:
            backlog.clear()
        if self._learner is not None:
            self._learner.clear()

    def stats(self, tier: GuardedTier) -> dict[str, float]:
        """Return a tier's gauges of blocks that it has not been given."""
        return self._by_tier[tier].stats()

    def check(self) -> None:
        """Raise InvariantError when a tier waits for a block that is not in the primary."""
        for backlog in self._backlogs:
            for key in backlog.waiting_keys():
                if not self._table.is_ready(key):
                    message = f"{key.hex()} is pending for {backlog.tier.name} but not in the primary"
                    raise InvariantError(message)
            kept = backlog.pending.keys() if backlog.is_keeping else set()
            if backlog.kept != kept:
                raise InvariantError(
                    f"{len(backlog.kept)} blocks are kept for {backlog.tier.name}, {len(kept)} wait"
                )

    def _leaving(self, backlog: StoreBacklog) -> Iterable[OffloadKey]:
        """Return what would be evicted next, soonest first; of a policy that cannot say it, the oldest stores."""
        table = self._table
        num_clean = max(1, table.num_blocks // AHEAD_DIVISOR) - table.slots.num_free
        num_ahead = max(0, min(num_clean, MAX_AHEAD_BLOCKS))
        victims = table.policy.next_victims(num_ahead)
        return list(islice(backlog.pending, num_ahead)) if victims is None else victims


def plan_num_remembered(tiers: Iterable[SecondaryTierManager]) -> int:
    """Return how many blocks must be remembered for the tiers that admit only what is likely to be used again. Pure.

    A forecast that remembers less than a tier holds does not see most of its hits, and takes late reuse for none.

    Returns:
        0 when every tier takes every block.
    """
    capacities = [tier.capacity_blocks for tier in tiers if tier.settings.admission is not None]
    if not capacities:
        return 0
    known = [num_blocks for num_blocks in capacities if num_blocks is not None]
    largest = max(known) if len(known) == len(capacities) else MAX_REMEMBERED_BLOCKS
    return min(REMEMBERED_PER_BLOCK * largest, MAX_REMEMBERED_BLOCKS)
