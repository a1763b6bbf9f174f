"""Throughput of the fs tier against raw files of the same size, in one run.

The floor writes and reads one file per block with as many threads as the tier has: ``open``, one ``pwritev`` or
``preadv`` of a page and a row, ``close``; no checksum, no name that appears only when the block is whole, no count
of bytes. Tier and floor take turns, so that both see the same device; the median of the rounds is reported.
Buffered reads find the page cache warm. The envelope's share is what the floor loses when it seals or checks each
row as the tier does.

    python -m benchmarks.fs --quick
    python -m benchmarks.fs --json fs.json
"""

import argparse
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from kvtier.base import JobId, OffloadKey, ReqContext, make_offload_key
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.tiering.base import JobMetadata
from kvtier.tiering.envelope import ENVELOPE_BYTES, HEADER_PAGE_BYTES, Verdict, check, pack, seal
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.settings import DEFAULT_NUM_THREADS

NUM_BLOCKS = 128
JOB_SHAPES = ((8, 16), (1, 128))
BLOCK_SIZES_BYTES = (64 * 2**10, 2**20, 4 * 2**20)
QUICK_SIZES_BYTES = BLOCK_SIZES_BYTES[:2]
NUM_ROUNDS = 7
NUM_QUICK_ROUNDS = 3
HANG_GUARD_S = 300.0


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    Attributes:
        block_bytes: length of a row.
        num_jobs: jobs submitted at once.
        blocks_per_job: blocks in each.
        is_direct: whether the page cache is bypassed.
    """

    block_bytes: int
    num_jobs: int
    blocks_per_job: int
    is_direct: bool


@dataclass(frozen=True, slots=True)
class Result:
    """Rates of a case, MiB/s, and shares.

    Attributes:
        case: what was measured.
        put_mib_s: the tier's writes.
        get_mib_s: the tier's reads.
        floor_put_mib_s: raw writes.
        floor_get_mib_s: raw reads.
        put_envelope_ratio: part of a sealed raw write's time that the envelope takes.
        get_envelope_ratio: part of a checked raw read's time that the envelope takes.
    """

    case: Case
    put_mib_s: float
    get_mib_s: float
    floor_put_mib_s: float
    floor_get_mib_s: float
    put_envelope_ratio: float
    get_envelope_ratio: float


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
    results = []
    print_header()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=arguments.dir) as folder:
        for block_bytes in sizes:
            for is_direct in (True, False):
                for num_jobs, blocks_per_job in JOB_SHAPES:
                    case = Case(block_bytes, num_jobs, blocks_per_job, is_direct)
                    result = measure(case, Path(folder), num_rounds, arguments.threads)
                    print_row(result)
                    results.append(result)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return 0


def measure(case: Case, folder: Path, num_rounds: int, num_threads: int) -> Result:
    """Run tier, floor and checksum in turns; at most two copies of the blocks are on the disk."""
    memory = mmap.mmap(-1, NUM_BLOCKS * case.block_bytes)
    rows = memoryview(memory).cast("b", (NUM_BLOCKS, case.block_bytes))
    np.asarray(rows)[:] = np.random.default_rng(0).integers(-128, 128, (1, case.block_bytes), dtype=np.int8)
    flat = [rows.cast("B")[n * case.block_bytes : (n + 1) * case.block_bytes] for n in range(NUM_BLOCKS)]
    floor = Floor(flat, folder / "floor", num_threads, is_direct=case.is_direct)
    times: dict[str, list[float]] = {}

    def note(name: str, action: Callable[[], None]) -> None:
        begun_s = time.perf_counter()
        action()
        times.setdefault(name, []).append(time.perf_counter() - begun_s)

    for round_number in range(num_rounds + 1):
        # The same folders in each round: what is measured is a tier that has been in use.
        keys = [make_offload_key(bytes([2 * n, round_number]) + bytes(30), 0) for n in range(NUM_BLOCKS)]
        tier = start_tier(case, rows, folder / "tier", num_threads)
        note("put", partial(run_jobs, tier, case, keys, is_promotion=False))
        note("get", partial(run_jobs, tier, case, keys, is_promotion=True))
        tier.shutdown(HANG_GUARD_S)
        remove_files(folder / "tier", "*.kv")
        for is_sealed in (False, True):
            note(f"floor_put_{is_sealed}", partial(floor.put, is_sealed=is_sealed))
            note(f"floor_get_{is_sealed}", partial(floor.get, is_sealed=is_sealed))
            remove_files(folder / "floor", "*")
    # The first round warms memory, folders and threads.
    median_s = {name: statistics.median(values[1:]) for name, values in times.items()}
    total_mib = NUM_BLOCKS * case.block_bytes / 2**20
    return Result(
        case=case,
        put_mib_s=total_mib / median_s["put"],
        get_mib_s=total_mib / median_s["get"],
        floor_put_mib_s=total_mib / median_s["floor_put_False"],
        floor_get_mib_s=total_mib / median_s["floor_get_False"],
        put_envelope_ratio=1 - median_s["floor_put_False"] / median_s["floor_put_True"],
        get_envelope_ratio=1 - median_s["floor_get_False"] / median_s["floor_get_True"],
    )


class Floor:
    """One raw file per block.

    Args:
        rows: what to write and where to read to.
        folder: where.
        num_threads: at the same time.
        is_direct: whether the page cache is bypassed.
    """

    def __init__(
        self, rows: Sequence[memoryview], folder: Path, num_threads: int, *, is_direct: bool
    ) -> None:
        self._rows = rows
        self._folder = folder
        self._pool = ThreadPoolExecutor(num_threads)
        self._flags = os.O_DIRECT if is_direct else 0
        self._pages = [memoryview(mmap.mmap(-1, HEADER_PAGE_BYTES)) for _ in rows]
        self._keys = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(len(rows))]
        folder.mkdir(exist_ok=True)

    def put(self, *, is_sealed: bool) -> None:
        """Write every block, with or without an envelope."""
        self._each(partial(self._put_one, is_sealed=is_sealed))

    def get(self, *, is_sealed: bool) -> None:
        """Read every block, and check its envelope if it has one."""
        self._each(partial(self._get_one, is_sealed=is_sealed))

    def _each(self, action: Callable[[int], None]) -> None:
        for _ in self._pool.map(action, range(len(self._rows))):
            pass

    def _put_one(self, number: int, *, is_sealed: bool) -> None:
        if is_sealed:
            envelope = pack(seal(self._keys[number], bytes(32), self._rows[number]))
            self._pages[number][:ENVELOPE_BYTES] = envelope
        fd = os.open(self._folder / str(number), os.O_CREAT | os.O_RDWR | self._flags, 0o600)
        os.pwritev(fd, [self._pages[number], self._rows[number]], 0)
        os.close(fd)

    def _get_one(self, number: int, *, is_sealed: bool) -> None:
        fd = os.open(self._folder / str(number), os.O_RDONLY | self._flags)
        os.preadv(fd, [self._pages[number], self._rows[number]], 0)
        os.close(fd)
        if is_sealed:
            verdict = check(self._pages[number], self._rows[number], self._keys[number], bytes(32))
            assert verdict is Verdict.OK


def start_tier(case: Case, rows: memoryview, folder: Path, num_threads: int) -> FSTier:
    """Build an empty tier that knows that it is empty."""
    group = KVGroup(block_size_tokens=16, layer_names=("layer.0",), page_size_bytes=case.block_bytes)
    config = OffloadingConfig("bench", ModelIdentity("bench"), (group,), hash_block_size=16)
    tier = FSTier(
        config,
        rows,
        root_dir=folder.absolute(),
        capacity_bytes="8GiB",
        direct_io="auto" if case.is_direct else False,
        num_threads=num_threads,
    )
    assert tier.wait_indexed(HANG_GUARD_S)
    return tier


def run_jobs(tier: FSTier, case: Case, keys: Sequence[OffloadKey], *, is_promotion: bool) -> None:
    """Submit all jobs at once and wait for them."""
    submit = tier.submit_load if is_promotion else tier.submit_store
    request = ReqContext("bench")
    for job_number in range(case.num_jobs):
        numbers = range(job_number * case.blocks_per_job, (job_number + 1) * case.blocks_per_job)
        block_ids = np.array(numbers, dtype=np.int64)
        job_keys = tuple(keys[number] for number in numbers)
        submit(JobMetadata(JobId(job_number), job_keys, block_ids, is_promotion, request))
    assert tier.drain(HANG_GUARD_S), "the tier hangs"
    results = list(tier.get_finished())
    assert len(results) == case.num_jobs
    assert all(result.success for result in results)


def remove_files(folder: Path, pattern: str) -> None:
    """Remove the files of that name anywhere below ``folder``."""
    for path in folder.rglob(pattern):
        path.unlink()


def print_header() -> None:
    """Print what the columns are."""
    print("MiB/s; ratios to the floor in brackets; envelope as a share of a raw put or get")
    print(
        f"{'block':>8} {'jobs':>7} {'I/O':>8} {'put':>14} {'get':>14} {'floor put':>10} {'floor get':>10}",
        end="",
    )
    print(f" {'seal':>6} {'check':>6}")


def print_row(result: Result) -> None:
    """Print one case."""
    case = result.case
    jobs = f"{case.num_jobs}x{case.blocks_per_job}"
    io = "direct" if case.is_direct else "buffered"
    put = f"{result.put_mib_s:.0f} ({result.put_mib_s / result.floor_put_mib_s:.2f})"
    get = f"{result.get_mib_s:.0f} ({result.get_mib_s / result.floor_get_mib_s:.2f})"
    rates = f"{result.floor_put_mib_s:>10.0f} {result.floor_get_mib_s:>10.0f}"
    shares = f"{result.put_envelope_ratio:>6.1%} {result.get_envelope_ratio:>6.1%}"
    print(
        f"{case.block_bytes // 1024:>5}KiB {jobs:>7} {io:>8} {put:>14} {get:>14} {rates} {shares}", flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
