"""How fast a tier loads: when its loads were handed over, and when they ended, or were reported if it does not say.

It calls no tier. Jobs overlap, so the time of one is not its own: what counts is a busy time, from the first load that
is handed over until none is left, with all the bytes of it. A busy time that does not end is cut after a few reports.
What is under way says something too: a load that takes longer than foretold is foretold to take as long again.
"""

from collections.abc import Callable
from typing import NamedTuple

from kvtier.base import JobId
from kvtier.cost_model import BandwidthEstimator, LinkRate
from kvtier.locations import TierLoad

MAX_BUSY_JOBS = 4
"""Reports after which a busy time is a sample although loads are left. More learn late under load; with fewer the
bytes of what is left, moved already and not counted, weigh more."""

PROBE_REST_RATIO = 9.0
"""A load that only measures leaves its tier alone for nine times as long as it took: at most a tenth of the time goes
into them, however slow the tier is. Smaller disturbs a slow tier's stores more; larger finds later that it is well."""

MIN_PROBE_REST_S = 1.0
"""A fast tier is not measured more often than this: nobody is refused often there, and each load takes a slot."""

MAX_PROBE_ROWS = 8
"""Rows of a load that only measures. One would not show what a tier gains by loading several at once; many would put as
many out of host memory, for a request that does not wait for them."""

MAX_PROBE_S = 1.0
"""A load that only measures takes no longer than this, as far as is known, unless one row does. A slow tier is measured
with few rows, and so the more often."""

MIN_SLOW_FAILURE_S = 1.0
"""A load that fails sooner says nothing of how fast the tier is: its blocks were gone, or the place refused. One that
takes longer is out of time, and tells at least how fast the tier is not."""


class LoadUnderWay(NamedTuple):
    """A load that was handed over and not reported.

    Attributes:
        num_bytes: bytes that it brings.
        begun_s: the clock's reading when it was handed over.
    """

    num_bytes: int
    begun_s: float


class LoadTimes:
    """The loads of one tier. Used from the scheduler's thread.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._meter = BandwidthEstimator()
        # INVARIANT: each load that was handed over and not reported, and no other.
        self._under_way: dict[JobId, LoadUnderWay] = {}
        self._busy_since_s = self._ended_s = 0.0
        self._busy_bytes = 0
        self._num_ended = 0
        self._is_spoiled = False
        self._is_probing = False
        self._rested_s = float("-inf")

    @property
    def rate(self) -> LinkRate | None:
        """How fast the tier loads, from loads that have ended; None before the first."""
        return self._meter.rate()

    def begin(self, job_id: JobId, num_bytes: int) -> None:
        """Note a load that was handed to the tier."""
        if not self._under_way:
            self._begin_busy_time()
        self._under_way[job_id] = LoadUnderWay(num_bytes, self._clock())
        self._busy_bytes += num_bytes

    def end(self, job_id: JobId, *, is_whole: bool, took_s: float | None = None) -> None:
        """Note a report; a load that brought less than all says something only if it took long to fail.

        Args:
            job_id: the load; what is none is ignored.
            is_whole: whether everything came.
            took_s: seconds that it took, as the tier says; None for until now.
        """
        load = self._under_way.pop(job_id, None)
        if load is not None:
            self._num_ended += 1
            self._is_spoiled |= not is_whole
            now_s = self._clock()
            ended_s = now_s if took_s is None else min(now_s, load.begun_s + took_s)
            self._ended_s = max(self._ended_s, ended_s)

    def settle(self) -> None:
        """Learn from the reports of one poll; they came together, whenever each load ended."""
        if self._num_ended == 0 or (self._under_way and self._num_ended < MAX_BUSY_JOBS):
            return
        left_bytes = self._bytes_under_way()
        now_s = self._clock()
        # The next poll may be much later than the last load: an engine computes a prompt, or has nothing to do.
        busy_s = (now_s if self._under_way else self._ended_s) - self._busy_since_s
        moved_bytes = self._busy_bytes - left_bytes
        if not self._is_spoiled or self._is_slow_failure(moved_bytes, busy_s):
            self._meter.add(moved_bytes, busy_s)
        self._rested_s = now_s + max(MIN_PROBE_REST_S, PROBE_REST_RATIO * busy_s if self._is_probing else 0.0)
        self._is_probing = False
        self._begin_busy_time()

    def plan_probe(self, row_bytes: int) -> int:
        """Return how many rows may be loaded now only to measure: 0 while it loads or rests."""
        if self._under_way or self._clock() < self._rested_s:
            return 0
        rate = self._meter.rate()
        if rate is None:
            return MAX_PROBE_ROWS
        num_rows = int(max(0.0, MAX_PROBE_S - rate.latency_s) * rate.bytes_per_s / row_bytes)
        return max(1, min(MAX_PROBE_ROWS, num_rows))

    def on_probe(self) -> None:
        """Note that the next load only measures, so that the tier is left alone after it."""
        self._is_probing = True

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
        num_queued = len(self._under_way) + (num_wanted_rows > 0)
        return TierLoad(name, row_bytes, rate, abs(busy_s - expected_s) + wanted_s, num_queued)

    def _is_slow_failure(self, asked_bytes: int, busy_s: float) -> bool:
        """Return whether a busy time in which something failed was slow even if everything had come."""
        rate = self._meter.rate()
        expected_s = 0.0 if rate is None else rate.time_s(asked_bytes)
        return busy_s > max(MIN_SLOW_FAILURE_S, expected_s)

    def _begin_busy_time(self) -> None:
        self._busy_since_s = self._ended_s = self._clock()
        self._busy_bytes = self._bytes_under_way()
        self._num_ended = 0
        self._is_spoiled = False

    def _bytes_under_way(self) -> int:
        return sum(load.num_bytes for load in self._under_way.values())

    def __len__(self) -> int:
        return len(self._under_way)
