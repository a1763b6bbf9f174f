"""Throughput of the slab tier against raw vectored calls on a file of the same layout.

The floor writes and reads with as many threads as the tier: one ``pwritev`` or ``preadv`` of a page and a row per
block. It has no checksum, no index, no pins and no eviction. It uses the tier's own file, because the place on a disk
affects the
speed: each turn writes all blocks before it reads them, so neither finds the other's bytes. If installed, vLLM's fs
tier and LMCache's disk back end alternate with them, with their own numbers of threads, only rows, and one file per
block. The slab is reused from round to round, so the measured one is full. Cold reads are of a slab that was written
back before the first of them and is dropped from the page cache before each.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from benchmarks.harness.block_files import spread_folders
from benchmarks.harness.crew import Crew
from benchmarks.harness.disk_case import (
    BAR_BLOCK_BYTES,
    BLOCK_SIZES_BYTES,
    QUICK_SIZES_BYTES,
    DiskCase,
    plan_cases,
)
from benchmarks.harness.disk_peers import DiskPeers, find_disk_peers
from benchmarks.harness.measurement import FLOOR, OURS, Bar, Better, Measurement
from benchmarks.harness.rounds import Contestant, RoundCount, run_rounds
from benchmarks.harness.suite import Options
from benchmarks.harness.tier_jobs import (
    HANG_GUARD_S,
    cold_rate_of,
    flat_rows,
    make_config,
    make_keys,
    make_rows,
    move_blocks,
    rates_of,
    write_back,
)
from kvtier.base import OffloadKey
from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES
from kvtier.tiering.slab import SlabTier
from kvtier.tiering.slab.superblock import SlabGeometry

NUM_ROUNDS, NUM_QUICK_ROUNDS = 6, 4
"""At least; rounded up so that each contestant begins equally often."""

BAR_RATIO = 0.9
"""Ratio to raw calls, with direct I/O."""


class Floor:
    """Raw calls on a slab.

    Args:
        rows: data to write, and memory to read into, shape (num_blocks, block_bytes).
        path: the slab of an open tier.
        case: kind of I/O, and number of threads.
    """

    def __init__(self, rows: memoryview, path: Path, case: DiskCase) -> None:
        self._crew = Crew(case.num_threads)
        self._fd = os.open(path, os.O_RDWR | (os.O_DIRECT if case.is_direct else 0))
        self._geometry = SlabGeometry(case.block_bytes, case.num_blocks)
        self._buffers = [[memoryview(mmap.mmap(-1, HEADER_PAGE_BYTES)), row] for row in flat_rows(rows)]

    def put(self) -> None:
        """Write every block."""
        self._each(os.pwritev)

    def get(self) -> None:
        """Read every block."""
        self._each(os.preadv)

    def close(self) -> None:
        """End the threads and close the file."""
        self._crew.close()
        os.close(self._fd)

    def _each(self, call: Callable[[int, Sequence[memoryview], int], int]) -> None:
        def move(number: int) -> None:
            assert call(self._fd, self._buffers[number], self._geometry.offset_of(number))

        self._crew.each(len(self._buffers), move)


class Turns:
    """The tier's turns: it gets the blocks that it put last, which no other contestant may have overwritten.

    Args:
        tier: the tier under test.
        rows: the tier's rows.
        case: the measured case.
    """

    def __init__(self, tier: SlabTier, rows: memoryview, case: DiskCase) -> None:
        self._tier = tier
        self._num_blocks = len(flat_rows(rows))
        self._num_jobs = case.num_jobs
        self._generations = count()
        self._keys: Sequence[OffloadKey] = ()

    def put(self) -> None:
        """Store new blocks; the previous ones are evicted."""
        self._keys = make_keys(self._num_blocks, next(self._generations))
        move_blocks(self._tier, self._keys, self._num_jobs, is_promotion=False)

    def get(self) -> None:
        """Load them."""
        move_blocks(self._tier, self._keys, self._num_jobs, is_promotion=True)


def measure(options: Options) -> Iterator[Measurement]:
    """Yield rates by direction, block size, jobs, threads and kind of I/O."""
    peers = find_disk_peers(options.note)
    num_rounds = options.count_rounds(NUM_ROUNDS, NUM_QUICK_ROUNDS)
    with options.new_folder() as folder:
        spread_folders(folder)
        for case in plan_cases(QUICK_SIZES_BYTES if options.is_quick else BLOCK_SIZES_BYTES):
            has_peers = case.is_usual and case.is_direct
            yield from measure_case(
                case, folder, case.rounds_of(num_rounds), peers if has_peers else DiskPeers()
            )


def bar_of(case: DiskCase) -> Bar | None:
    """Return the tier's bar. Pure."""
    has_one = case.is_direct and case.block_bytes == BAR_BLOCK_BYTES and case.has_usual_threads
    return Bar(FLOOR, BAR_RATIO) if has_one else None


def measure_case(
    case: DiskCase, folder: Path, num_rounds: RoundCount, peers: DiskPeers
) -> Iterator[Measurement]:
    """Run tier, floor and peers in turns; truncated files of peers stay in ``folder``."""
    rows = make_rows(case.num_blocks, case.block_bytes)
    place = Path(tempfile.mkdtemp(dir=folder))
    path = place / "slab"
    with ExitStack() as ends:
        tier = start_tier(case, rows, path)
        ends.callback(path.unlink)
        ends.callback(tier.shutdown, HANG_GUARD_S)
        floor = Floor(rows, path, case)
        ends.callback(floor.close)
        turns = Turns(tier, rows, case)
        contestants: dict[str, Contestant]
        if case.is_cold:
            turns.put()
            write_back([path])
            contestants = {
                OURS: lambda: cold_rate_of(rows.nbytes, [path], turns.get),
                FLOOR: lambda: cold_rate_of(rows.nbytes, [path], floor.get),
            }
        else:
            contestants = {
                OURS: lambda: rates_of(rows.nbytes, turns.put, turns.get),
                FLOOR: lambda: rates_of(rows.nbytes, floor.put, floor.get),
            }
        contestants |= peers.open(case, rows, place, ends, is_direct=True)
        rounds = run_rounds(contestants, num_rounds)
    for operation, values in rounds.items():
        yield Measurement(case.labels(operation), "MiB/s", Better.HIGHER, values, bar_of(case))


def start_tier(case: DiskCase, rows: memoryview, path: Path) -> SlabTier:
    """Build a tier with room for exactly the blocks of a round."""
    tier = SlabTier(
        make_config(case.block_bytes),
        rows,
        path=path.absolute(),
        capacity_bytes=SlabGeometry(case.block_bytes, case.num_blocks).file_bytes,
        direct_io="auto" if case.is_direct else False,
        num_threads=None if case.has_usual_threads else case.num_threads,
    )
    assert tier.wait_indexed(HANG_GUARD_S)
    return tier
