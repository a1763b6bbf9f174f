"""Time per block of the manager's tables as they grow, and how much slower many blocks are than sixteen thousand."""

from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.growth.factor import growth_of
from benchmarks.harness.measurement import OURS, Better, Measurement
from benchmarks.harness.rounds import fixed, run_rounds
from benchmarks.harness.suite import Options
from benchmarks.manager import Maker, make_batches, make_request, rates_once
from kvtier.cpu.manager import CPUOffloadingManager

CAPACITIES = (2**12, 2**14, 2**16, 2**18, 2**20)
QUICK_CAPACITIES = (2**12, 2**14)
BASE_CAPACITY = 2**14
"""The base of the growth: fewer blocks fit into the processor's caches."""

LARGEST_OF_POLICY = {"lru": 2**20, "arc": 2**18}
"""ARC takes twice as long, and its curve is as flat: a million blocks would take most of the run."""

NUM_ROUNDS = 3
"""At least; rounded up so that each number of blocks begins equally often. Processor time hardly varies."""


def measure(options: Options) -> Iterator[Measurement]:
    """Yield nanoseconds per block by operation, policy and number of blocks, then the growths."""
    capacities = QUICK_CAPACITIES if options.is_quick else CAPACITIES
    growths: list[Measurement] = []
    for policy, largest in LARGEST_OF_POLICY.items():
        chosen = [num_blocks for num_blocks in capacities if num_blocks <= largest]
        for operation, costs_ns in measure_costs(policy, chosen).items():
            for num_blocks, times_ns in costs_ns.items():
                labels: dict[str, str | int] = {
                    "operation": operation,
                    "policy": policy,
                    "blocks": num_blocks,
                }
                yield Measurement(labels, "ns a block", Better.LOWER, {OURS: times_ns})
            grown = {size: times_ns for size, times_ns in costs_ns.items() if size >= BASE_CAPACITY}
            if len(grown) > 1:
                growths.append(growth_of(f"{operation}, {policy}, a block", "blocks", grown))
    yield from growths


def measure_costs(policy: str, capacities: Sequence[int]) -> dict[str, dict[int, tuple[float, ...]]]:
    """Return nanoseconds per block, by operation and capacity, of managers that alternate."""
    maker = Maker(CPUOffloadingManager, make_request)
    contestants = {
        str(num_blocks): partial(rates_once, maker, num_blocks, policy, make_batches(2 * num_blocks))
        for num_blocks in capacities
    }
    return {
        operation: {
            num_blocks: tuple(1e6 / rate for rate in values[str(num_blocks)]) for num_blocks in capacities
        }
        for operation, values in run_rounds(contestants, fixed(NUM_ROUNDS), num_warmups=0).items()
    }
