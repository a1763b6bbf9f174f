"""The cost of an eviction policy alone: blocks per second of insertion, hit and eviction.

The floor is a bare ordered dictionary that drops its oldest entry without checking whether it is in use. Blocks are the
manager's own objects, made beforehand; calls come in batches of 64. The thread's processor time is measured. Hazard,
which learns from whole requests, is measured with those (``benchmarks.hazard``).
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from benchmarks import hazard
from benchmarks.harness.measurement import FLOOR, OURS, Better, Measurement
from benchmarks.harness.rounds import Contestant, run_rounds
from benchmarks.harness.suite import Options
from benchmarks.harness.tier_jobs import make_keys
from kvtier.base import OffloadKey
from kvtier.cpu.policies import BlockStatus, CachePolicy, create_cache_policy

BATCH = 64
ROUNDS_OF_CAPACITY = {16_384: 8, 131_072: 4, 1_048_576: 2}
"""Blocks -> rounds, in which both contestants begin equally often; a million blocks take seconds."""

QUICK_ROUNDS_OF_CAPACITY = {16_384: 2}
POLICIES = ("lru", "arc")

Batches = Sequence[tuple[Sequence[OffloadKey], Sequence[BlockStatus]]]


class BarePolicy(CachePolicy):
    """The least cost of an eviction order."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._blocks: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()

    def get(self, key: OffloadKey) -> BlockStatus | None:
        """Return the block under ``key``."""
        return self._blocks.get(key)

    def getter(self) -> Callable[[OffloadKey], BlockStatus | None]:
        """Return the dictionary's own ``get``."""
        return self._blocks.get

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        """Hold a block."""
        self._blocks[key] = block

    def remove(self, key: OffloadKey) -> None:
        """Stop holding it."""
        self._blocks.pop(key, None)

    def touch(self, keys: Collection[OffloadKey]) -> None:
        """Make ``keys`` the most recent."""
        for key in keys:
            self._blocks.move_to_end(key)

    def evict(self, n: int, protected: Collection[OffloadKey]) -> list[tuple[OffloadKey, BlockStatus]] | None:
        """Drop the oldest."""
        del protected
        return [self._blocks.popitem(last=False) for _ in range(n)]

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()


def measure(options: Options) -> Iterator[Measurement]:
    """Yield rates by operation, policy and capacity."""
    rounds_of_capacity = QUICK_ROUNDS_OF_CAPACITY if options.is_quick else ROUNDS_OF_CAPACITY
    for num_blocks, num_rounds in rounds_of_capacity.items():
        batches = make_batches(num_blocks)
        for policy in POLICIES:
            makers: dict[str, Callable[[], CachePolicy]] = {
                OURS: partial(create_cache_policy, policy, num_blocks),
                FLOOR: partial(BarePolicy, num_blocks),
            }
            contestants: dict[str, Contestant] = {
                name: partial(rates_once, make, batches) for name, make in makers.items()
            }
            for operation, values in run_rounds(
                contestants, options.count_rounds(num_rounds, num_rounds), num_warmups=0
            ).items():
                labels: dict[str, str | int] = {
                    "operation": operation,
                    "policy": policy,
                    "blocks": num_blocks,
                }
                yield Measurement(labels, "k blocks/s", Better.HIGHER, values)
    yield from hazard.measure(is_quick=options.is_quick)


def make_batches(num_blocks: int) -> Batches:
    """Return keys for twice the capacity with idle blocks; the second half has the slots of the first."""
    blocks = [BlockStatus(number) for number in range(num_blocks)]
    for block in blocks:
        block.ref_cnt = 0
    keys = make_keys(2 * num_blocks, 0)
    blocks += blocks
    starts = range(0, 2 * num_blocks, BATCH)
    return [(keys[start : start + BATCH], blocks[start : start + BATCH]) for start in starts]


def rates_once(make: Callable[[], CachePolicy], batches: Batches) -> Mapping[str, float]:
    """Return thousand blocks per processor second, by operation, over one capacity's worth of blocks each."""
    policy = make()
    half = len(batches) // 2
    rates = {}
    for name, run, part in (
        ("insert", insert_all, batches[:half]),
        ("hit", hit_all, batches[:half]),
        ("evict and insert", replace_all, batches[half:]),
    ):
        begun_s = time.thread_time()
        run(policy, part)
        rates[name] = half * BATCH / 1e3 / (time.thread_time() - begun_s)
    return rates


def insert_all(policy: CachePolicy, batches: Batches) -> None:
    """Fill the policy."""
    for keys, blocks in batches:
        policy.insert_many(keys, blocks)


def hit_all(policy: CachePolicy, batches: Batches) -> None:
    """Find and touch every block."""
    get = policy.getter()
    for keys, _ in batches:
        for key in keys:
            get(key)
        policy.touch(keys)


def replace_all(policy: CachePolicy, batches: Batches) -> None:
    """Evict for each batch, then insert it."""
    for keys, blocks in batches:
        policy.evict(len(keys), ())
        policy.insert_many(keys, blocks)
