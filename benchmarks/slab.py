"""Throughput of the slab tier against raw vectored calls on a file of the same layout.

The floor writes and reads one preallocated file with as many threads as the tier has: one ``pwritev`` or ``preadv``
of a page and a row per block; no checksum, no index, nobody who pins or evicts. If vLLM can be imported, its fs tier
takes turns with them, with its own number of threads, rows alone and one file per block. The slab is used again from
round to round: what is measured is one that has been full for long. Buffered reads find the page cache warm.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from benchmarks.harness import vllm_fs
from benchmarks.harness.measurement import FLOOR, OURS, Bar, Better, Measurement
from benchmarks.harness.rounds import Contestant, run_rounds
from benchmarks.harness.suite import Options
from benchmarks.harness.tier_jobs import (
    HANG_GUARD_S,
    flat_rows,
    make_config,
    make_keys,
    make_rows,
    move_blocks,
    rates_of,
)
from benchmarks.harness.vllm_fs import VLLMFSTier
from kvtier.tiering.envelope import HEADER_PAGE_BYTES
from kvtier.tiering.slab import SlabTier
from kvtier.tiering.slab.settings import DEFAULT_NUM_THREADS
from kvtier.tiering.slab.superblock import Geometry

NUM_BLOCKS = 128
JOB_COUNTS = (8, 1)
BLOCK_SIZES_BYTES = (64 * 2**10, 2**20, 4 * 2**20)
QUICK_SIZES_BYTES = BLOCK_SIZES_BYTES[1:2]
NUM_ROUNDS, NUM_QUICK_ROUNDS = 12, 6
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
    """

    block_bytes: int
    num_jobs: int
    is_direct: bool


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
        self._geometry = Geometry(rows.nbytes // NUM_BLOCKS, NUM_BLOCKS)
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

        for _ in self._pool.map(move, range(NUM_BLOCKS)):
            pass


def measure(options: Options) -> Iterator[Measurement]:
    """Yield rates by direction, block size, jobs and kind of I/O."""
    has_vllm = vllm_fs.can_import()
    if not has_vllm:
        options.note(vllm_fs.MISSING)
    for block_bytes in QUICK_SIZES_BYTES if options.is_quick else BLOCK_SIZES_BYTES:
        for is_direct in (True, False):
            for num_jobs in JOB_COUNTS:
                case = Case(block_bytes, num_jobs, is_direct)
                yield from measure_case(case, options, has_vllm=has_vllm and is_direct)


def measure_case(case: Case, options: Options, *, has_vllm: bool) -> Iterator[Measurement]:
    """Run tier, floor and vLLM's tier in turns."""
    rows = make_rows(NUM_BLOCKS, case.block_bytes)
    generations = count()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=options.folder) as name, ExitStack() as ends:
        folder = Path(name)
        floor = Floor(rows, folder / "floor", DEFAULT_NUM_THREADS, is_direct=case.is_direct)
        ends.callback(floor.close)
        tier = start_tier(case, rows, folder / "slab")
        ends.callback(tier.shutdown, HANG_GUARD_S)

        def run_ours() -> Mapping[str, float]:
            keys = make_keys(NUM_BLOCKS, next(generations))
            return rates_of(
                rows.nbytes,
                lambda: move_blocks(tier, keys, case.num_jobs, is_promotion=False),
                lambda: move_blocks(tier, keys, case.num_jobs, is_promotion=True),
            )

        contestants: dict[str, Contestant] = {
            OURS: run_ours,
            FLOOR: lambda: rates_of(rows.nbytes, floor.put, floor.get),
        }
        if has_vllm:
            peer = VLLMFSTier(rows, folder / "vllm", is_direct=True)
            ends.callback(peer.close)
            contestants[vllm_fs.NAME] = lambda: peer.run(
                make_keys(NUM_BLOCKS, next(generations)), case.num_jobs
            )
        rounds = run_rounds(contestants, NUM_QUICK_ROUNDS if options.is_quick else NUM_ROUNDS)
    has_bar = case.is_direct and case.block_bytes == BAR_BLOCK_BYTES
    for operation, values in rounds.items():
        yield Measurement(
            {
                "operation": operation,
                "block": f"{case.block_bytes // 1024} KiB",
                "jobs": f"{case.num_jobs} of {NUM_BLOCKS // case.num_jobs}",
                "I/O": "direct" if case.is_direct else "buffered",
            },
            "MiB/s",
            Better.HIGHER,
            values,
            Bar(FLOOR, BAR_RATIO) if has_bar else None,
        )


def start_tier(case: Case, rows: memoryview, path: Path) -> SlabTier:
    """Build a tier with room for exactly the blocks of a round."""
    tier = SlabTier(
        make_config(case.block_bytes),
        rows,
        path=path.absolute(),
        capacity_bytes=Geometry(case.block_bytes, NUM_BLOCKS).file_bytes,
        direct_io="auto" if case.is_direct else False,
    )
    assert tier.wait_indexed(HANG_GUARD_S)
    return tier
