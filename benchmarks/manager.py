"""The cost of the primary tier's manager: blocks per second of store, hit and evicting store, and bytes per block.

No KV cache is moved. Each case drives the same calls, in batches of 64 keys, through kvtier's manager and through a
floor: a bare ordered dictionary with the same loops and no guarantees. If vLLM is installed, its CPUOffloadingManager
is driven in the same run with the same calls. Each batch belongs to its own request, whose context is made beforehand,
because vLLM's manager has tables per request. The thread's processor time is measured, so that other processes matter
little.
"""

import gc
import importlib
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.harness.measurement import FLOOR, OURS, Bar, Better, Measurement
from benchmarks.harness.rounds import Contestant, RoundCount, run_rounds
from benchmarks.harness.suite import Options
from kvtier.base import OffloadKey, ReqContext, make_offload_key
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies.arc import ARCCachePolicy

BATCH = 64
"""Keys per call, about what an engine step names for one request."""

ROUNDS_OF_CAPACITY = {16_384: 12, 131_072: 6, 1_048_576: 2}
"""Blocks -> least number of rounds, rounded up so that each contestant begins equally often. A million blocks take
seconds per round, and processor time hardly varies there."""

QUICK_ROUNDS_OF_CAPACITY = {16_384: 2}
BAR_CAPACITY = 131_072
MEMORY_CAPACITIES = (100_000, 131_072)
"""The second is a power of two, the first is close to the worst case for the hash tables after long use."""

STORE, HIT, EVICTING_STORE = "store", "hit", "evicting store"
VLLM_BARS = {STORE: 5.0, HIT: 8.0, EVICTING_STORE: 8.0}
"""Ratios to vLLM's, with LRU at BAR_CAPACITY."""

BLOCK_BAR_BYTES = 250.0
GHOST_BAR_BYTES = 150.0

POLICIES = ("lru", "arc")
VLLM = "vllm"
VLLM_MODULE = "vllm.v1.kv_offload"

Batches = Sequence[Sequence[OffloadKey]]
Calls = Sequence[tuple[Sequence[OffloadKey], Any]]  # Any: a request's context, ours or vLLM's
Manager = Any  # Any: ours, the floor and vLLM's have these methods in common and no base class


