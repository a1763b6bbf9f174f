"""Throughput of the fs tier against raw files of the same size.

The floor writes and reads one file per block with as many threads as the tier has: ``open``, one ``pwritev`` or
``preadv`` of a page and a row, ``close``; no checksum, no name that appears only when the block is whole, no count
of bytes. A second floor seals and checks each row as the tier does: the ratio of the two is what the envelope costs.
vLLM's fs tier has its own number of threads. Buffered reads find the page cache warm.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
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
from kvtier.tiering.envelope import ENVELOPE_BYTES, HEADER_PAGE_BYTES, Verdict, check, pack, seal
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.settings import DEFAULT_NUM_THREADS

NUM_BLOCKS = 128
MANY_JOBS, ONE_JOB = 8, 1
BLOCK_SIZES_BYTES = (64 * 2**10, 2**20, 4 * 2**20)
QUICK_SIZES_BYTES = BLOCK_SIZES_BYTES[1:2]
NUM_ROUNDS, NUM_QUICK_ROUNDS = 9, 4
SEALED = "sealed floor"
BAR_BLOCK_BYTES = 2**20
MANY_JOBS_BAR, ONE_JOB_PUT_BAR = 0.95, 1.4
"""Of vLLM's fs tier: with direct I/O and eight jobs, and in buffered puts of one."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    Attributes:
        block_bytes: length of a row.
        num_jobs: jobs submitted at once.
        is_direct: whether the page cache is bypassed.
    """

    block_bytes: int
    num_jobs: int
    is_direct: bool

    def bar(self, operation: str) -> Bar | None:
        """Return what the tier should reach in ``operation``."""
        if self.block_bytes != BAR_BLOCK_BYTES:
            return None
        if self.is_direct and self.num_jobs == MANY_JOBS:
            return Bar(vllm_fs.NAME, MANY_JOBS_BAR)
        is_one_put = not self.is_direct and self.num_jobs == ONE_JOB and operation == "put"
        return Bar(vllm_fs.NAME, ONE_JOB_PUT_BAR) if is_one_put else None


class Floor:
    """One raw file per block.

    Args:
        rows: what to write and where to read to, shape (NUM_BLOCKS, block_bytes).
        folder: where.
        is_direct: whether the page cache is bypassed.
        is_sealed: whether each row has an envelope.
    """

    def __init__(self, rows: memoryview, folder: Path, *, is_direct: bool, is_sealed: bool) -> None:
        self._rows = flat_rows(rows)
        self._folder = folder
        self._pool = ThreadPoolExecutor(DEFAULT_NUM_THREADS)
        self._flags = os.O_DIRECT if is_direct else 0
        self._is_sealed = is_sealed
        self._pages = [memoryview(mmap.mmap(-1, HEADER_PAGE_BYTES)) for _ in self._rows]
        self._keys = make_keys(len(self._rows), 0)
        folder.mkdir()

    def run(self) -> Mapping[str, float]:
        """Write every block, then read it, and return the rates."""
        num_bytes = sum(map(len, self._rows))
        rates = rates_of(num_bytes, partial(self._each, self._put), partial(self._each, self._get))
        remove_files(self._folder, "*")
        return rates

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _each(self, action: Callable[[int], None]) -> None:
        for _ in self._pool.map(action, range(len(self._rows))):
            pass

    def _put(self, number: int) -> None:
        if self._is_sealed:
            envelope = pack(seal(self._keys[number], bytes(32), self._rows[number]))
            self._pages[number][:ENVELOPE_BYTES] = envelope
        fd = os.open(self._folder / str(number), os.O_CREAT | os.O_RDWR | self._flags, 0o600)
        os.pwritev(fd, [self._pages[number], self._rows[number]], 0)
        os.close(fd)

    def _get(self, number: int) -> None:
        fd = os.open(self._folder / str(number), os.O_RDONLY | self._flags)
        os.preadv(fd, [self._pages[number], self._rows[number]], 0)
        os.close(fd)
        if self._is_sealed:
            verdict = check(self._pages[number], self._rows[number], self._keys[number], bytes(32))
            assert verdict is Verdict.OK


def measure(options: Options) -> Iterator[Measurement]:
    """Yield rates by direction, block size, jobs and kind of I/O."""
    has_vllm = vllm_fs.can_import()
    if not has_vllm:
        options.note(vllm_fs.MISSING)
    for block_bytes in QUICK_SIZES_BYTES if options.is_quick else BLOCK_SIZES_BYTES:
        for is_direct in (True, False):
            for num_jobs in (MANY_JOBS, ONE_JOB):
                yield from measure_case(Case(block_bytes, num_jobs, is_direct), options, has_vllm=has_vllm)


def measure_case(case: Case, options: Options, *, has_vllm: bool) -> Iterator[Measurement]:
    """Run tier, floors and vLLM's tier in turns; at most one copy of the blocks is on the disk."""
    rows = make_rows(NUM_BLOCKS, case.block_bytes)
    generations = count()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=options.folder) as name, ExitStack() as ends:
        folder = Path(name)
        floor = Floor(rows, folder / "floor", is_direct=case.is_direct, is_sealed=False)
        sealed = Floor(rows, folder / "sealed", is_direct=case.is_direct, is_sealed=True)
        ends.callback(floor.close)
        ends.callback(sealed.close)
        contestants: dict[str, Contestant] = {
            OURS: lambda: run_tier(case, rows, folder / "tier", next(generations)),
            FLOOR: floor.run,
            SEALED: sealed.run,
        }
        if has_vllm:
            peer = VLLMFSTier(rows, folder / "vllm", is_direct=case.is_direct)
            ends.callback(peer.close)
            contestants[vllm_fs.NAME] = lambda: peer.run(
                make_keys(NUM_BLOCKS, next(generations)), case.num_jobs
            )
        rounds = run_rounds(contestants, NUM_QUICK_ROUNDS if options.is_quick else NUM_ROUNDS)
    for operation, values in rounds.items():
        labels: dict[str, str | int] = {
            "operation": operation,
            "block": f"{case.block_bytes // 1024} KiB",
            "jobs": f"{case.num_jobs} of {NUM_BLOCKS // case.num_jobs}",
            "I/O": "direct" if case.is_direct else "buffered",
        }
        yield Measurement(labels, "MiB/s", Better.HIGHER, values, case.bar(operation))


def run_tier(case: Case, rows: memoryview, folder: Path, generation: int) -> Mapping[str, float]:
    """Store and load every block once, and return the rates; the folders stay, as those of a tier in use do."""
    tier = FSTier(
        make_config(case.block_bytes),
        rows,
        root_dir=folder.absolute(),
        capacity_bytes="8GiB",
        direct_io="auto" if case.is_direct else False,
    )
    assert tier.wait_indexed(HANG_GUARD_S)
    keys = make_keys(NUM_BLOCKS, generation)
    rates = rates_of(
        rows.nbytes,
        lambda: move_blocks(tier, keys, case.num_jobs, is_promotion=False),
        lambda: move_blocks(tier, keys, case.num_jobs, is_promotion=True),
    )
    tier.shutdown(HANG_GUARD_S)
    remove_files(folder, "*.kv")
    return rates


def remove_files(folder: Path, pattern: str) -> None:
    """Remove the files of that name anywhere below ``folder``."""
    for path in folder.rglob(pattern):
        path.unlink()
