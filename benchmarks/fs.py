"""Throughput of the fs tier against raw files of the same size.

The floor writes and reads one file per block with as many threads as the tier has: ``open``, one ``pwritev`` or
``preadv`` of a page and a row, ``close``; no checksum, no name that appears only when the block is whole, no count
of bytes. A second floor seals and checks each row as the tier does; how much longer it takes is what the envelope and
its checksum cost, and has lines of its own. vLLM's fs tier and LMCache's disk back end have their own numbers of
threads, so they stay away where these are changed. Cold reads come after the files were written back and the page
cache forgot them.
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
from kvtier.tiering.envelope import ENVELOPE_BYTES, HEADER_PAGE_BYTES, Verdict, check, pack, seal
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.settings import DEFAULT_NUM_THREADS

MAX_BLOCKS, MAX_BYTES = 128, 128 * 2**20
"""Of a round; the second keeps large blocks from taking most of the run."""

MANY_JOBS, ONE_JOB = 8, 1
BLOCK_SIZES_BYTES = (64 * 2**10, 2**20, 4 * 2**20)
QUICK_SIZES_BYTES = BLOCK_SIZES_BYTES[1:2]
THREAD_COUNTS = (1, 2, 4, 8)
NUM_ROUNDS, NUM_QUICK_ROUNDS = 9, 3
"""At least; so many more that each contestant begins equally often."""

ENVELOPE_BLOCKS = 16
NUM_ENVELOPE_ROUNDS, NUM_QUICK_ENVELOPE_ROUNDS = 80, 20
"""Many short ones: what is looked for is smaller than what a disk's speed changes by from one second to the next."""

SEALED = "sealed floor"
BAR_BLOCK_BYTES = 2**20
MANY_JOBS_BAR, ONE_JOB_PUT_BAR = 0.95, 1.4
"""Of vLLM's fs tier: with direct I/O and eight jobs, and in buffered puts of one."""

ENVELOPE_BAR_PERCENT = 10.0
"""Of the time of a put or a get, with direct I/O."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    Attributes:
        block_bytes: length of a row.
        num_jobs: jobs submitted at once.
        is_direct: whether the page cache is bypassed.
        num_threads: of the tier and the floors.
        is_cold: whether the page cache has forgotten the files before they are read; then only that is told.
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

    @property
    def is_usual(self) -> bool:
        """Whether a peer that cannot be told about threads and the page cache does the same work."""
        return self.num_threads == DEFAULT_NUM_THREADS and not self.is_cold

    def labels(self, operation: str) -> dict[str, str | int]:
        """Return what a line says of itself."""
        return {
            "operation": operation,
            "block": f"{self.block_bytes // 1024} KiB",
            "jobs": f"{self.num_jobs} of {self.num_blocks // self.num_jobs}",
            "threads": self.num_threads,
            "I/O": "direct" if self.is_direct else "buffered, cold" if self.is_cold else "buffered",
        }

    def bar(self, operation: str) -> Bar | None:
        """Return what the tier should reach in ``operation``."""
        if self.block_bytes != BAR_BLOCK_BYTES or not self.is_usual:
            return None
        if self.is_direct and self.num_jobs == MANY_JOBS:
            return Bar(vllm_fs.NAME, MANY_JOBS_BAR)
        is_one_put = not self.is_direct and self.num_jobs == ONE_JOB and operation == "put"
        return Bar(vllm_fs.NAME, ONE_JOB_PUT_BAR) if is_one_put else None


class Floor:
    """One raw file per block.

    Args:
        rows: what to write and where to read to, shape (num_blocks, block_bytes).
        folder: where.
        case: kind of I/O, and how many threads.
        is_sealed: whether each row has an envelope.
    """

    def __init__(self, rows: memoryview, folder: Path, case: Case, *, is_sealed: bool) -> None:
        self._rows = flat_rows(rows)
        self._folder = folder
        self._pool = ThreadPoolExecutor(case.num_threads)
        self._flags = os.O_DIRECT if case.is_direct else 0
        self._is_cold = case.is_cold
        self._is_sealed = is_sealed
        self._pages = [memoryview(mmap.mmap(-1, HEADER_PAGE_BYTES)) for _ in self._rows]
        self._keys = make_keys(len(self._rows), 0)
        folder.mkdir()

    def run(self) -> Mapping[str, float]:
        """Write every block, then read it, and return the rates."""
        num_bytes = sum(map(len, self._rows))
        put, get = (partial(self._each, action) for action in (self._put, self._get))
        rates = rates_of(num_bytes, put, get, self._forget if self._is_cold else None)
        remove_files(self._folder, "*")
        return rates

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _forget(self) -> None:
        drop_page_cache(self._folder.iterdir())

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
    """Yield rates by direction, block size, jobs, threads and kind of I/O, then what the envelope costs."""
    has_vllm = vllm_fs.can_import()
    if not has_vllm:
        options.note(vllm_fs.MISSING)
    obstacle = lmcache_local.find_obstacle()
    if obstacle is not None:
        options.note(obstacle)
    for case in plan_cases(QUICK_SIZES_BYTES if options.is_quick else BLOCK_SIZES_BYTES):
        has_lmcache = obstacle is None and case.is_usual
        yield from measure_case(case, options, has_vllm=has_vllm and case.is_usual, has_lmcache=has_lmcache)
    for is_direct, num_threads in ((True, 1), (True, DEFAULT_NUM_THREADS), (False, DEFAULT_NUM_THREADS)):
        yield from measure_envelope(Case(BAR_BLOCK_BYTES, MANY_JOBS, is_direct, num_threads), options)


def plan_cases(sizes_bytes: Sequence[int]) -> Iterator[Case]:
    """Yield what to measure: the usual cases, then cold reads, then other numbers of threads. Pure."""
    for block_bytes in sizes_bytes:
        for is_direct in (True, False):
            for num_jobs in (MANY_JOBS, ONE_JOB):
                yield Case(block_bytes, num_jobs, is_direct)
    for block_bytes in sizes_bytes:
        yield Case(block_bytes, MANY_JOBS, is_direct=False, is_cold=True)
    for num_threads in THREAD_COUNTS:
        if num_threads != DEFAULT_NUM_THREADS:
            yield Case(BAR_BLOCK_BYTES, MANY_JOBS, is_direct=True, num_threads=num_threads)


def measure_case(case: Case, options: Options, *, has_vllm: bool, has_lmcache: bool) -> Iterator[Measurement]:
    """Run tier, floors and peers in turns; at most one copy of the blocks is on the disk."""
    rows = make_rows(case.num_blocks, case.block_bytes)
    generations = count()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=options.folder) as name, ExitStack() as ends:
        folder = Path(name)
        floors = open_floors(rows, folder, case, ends)
        if not case.is_usual:
            del floors[SEALED]
        contestants: dict[str, Contestant] = {
            OURS: lambda: run_tier(case, rows, folder / "tier", next(generations))
        } | floors
        if has_vllm:
            peer = VLLMFSTier(rows, folder / "vllm", is_direct=case.is_direct)
            ends.callback(peer.close)
            contestants[vllm_fs.NAME] = lambda: peer.run(
                make_keys(case.num_blocks, next(generations)), case.num_jobs
            )
        if has_lmcache:
            disk = LMCacheDisk(rows, folder / "lmcache", is_direct=case.is_direct)
            ends.callback(disk.close)
            contestants[lmcache_local.DISK_NAME] = lambda: disk.run(
                make_keys(case.num_blocks, next(generations)), case.num_jobs
            )
        num_rounds = NUM_QUICK_ROUNDS if options.is_quick else NUM_ROUNDS
        rounds = run_rounds(contestants, whole_turns(num_rounds, len(contestants)))
    for operation, values in rounds.items():
        if operation == "get" or not case.is_cold:
            yield Measurement(case.labels(operation), "MiB/s", Better.HIGHER, values, case.bar(operation))


def measure_envelope(case: Case, options: Options) -> Iterator[Measurement]:
    """Let the floors take turns; yield which share of the sealed one's time is seal, checksum and check."""
    rows = make_rows(ENVELOPE_BLOCKS, case.block_bytes)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=options.folder) as name, ExitStack() as ends:
        floors = open_floors(rows, Path(name), case, ends)
        num_rounds = NUM_QUICK_ENVELOPE_ROUNDS if options.is_quick else NUM_ENVELOPE_ROUNDS
        rounds = run_rounds(floors, whole_turns(num_rounds, len(floors)))
    for operation, values in rounds.items():
        labels = case.labels(operation) | {"share of": "envelope and checksum"}
        del labels["jobs"]
        bar = Bar(None, ENVELOPE_BAR_PERCENT) if case.is_direct else None
        shares = envelope_shares_percent(values[FLOOR], values[SEALED])
        yield Measurement(labels, "%", Better.LOWER, {OURS: shares}, bar)


