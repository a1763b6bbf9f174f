"""What one tier is to get of the primary tier, and has not been given yet.

It submits nothing. A block is withheld until the primary has seen it often enough, then due, and forgotten when it
is given or evicted: evicted while due, it is lost to the tier and counted.
"""

from collections.abc import Collection, Iterable

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import DEFAULT_MAX_TRACKER_SIZE
from kvtier.cpu.manager import MIN_STORE_THRESHOLD
from kvtier.cpu.reuse_filter import ReuseFilter
from kvtier.tiering.base import CascadeMode
from kvtier.tiering.guard import TierGuard


class TierIntake:
    """The blocks of the primary tier that wait for one tier.

    Args:
        guard: the tier.

    Attributes:
        guard: the same.
        due: blocks to be given, those that wait longest first. INVARIANT: each is ready in the primary.
    """

    def __init__(self, guard: TierGuard) -> None:
        self.guard = guard
        self.due: dict[OffloadKey, None] = {}
        self._withheld: set[OffloadKey] = set()
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
        if self._filter is None:
            return
        distinct = list(keys)
        for key in distinct:
            self._filter.observe(key, req_context)
        for key in self._filter.admit(distinct):
            if key in self._withheld:
                self._withheld.discard(key)
                self.due[key] = None

    def take(self, keys: Iterable[OffloadKey]) -> tuple[OffloadKey, ...]:
        """Return those of ``keys`` that are due and that the tier has room for now; they are due no more."""
        num_fitting = self._num_fitting() if self.due else 0
        taken: list[OffloadKey] = []
        for key in keys:
            if len(taken) == num_fitting:
                break
            if key in self.due:
                taken.append(key)
        for key in taken:
            del self.due[key]
        return tuple(taken)

    def note_departed(self, keys: Iterable[OffloadKey]) -> None:
        """Forget blocks that have left the primary; those that were due are lost to the tier."""
        for key in keys:
            if key in self.due:
                del self.due[key]
                self.guard.num_declined_cascades += 1
            self._withheld.discard(key)

    def request_finished(self, req_context: ReqContext) -> None:
        """Forget what the request has used; it stays counted."""
        if self._filter is not None:
            self._filter.request_finished(req_context)

    def clear(self) -> None:
        """Forget everything, as a reset does."""
        self.due.clear()
        self._withheld.clear()
        if self._filter is not None:
            self._filter.clear()

    def waiting_keys(self) -> Collection[OffloadKey]:
        """Return every block that the tier may still get."""
        return self.due.keys() | self._withheld

    def _num_fitting(self) -> int:
        guard = self.guard
        return 0 if guard.is_out_of_service else guard.budget.room_for(guard.row_bytes)
