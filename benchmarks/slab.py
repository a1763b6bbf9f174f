"""Throughput of the slab tier against raw vectored calls on a file of the same layout, in one run.

The floor writes and reads one preallocated file with as many threads as the tier has: one ``pwritev`` or ``preadv``
of a page and a row per block; no checksum, no index, nobody who pins or evicts. If vLLM can be imported, its fs tier
takes turns with them, with its own number of threads, rows alone and one file per block. All see the same device one
after another in each round; the median of the rounds is reported. The slab is used again from round to round: what is
measured is one that has been full for long. Buffered reads find the page cache warm.

    python -m benchmarks.slab --quick
    python -m benchmarks.slab --json slab.json
"""

import argparse
import importlib
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvtier.base import JobId, OffloadKey, ReqContext, make_offload_key
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.tiering.base import JobMetadata
from kvtier.tiering.envelope import HEADER_PAGE_BYTES
from kvtier.tiering.slab import SlabTier
from kvtier.tiering.slab.settings import DEFAULT_NUM_THREADS
from kvtier.tiering.slab.superblock import Geometry

NUM_BLOCKS = 128
JOB_SHAPES = ((8, 16), (1, 128))
BLOCK_SIZES_BYTES = (64 * 2**10, 2**20, 4 * 2**20)
QUICK_SIZES_BYTES = BLOCK_SIZES_BYTES[:2]
NUM_ROUNDS = 12
NUM_QUICK_ROUNDS = 6
HANG_GUARD_S = 300.0
VLLM_TIERING = "vllm.v1.kv_offload.tiering"

VLLM = Any  # Any: modules and objects of a package that may be missing


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    Attributes:
        block_bytes: length of a row.
        num_jobs: jobs submitted at once.
        blocks_per_job: blocks in each.
        is_direct: whether the page cache is bypassed; vLLM's tier does that whenever it can.
    """

    block_bytes: int
    num_jobs: int
    blocks_per_job: int
    is_direct: bool


@dataclass(frozen=True, slots=True)
class Result:
    """Rates of a case, MiB/s.

    Attributes:
        case: what was measured.
        put_mib_s: the tier's writes.
        get_mib_s: the tier's reads.
        floor_put_mib_s: raw writes.
        floor_get_mib_s: raw reads.
        put_ratio: of the tier's writes to raw ones of the same round.
        get_ratio: of its reads.
        vllm_put_mib_s: writes of vLLM's fs tier, None where it is not measured.
        vllm_get_mib_s: its reads.
        vllm_put_ratio: of the tier's writes to vLLM's of the same round.
        vllm_get_ratio: of its reads.
    """

    case: Case
    put_mib_s: float
    get_mib_s: float
    floor_put_mib_s: float
    floor_get_mib_s: float
    put_ratio: float
    get_ratio: float
    vllm_put_mib_s: float | None = None
    vllm_get_mib_s: float | None = None
    vllm_put_ratio: float | None = None
    vllm_get_ratio: float | None = None


def main() -> int:
    """Measure, print a table, write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller blocks, fewer rounds")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--dir", type=Path, help="measure below this directory instead of a temporary one")
    parser.add_argument("--threads", type=int, default=DEFAULT_NUM_THREADS, help="threads of tier and floor")
    arguments = parser.parse_args()
    sizes = QUICK_SIZES_BYTES if arguments.quick else BLOCK_SIZES_BYTES
    num_rounds = NUM_QUICK_ROUNDS if arguments.quick else NUM_ROUNDS
    has_vllm = can_import_vllm()
    print_header(has_vllm=has_vllm)
    results = []
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=arguments.dir) as folder:
        for block_bytes in sizes:
            for is_direct in (True, False):
                for num_jobs, blocks_per_job in JOB_SHAPES:
                    case = Case(block_bytes, num_jobs, blocks_per_job, is_direct)
                    is_vllm_case = has_vllm and is_direct
                    result = measure(case, Path(folder), num_rounds, arguments.threads, has_vllm=is_vllm_case)
                    print_row(result)
                    results.append(result)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return 0