def envelope_shares_percent(floor: Sequence[float], sealed: Sequence[float]) -> tuple[float, ...]:
    """Return how much of the sealed floor's time the other does not take, per cent, from their rates. Pure."""
    return tuple(
        100.0 * (1.0 - sealed_rate / floor_rate)
        for floor_rate, sealed_rate in zip(floor, sealed, strict=True)
    )


def open_floors(rows: memoryview, folder: Path, case: Case, ends: ExitStack) -> dict[str, Contestant]:
    """Return both floors by name; ``ends`` closes them."""
    floors: dict[str, Contestant] = {}
    for name, is_sealed in ((FLOOR, False), (SEALED, True)):
        floor = Floor(rows, folder / name, case, is_sealed=is_sealed)
        ends.callback(floor.close)
        floors[name] = floor.run
    return floors


def run_tier(case: Case, rows: memoryview, folder: Path, generation: int) -> Mapping[str, float]:
    """Store and load every block once, and return the rates; the folders stay, as those of a tier in use do."""
    tier = FSTier(
        make_config(case.block_bytes),
        rows,
        root_dir=folder.absolute(),
        capacity_bytes="8GiB",
        direct_io="auto" if case.is_direct else False,
        num_threads=case.num_threads,
    )
    assert tier.wait_indexed(HANG_GUARD_S)
    keys = make_keys(case.num_blocks, generation)
    rates = rates_of(
        rows.nbytes,
        lambda: move_blocks(tier, keys, case.num_jobs, is_promotion=False),
        lambda: move_blocks(tier, keys, case.num_jobs, is_promotion=True),
        (lambda: drop_page_cache(folder.rglob("*.kv"))) if case.is_cold else None,
    )
    tier.shutdown(HANG_GUARD_S)
    remove_files(folder, "*.kv")
    return rates


def remove_files(folder: Path, pattern: str) -> None:
    """Remove the files of that name anywhere below ``folder``."""
    for path in folder.rglob(pattern):
        path.unlink()
