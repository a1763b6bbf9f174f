"""Time per request of a step in which nothing changes, as more requests wait or run, and how it grows."""

import statistics
from collections.abc import Iterator

from benchmarks.engine.steps import make_load_step, make_promotion_step, make_running_step
from benchmarks.growth.factor import growth_of
from benchmarks.harness.measurement import OURS, Better, Measurement
from benchmarks.harness.rounds import timed
from benchmarks.harness.suite import Options

REQUEST_COUNTS = (125, 250, 500, 1000, 2000, 4000)
QUICK_REQUEST_COUNTS = (250, 1000)
NUM_ROUNDS = 100


def measure(options: Options) -> Iterator[Measurement]:
    """Yield microseconds per request by what the requests do and how many there are, then the growths."""
    costs_us: dict[str, dict[int, float]] = {}
    for num_requests in QUICK_REQUEST_COUNTS if options.is_quick else REQUEST_COUNTS:
        for doing, make_step in (
            ("wait for a promotion", make_promotion_step),
            ("wait for another's load", make_load_step),
            ("run, and fill no block", make_running_step),
        ):
            step = make_step(num_requests)
            step()
            times_us = tuple(1e6 * timed(step) / num_requests for _ in range(NUM_ROUNDS))
            costs_us.setdefault(doing, {})[num_requests] = statistics.median(times_us)
            labels: dict[str, str | int] = {"a step in which they": doing, "requests": num_requests}
            yield Measurement(labels, "us a request", Better.LOWER, {OURS: times_us})
    for doing, of_count in costs_us.items():
        yield growth_of(f"{doing}, a request", "requests", of_count)
