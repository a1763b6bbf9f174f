"""Time per block of the books as they grow, and how much slower many blocks are than sixteen thousand."""

import statistics
from collections.abc import Iterator
from functools import partial

from benchmarks.growth.factor import growth_of
from benchmarks.harness.measurement import OURS, Better, Measurement
from benchmarks.harness.rounds import fixed, run_rounds
from benchmarks.harness.suite import Options
from benchmarks.manager import Maker, make_batches, make_request, rates_once
from kvtier.cpu.manager import CPUOffloadingManager

ROUNDS_OF_CAPACITY = {2**12: 9, 2**14: 9, 2**16: 5, 2**18: 3, 2**20: 3}
QUICK_ROUNDS_OF_CAPACITY = {2**12: 3, 2**14: 3}
BASE_CAPACITY = 2**14
"""From which growth is told: fewer blocks are in the caches altogether."""

LARGEST_OF_POLICY = {"lru": 2**20, "arc": 2**18}
"""ARC takes twice as long, and its curve is as flat: a million blocks would be most of the run."""


def measure(options: Options) -> Iterator[Measurement]:
    """Yield nanoseconds per block by operation, policy and number of blocks, then the growths."""
    costs_ns: dict[tuple[str, str], dict[int, float]] = {}
    rounds_of_capacity = QUICK_ROUNDS_OF_CAPACITY if options.is_quick else ROUNDS_OF_CAPACITY
    for num_blocks, num_rounds in rounds_of_capacity.items():
        batches = make_batches(2 * num_blocks)
        for policy in (name for name, largest in LARGEST_OF_POLICY.items() if num_blocks <= largest):
            maker = Maker(CPUOffloadingManager, make_request)
            run = partial(rates_once, maker, num_blocks, policy, batches)
            for operation, values in run_rounds({OURS: run}, fixed(num_rounds), num_warmups=0).items():
                times_ns = tuple(1e6 / rate for rate in values[OURS])
                costs_ns.setdefault((operation, policy), {})[num_blocks] = statistics.median(times_ns)
                labels: dict[str, str | int] = {
                    "operation": operation,
                    "policy": policy,
                    "blocks": num_blocks,
                }
                yield Measurement(labels, "ns a block", Better.LOWER, {OURS: times_ns})
    for (operation, policy), of_capacity in costs_ns.items():
        grown = {size: cost for size, cost in of_capacity.items() if size >= BASE_CAPACITY}
        if len(grown) > 1:
            yield growth_of(f"{operation}, {policy}, a block", "blocks", grown)
