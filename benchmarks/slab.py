"""Throughput of the slab tier against raw vectored calls on a file of the same layout.

The floor writes and reads one preallocated file with as many threads as the tier has: one ``pwritev`` or ``preadv``
of a page and a row per block; no checksum, no index, nobody who pins or evicts. If they can be imported, vLLM's fs tier
and LMCache's disk back end take turns with them, with their own numbers of threads, rows alone and one file per block.
The slab is used again from round to round: what is measured is one that has been full for long. Cold reads come after
the file was written back and the page cache forgot it.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks.harness import lmcache_local, vllm_fs
from benchmarks.harness.lmcache_local import LMCacheDisk
from benchmarks.harness.measurement import FLOOR, OURS, Bar, Better, Measurement
from benchmarks.harness.rounds import Contestant, run_rounds
from benchmarks.harness.suite import Options
from benchmarks.harness.tier_jobs import (
    HANG_GUARD_S,
    drop_page_cache,
    flat_rows,
    make_config,
    make_keys,
    make_rows,
    move_blocks,
    rates_of,
    whole_turns,
)
from benchmarks.harness.vllm_fs import VLLMFSTier
from kvtier.tiering.envelope import HEADER_PAGE_BYTES
from kvtier.tiering.slab import SlabTier
from kvtier.tiering.slab.settings import DEFAULT_NUM_THREADS
from kvtier.tiering.slab.superblock import Geometry

MAX_BLOCKS, MAX_BYTES = 128, 128 * 2**20
"""Of a round; the second keeps large blocks from taking most of the run."""

JOB_COUNTS = (8, 1)
BLOCK_SIZES_BYTES = (64 * 2**10, 2**20, 4 * 2**20)
QUICK_SIZES_BYTES = BLOCK_SIZES_BYTES[1:2]
THREAD_COUNTS = (1, 2, 4, 8)
NUM_ROUNDS, NUM_QUICK_ROUNDS = 9, 4
"""At least; so many more that each contestant begins equally often."""

BAR_BLOCK_BYTES = 2**20
BAR_RATIO = 0.9
"""Of raw calls, with direct I/O."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    Attributes:
        block_bytes: length of a row.
        num_jobs: jobs submitted at once.
        is_direct: whether the page cache is bypassed; vLLM's tier does that whenever it can.
        num_threads: of the tier and the floor.
        is_cold: whether the page cache has forgotten the file before it is read; then only that is told.
    """

    block_bytes: int
    num_jobs: int
    is_direct: bool
    num_threads: int = DEFAULT_NUM_THREADS
    is_cold: bool = False

    @property
    def num_blocks(self) -> int:
        """Number of rows."""
        return min(MAX_BLOCKS, MAX_BYTES // self.block_bytes)

    def labels(self, operation: str) -> dict[str, str | int]:
        """Return what a line says of itself."""
        return {
            "operation": operation,
            "block": f"{self.block_bytes // 1024} KiB",
            "jobs": f"{self.num_jobs} of {self.num_blocks // self.num_jobs}",
            "threads": self.num_threads,
            "I/O": "direct" if self.is_direct else "buffered, cold" if self.is_cold else "buffered",
        }

    @property
    def bar(self) -> Bar | None:
        """Return what the tier should reach."""
        has_one = self.is_direct and self.block_bytes == BAR_BLOCK_BYTES
        return Bar(FLOOR, BAR_RATIO) if has_one and self.num_threads == DEFAULT_NUM_THREADS else None


class Floor:
    """Raw calls on one preallocated file.

    Args:
        rows: what to write and where to read to, shape (num_blocks, block_bytes).
        path: the file.
        case: kind of I/O, and how many threads.
    """

    def __init__(self, rows: memoryview, path: Path, case: Case) -> None:
        self._path = path
        self._pool = ThreadPoolExecutor(case.num_threads)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if case.is_direct else 0), 0o600)
        self._geometry = Geometry(case.block_bytes, case.num_blocks)
        os.posix_fallocate(self._fd, 0, self._geometry.file_bytes)
        self._buffers = [[memoryview(mmap.mmap(-1, HEADER_PAGE_BYTES)), row] for row in flat_rows(rows)]

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

        for _ in self._pool.map(move, range(len(self._buffers))):
            pass


def measure(options: Options) -> Iterator[Measurement]:
    """Yield rates by direction, block size, jobs, threads and kind of I/O."""
    has_vllm = vllm_fs.can_import()
    if not has_vllm:
        options.note(vllm_fs.MISSING)
    obstacle = lmcache_local.find_obstacle()
    if obstacle is not None:
        options.note(obstacle)
    for case in plan_cases(QUICK_SIZES_BYTES if options.is_quick else BLOCK_SIZES_BYTES):
        is_usual = case.is_direct and case.num_threads == DEFAULT_NUM_THREADS
        has_lmcache = obstacle is None and is_usual
        yield from measure_case(case, options, has_vllm=has_vllm and is_usual, has_lmcache=has_lmcache)


def plan_cases(sizes_bytes: Sequence[int]) -> Iterator[Case]:
    """Yield what to measure: the usual cases, then cold reads, then other numbers of threads. Pure."""
    for block_bytes in sizes_bytes:
        for is_direct in (True, False):
            for num_jobs in JOB_COUNTS:
                yield Case(block_bytes, num_jobs, is_direct)
    for block_bytes in sizes_bytes:
        yield Case(block_bytes, max(JOB_COUNTS), is_direct=False, is_cold=True)
    for num_threads in THREAD_COUNTS:
        if num_threads != DEFAULT_NUM_THREADS:
            yield Case(BAR_BLOCK_BYTES, max(JOB_COUNTS), is_direct=True, num_threads=num_threads)


def measure_case(case: Case, options: Options, *, has_vllm: bool, has_lmcache: bool) -> Iterator[Measurement]:
    """Run tier, floor and peers in turns."""
    rows = make_rows(case.num_blocks, case.block_bytes)
    generations = count()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=options.folder) as name, ExitStack() as ends:
        folder = Path(name)
        floor_path, tier_path = folder / "floor", folder / "slab"
        floor = Floor(rows, floor_path, case)
        ends.callback(floor.close)
        tier = start_tier(case, rows, tier_path)
        ends.callback(tier.shutdown, HANG_GUARD_S)

        def run_ours() -> Mapping[str, float]:
            keys = make_keys(case.num_blocks, next(generations))
            return rates_of(
                rows.nbytes,
                lambda: move_blocks(tier, keys, case.num_jobs, is_promotion=False),
                lambda: move_blocks(tier, keys, case.num_jobs, is_promotion=True),
                partial(drop_page_cache, [tier_path]) if case.is_cold else None,
            )

        def run_floor() -> Mapping[str, float]:
            forget = partial(drop_page_cache, [floor_path]) if case.is_cold else None
            return rates_of(rows.nbytes, floor.put, floor.get, forget)

        contestants: dict[str, Contestant] = {OURS: run_ours, FLOOR: run_floor}
        if has_vllm:
            peer = VLLMFSTier(rows, folder / "vllm", is_direct=True)
            ends.callback(peer.close)
            contestants[vllm_fs.NAME] = lambda: peer.run(
                make_keys(case.num_blocks, next(generations)), case.num_jobs
            )
        if has_lmcache:
            disk = LMCacheDisk(rows, folder / "lmcache", is_direct=True)
            ends.callback(disk.close)
            contestants[lmcache_local.DISK_NAME] = lambda: disk.run(
                make_keys(case.num_blocks, next(generations)), case.num_jobs
            )
        num_rounds = NUM_QUICK_ROUNDS if options.is_quick else NUM_ROUNDS
        rounds = run_rounds(contestants, whole_turns(num_rounds, len(contestants)))
    for operation, values in rounds.items():
        if operation == "get" or not case.is_cold:
            yield Measurement(case.labels(operation), "MiB/s", Better.HIGHER, values, case.bar)


def start_tier(case: Case, rows: memoryview, path: Path) -> SlabTier:
    """Build a tier with room for exactly the blocks of a round."""
    tier = SlabTier(
        make_config(case.block_bytes),
        rows,
        path=path.absolute(),
        capacity_bytes=Geometry(case.block_bytes, case.num_blocks).file_bytes,
        direct_io="auto" if case.is_direct else False,
        num_threads=case.num_threads,
    )
    assert tier.wait_indexed(HANG_GUARD_S)
    return tier
