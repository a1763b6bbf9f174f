"""Puts into the primary tier and gets from it, manager and bytes, against a plain copy of the same bytes.

A put is the cost of a store: slots from the manager, a job of the handlers that copies a tensor's blocks into them,
and the manager's completion; a get is the way back, into other blocks. One job moves all of them. Blocks are drawn at
random, as in an engine that has run for long, and slots are in the manager's order. The tier is as large as one round,
so from the second round on each put evicts. The floor is one contiguous torch ``copy_``.

If LMCache is installed, its CPU back end alternates with them: a memory object for each block, a plain copy of each by
as many threads as kvtier uses, and its tables; it never has to evict.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import count

import numpy as np
import torch

from benchmarks.harness import lmcache_local
from benchmarks.harness.lmcache_local import LMCacheCPU
from benchmarks.harness.measurement import FLOOR, OURS, Better, Measurement
from benchmarks.harness.rounds import Contestant, RoundCount, run_rounds
from benchmarks.harness.suite import Options
from benchmarks.harness.tier_jobs import make_keys, rates_of
from kvtier.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingHandler,
    OffloadKey,
    ReqContext,
    TransferJobId,
    TransferSpec,
)
from kvtier.cpu.gpu_worker import CpuGpuOffloadingHandlers
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.shared_offload_region import SharedOffloadRegion

TOTAL_BYTES = 128 << 20
"""Bytes of a round, more than caches hold."""

BLOCK_SIZES_BYTES = (64 << 10, 1 << 20, 4 << 20)
QUICK_SIZES_BYTES = BLOCK_SIZES_BYTES[1:2]
NUM_ROUNDS, NUM_QUICK_ROUNDS = 30, 3


class Primary:
    """The primary tier, with room for one round.

    Args:
        device: blocks of a KV cache, shape (num_device_blocks, block_bytes), int8, CPU.
        sources: numbers of the blocks to put.
        targets: numbers of as many blocks to get into.
    """

    def __init__(self, device: torch.Tensor, sources: list[int], targets: list[int]) -> None:
        num_slots, block_bytes = len(sources), device.shape[1]
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(device, block_bytes)], [[CanonicalKVCacheRef(0, block_bytes)]]
        )
        self._num_bytes = num_slots * block_bytes
        self._manager = CPUOffloadingManager(num_slots)
        self._region = SharedOffloadRegion(
            f"benchmark-{os.getpid()}", self._num_bytes, num_slots, 0, 1, block_bytes
        )
        self._region.seal()
        self._handlers = CpuGpuOffloadingHandlers(caches, 1, num_slots, self._region)
        self._sources, self._targets = (
            GPULoadStoreSpec(np.array(numbers), [num_slots], [0]) for numbers in (sources, targets)
        )
        self._request = ReqContext("benchmark")

    def run(self, keys: list[OffloadKey]) -> Mapping[str, float]:
        """Put and get every block once, and return the rates, MiB/s."""
        return rates_of(self._num_bytes, lambda: self._put(keys), lambda: self._get(keys))

    def close(self) -> None:
        """Shut down the threads and free the memory."""
        self._handlers.shutdown()
        self._region.cleanup()

    def _put(self, keys: list[OffloadKey]) -> None:
        plan = self._manager.prepare_store(keys, self._request)
        assert plan is not None
        move(self._handlers.gpu_to_cpu_handler, TransferSpec(self._sources, plan.store_spec))
        self._manager.complete_store(keys, self._request)

    def _get(self, keys: list[OffloadKey]) -> None:
        rows = self._manager.prepare_load(keys, self._request)
        move(self._handlers.cpu_to_gpu_handler, TransferSpec(rows, self._targets))
        self._manager.complete_load(keys, self._request)


def measure(options: Options) -> Iterator[Measurement]:
    """Yield rates by direction and block size."""
    obstacle = lmcache_local.find_obstacle()
    if obstacle is not None:
        options.note(obstacle)
    num_rounds = options.count_rounds(NUM_ROUNDS, NUM_QUICK_ROUNDS)
    for block_bytes in QUICK_SIZES_BYTES if options.is_quick else BLOCK_SIZES_BYTES:
        yield from measure_size(block_bytes, num_rounds, has_lmcache=obstacle is None)


def measure_size(block_bytes: int, num_rounds: RoundCount, *, has_lmcache: bool) -> Iterator[Measurement]:
    """Run primary tier, plain copies and LMCache in turns."""
    num_blocks = TOTAL_BYTES // block_bytes
    device = torch.randint(-128, 128, (2 * num_blocks, block_bytes), dtype=torch.int8)
    order = np.random.default_rng(0).permutation(2 * num_blocks).tolist()
    sources, targets = order[:num_blocks], order[num_blocks:]
    generations = count()
    with ExitStack() as ends:
        primary = Primary(device, sources, targets)
        ends.callback(primary.close)
        contestants: dict[str, Contestant] = {
            OURS: lambda: primary.run(make_keys(num_blocks, next(generations))),
            FLOOR: open_floor(num_blocks * block_bytes),
        }
        if has_lmcache:
            peer = LMCacheCPU([device[number] for number in sources], [device[number] for number in targets])
            ends.callback(peer.close)
            contestants[lmcache_local.CPU_NAME] = lambda: peer.run(make_keys(num_blocks, next(generations)))
        rounds = run_rounds(contestants, num_rounds)
    for operation, values in rounds.items():
        labels: dict[str, str | int] = {
            "operation": operation,
            "block": f"{block_bytes >> 10} KiB",
            "blocks": num_blocks,
        }
        yield Measurement(labels, "MiB/s", Better.HIGHER, values)


def open_floor(num_bytes: int) -> Contestant:
    """Return a contestant that copies ``num_bytes`` there and back."""
    host, device = torch.ones(num_bytes, dtype=torch.int8), torch.ones(num_bytes, dtype=torch.int8)
    return lambda: rates_of(num_bytes, lambda: host.copy_(device), lambda: device.copy_(host))


def move(handler: OffloadingHandler, spec: TransferSpec) -> None:
    """Run one job and wait for it; it must succeed."""
    job = TransferJobId(1)
    assert handler.transfer_async(job, spec)
    handler.wait({job})
    (result,) = handler.get_finished()
    assert result.success
