"""Which blocks of the primary tier go to which tiers, and when.

It pins and submits nothing. A tier gets a block when it is stored, or, with write-back, shortly before it would be
evicted, so that an evicted block is already below. What a tier cannot take just now, because it is left out or its
stores hold their share of the primary, stays due and unpinned: a queue of pinned slots would let the slowest tier
take the primary from everybody. A block that is evicted first is lost to that tier, and never waited for.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvtier.base import OffloadKey, ReqContext
from kvtier.cpu.policies.hazard.forecaster import ReuseForecaster
from kvtier.cpu.policies.hazard.shadow import GHOSTS_PER_BLOCK
from kvtier.cpu.policies.learning import ArrivedRequest
from kvtier.errors import InvariantError
from kvtier.tiering.admission import PassingThrough
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.guard import TierGuard
from kvtier.tiering.intake import TierIntake
from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager

AHEAD_DIVISOR = 8
"""Write-back keeps the eighth of the primary that leaves next free or already below. Less is overtaken by a burst of
stores; more writes blocks that are used again before they would have left."""

MAX_AHEAD_BLOCKS = 1024
"""The most of them that are looked at in a step, which takes about a tenth of a millisecond; a step of an engine
stores fewer."""

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

    guard: TierGuard
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
        guards: Sequence[TierGuard],
        primary: CPUPrimaryTierOffloadingManager,
        clock: Callable[[], float],
    ) -> None:
        self._primary = primary
        self._clock = clock
        self._learner: ReuseForecaster | None = None
        forecast = primary.forecast
        num_remembered = plan_num_remembered([guard.tier for guard in guards])
        if num_remembered and (forecast is None or GHOSTS_PER_BLOCK * primary.num_blocks < num_remembered):
            forecast = self._learner = ReuseForecaster(num_remembered)
        self._intakes = [TierIntake(guard, forecast) for guard in guards]
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
            self._learner.note_stored(keys, req_context.req_id)
        for intake in self._intakes:
            intake.offer(keys, req_context)

    def offer_promoted(self, keys: Sequence[OffloadKey], source: TierGuard) -> None:
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

    def note_used(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Count a use of ``keys`` for the tiers that want blocks used more than once."""
        for intake in self._intakes:
            intake.note_used(keys, req_context)

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
            self._learner.note_finished(req_context.req_id)
        for intake in self._intakes:
            intake.request_finished(req_context)

    def clear(self) -> None:
        """Forget everything, as a reset does."""
        self._forget_departed()
        for intake in self._intakes:
            intake.clear()
        if self._learner is not None:
            self._learner.clear()

    def stats(self, guard: TierGuard) -> dict[str, float]:
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

    def _leaving(self, intake: TierIntake) -> Iterable[OffloadKey]:
        """Return what would be evicted next, soonest first; of a policy that cannot say it, the oldest stores."""
        num_clean = max(1, self._primary.num_blocks // AHEAD_DIVISOR) - self._primary.num_free
        num_ahead = max(0, min(num_clean, MAX_AHEAD_BLOCKS))
        victims = self._primary.next_victims(num_ahead)
        return list(islice(intake.due, num_ahead)) if victims is None else victims

    def _forget_departed(self) -> None:
        departed = self._primary.departed
        if departed:
            for intake in self._intakes:
                intake.note_departed(departed)
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
    return min(GHOSTS_PER_BLOCK * largest, MAX_REMEMBERED_BLOCKS)
