"""Time per block of a search without hits, and of a store that cascades, by the number of tiers.

The tiers keep rows in a dictionary and answer at once, so what grows is the manager's part: a search queries each
tier, a store is submitted to each. The cost is proportional to the tiers, so the growth is of the time per block and
tier.
"""

import gc
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count

import numpy as np

from benchmarks.growth.factor import growth_of
from benchmarks.harness.measurement import OURS, Better, Measurement
from benchmarks.harness.rounds import fixed, run_rounds
from benchmarks.harness.suite import Options
from benchmarks.harness.tier_jobs import make_config, make_keys
from kvtier.base import ReqContext
from kvtier.cpu.manager import CPUPrimaryTierOffloadingManager
from kvtier.tiering.example import ExampleSecondaryTier
from kvtier.tiering.manager import TieringOffloadingManager

TIER_COUNTS = (1, 2, 4, 8, 16)
QUICK_TIER_COUNTS = (1, 4)
NUM_BLOCKS = 4096
REQUEST_BLOCKS = 64
ROW_BYTES = 64
NUM_ROUNDS, NUM_QUICK_ROUNDS = 10, 3


class Rows:
    """Small rows in ordinary memory."""

    def create_kv_memoryview(self) -> memoryview:
        """Return the rows, shape (NUM_BLOCKS, ROW_BYTES), format 'b'."""
        return np.zeros((NUM_BLOCKS, ROW_BYTES), dtype=np.int8).data

    def cleanup(self) -> None:
        """Do nothing."""


def measure(options: Options) -> Iterator[Measurement]:
    """Yield microseconds per block by operation and number of tiers, then the growths."""
    counts = QUICK_TIER_COUNTS if options.is_quick else TIER_COUNTS
    generations = count()
    managers = {str(num_tiers): partial(times_once, num_tiers, generations) for num_tiers in counts}
    num_rounds = fixed(NUM_QUICK_ROUNDS if options.is_quick else NUM_ROUNDS)
    rounds = run_rounds(managers, num_rounds)
    for operation, values in rounds.items():
        for num_tiers in counts:
            labels: dict[str, str | int] = {"operation": operation, "tiers": num_tiers}
            yield Measurement(labels, "us a block", Better.LOWER, {OURS: values[str(num_tiers)]})
    for operation, values in rounds.items():
        shares_us = {
            num_tiers: [time_us / num_tiers for time_us in values[str(num_tiers)]] for num_tiers in counts
        }
        yield growth_of(f"{operation}, a block and tier", "tiers", shares_us)


def times_once(num_tiers: int, generations: Iterator[int]) -> Mapping[str, float]:
    """Return microseconds per block of a search without hits and of stores, on a new manager."""
    manager = make_manager(num_tiers)
    keys = make_keys(NUM_BLOCKS, next(generations))
    requests = [keys[start : start + REQUEST_BLOCKS] for start in range(0, NUM_BLOCKS, REQUEST_BLOCKS)]
    gc.collect()
    begun_s = time.perf_counter()
    for number, asked in enumerate(requests):
        context = ReqContext(f"search-{number}")
        for key in asked:
            manager.lookup(key, context)
        manager.end_step()
        manager.request_finished(context)
    between_s = time.perf_counter()
    for number, stored in enumerate(requests):
        context = ReqContext(f"store-{number}")
        manager.prepare_store(stored, context)
        manager.complete_store(stored, context)
        manager.end_step()
        manager.request_finished(context)
    ended_s = time.perf_counter()
    manager.shutdown()
    return {
        "search without hits": 1e6 * (between_s - begun_s) / NUM_BLOCKS,
        "store and cascade": 1e6 * (ended_s - between_s) / NUM_BLOCKS,
    }


def make_manager(num_tiers: int) -> TieringOffloadingManager:
    """Return a manager over that many tiers, each with room for every block."""
    primary = CPUPrimaryTierOffloadingManager(NUM_BLOCKS, Rows())
    rows = primary.get_kv_memoryview()
    config = make_config(ROW_BYTES)
    tiers = [ExampleSecondaryTier(config, rows, max_blocks=NUM_BLOCKS) for _ in range(num_tiers)]
    return TieringOffloadingManager(primary, tiers)
