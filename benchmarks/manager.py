"""What the primary tier's books cost: time per block for store, hit and evicting store, and bytes per block.

No byte of KV cache moves here. Each case drives the same calls, in batches of 64 keys, through this project's
manager and through a floor: a bare ordered dictionary with the same loops and no promises. If vLLM can be
imported, its CPUOffloadingManager is driven in the same run by the same calls. Repetitions are interleaved, so
that a noisy moment of the machine hits each alike, and the thread's processor time is taken, so that other
processes count for little; medians are printed, ratios are what to compare.

Run: ``python -m benchmarks.manager [--quick] [--json FILE]``.
"""

import argparse
import gc
import importlib
import json
import statistics
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier.base import OffloadKey, ReqContext, make_offload_key
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies.arc import ARCCachePolicy

BATCH = 64
"""Keys in a call, about what an engine step names for one request."""

CAPACITIES = (16_384, 131_072, 1_048_576)
MEMORY_CAPACITIES = (100_000, 131_072)
"""The second is a power of two, the first is close to the worst for the hash tables after long use."""

OPERATIONS = ("store", "hit", "evicting store")
POLICIES = ("lru", "arc")
VLLM_MODULE = "vllm.v1.kv_offload"

Batches = Sequence[Sequence[OffloadKey]]
Manager = Any  # Any: ours, the floor and vLLM's have these methods in common and no base class


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: medians over the repetitions.

    Attributes:
        blocks_per_s: by subject ("ours", "floor", "vllm").
    """

    operation: str
    policy: str
    num_blocks: int
    blocks_per_s: dict[str, float]

    def ratio(self, other: str) -> float | None:
        """Return how many times as fast ours is, None when the other did not run."""
        rate = self.blocks_per_s.get(other)
        return self.blocks_per_s["ours"] / rate if rate else None


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes beyond the keys, traced by the allocator, after filling and after as much again was evicted."""

    num_blocks: int
    bytes_per_held_block: float
    bytes_per_held_block_after_churn: float
    bytes_per_ghost: float


class Floor:
    """The least that such books can cost in Python: one ordered dictionary, one loop a call."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[OffloadKey, list[int]] = OrderedDict()

    def prepare_store(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[int]:
        """Insert what is missing, pushing out the oldest."""
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
        """Mark as ready."""
        del req_context
        for key in keys:
            self._blocks[key][1] = 0

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool:
        """Return whether it is held."""
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


def main() -> None:
    """Measure, print one table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="small capacities, two repetitions")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--repeats", type=int, default=0, help="repetitions; 0 takes 3, or 2 when quick")
    parser.add_argument(
        "--num-blocks", type=int, nargs="+", help="capacities to time instead of the usual three"
    )
    args = parser.parse_args()
    repeats = args.repeats or (2 if args.quick else 3)
    capacities = args.num_blocks or (CAPACITIES[:1] if args.quick else CAPACITIES)
    vllm = find_vllm()
    rows = [
        row
        for num_blocks in capacities
        for policy in POLICIES
        for row in measure_speed(num_blocks, policy, repeats, vllm)
    ]
    memory = [
        measure_memory(num_blocks) for num_blocks in (CAPACITIES[:1] if args.quick else MEMORY_CAPACITIES)
    ]
    print_speed(rows)
    print(f"\nvLLM: {'driven by the same calls in this run' if vllm else 'not installed, so not compared'}\n")
    print_memory(memory)
    if args.json:
        document = {"speed": [asdict(row) for row in rows], "memory": [asdict(row) for row in memory]}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


def find_vllm() -> Callable[[int, str], Manager] | None:
    """Return a function that makes vLLM's manager, or None when vLLM is not installed."""
    try:
        manager = importlib.import_module(f"{VLLM_MODULE}.cpu.manager").CPUOffloadingManager
    except ImportError:
        return None

    def make(num_blocks: int, policy: str) -> Manager:
        return manager(num_blocks=num_blocks, cache_policy=policy, enable_events=False)

    return make


def measure_speed(
    num_blocks: int, policy: str, repeats: int, vllm: Callable[[int, str], Manager] | None
) -> list[Row]:
    """Time the three operations for each subject in turn, ``repeats`` times over."""
    batches = make_batches(2 * num_blocks)
    makers: dict[str, Callable[[], Manager]] = {
        "ours": lambda: CPUOffloadingManager(num_blocks, policy),
        "floor": lambda: Floor(num_blocks),
    }
    if vllm is not None:
        makers["vllm"] = lambda: vllm(num_blocks, policy)
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in OPERATIONS}
    for _ in range(repeats):
        for subject, make in makers.items():
            for name, spent in time_once(make(), batches).items():
                seconds[name].setdefault(subject, []).append(spent)
    return [
        Row(
            name,
            policy,
            num_blocks,
            {subject: num_blocks / statistics.median(times) for subject, times in by_subject.items()},
        )
        for name, by_subject in seconds.items()
    ]


