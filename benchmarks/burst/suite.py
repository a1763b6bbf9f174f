"""Many short requests that arrive in one step: the time until all are loaded, and until all are stored.

Each has a prompt of its own of a few small blocks, which is in host memory or only in a tier. The floor is one request
with as many blocks: what is beyond it is the price of there being many. "One by one" is kvtier with a copy and a call
of the tier for each job. Only ratios of one run are meaningful: the contestants alternate.

    python -m benchmarks.burst.suite --out docs/results/requests.md    writes the page of the published numbers
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.burst.engine import BurstEngine, make_requests
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.measurement import FLOOR, OURS, Better, Measurement
from benchmarks.harness.rounds import Contestant, RoundCount, fixed, run_rounds, timed
from benchmarks.harness.suite import Options
from kvtier.cli.demo.backends import open_backend
from kvtier.cpu import row_handler
from kvtier.errors import KVTierError
from kvtier.tiering.fs.store import FSBlockStore
from kvtier.tiering.kit import io_pool
from kvtier.tiering.slab.store import SlabBlockStore
from kvtier.tiering.valkey.store import ValkeyBlockStore

HOST = "host"
TIERS = {"fs": FSBlockStore, "slab": SlabBlockStore, "valkey": ValkeyBlockStore}
REQUEST_COUNTS = (1, 8, 64, 256)
QUICK_REQUEST_COUNTS = (1, 64)
BLOCKS_PER_REQUEST, BLOCK_BYTES = 4, 16 * 2**10
NUM_ROUNDS, NUM_QUICK_ROUNDS = 8, 3
ONE_BY_ONE = "one by one"
LOAD, STORE = "load", "store"
COLUMNS = (
    "from or to",
    "operation",
    "requests",
    *(f"{what}{by}" for what in ("ms of processor", "calls") for by in ("", ", one request", ", one by one")),
)


def measure(options: Options) -> Iterator[Measurement]:
    """Yield the times by place, operation and number of requests, and the calls of the tier that they took."""
    counts = QUICK_REQUEST_COUNTS if options.is_quick else REQUEST_COUNTS
    num_rounds = fixed(NUM_QUICK_ROUNDS if options.is_quick else NUM_ROUNDS)
    for place in (HOST, *TIERS):
        for num_requests in counts:
            with options.new_folder() as folder:
                values = run(place, num_requests, folder, num_rounds)
            yield from as_measurements(place, num_requests, values)


def as_measurements(
    place: str, num_requests: int, values: Mapping[str, Mapping[str, tuple[float, ...]]]
) -> Iterator[Measurement]:
    """Yield the lines of one place and number of requests. Pure."""
    for operation, of_contestants in values.items():
        what, _, unit = operation.partition(", ")
        labels: dict[str, str | int] = {"from or to": place, "operation": what, "requests": num_requests}
        yield Measurement(labels, unit, Better.LOWER, of_contestants)


def run(
    place: str, num_requests: int, folder: Path, num_rounds: RoundCount
) -> dict[str, dict[str, tuple[float, ...]]]:
    """Run the contestants in turns; each round stores and loads prompts of its own."""
    generations = count()
    with ExitStack() as ends:
        tier: dict[str, Any] | None = None  # Any: a tier's JSON settings
        if place != HOST:
            tier = {"type": place, **ends.enter_context(open_backend(place, folder))}

        def contestant(num: int, num_blocks: int, name: str) -> Contestant:
            own = None if tier is None else _own_place(tier, folder, name)
            slots = num * num_blocks * (1 if own else 2)
            engine = BurstEngine(BLOCK_BYTES, slots, [own] if own else [], name)
            ends.callback(engine.shutdown)
            return partial(times_once, engine, place, num, num_blocks, generations)

        contestants: dict[str, Contestant] = {OURS: contestant(num_requests, BLOCKS_PER_REQUEST, "ours")}
        contestants[FLOOR] = contestant(1, num_requests * BLOCKS_PER_REQUEST, "floor")
        with joining_nothing():
            alone = contestant(num_requests, BLOCKS_PER_REQUEST, "alone")
        contestants[ONE_BY_ONE] = joining_nothing()(alone)
        return run_rounds(contestants, num_rounds)


@contextmanager
def joining_nothing() -> Iterator[None]:
    """Make every job a call of its own: of a tier that is opened inside the block, and of what is copied inside it."""
    with patch.object(io_pool, "MAX_JOINED_BYTES", 0), patch.object(row_handler, "MAX_JOINED_BYTES", 0):
        yield


def _own_place(tier: Mapping[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """Return a tier's settings with files of its own: a slab belongs to one engine."""
    files = {"path": str(folder / f"{name}.slab"), "root_dir": str(folder / name)}
    return {key: files.get(key, value) for key, value in tier.items()}


