"""What one tier is to get of the primary tier, and has not been given yet.

It submits nothing. A block is withheld until the primary has seen it often enough, then due, and forgotten when it
is given or evicted: evicted while due, it is lost to the tier and counted. A tier that wants only what is likely to
come back refuses a block when its turn has come; with the next use of the block its turn comes again.
"""

from collections.abc import Collection, Iterable
from itertools import chain, islice

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import DEFAULT_MAX_TRACKER_SIZE
from kvtier.cpu.manager import MIN_STORE_THRESHOLD
from kvtier.cpu.policies.learning import ReuseForecast
from kvtier.cpu.reuse_filter import ReuseFilter
from kvtier.tiering.base import CascadeMode
from kvtier.tiering.guard import TierGuard


class TierIntake:
    """The blocks of the primary tier that wait for one tier.

    Args:
        guard: the tier.
        forecast: who can tell how likely blocks come back; None admits each.

    Attributes:
        guard: the same.
        due: blocks to be given, those that wait longest first. INVARIANT: each is ready in the primary.
    """

    def __init__(self, guard: TierGuard, forecast: ReuseForecast | None = None) -> None:
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
            self.note_used(keys, req_context)

    def note_used(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
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

    def note_departed(self, keys: Iterable[OffloadKey]) -> None:
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
