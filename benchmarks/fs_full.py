"""Throughput of puts into a full directory: for each new block, one has to be evicted.

This is a tier's normal state. The floor renames its oldest file to the new name and overwrites it in place; another
contestant removes its oldest file and creates a new one. Neither has checksums, counts, an order of use or readers;
both have as many threads as the tier.
"""

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks.harness.crew import Crew
from benchmarks.harness.disk_case import BAR_BLOCK_BYTES, MANY_JOBS, DiskCase
from benchmarks.harness.measurement import FLOOR, OURS, Better, Measurement
from benchmarks.harness.rounds import Contestant, RoundCount, run_rounds, timed
from benchmarks.harness.suite import Options
from benchmarks.harness.tier_jobs import (
    HANG_GUARD_S,
    flat_rows,
    make_config,
    make_keys,
    make_rows,
    move_blocks,
)
from kvtier.tiering.fs import FSTier
from kvtier.tiering.kit.disk import plan_num_threads
from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES

OPERATION = "put, full"
REMOVED = "removed and made"
NUM_ROUNDS, NUM_QUICK_ROUNDS = 6, 3
NUM_SETS = 16
"""Rounds that the directory holds: what it keeps free, a 32nd part, is then half a round."""

CASES = ((BAR_BLOCK_BYTES, True), (BAR_BLOCK_BYTES, False), (64 * 2**10, True), (64 * 2**10, False))
"""Bytes of a block, and whether I/O is direct."""


class Ring:
    """A full directory of raw files, in which the oldest are replaced first.

    Args:
        folder: a new folder.
        rows: the data, shape (num_blocks, block_bytes).
        case: kind of I/O, and number of threads.
        is_written_over: whether the oldest file is overwritten, or removed and another created.
    """

    def __init__(self, folder: Path, rows: memoryview, case: DiskCase, *, is_written_over: bool) -> None:
        folder.mkdir()
        self._folder = folder
        self._rows = flat_rows(rows)
        self._pages = [memoryview(mmap.mmap(-1, HEADER_PAGE_BYTES)) for _ in self._rows]
        self._crew = Crew(case.num_threads)
        self._flags = os.O_RDWR | (os.O_DIRECT if case.is_direct else 0)
        self._is_written_over = is_written_over
        self._numbers = count()
        self._paths: deque[str] = deque()
        for _ in range(NUM_SETS):
            self._crew.each(len(self._rows), self._make)

    def put(self) -> None:
        """Write every block, each in place of another."""
        self._crew.each(len(self._rows), self._write_over if self._is_written_over else self._remove_and_make)

    def close(self) -> None:
        """End the threads."""
        self._crew.close()

    def _write_over(self, number: int) -> None:
        path = self._new_path()
        Path(self._paths.popleft()).rename(path)
        self._write(path, 0, number)

    def _remove_and_make(self, number: int) -> None:
        Path(self._paths.popleft()).unlink()
        self._make(number)

    def _make(self, number: int) -> None:
        self._write(self._new_path(), os.O_CREAT | os.O_EXCL, number)

    def _write(self, path: str, flags: int, number: int) -> None:
        fd = os.open(path, self._flags | flags, 0o600)
        num_written = os.pwritev(fd, [self._pages[number], self._rows[number]], 0)
        os.close(fd)
        assert num_written == HEADER_PAGE_BYTES + len(self._rows[number])
        self._paths.append(path)

    def _new_path(self) -> str:
        return f"{self._folder}/{next(self._numbers)}"


class FullTier:
    """The tier, in a full directory with the capacity of a ring.

    Args:
        case: kind of I/O, and number of jobs.
        rows: the tier's rows.
        root: its directory.
    """

    def __init__(self, case: DiskCase, rows: memoryview, root: Path) -> None:
        self._case = case
        self._generations = count()
        self._tier = FSTier(
            make_config(case.block_bytes),
            rows,
            root_dir=root.absolute(),
            capacity_bytes=NUM_SETS * case.num_blocks * (HEADER_PAGE_BYTES + case.block_bytes),
            direct_io="auto" if case.is_direct else False,
        )
        assert self._tier.wait_indexed(HANG_GUARD_S)
        # Until the first eviction has made room, a block may find none.
        while not self._tier.stats()["evicted_blocks"]:
            self.put(must_succeed=False)

    def put(self, *, must_succeed: bool = True) -> None:
        """Store new blocks, one per row."""
        keys = make_keys(self._case.num_blocks, next(self._generations))
        move_blocks(self._tier, keys, self._case.num_jobs, is_promotion=False, must_succeed=must_succeed)

    def close(self) -> None:
        """End the tier."""
        self._tier.shutdown(HANG_GUARD_S)


def measure(options: Options, folder: Path) -> Iterator[Measurement]:
    """Yield rates by block size and kind of I/O; the files stay in ``folder``."""
    num_rounds = options.count_rounds(NUM_ROUNDS, NUM_QUICK_ROUNDS)
    for block_bytes, is_direct in CASES[:1] if options.is_quick else CASES:
        num_threads = plan_num_threads(None, block_bytes, has_direct_io=is_direct)
        case = DiskCase(block_bytes, MANY_JOBS, is_direct, num_threads)
        name = f"full {block_bytes} {'direct' if is_direct else 'buffered'}"
        yield measure_case(case, folder / name, case.rounds_of(num_rounds))


def measure_case(case: DiskCase, place: Path, num_rounds: RoundCount) -> Measurement:
    """Run tier and rings in turns."""
    place.mkdir()
    rows = make_rows(case.num_blocks, case.block_bytes)
    mib = rows.nbytes / 2**20

    def rate_of(put: Callable[[], None]) -> Mapping[str, float]:
        return {OPERATION: mib / timed(put)}

    with ExitStack() as ends:
        tier = FullTier(case, rows, place / "tier")
        ends.callback(tier.close)
        contestants: dict[str, Contestant] = {OURS: partial(rate_of, tier.put)}
        for name, is_written_over in ((FLOOR, True), (REMOVED, False)):
            ring = Ring(place / name, rows, case, is_written_over=is_written_over)
            ends.callback(ring.close)
            contestants[name] = partial(rate_of, ring.put)
        values = run_rounds(contestants, num_rounds)[OPERATION]
    return Measurement(case.labels(OPERATION), "MiB/s", Better.HIGHER, values)
