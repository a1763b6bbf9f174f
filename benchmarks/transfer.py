"""Device <-> primary through the handlers, against a plain copy of the same bytes.

The whole job is measured, from transfer_async to wait, 128 MiB at a time. "runs": device blocks and slots are
consecutive; "scattered": both are drawn at random, the worst case. The floor is one contiguous torch ``copy_`` in the
same direction with torch's threads; on CUDA from and to pinned memory. The difference is planning and the cost of each
piece. On CUDA "ours" is the way to copy that handlers choose; each available way takes part too.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from benchmarks.harness.measurement import FLOOR, OURS, Bar, Better, Measurement
from benchmarks.harness.rounds import RoundCount, run_rounds, timed
from benchmarks.harness.suite import Options
from kvtier.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferJobId,
    TransferSpec,
)
from kvtier.config import CudaCopier
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.gpu_worker import CpuGpuOffloadingHandlers
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.errors import ConfigError

TOTAL_BYTES = 128 << 20
"""Bytes of one job: four times this machine's last-level cache, so that memory is measured."""

SHAPES = [(64, 4), (64, 16), (256, 16), (512, 16), (2048, 8), (2048, 16), (2048, 32), (4096, 32)]
QUICK_SHAPES = [(256, 16), (2048, 32)]
"""Row in KiB, layers."""

NUM_ROUNDS, NUM_QUICK_ROUNDS = 6, 4
MORE_ROUNDS_FACTOR = 2
"""Factor for the number of rounds; a round takes a fifth of a second."""

FLOOR_TRIES = 3
"""Plain copies per round, of which the fastest counts: a floor is what the machine can do, and in a virtual machine one
in four or five takes half as long again, probably with both of torch's threads on one core."""

SETTLE_S = 0.02
"""Seconds of rest before each copy. After a copy of torch's its OpenMP threads spin for some milliseconds and take a
core from the next contestant: without the rest a store of ours varied between 0.65 and 0.98 of the floor."""

BAR_ROW_BYTES = 2 << 20
BARS = {"cpu": 0.8, "cuda": 0.9}
"""Ratios to the plain copy, by device."""

Copy = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Shape:
    """A measured transfer.

    Attributes:
        device: the device of the KV cache.
        row_bytes: bytes of a row.
        num_layers: refs in a row.
        is_scattered: whether blocks and slots are drawn at random.
    """

    device: str
    row_bytes: int
    num_layers: int
    is_scattered: bool


