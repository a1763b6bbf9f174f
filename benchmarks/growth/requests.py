"""Time per request of a step in which nothing changes, as more requests wait or run, and how it grows."""

from collections.abc import Callable, Iterator, Sequence

from benchmarks.engine.steps import make_load_step, make_promotion_step, make_running_step
from benchmarks.growth.factor import growth_of
from benchmarks.harness.measurement import OURS, Better, Measurement
from benchmarks.harness.rounds import timed
from benchmarks.harness.suite import Options

REQUEST_COUNTS = (125, 250, 500, 1000, 2000, 4000)
QUICK_REQUEST_COUNTS = (250, 1000)
NUM_WARMUPS, NUM_ROUNDS = 1, 100


def measure(options: Options) -> Iterator[Measurement]:
    """Yield microseconds per request by what the requests do and how many there are, then the growths."""
    counts = QUICK_REQUEST_COUNTS if options.is_quick else REQUEST_COUNTS
    costs_us: dict[str, dict[int, list[float]]] = {}
    for doing, make_step in (
        ("wait for a promotion", make_promotion_step),
        ("wait for another's load", make_load_step),
        ("run, and fill no block", make_running_step),
    ):
        of_count = costs_us[doing] = measure_steps(make_step, counts)
        for num_requests, times_us in of_count.items():
            labels: dict[str, str | int] = {"a step in which they": doing, "requests": num_requests}
            yield Measurement(labels, "us a request", Better.LOWER, {OURS: tuple(times_us)})
    for doing, of_count in costs_us.items():
        yield growth_of(f"{doing}, a request", "requests", of_count)


def measure_steps(
    make_step: Callable[[int], Callable[[], None]], counts: Sequence[int]
) -> dict[int, list[float]]:
    """Return microseconds per request of steps with so many requests, which take turns."""
    steps = {num_requests: make_step(num_requests) for num_requests in counts}
    times_us: dict[int, list[float]] = {num_requests: [] for num_requests in counts}
    for round_number in range(NUM_WARMUPS + NUM_ROUNDS):
        for num_requests, step in steps.items():
            time_us = 1e6 * timed(step) / num_requests
            if round_number >= NUM_WARMUPS:
                times_us[num_requests].append(time_us)
    return times_us
