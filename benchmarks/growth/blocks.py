"""Time per block of the books as they grow, and how much slower a million blocks are than sixteen thousand."""

import statistics
from collections.abc import Iterator
from functools import partial

from benchmarks.harness.measurement import OURS, Bar, Better, Measurement
from benchmarks.harness.rounds import run_rounds
from benchmarks.harness.suite import Options
from benchmarks.manager import Maker, make_batches, make_request, rates_once
from kvtier.cpu.manager import CPUOffloadingManager

CAPACITIES = tuple(2**power for power in range(12, 21, 2))
QUICK_CAPACITIES = CAPACITIES[:2]
BASE_CAPACITY, LARGE_CAPACITY = 2**14, 2**20
SLOWDOWN_BAR = 2.5
POLICIES = ("lru", "arc")
NUM_ROUNDS = 3


def measure(options: Options) -> Iterator[Measurement]:
    """Yield nanoseconds per block by operation, policy and number of blocks, then the slowdowns."""
    median_ns: dict[tuple[str, str, int], float] = {}
    for num_blocks in QUICK_CAPACITIES if options.is_quick else CAPACITIES:
        batches = make_batches(2 * num_blocks)
        for policy in POLICIES:
            maker = Maker(CPUOffloadingManager, make_request)
            run = partial(rates_once, maker, num_blocks, policy, batches)
            for operation, values in run_rounds({OURS: run}, NUM_ROUNDS, num_warmups=0).items():
                times_ns = tuple(1e6 / rate for rate in values[OURS])
                median_ns[operation, policy, num_blocks] = statistics.median(times_ns)
                labels: dict[str, str | int] = {
                    "operation": operation,
                    "policy": policy,
                    "blocks": num_blocks,
                }
                yield Measurement(labels, "ns a block", Better.LOWER, {OURS: times_ns})
    for (operation, policy, num_blocks), large_ns in median_ns.items():
        if num_blocks == LARGE_CAPACITY:
            slowdown = large_ns / median_ns[operation, policy, BASE_CAPACITY]
            labels = {"slowdown from 16,384 to 1,048,576 blocks": f"{operation}, {policy}"}
            yield Measurement(labels, "times", Better.LOWER, {OURS: (slowdown,)}, Bar(None, SLOWDOWN_BAR))