class Floor:
    """The least cost of such tables in Python: one ordered dictionary, one loop per call."""

    def __init__(self, num_blocks: int, policy: str) -> None:
        del policy
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[OffloadKey, list[int]] = OrderedDict()

    def prepare_store(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[int]:
        """Insert the missing keys, evicting the oldest."""
        del req_context
        blocks, slots = self._blocks, []
        for key in keys:
            if key not in blocks:
                is_full = len(blocks) == self._num_blocks
                slot = blocks.popitem(last=False)[1][0] if is_full else len(blocks)
                blocks[key] = [slot, -1]
                slots.append(slot)
        return slots

    def complete_store(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Mark the keys as ready."""
        del req_context
        for key in keys:
            self._blocks[key][1] = 0

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool:
        """Return whether the key is held and ready."""
        del req_context
        return key in self._blocks

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Renew."""
        del req_context
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[int]:
        """Pin."""
        del req_context
        slots = []
        for key in keys:
            block = self._blocks[key]
            block[1] += 1
            slots.append(block[0])
        return slots

    def complete_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Unpin."""
        del req_context
        for key in keys:
            self._blocks[key][1] -= 1


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes a contestant's manager.

    Attributes:
        make_manager: from a number of blocks and the name of a policy.
        make_request: the context that its calls take.
    """

    make_manager: Callable[[int, str], Manager]
    make_request: Callable[[], Any]  # Any: ours, or vLLM's


def measure(options: Options) -> Iterator[Measurement]:
    """Yield rates by operation, policy and capacity, then bytes per block."""
    vllm = find_vllm()
    if vllm is None:
        options.note("vLLM is not installed, so its manager was not measured: make bench-peers")
    rounds_of_capacity = QUICK_ROUNDS_OF_CAPACITY if options.is_quick else ROUNDS_OF_CAPACITY
    for num_blocks, num_rounds in rounds_of_capacity.items():
        for policy in POLICIES:
            yield from measure_speed(num_blocks, policy, options.count_rounds(num_rounds, num_rounds), vllm)
    for num_blocks in QUICK_ROUNDS_OF_CAPACITY if options.is_quick else MEMORY_CAPACITIES:
        yield from measure_memory(num_blocks)


def find_vllm() -> Maker | None:
    """Return the maker of vLLM's manager; None when vLLM is not installed."""
    try:
        manager = importlib.import_module(f"{VLLM_MODULE}.cpu.manager").CPUOffloadingManager
        base = importlib.import_module(f"{VLLM_MODULE}.base")
    except ImportError:
        return None
    return Maker(manager, lambda: base.ReqContext("benchmark"))


def measure_speed(
    num_blocks: int, policy: str, num_rounds: RoundCount, vllm: Maker | None
) -> Iterator[Measurement]:
    """Time the three operations for each contestant in turn, with a new manager each time."""
    batches = make_batches(2 * num_blocks)
    makers = {OURS: Maker(CPUOffloadingManager, make_request), FLOOR: Maker(Floor, make_request)}
    if vllm is not None:
        makers[VLLM] = vllm
    contestants: dict[str, Contestant] = {
        name: partial(rates_once, maker, num_blocks, policy, batches) for name, maker in makers.items()
    }
    # A new manager has nothing to warm, so there are no warm-up rounds.
    for operation, values in run_rounds(contestants, num_rounds, num_warmups=0).items():
        has_bar = policy == "lru" and num_blocks == BAR_CAPACITY
        labels: dict[str, str | int] = {"operation": operation, "policy": policy, "blocks": num_blocks}
        bar = Bar(VLLM, VLLM_BARS[operation]) if has_bar else None
        yield Measurement(labels, "k blocks/s", Better.HIGHER, values, bar)


def make_batches(num_keys: int) -> Batches:
    """Return distinct keys of 36 bytes, like those of a SHA-256 and a group, in batches."""
    keys = [make_offload_key(number.to_bytes(32, "little"), 0) for number in range(num_keys)]
    return [keys[start : start + BATCH] for start in range(0, num_keys, BATCH)]


def rates_once(maker: Maker, num_blocks: int, policy: str, batches: Batches) -> Mapping[str, float]:
    """Return thousand blocks per processor second, by operation, over one capacity's worth of blocks each."""
    manager = maker.make_manager(num_blocks, policy)
    half = len(batches) // 2
    gc.collect()
    rates = {}
    for name, run, asked in (
        (STORE, store_all, batches[:half]),
        (HIT, hit_all, batches[:half]),
        (EVICTING_STORE, store_all, batches[half:]),
    ):
        calls = [(keys, maker.make_request()) for keys in asked]
        begun_s = time.thread_time()
        run(manager, calls)
        rates[name] = half * BATCH / 1e3 / (time.thread_time() - begun_s)
    return rates


def store_all(manager: Manager, calls: Calls) -> None:
    """Store batch after batch, each completely."""
    for keys, request in calls:
        manager.prepare_store(keys, request)
        manager.complete_store(keys, request)


def hit_all(manager: Manager, calls: Calls) -> None:
    """Find, touch, pin and unpin batch after batch, like a request whose whole prefix is held."""
    lookup = manager.lookup
    for keys, request in calls:
        for key in keys:
            lookup(key, request)
        manager.touch(keys, request)
        manager.prepare_load(keys, request)
        manager.complete_load(keys, request)


def make_request() -> ReqContext:
    """Return the context of a new request."""
    return ReqContext("benchmark")


def measure_memory(num_blocks: int) -> Iterator[Measurement]:
    """Measure what LRU's tables and ARC's ghosts allocate beyond the keys: when full, then when all were replaced."""
    batches = make_batches(6 * num_blocks)
    calls = [(keys, make_request()) for keys in batches]
    num_batches = len(batches) // 6
    tracemalloc.start()
    before = traced_bytes()
    manager = CPUOffloadingManager(num_blocks)
    store_all(manager, calls[:num_batches])
    filled = traced_bytes() - before
    store_all(manager, calls[num_batches:])
    churned = traced_bytes() - before
    del manager
    ghosts = measure_ghosts(num_blocks, calls)
    tracemalloc.stop()
    found = {
        "held block, filled": (filled / num_blocks, BLOCK_BAR_BYTES),
        "held block, all replaced": (churned / num_blocks, BLOCK_BAR_BYTES),
        "ghost of ARC": (ghosts, GHOST_BAR_BYTES),
    }
    for what, (num_bytes, bar_bytes) in found.items():
        labels: dict[str, str | int] = {"memory": what, "blocks": num_blocks}
        yield Measurement(labels, "bytes", Better.LOWER, {OURS: (num_bytes,)}, Bar(None, bar_bytes))


def measure_ghosts(num_blocks: int, calls: Calls) -> float:
    """Return the bytes that one ghost of a full ARC frees when it is forgotten."""
    manager = CPUOffloadingManager(num_blocks, "arc")
    for number, (keys, request) in enumerate(calls):
        store_all(manager, [(keys, request)])
        # ARC remembers almost nothing without reuse, so half of the blocks are used again.
        if number % 2:
            manager.touch(keys, request)
    policy = manager.table.policy
    assert isinstance(policy, ARCCachePolicy)
    with_ghosts, num_ghosts = traced_bytes(), len(policy.b1) + len(policy.b2)
    policy.b1.clear()
    policy.b2.clear()
    return (with_ghosts - traced_bytes()) / num_ghosts


def traced_bytes() -> int:
    """Return the bytes that are allocated now."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
