"""What one tier is to get of the primary tier, and has not been given yet.

It submits nothing. A block is withheld until the primary has seen it often enough, then due, and forgotten when it
is given or evicted: evicted while due, it is lost to the tier and counted. A tier that wants only what is likely to
come back refuses a block when its turn has come; with the next use of the block its turn comes again.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import DEFAULT_MAX_TRACKER_SIZE
from kvtier.cpu.manager import MIN_STORE_THRESHOLD
from kvtier.cpu.policies.learning import ArrivedRequest, ReuseForecast, ReuseForecaster
from kvtier.cpu.reuse_filter import ReuseFilter
from kvtier.errors import InvariantError
from kvtier.tiering.admission import PassingThrough
from kvtier.tiering.base import CascadeMode, SecondaryTierManager
from kvtier.tiering.guard import GuardedTier
from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager


class StoreBacklog:
    """The blocks of the primary tier that wait for one tier.

    Args:
        guard: the tier.
        forecast: who can tell how likely blocks come back; None admits each.

    Attributes:
        guard: the same.
        due: blocks to be given, those that wait longest first. INVARIANT: each is ready in the primary.
    """

    def __init__(self, guard: GuardedTier, forecast: ReuseForecast | None = None) -> None:
        self.guard = guard
        self.due: dict[OffloadKey, None] = {}
        self._withheld: set[OffloadKey] = set()
        self._refused: set[OffloadKey] = set()
        self._forecast = forecast
        threshold = guard.tier.settings.store_threshold
        is_filtering = threshold >= MIN_STORE_THRESHOLD
        self._filter = ReuseFilter(threshold, DEFAULT_MAX_TRACKER_SIZE) if is_filtering else None

    @property
    def is_write_back(self) -> bool:
        """Whether blocks are given only shortly before they leave the primary."""
        return self.guard.tier.settings.cascade is CascadeMode.ON_EVICT

    def offer(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Take note of blocks that have become ready in the primary; the request's use of them counts."""
        if self._filter is None:
            self.due.update(dict.fromkeys(keys))
        else:
            self._withheld.update(keys)
            self.on_used(keys, req_context)

    def on_used(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Count a use of ``keys``, one for each request; those used often enough are due from now on."""
        if self._filter is None and not self._refused:
            return
        distinct = list(keys)
        if self._refused:
            again = [key for key in distinct if key in self._refused]
            self._refused.difference_update(again)
            self.due.update(dict.fromkeys(again))
        if self._filter is None:
            return
        for key in distinct:
            self._filter.observe(key, req_context)
        for key in self._filter.admit(distinct):
            if key in self._withheld:
                self._withheld.discard(key)
                self.due[key] = None

    def take(self, keys: Iterable[OffloadKey]) -> tuple[OffloadKey, ...]:
        """Return those of ``keys`` that are due, wanted, and that the tier has room for now; they are due no more."""
        num_fitting = self._num_fitting() if self.due else 0
        due = filter(self.due.__contains__, keys)
        taken: list[OffloadKey] = []
        refused: list[OffloadKey] = []
        # No more are asked about than fit, because those that do not are asked about again.
        while asked := list(islice(due, num_fitting - len(taken))):
            wanted = self._likely(asked)
            taken += wanted
            if len(wanted) < len(asked):
                # After an outage that may be all of the primary.
                likely = frozenset(wanted)
                refused += [key for key in asked if key not in likely]
        if len(taken) + len(refused) == len(self.due):
            self.due.clear()
        else:
            for key in chain(taken, refused):
                del self.due[key]
        self._refused.update(refused)
        return tuple(taken)

    def wanted(self, keys: Collection[OffloadKey]) -> Collection[OffloadKey]:
        """Return those of ``keys`` that the tier would be given if they were in the primary, in order. Pure."""
        if self.guard.is_out_of_service:
            return ()
        return self._likely(keys if self._filter is None else self._filter.admit(keys))

    def on_departed(self, keys: Iterable[OffloadKey]) -> None:
        """Forget blocks that have left the primary; those that were due are lost to the tier."""
        if not (self.due or self._refused or self._withheld):
            return
        for key in keys:
            if key in self.due:
                del self.due[key]
                self.guard.num_declined_cascades += 1
            elif key in self._refused:
                self._refused.remove(key)
                self.guard.num_refused_by_admission += 1
            self._withheld.discard(key)

    def request_finished(self, req_context: ReqContext) -> None:
        """Forget what the request has used; it stays counted."""
        if self._filter is not None:
            self._filter.request_finished(req_context)

    def clear(self) -> None:
        """Forget everything, as a reset does."""
        self.due.clear()
        self._withheld.clear()
        self._refused.clear()
        if self._filter is not None:
            self._filter.clear()

    def waiting_keys(self) -> Collection[OffloadKey]:
        """Return every block that the tier may still get."""
        return self.due.keys() | self._withheld | self._refused

    def stats(self) -> dict[str, float]:
        """Return gauges of blocks that the tier was not given: those that it is to get, and those refused so far."""
        return {"due_blocks": float(len(self.due)), "refused_blocks": float(len(self._refused))}

    def _likely(self, keys: Collection[OffloadKey]) -> Collection[OffloadKey]:
        """Return those of ``keys`` that the tier's admission lets through, in order; each that nothing is known of."""
        admission = self.guard.tier.settings.admission
        if admission is None or self._forecast is None:
            return keys
        probabilities = self._forecast.reuse_probabilities(keys, admission.horizon_s)
        least = admission.min_reuse_probability
        return [
            key for key, found in zip(keys, probabilities, strict=True) if found is None or found >= least
        ]

    def _num_fitting(self) -> int:
        guard = self.guard
        return 0 if guard.is_out_of_service else guard.budget.room_for(guard.row_bytes)


AHEAD_DIVISOR = 8
"""Write-back keeps the eighth of the primary that leaves next free or already below. Less is overtaken by a burst of
stores; more writes blocks that are used again before they would have left."""

MAX_AHEAD_BLOCKS = 1024
"""The most of them that are looked at in a step, which takes about a tenth of a millisecond; a step of an engine
stores fewer."""

REMEMBERED_PER_BLOCK = 4
"""Blocks that are remembered for each block that a tier with an admission holds. Fewer hide returns of blocks that left
the tier early; more only cost memory."""

MAX_REMEMBERED_BLOCKS = 2**18
"""The most blocks that are remembered to tell which ones come back, about 0.4 KB each. Fewer make what comes back late
look lost; more tell it for longer horizons."""


@dataclass(frozen=True, slots=True)
class PlannedCascade:
    """What one tier gets.

    Attributes:
        guard: the tier.
        keys: blocks that are ready in the primary.
    """

    guard: GuardedTier
    keys: tuple[OffloadKey, ...]


class CascadePlanner:
    """What each tier is still to get.

    Args:
        guards: the tiers, fastest first.
        primary: where blocks are evicted from. What its policy refuses passes through it when a tier wants it.
        clock: seconds, monotonic; when requests arrive.
    """

    def __init__(
        self,
        guards: Sequence[GuardedTier],
        primary: CPUPrimaryTierOffloadingManager,
        clock: Callable[[], float],
    ) -> None:
        self._primary = primary
        self._clock = clock
        self._learner: ReuseForecaster | None = None
        forecast = primary.forecast
        num_remembered = plan_num_remembered([guard.tier for guard in guards])
        if num_remembered and (forecast is None or forecast.num_remembered_blocks < num_remembered):
            forecast = self._learner = primary.create_forecaster(num_remembered)
        self._intakes = [StoreBacklog(guard, forecast) for guard in guards]
        if self._intakes:
            primary.departed = []
            if primary.admission is not None:
                primary.admission = PassingThrough(primary.admission, self._wanted)

    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        """Learn from a request that has arrived, where a tier asks how likely blocks come back."""
        if self._learner is not None:
            hints = req_context.kv_transfer_params or {}
            self._learner.note_request(
                ArrivedRequest(req_context.req_id, tuple(chains), self._clock(), hints)
            )

    def offer(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Take note of blocks that the device has stored and that are ready now."""
        self._forget_departed()
        if self._learner is not None:
            self._learner.on_stored(keys, req_context.req_id)
        for intake in self._intakes:
            intake.offer(keys, req_context)

    def offer_promoted(self, keys: Sequence[OffloadKey], source: GuardedTier) -> None:
        """Take note of blocks that ``source`` has brought up, for the tiers above it that fill.

        The copy below stays: dropping it would write the block again each time it leaves the primary.
        """
        self._forget_departed()
        req_context = ReqContext("fill")
        for intake in self._intakes:
            if intake.guard is source:
                return
            if intake.guard.tier.settings.fill:
                intake.offer(keys, req_context)

    def has_due(self) -> bool:
        """Return whether a tier is still to get a block; most steps of an engine have nothing to plan."""
        self._forget_departed()
        return any(intake.due for intake in self._intakes)

    def on_used(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Count a use of ``keys`` for the tiers that want blocks used more than once."""
        for intake in self._intakes:
            intake.on_used(keys, req_context)

    def plan(self, req_context: ReqContext, *, is_step_over: bool) -> list[PlannedCascade]:
        """Return what the tiers get now.

        Args:
            req_context: on whose behalf; it owns the probe of a tier that is being tried again.
            is_step_over: whether blocks that would leave next are written ahead too.

        Effects: what is returned is due no more.
        """
        self._forget_departed()
        planned = []
        for intake in self._intakes:
            if not intake.due or not intake.guard.breaker.allows(req_context):
                continue
            if not intake.is_write_back:
                keys = intake.take(intake.due)
            else:
                keys = intake.take(self._leaving(intake)) if is_step_over else ()
            if keys:
                planned.append(PlannedCascade(intake.guard, keys))
        return planned

    def request_finished(self, req_context: ReqContext) -> None:
        """Forget which blocks the request has used."""
        if self._learner is not None:
            self._learner.on_finished(req_context.req_id)
        for intake in self._intakes:
            intake.request_finished(req_context)

    def clear(self) -> None:
        """Forget everything, as a reset does."""
        self._forget_departed()
        for intake in self._intakes:
            intake.clear()
        if self._learner is not None:
            self._learner.clear()

    def stats(self, guard: GuardedTier) -> dict[str, float]:
        """Return a tier's gauges of blocks that it has not been given."""
        (intake,) = (intake for intake in self._intakes if intake.guard is guard)
        return intake.stats()

    def check(self) -> None:
        """Raise InvariantError when a tier waits for a block that is not in the primary."""
        self._forget_departed()
        for intake in self._intakes:
            for key in intake.waiting_keys():
                if not self._primary.is_ready(key):
                    raise InvariantError(f"{key.hex()} is due for {intake.guard.name} but not in the primary")

    def _wanted(self, keys: Collection[OffloadKey]) -> Collection[OffloadKey]:
        """Return those of ``keys`` that any tier wants. Pure."""
        wanted: set[OffloadKey] = set()
        for intake in self._intakes:
            if len(wanted) < len(keys):
                wanted.update(intake.wanted(keys))
        return wanted

    def _leaving(self, intake: StoreBacklog) -> Iterable[OffloadKey]:
        """Return what would be evicted next, soonest first; of a policy that cannot say it, the oldest stores."""
        num_clean = max(1, self._primary.num_blocks // AHEAD_DIVISOR) - self._primary.num_free
        num_ahead = max(0, min(num_clean, MAX_AHEAD_BLOCKS))
        victims = self._primary.next_victims(num_ahead)
        return list(islice(intake.due, num_ahead)) if victims is None else victims

    def _forget_departed(self) -> None:
        departed = self._primary.departed
        if departed:
            for intake in self._intakes:
                intake.on_departed(departed)
            departed.clear()


def plan_num_remembered(tiers: Iterable[SecondaryTierManager]) -> int:
    """Return how many blocks must be remembered for the tiers that admit only what is likely to come back. Pure.

    Who remembers less than a tier holds does not see most of its hits, and takes what comes back late for lost.

    Returns:
        0 when every tier takes every block.
    """
    asking = [tier.capacity_blocks for tier in tiers if tier.settings.admission is not None]
    if not asking:
        return 0
    known = [num_blocks for num_blocks in asking if num_blocks is not None]
    largest = max(known) if len(known) == len(asking) else MAX_REMEMBERED_BLOCKS
    return min(REMEMBERED_PER_BLOCK * largest, MAX_REMEMBERED_BLOCKS)