def make_batches(num_keys: int) -> Batches:
    """Return distinct keys of 36 bytes, as a SHA-256 and a group would make them, in batches."""
    keys = [make_offload_key(number.to_bytes(32, "little"), 0) for number in range(num_keys)]
    return [keys[start : start + BATCH] for start in range(0, num_keys, BATCH)]


def time_once(manager: Manager, batches: Batches) -> dict[str, float]:
    """Return the processor seconds that each operation took over one capacity's worth of blocks."""
    half = len(batches) // 2
    request = ReqContext("benchmark")
    gc.collect()
    steps: tuple[Callable[[], None], ...] = (
        lambda: store_all(manager, batches[:half], request),
        lambda: hit_all(manager, batches[:half], request),
        lambda: store_all(manager, batches[half:], request),
    )
    spent: dict[str, float] = {}
    for name, step in zip(OPERATIONS, steps, strict=True):
        start = time.thread_time()
        step()
        spent[name] = time.thread_time() - start
    return spent


def store_all(manager: Manager, batches: Batches, request: ReqContext) -> None:
    """Store batch after batch, each to the end."""
    for keys in batches:
        manager.prepare_store(keys, request)
        manager.complete_store(keys, request)


def hit_all(manager: Manager, batches: Batches, request: ReqContext) -> None:
    """Find, renew, pin and unpin batch after batch, as a request whose whole prefix is held does."""
    lookup = manager.lookup
    for keys in batches:
        for key in keys:
            lookup(key, request)
        manager.touch(keys, request)
        manager.prepare_load(keys, request)
        manager.complete_load(keys, request)


def measure_memory(num_blocks: int) -> MemoryRow:
    """Trace what the books of LRU and the ghosts of ARC allocate beyond the keys."""
    batches = make_batches(6 * num_blocks)
    num_batches = len(batches) // 6
    request = ReqContext("benchmark")
    tracemalloc.start()
    before = traced_bytes()
    manager = CPUOffloadingManager(num_blocks)
    store_all(manager, batches[:num_batches], request)
    filled = traced_bytes() - before
    store_all(manager, batches[num_batches:], request)
    churned = traced_bytes() - before
    del manager
    ghosts = measure_ghosts(num_blocks, batches, request)
    tracemalloc.stop()
    return MemoryRow(num_blocks, filled / num_blocks, churned / num_blocks, ghosts)


def measure_ghosts(num_blocks: int, batches: Batches, request: ReqContext) -> float:
    """Return the bytes that one ghost of a full ARC gives back when it is forgotten."""
    manager = CPUOffloadingManager(num_blocks, "arc")
    store_all(manager, batches, request)
    policy = manager._policy  # noqa: SLF001 - ghosts show nowhere else
    assert isinstance(policy, ARCCachePolicy)
    with_ghosts, num_ghosts = traced_bytes(), len(policy.b1) + len(policy.b2)
    policy.b1.clear()
    policy.b2.clear()
    return (with_ghosts - traced_bytes()) / num_ghosts


def traced_bytes() -> int:
    """Return what is allocated now."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def print_speed(rows: Sequence[Row]) -> None:
    """Print rates in thousands of blocks a second, and ratios."""
    print(
        f"thousand blocks per processor second, batches of {BATCH}, medians; x is ours divided by the other"
    )
    print(f"{'operation':16}{'policy':8}{'blocks':>10}{'ours':>9}{'floor':>9}{'x':>7}{'vllm':>9}{'x':>7}")
    for row in rows:
        line = f"{row.operation:16}{row.policy:8}{row.num_blocks:10,}{row.blocks_per_s['ours'] / 1e3:9,.0f}"
        for other in ("floor", "vllm"):
            ratio = row.ratio(other)
            line += (
                "        -      -" if ratio is None else f"{row.blocks_per_s[other] / 1e3:9,.0f}{ratio:7.2f}"
            )
        print(line)


def print_memory(rows: Sequence[MemoryRow]) -> None:
    """Print bytes per block."""
    print("bytes beyond the key, traced by the allocator")
    print(f"{'blocks':>10}{'held (LRU)':>13}{'after churn':>13}{'ghost (ARC)':>13}")
    for row in rows:
        churn, ghost = row.bytes_per_held_block_after_churn, row.bytes_per_ghost
        print(f"{row.num_blocks:10,}{row.bytes_per_held_block:13.0f}{churn:13.0f}{ghost:13.0f}")


if __name__ == "__main__":
    main()
