"""How fast a tier loads, seen from outside: when its loads were handed over, and when they were reported.

It calls no tier. Jobs overlap, so the time of one is not its own: what counts is a busy time, from the first load that
is handed over until none is left, with all the bytes of it. A busy time that does not end is cut after a few reports.
What is under way says something too: a load that takes longer than foretold is foretold to take as long again.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.base import JobId
from kvtier.load_cost import LinkRate
from kvtier.tiering.link_meter import LinkMeter

MAX_BUSY_JOBS = 4
"""Reports after which a busy time is a sample although loads are left. More learn late under load; with fewer the
bytes of what is left, moved already and not counted, weigh more."""

PROBE_REST_RATIO = 9.0
"""Loads that only measure leave a tier alone for nine times as long as the last one took: at most a tenth of its time
goes into them, however slow it is. Smaller disturbs a slow tier's stores more; larger finds later that it is well."""

MIN_PROBE_REST_S = 1.0
"""A fast tier is not measured more often than this: nobody is refused often there, and each load takes a slot."""


@dataclass(frozen=True, slots=True)
class TierLoad:
    """What a load from a tier would cost now.

    Attributes:
        name: the tier's type.
        row_bytes: bytes of a row, in the unit of ``rate``.
        rate: how fast it loads; None while nobody knows.
        queue_s: seconds until what it has to load already is loaded.
    """

    name: str
    row_bytes: int
    rate: LinkRate | None = None
    queue_s: float = 0.0

    def time_s(self, num_rows: float) -> float:
        """Return the seconds until so many more rows are loaded; with none, until those on their way are. Pure."""
        if self.rate is None:
            return 0.0
        return self.queue_s + self.rate.time_s(num_rows * self.row_bytes)


class LoadTimes:
    """The loads of one tier. Used from the scheduler's thread.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._meter = LinkMeter()
        # INVARIANT: the bytes of each load that was handed over and not reported, and of no other.
        self._under_way: dict[JobId, int] = {}
        self._busy_since_s = 0.0
        self._busy_bytes = 0
        self._num_ended = 0
        self._is_spoiled = False
        self._rested_s = float("-inf")

    @property
    def rate(self) -> LinkRate | None:
        """How fast the tier loads, from loads that have ended; None before the first."""
        return self._meter.rate()

    def begin(self, job_id: JobId, num_bytes: int) -> None:
        """Note a load that was handed to the tier."""
        if not self._under_way:
            self._begin_busy_time()
        self._under_way[job_id] = num_bytes
        self._busy_bytes += num_bytes

    def end(self, job_id: JobId, *, is_whole: bool) -> None:
        """Note a report; of a load that brought less than all nobody knows what it moved."""
        if self._under_way.pop(job_id, None) is not None:
            self._num_ended += 1
            self._is_spoiled |= not is_whole

    def settle(self) -> None:
        """Learn from the reports of one poll; they came together, whenever each load ended."""
        if self._num_ended == 0 or (self._under_way and self._num_ended < MAX_BUSY_JOBS):
            return
        left_bytes = sum(self._under_way.values())
        now_s = self._clock()
        busy_s = now_s - self._busy_since_s
        if not self._is_spoiled:
            self._meter.add(self._busy_bytes - left_bytes, busy_s)
        self._rested_s = now_s + max(MIN_PROBE_REST_S, PROBE_REST_RATIO * busy_s)
        self._begin_busy_time()

    def is_probe_due(self) -> bool:
        """Return whether the tier has nothing to load and was not measured for a while."""
        return not self._under_way and self._clock() >= self._rested_s

    def describe(self, name: str, row_bytes: int, num_wanted_rows: int = 0) -> TierLoad:
        """Return what a load would cost now.

        What else the tier has to do is not counted: its stores let loads pass, and what they take of its bandwidth is
        in the loads that were measured.

        Args:
            name: the tier's type.
            row_bytes: bytes of a row.
            num_wanted_rows: rows that this step will ask for, and has not handed over yet.
        """
        busy_s = self._clock() - self._busy_since_s if self._under_way else 0.0
        rate = self._meter.rate()
        if rate is None:
            # No load has ended. Those under way have not moved more than all they have to: nothing is faster.
            bound = LinkRate(self._busy_bytes / busy_s) if busy_s > 0 and self._busy_bytes else None
            return TierLoad(name, row_bytes, bound)
        expected_s = rate.time_s(self._busy_bytes) if self._under_way else 0.0
        wanted_s = rate.time_s(num_wanted_rows * row_bytes)
        return TierLoad(name, row_bytes, rate, abs(busy_s - expected_s) + wanted_s)

    def _begin_busy_time(self) -> None:
        self._busy_since_s = self._clock()
        self._busy_bytes = sum(self._under_way.values())
        self._num_ended = 0
        self._is_spoiled = False

    def __len__(self) -> int:
        return len(self._under_way)
