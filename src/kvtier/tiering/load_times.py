"""How fast a tier loads, measured from the loads that it was given.

Jobs overlap, so the time of a single job is not its own. The sample is a busy period: from the first load that is
submitted until none is open, with all their bytes. A busy period that does not end is cut after a few reports. Open
loads count too: a load that takes longer than predicted is predicted to take as long again.
"""

from collections.abc import Callable

from kvtier.cost_model import BandwidthEstimator, LinkRate
from kvtier.locations import TierLoad

MAX_BUSY_JOBS = 4
"""Reports after which a busy period is a sample although loads are open. More learn late under load; with fewer the
bytes that open loads have moved already, which are not counted, weigh more."""

PROBE_REST_RATIO = 9.0
"""After a probe, a load that only measures, the tier is not probed for nine times as long as it took: probes take at
most a tenth of the time, however slow the tier is. Smaller disturbs a slow tier's stores more; larger notices later
that the tier is fast again."""

MIN_PROBE_REST_S = 1.0
"""A fast tier is not probed more often than this: requests rarely leave its blocks, and each probe takes a slot."""

MAX_PROBE_ROWS = 8
"""Rows of a probe. One would not show what a tier gains by loading several at once; many would evict as many from host
memory, for a request that does not wait for them."""

MAX_PROBE_S = 1.0
"""A probe takes no longer than this, as far as is known, unless one row does. A slow tier is probed with few rows, and
so more often."""

MIN_SLOW_FAILURE_S = 1.0
"""A load that fails sooner says nothing about the tier's speed: its blocks were gone, or the backend refused. A load
that fails later has timed out, and gives an upper bound of the speed."""


class LoadTimes:
    """The loads of one tier. Used from the scheduler's thread.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._meter = BandwidthEstimator()
        # INVARIANT: loads that were submitted and not reported, and their bytes.
        self._num_open = self._open_bytes = 0
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

    def stats(self) -> dict[str, float]:
        """Return the present rate as gauges, 0 where there is none."""
        rate = self.present_rate()
        return {
            "load_bytes_per_s": 0.0 if rate is None else rate.bytes_per_s,
            "load_latency_s": 0.0 if rate is None else rate.latency_s,
        }

    def present_rate(self) -> LinkRate | None:
        """Return the same, and change nothing. Thread: any."""
        return self._meter.present_rate()

    def begin(self, num_bytes: int) -> None:
        """Record a load that was submitted."""
        if not self._num_open:
            self._begin_busy_period()
        self._num_open += 1
        self._open_bytes += num_bytes
        self._busy_bytes += num_bytes

    def end(self, num_bytes: int, started_s: float, *, is_whole: bool, took_s: float | None = None) -> None:
        """Record the end of a load; a partial load is a sample only if it took long to fail.

        Args:
            num_bytes: as at its beginning.
            started_s: the clock's reading at its beginning.
            is_whole: whether every block arrived.
            took_s: seconds that it took, as the tier reports; None: until now.
        """
        self._num_open -= 1
        self._open_bytes -= num_bytes
        self._num_ended += 1
        self._is_spoiled |= not is_whole
        now_s = self._clock()
        ended_s = now_s if took_s is None else min(now_s, started_s + took_s)
        self._ended_s = max(self._ended_s, ended_s)

    def learn(self) -> None:
        """Learn from the reports of one poll; they came together, whenever each load ended."""
        if self._num_ended == 0 or (self._num_open and self._num_ended < MAX_BUSY_JOBS):
            return
        now_s = self._clock()
        # The next poll may be much later than the last load: an engine computes a prompt, or has nothing to do.
        busy_s = (now_s if self._num_open else self._ended_s) - self._busy_since_s
        moved_bytes = self._busy_bytes - self._open_bytes
        if not self._is_spoiled or self._is_slow_failure(moved_bytes, busy_s):
            self._meter.observe(moved_bytes, busy_s)
        self._rested_s = now_s + max(MIN_PROBE_REST_S, PROBE_REST_RATIO * busy_s if self._is_probing else 0.0)
        self._is_probing = False
        self._begin_busy_period()

    def plan_probe(self, row_bytes: int) -> int:
        """Return how many rows may be loaded now only to measure: 0 while the tier loads or rests."""
        if self._num_open or self._clock() < self._rested_s:
            return 0
        rate = self._meter.rate()
        if rate is None:
            return MAX_PROBE_ROWS
        num_rows = int(max(0.0, MAX_PROBE_S - rate.latency_s) * rate.bytes_per_s / row_bytes)
        return max(1, min(MAX_PROBE_ROWS, num_rows))

    def on_probe(self) -> None:
        """Record that the next load is a probe, so that the tier rests after it."""
        self._is_probing = True

    def describe(self, name: str, row_bytes: int, num_wanted_rows: int = 0) -> TierLoad:
        """Return what a load would cost now.

        The tier's stores are not counted: loads pass them, and the bandwidth that they take is in the measured loads.

        Args:
            name: the tier's type.
            row_bytes: bytes of a row.
            num_wanted_rows: rows that this step has planned to load and not submitted yet.
        """
        busy_s = self._clock() - self._busy_since_s if self._num_open else 0.0
        rate = self._meter.rate()
        if rate is None:
            # No load has ended. The open ones have moved at most all their bytes, which bounds the rate.
            bound = LinkRate(self._busy_bytes / busy_s) if busy_s > 0 and self._busy_bytes else None
            return TierLoad(name, row_bytes, bound)
        expected_s = rate.time_s(self._busy_bytes) if self._num_open else 0.0
        wanted_s = rate.time_s(num_wanted_rows * row_bytes)
        num_queued = self._num_open + (num_wanted_rows > 0)
        return TierLoad(name, row_bytes, rate, abs(busy_s - expected_s) + wanted_s, num_queued)

    def _is_slow_failure(self, requested_bytes: int, busy_s: float) -> bool:
        """Return whether a busy period with a failure was slow even if every block had arrived."""
        rate = self._meter.rate()
        expected_s = 0.0 if rate is None else rate.time_s(requested_bytes)
        return busy_s > max(MIN_SLOW_FAILURE_S, expected_s)

    def _begin_busy_period(self) -> None:
        self._busy_since_s = self._ended_s = self._clock()
        self._busy_bytes = self._open_bytes
        self._num_ended = 0
        self._is_spoiled = False
