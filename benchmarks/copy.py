"""The copy floor: device <-> primary through the handlers, against a plain copy of the same bytes.

    python -m benchmarks.copy [--quick] [--private] [--json FILE]

It measures the whole job, from transfer_async to wait, of 128 MiB at a time. "runs": device blocks and slots follow one
another; "scattered": both are drawn at random, the worst case. Plain copies are one contiguous torch ``copy_`` (as
many threads as torch takes) and one ``np.copyto`` (one thread). Contestants take turns; numbers are medians; ratios
are against torch. The bar: 0.8 at 2 MiB rows on CPU tensors. Where CUDA is, pinned copies are measured too (bar 0.9).
"""  # noqa: A005  # always imported as benchmarks.copy

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from kvtier.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferJobId,
    TransferSpec,
)
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.gpu_worker import CpuGpuOffloadingHandlers
from kvtier.cpu.shared_offload_region import SharedOffloadRegion

TOTAL_BYTES = 128 << 20
"""Bytes of one job: four times this machine's last-level cache, so that memory is measured."""

SHAPES = [(64, 4), (64, 16), (256, 16), (512, 16), (2048, 8), (2048, 16), (2048, 32), (4096, 32)]
QUICK_SHAPES = [(256, 16), (2048, 16), (2048, 32)]
"""Row in KiB, layers."""

ROUNDS, QUICK_ROUNDS = 15, 5


@dataclass(frozen=True, slots=True)
class Shape:
    """One line of the table.

    Attributes:
        device: where the KV cache is.
        row_bytes: bytes of a row.
        num_layers: refs in a row.
        is_scattered: whether blocks and slots are drawn at random.
    """

    device: str
    row_bytes: int
    num_layers: int
    is_scattered: bool


@dataclass(frozen=True, slots=True)
class Line:
    """Medians in GB/s.

    Attributes:
        shape: what was copied.
        plain_torch: one contiguous torch copy from device to host memory.
        plain_numpy: the same with numpy on one thread; on CUDA the torch copy from host to device.
        store: through the handler, device -> rows.
        load: through the handler, rows -> device.
    """

    shape: Shape
    plain_torch: float
    plain_numpy: float
    store: float
    load: float


def main() -> None:
    """Measure, print the table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer shapes and rounds")
    parser.add_argument(
        "--private", action="store_true", help="rows of the worker's own instead of the region"
    )
    parser.add_argument("--json", type=Path, help="write the numbers here")
    arguments = parser.parse_args()
    shapes, rounds = (QUICK_SHAPES, QUICK_ROUNDS) if arguments.quick else (SHAPES, ROUNDS)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    print(f"{os.cpu_count()} cores, torch {torch.__version__} with {torch.get_num_threads()} threads")
    print("device  row KiB layers blocks    | torch numpy  store  load GB/s | store load (of torch)")
    lines = []
    for device in devices:
        for row_kib, num_layers in shapes:
            for is_scattered in (False, True):
                shape = Shape(device, row_kib << 10, num_layers, is_scattered)
                lines.append(measure(shape, rounds, is_private=arguments.private))
                print(format_line(lines[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(line) for line in lines], indent=1))


def measure(shape: Shape, rounds: int, *, is_private: bool) -> Line:
    """Time the four contestants in turns and return their medians."""
    with _contestants(shape, is_private=is_private) as contestants:
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for round_number in range(rounds + 1):
            for name, contestant in contestants.items():
                start = time.perf_counter()
                contestant()
                if round_number:  # the first round warms caches and threads
                    seconds[name].append(time.perf_counter() - start)
    num_bytes = TOTAL_BYTES // shape.row_bytes * shape.row_bytes
    rates = {name: num_bytes / statistics.median(times) / 1e9 for name, times in seconds.items()}
    return Line(shape, rates["torch"], rates["numpy"], rates["store"], rates["load"])


def format_line(line: Line) -> str:
    """Return one row of the table."""
    shape = line.shape
    return (
        f"{shape.device:6} {shape.row_bytes >> 10:8} {shape.num_layers:6} "
        f"{'scattered' if shape.is_scattered else 'runs':9} | "
        f"{line.plain_torch:5.1f} {line.plain_numpy:5.1f}  {line.store:5.1f} {line.load:5.1f}      | "
        f"{line.store / line.plain_torch:5.2f} {line.load / line.plain_torch:5.2f}"
    )


@contextmanager
def _contestants(shape: Shape, *, is_private: bool) -> Iterator[dict[str, Callable[[], None]]]:
    num_slots = TOTAL_BYTES // shape.row_bytes
    page_bytes = shape.row_bytes // shape.num_layers
    caches = _make_caches(shape, 2 * num_slots, page_bytes)
    region = None
    if not is_private:
        name = f"benchmark-{os.getpid()}"
        region = SharedOffloadRegion(name, TOTAL_BYTES, num_slots, 0, 1, shape.row_bytes)
        region.seal()
    handlers = CpuGpuOffloadingHandlers(caches, 1, num_slots, region)
    random = np.random.default_rng(0)
    blocks = random.permutation(2 * num_slots)[:num_slots] if shape.is_scattered else np.arange(num_slots)
    slots = random.permutation(num_slots) if shape.is_scattered else np.arange(num_slots)
    device, rows = GPULoadStoreSpec(blocks, [num_slots], [0]), CPULoadStoreSpec(slots)
    store, load = TransferSpec(device, rows), TransferSpec(rows, device)
    try:
        yield _plain_copies(shape.device) | {
            "store": lambda: _transfer(handlers.gpu_to_cpu_handler, store),
            "load": lambda: _transfer(handlers.cpu_to_gpu_handler, load),
        }
    finally:
        handlers.shutdown()
        if region is not None:
            region.cleanup()


def _plain_copies(device: str) -> dict[str, Callable[[], None]]:
    is_cuda = device == "cuda"
    host = torch.ones(TOTAL_BYTES, dtype=torch.int8, pin_memory=is_cuda)
    other = torch.ones(TOTAL_BYTES, dtype=torch.int8, device=device)

    def copy_torch() -> None:
        host.copy_(other)

    def copy_numpy() -> None:
        np.copyto(host.numpy(), other.numpy())

    def copy_back() -> None:
        other.copy_(host)
        torch.cuda.synchronize()

    return {"torch": copy_torch, "numpy": copy_back if is_cuda else copy_numpy}


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


if __name__ == "__main__":
    main()