def times_once(
    engine: BurstEngine, place: str, num_requests: int, num_blocks: int, generations: Iterator[int]
) -> Mapping[str, float]:
    """Return the milliseconds of storing and of loading new prompts, and the calls of the tier's store."""
    requests = make_requests(num_requests, num_blocks, next(generations))
    for number, layer in enumerate(engine.layers):
        layer.fill_(next(generations) % 100 + number)
    expected = engine.pages_of(requests).copy()
    with counted_calls(place) as calls:
        store_ms, store_cpu_ms = times_of(partial(engine.store, requests))
        if place != HOST:
            engine.clear_host()
        for layer in engine.layers:
            layer.zero_()
        for request in requests:
            request.request_id += " again"
        load_ms, load_cpu_ms = times_of(partial(engine.load, requests))
    if (engine.pages_of(requests) != expected).any():
        raise KVTierError(f"{place}: wrong bytes were loaded")
    times = {f"{LOAD}, ms": load_ms, f"{STORE}, ms": store_ms}
    times |= {f"{LOAD}, ms of processor": load_cpu_ms, f"{STORE}, ms of processor": store_cpu_ms}
    return (
        times if place == HOST else times | {f"{what}, calls": float(calls[what]) for what in (LOAD, STORE)}
    )


def times_of(action: Callable[[], object]) -> tuple[float, float]:
    """Return the milliseconds that ``action`` takes, and those of the processor that all threads use meanwhile."""
    begun_cpu_s = time.process_time()
    took_s = timed(action)
    return 1e3 * took_s, 1e3 * (time.process_time() - begun_cpu_s)


@contextmanager
def counted_calls(place: str) -> Iterator[Counter[str]]:
    """Count the calls of a tier's block store inside the block, by direction."""
    calls: Counter[str] = Counter()

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:  # Any: passed on as it is
        def counted(*arguments: Any) -> Any:  # noqa: ANN401  # as above
            calls[name] += 1
            return call(*arguments)

        return counted

    with ExitStack() as patches:
        if place in TIERS:
            for name in (LOAD, STORE):
                store = TIERS[place]
                patches.enter_context(patch.object(store, name, counting(name, getattr(store, name))))
        yield calls


def make_page(measurements: Sequence[Measurement], machine: Mapping[str, object]) -> str:
    """Return the page of the published numbers. Pure."""
    lines = [
        "# Many short requests at once",
        "",
        f"Requests with {BLOCKS_PER_REQUEST} blocks of {BLOCK_BYTES // 1024} KiB each arrive in one step.",
        "The time is the least that the processor spends, on all threads but without a server's, until all are",
        "loaded, or stored everywhere. Calls are those of the tier's block store, in the median.",
        "",
        "One request has as many blocks; one by one, each job is a call and a copy. `kvtier bench burst` prints",
        "the time that passes too, which only an idle machine can compare: the second table has the load.",
        "",
        "Written by `python -m benchmarks.burst.suite --out docs/results/requests.md`.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|---|---|{(len(COLUMNS) - 2) * '---:|'}",
    ]
    by_labels = {
        (*measurement.labels.values(), measurement.unit): measurement for measurement in measurements
    }
    for (*key, unit), used in by_labels.items():
        if unit != "ms of processor":
            continue
        calls = by_labels.get((*key, "calls"))
        cells = [
            *(format_least(used.values.get(name), ".2f") for name in (OURS, FLOOR, ONE_BY_ONE)),
            *(format_median(calls, name) for name in (OURS, FLOOR, ONE_BY_ONE)),
        ]
        lines.append(f"| {' | '.join(map(str, key))} | {' | '.join(cells)} |")
    facts = [f"| {name} | {value} |" for name, value in machine.items()]
    return "\n".join([*lines, "", "| machine | |", "|---|---|", *facts, ""])


def format_least(values: Sequence[float] | None, spec: str) -> str:
    """Return the least of the values as a cell. Pure."""
    return "" if not values else format(min(values), spec)


def format_median(measurement: Measurement | None, name: str) -> str:
    """Return the median of a contestant's values as a cell. Pure."""
    if measurement is None or name not in measurement.values:
        return ""
    return format(statistics.median(measurement.values[name]), ".0f")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(prog="benchmarks.burst.suite", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the page to write")
    parser.add_argument("--quick", action="store_true", help="fewer numbers of requests and rounds")
    given = parser.parse_args(arguments)
    machine = describe_machine()
    measurements: list[Measurement] = []
    for measurement in measure(Options(given.quick, None, print)):
        print(dict(measurement.labels), measurement.unit, {n: min(v) for n, v in measurement.values.items()})
        measurements.append(measurement)
    given.out.write_text(make_page(measurements, machine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