def measure(case: Case, folder: Path, num_rounds: int, num_threads: int, *, has_vllm: bool) -> Result:
    """Run tier, floor and vLLM's tier in turns, each round beginning with another."""
    memory = mmap.mmap(-1, NUM_BLOCKS * case.block_bytes)
    rows = memoryview(memory).cast("b", (NUM_BLOCKS, case.block_bytes))
    np.asarray(rows)[:] = np.random.default_rng(0).integers(-128, 128, (1, case.block_bytes), dtype=np.int8)
    floor = Floor(rows, folder / "floor", num_threads, is_direct=case.is_direct)
    tier = start_tier(case, rows, folder / "slab", num_threads)
    other = VLLMTier(case, rows, folder / "vllm") if has_vllm else None
    times: dict[str, list[float]] = {}

    def note(name: str, action: Callable[[], None]) -> None:
        begun_s = time.perf_counter()
        action()
        times.setdefault(name, []).append(time.perf_counter() - begun_s)

    for round_number in range(num_rounds + 1):
        keys = [make_offload_key(bytes([2 * n, round_number]) + bytes(30), 0) for n in range(NUM_BLOCKS)]
        turns: list[list[tuple[str, Callable[[], None]]]] = [
            [
                ("put", partial(run_jobs, tier, case, keys, is_promotion=False)),
                ("get", partial(run_jobs, tier, case, keys, is_promotion=True)),
            ],
            [("floor_put", floor.put), ("floor_get", floor.get)],
        ]
        if other is not None:
            turns.append(
                [
                    ("vllm_put", partial(other.run, keys, is_promotion=False)),
                    ("vllm_get", partial(other.run, keys, is_promotion=True)),
                ]
            )
        # What one leaves to the disk falls on the next: each comes first, middle and last as often as the others.
        first = round_number % len(turns)
        for turn in turns[first:] + turns[:first]:
            for name, action in turn:
                note(name, action)
        if other is not None:
            other.remove_files()
    assert tier.shutdown(HANG_GUARD_S)
    floor.close()
    if other is not None:
        other.close()
    (folder / "slab").unlink()
    # The first round warms memory, files and threads.
    total_mib = NUM_BLOCKS * case.block_bytes / 2**20
    rates = {name: total_mib / statistics.median(values[1:]) for name, values in times.items()}
    ratios = {
        f"{prefix}{way}_ratio": statistics.median(
            other_s / own_s for own_s, other_s in zip(times[way][1:], times[against][1:], strict=True)
        )
        for prefix, peer in (("", "floor_"), ("vllm_", "vllm_"))
        for way in ("put", "get")
        if (against := f"{peer}{way}") in times
    }
    return Result(case, **{f"{name}_mib_s": rate for name, rate in rates.items()}, **ratios)


class Floor:
    """Raw calls on one preallocated file.

    Args:
        rows: what to write and where to read to, shape (NUM_BLOCKS, block_bytes).
        path: the file.
        num_threads: at the same time.
        is_direct: whether the page cache is bypassed.
    """

    def __init__(self, rows: memoryview, path: Path, num_threads: int, *, is_direct: bool) -> None:
        self._path = path
        self._pool = ThreadPoolExecutor(num_threads)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if is_direct else 0), 0o600)
        row_bytes = rows.nbytes // NUM_BLOCKS
        self._geometry = Geometry(row_bytes, NUM_BLOCKS)
        os.posix_fallocate(self._fd, 0, self._geometry.file_bytes)
        flat = rows.cast("B")
        self._buffers = [
            [memoryview(mmap.mmap(-1, HEADER_PAGE_BYTES)), flat[n * row_bytes : (n + 1) * row_bytes]]
            for n in range(NUM_BLOCKS)
        ]

    def put(self) -> None:
        """Write every block."""
        self._each(os.pwritev)

    def get(self) -> None:
        """Read every block."""
        self._each(os.preadv)

    def close(self) -> None:
        """End the threads and remove the file."""
        self._pool.shutdown()
        os.close(self._fd)
        self._path.unlink()

    def _each(self, call: Callable[[int, Sequence[memoryview], int], int]) -> None:
        def move(number: int) -> None:
            assert call(self._fd, self._buffers[number], self._geometry.offset_of(number))

        for _ in self._pool.map(move, range(NUM_BLOCKS)):
            pass


