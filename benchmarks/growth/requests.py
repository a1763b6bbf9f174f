"""Time per request of a step in which nothing changes, by the number of waiting or running requests."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from benchmarks.engine.steps import make_load_step, make_promotion_step, make_running_step
from benchmarks.growth.factor import growth_of
from benchmarks.harness.measurement import OURS, Better, Measurement
from benchmarks.harness.rounds import fixed, run_rounds, timed
from benchmarks.harness.suite import Options

REQUEST_COUNTS = (125, 250, 500, 1000, 2000, 4000)
QUICK_REQUEST_COUNTS = (250, 1000)
NUM_ROUNDS = 100
STEP = "step"


def measure(options: Options) -> Iterator[Measurement]:
    """Yield microseconds per request by what the requests do and how many there are, then the growths."""
    counts = QUICK_REQUEST_COUNTS if options.is_quick else REQUEST_COUNTS
    costs_us: dict[str, dict[int, tuple[float, ...]]] = {}
    for doing, make_step in (
        ("wait for a promotion", make_promotion_step),
        ("wait for another's load", make_load_step),
        ("run, and fill no block", make_running_step),
    ):
        of_count = costs_us[doing] = measure_steps(make_step, counts)
        for num_requests, times_us in of_count.items():
            labels: dict[str, str | int] = {"a step in which they": doing, "requests": num_requests}
            yield Measurement(labels, "us a request", Better.LOWER, {OURS: times_us})
    for doing, of_count in costs_us.items():
        yield growth_of(f"{doing}, a request", "requests", of_count)


def measure_steps(
    make_step: Callable[[int], Callable[[], None]], counts: Sequence[int]
) -> dict[int, tuple[float, ...]]:
    """Return microseconds per request of steps with these numbers of requests, which alternate."""
    turns = {str(num_requests): partial(time_once, make_step(num_requests)) for num_requests in counts}
    times_s = run_rounds(turns, fixed(NUM_ROUNDS))[STEP]
    return {
        num_requests: tuple(1e6 * time_s / num_requests for time_s in times_s[str(num_requests)])
        for num_requests in counts
    }


def time_once(step: Callable[[], None]) -> Mapping[str, float]:
    """Return the seconds of a step after an untimed one: an engine runs nothing but such steps."""
    step()
    return {STEP: timed(step)}