def measure(options: Options) -> Iterator[Measurement]:
    """Yield rates by direction, device, row size, layers and order."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if devices == ["cpu"]:
        options.note("there is no CUDA device: copies from and to one were not measured")
    note = cache(options.note)  # the same line for each shape is printed once
    for device in devices:
        for row_kib, num_layers in QUICK_SHAPES if options.is_quick else SHAPES:
            for is_scattered in (False, True):
                shape = Shape(device, row_kib << 10, num_layers, is_scattered)
                num_rounds = options.count_rounds(NUM_ROUNDS, NUM_QUICK_ROUNDS).with_most(MORE_ROUNDS_FACTOR)
                yield from measure_shape(shape, num_rounds, note)


def measure_shape(shape: Shape, num_rounds: RoundCount, note: Callable[[str], None]) -> Iterator[Measurement]:
    """Run handlers and plain copies in turns, each first equally often."""
    with _contestants(shape, note) as contestants:
        turns = {
            name: _rates_of(copies, FLOOR_TRIES if name == FLOOR else 1)
            for name, copies in contestants.items()
        }
        rounds = run_rounds(turns, num_rounds)
    for operation, values in rounds.items():
        labels: dict[str, str | int] = {
            "operation": operation,
            "device": shape.device,
            "row": f"{shape.row_bytes >> 10} KiB",
            "layers": shape.num_layers,
            "order": "scattered" if shape.is_scattered else "runs",
        }
        bar = Bar(FLOOR, BARS[shape.device]) if shape.row_bytes == BAR_ROW_BYTES else None
        yield Measurement(labels, "GB/s", Better.HIGHER, values, bar)


def _rates_of(copies: Mapping[str, Copy], num_tries: int) -> Callable[[], Mapping[str, float]]:
    """Return a turn of copying that returns the rate of the fastest try."""

    def run() -> Mapping[str, float]:
        rates = {}
        for operation, copy in copies.items():
            tries_s = []
            for _ in range(num_tries):
                time.sleep(SETTLE_S)
                tries_s.append(timed(copy))
            rates[operation] = TOTAL_BYTES / 1e9 / min(tries_s)
        return rates

    return run


@contextmanager
def _contestants(shape: Shape, note: Callable[[str], None]) -> Iterator[dict[str, dict[str, Copy]]]:
    ways = {OURS: CudaCopier.AUTO}
    if shape.device == "cuda":
        ways |= {way.value: way for way in CudaCopier if way is not CudaCopier.AUTO}
    num_slots = TOTAL_BYTES // shape.row_bytes
    caches = _make_caches(shape, 2 * num_slots, shape.row_bytes // shape.num_layers)
    contestants: dict[str, dict[str, Copy]] = {}
    with ExitStack() as ending:
        for name, way in ways.items():
            try:
                contestants[name] = _copies_of(shape, caches, num_slots, way, ending)
            except ConfigError as error:
                note(f"not measured: {error}")
        yield contestants | {FLOOR: _plain_copies(shape.device)}


def _copies_of(
    shape: Shape, caches: CanonicalKVCaches, num_slots: int, way: CudaCopier, ending: ExitStack
) -> dict[str, Copy]:
    """Build handlers that copy one way, on their own region; ``ending`` closes both."""
    name = f"benchmark-{os.getpid()}-{way.value}"
    region = SharedOffloadRegion(name, TOTAL_BYTES, num_slots, 0, 1, shape.row_bytes)
    ending.callback(region.cleanup)
    region.seal()
    handlers = CpuGpuOffloadingHandlers(caches, 1, num_slots, region, cuda_copier=way)
    ending.callback(handlers.shutdown)
    random = np.random.default_rng(0)
    blocks = random.permutation(2 * num_slots)[:num_slots] if shape.is_scattered else np.arange(num_slots)
    slots = random.permutation(num_slots) if shape.is_scattered else np.arange(num_slots)
    device, rows = GPULoadStoreSpec(blocks, [num_slots], [0]), CPULoadStoreSpec(slots)
    store, load = TransferSpec(device, rows), TransferSpec(rows, device)
    return {
        "store": lambda: _transfer(handlers.gpu_to_cpu_handler, store),
        "load": lambda: _transfer(handlers.cpu_to_gpu_handler, load),
    }


def _plain_copies(device: str) -> dict[str, Copy]:
    is_cuda = device == "cuda"
    host = torch.ones(TOTAL_BYTES, dtype=torch.int8, pin_memory=is_cuda)
    other = torch.ones(TOTAL_BYTES, dtype=torch.int8, device=device)

    def store() -> None:
        host.copy_(other)

    def load() -> None:
        other.copy_(host)
        if is_cuda:
            torch.cuda.synchronize()

    return {"store": store, "load": load}


def _make_caches(shape: Shape, num_blocks: int, page_bytes: int) -> CanonicalKVCaches:
    tensors = [
        torch.randint(-128, 128, (num_blocks, page_bytes), dtype=torch.int8, device=shape.device)
        for _ in range(shape.num_layers)
    ]
    refs = [CanonicalKVCacheRef(layer, page_bytes) for layer in range(shape.num_layers)]
    return CanonicalKVCaches([CanonicalKVCacheTensor(tensor, page_bytes) for tensor in tensors], [refs])


def _transfer(handler: OffloadingHandler, spec: TransferSpec) -> None:
    job = TransferJobId(1)
    if not handler.transfer_async(job, spec):
        raise SystemExit("the handler declined the benchmark's own transfer")
    handler.wait({job})
    (result,) = handler.get_finished()
    if not result.success:
        raise SystemExit("the transfer failed")