class VLLMTier:
    """vLLM's fs tier, driven by the same jobs.

    Args:
        case: what is measured.
        rows: the same rows.
        folder: where it keeps its files.
    """

    def __init__(self, case: Case, rows: memoryview, folder: Path) -> None:
        base: VLLM = importlib.import_module(f"{VLLM_TIERING}.base")
        manager: VLLM = importlib.import_module(f"{VLLM_TIERING}.fs.manager")
        self._case = case
        self._folder = folder
        self._make_job: VLLM = base.TransferJob
        # What the tier reads of vLLM's spec: names for its folders, and sizes of parallel groups.
        group = SimpleNamespace(tokens_per_block=16, layer_names=("layer.0",))
        parallel = SimpleNamespace(
            tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True
        )
        config = SimpleNamespace(
            groups=[group],
            parallel=parallel,
            canonical_layout=False,
            replicated_layout=False,
            model=SimpleNamespace(name="bench", dtype="float16"),
            cache=SimpleNamespace(tokens_per_hash=16),
        )
        spec = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)
        self._tier: VLLM = manager.FileSystemTierManager(spec, rows, "fs", str(folder))

    def run(self, keys: Sequence[OffloadKey], *, is_promotion: bool) -> None:
        """Submit all jobs at once and wait for them."""
        submit = self._tier.submit_load if is_promotion else self._tier.submit_store
        for job_number, numbers in enumerate(job_numbers(self._case)):
            job_keys = [keys[number] for number in numbers]
            block_ids = np.array(numbers, dtype=np.int64)
            submit(self._make_job(job_number, job_keys, block_ids, is_promotion, None))
        self._tier.drain_jobs()
        results = list(self._tier.get_finished_jobs())
        assert len(results) == self._case.num_jobs
        assert all(result.success for result in results)

    def remove_files(self) -> None:
        """Remove the blocks and keep the folders."""
        for path in self._folder.rglob("*.bin"):
            path.unlink()

    def close(self) -> None:
        """End its threads and remove what is left."""
        self._tier.shutdown()
        shutil.rmtree(self._folder)


def can_import_vllm() -> bool:
    """Return whether vLLM's fs tier is here."""
    try:
        importlib.import_module(f"{VLLM_TIERING}.fs.manager")
    except ImportError:
        return False
    return True


def start_tier(case: Case, rows: memoryview, path: Path, num_threads: int) -> SlabTier:
    """Build a tier with room for exactly the blocks of a round."""
    group = KVGroup(block_size_tokens=16, layer_names=("layer.0",), page_size_bytes=case.block_bytes)
    config = OffloadingConfig("bench", ModelIdentity("bench"), (group,), hash_block_size=16)
    tier = SlabTier(
        config,
        rows,
        path=path.absolute(),
        capacity_bytes=Geometry(case.block_bytes, NUM_BLOCKS).file_bytes,
        direct_io="auto" if case.is_direct else False,
        num_threads=num_threads,
    )
    assert tier.wait_indexed(HANG_GUARD_S)
    return tier


def run_jobs(tier: SlabTier, case: Case, keys: Sequence[OffloadKey], *, is_promotion: bool) -> None:
    """Submit all jobs at once and wait for them."""
    submit = tier.submit_load if is_promotion else tier.submit_store
    request = ReqContext("bench")
    for job_number, numbers in enumerate(job_numbers(case)):
        block_ids = np.array(numbers, dtype=np.int64)
        job_keys = tuple(keys[number] for number in numbers)
        submit(JobMetadata(JobId(job_number), job_keys, block_ids, is_promotion, request))
    assert tier.drain(HANG_GUARD_S), "the tier hangs"
    results = list(tier.get_finished())
    assert len(results) == case.num_jobs
    assert all(result.success for result in results)


def job_numbers(case: Case) -> list[range]:
    """Return which blocks are in which job. Pure."""
    size = case.blocks_per_job
    return [range(number * size, (number + 1) * size) for number in range(case.num_jobs)]


def print_header(*, has_vllm: bool) -> None:
    """Print what the columns are."""
    print("MiB/s; in brackets the ratio to raw calls, or of the tier to vLLM's fs tier")
    if not has_vllm:
        print("vLLM cannot be imported here: its columns stay empty")
    columns = f"{'put':>14} {'get':>14} {'raw put':>8} {'raw get':>8} {'vLLM put':>14} {'vLLM get':>14}"
    print(f"{'block':>8} {'jobs':>7} {'I/O':>8} {columns}")


def print_row(result: Result) -> None:
    """Print one case."""
    case = result.case
    jobs = f"{case.num_jobs}x{case.blocks_per_job}"
    io = "direct" if case.is_direct else "buffered"
    put, get = (
        f"{rate:.0f} ({ratio:.2f})"
        for rate, ratio in ((result.put_mib_s, result.put_ratio), (result.get_mib_s, result.get_ratio))
    )
    vllm_put = with_ratio(result.vllm_put_mib_s, result.vllm_put_ratio)
    vllm_get = with_ratio(result.vllm_get_mib_s, result.vllm_get_ratio)
    rates = f"{result.floor_put_mib_s:>8.0f} {result.floor_get_mib_s:>8.0f} {vllm_put:>14} {vllm_get:>14}"
    print(f"{case.block_bytes // 1024:>5}KiB {jobs:>7} {io:>8} {put:>14} {get:>14} {rates}", flush=True)


def with_ratio(rate: float | None, ratio: float | None) -> str:
    """Return a peer's rate and how many times as fast ours is. Pure."""
    return "-" if rate is None else f"{rate:.0f} ({ratio:.2f})"


if __name__ == "__main__":
    sys.exit(main())
