"""A file of slots as a pack of the fs tier has them, each a page and a row: the floors of the fs suite.

Each thread takes as many neighbouring slots as a thread of the tier moves at a stretch, and moves them with one call.
The floor with checksums seals as far ahead of its writes as the tier does, so it shows the cost of a checksum in the
tier, and not the best distance.
"""

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.harness.crew import Crew
from benchmarks.harness.tier_jobs import flat_rows
from kvtier.base import OffloadKey
from kvtier.tiering.kit.disk import checksum_ahead, plan_num_checksums_ahead
from kvtier.tiering.kit.envelope import (
    ENVELOPE_BYTES,
    HEADER_PAGE_BYTES,
    HeaderCheck,
    check_block,
    make_header,
)

DIGEST = bytes(32)
"""Of the namespace in the envelopes."""


class RawSlots:
    """Writes and reads slots of one file with its own threads.

    Args:
        path: the file, which is made.
        rows: data to write, and memory to read into, shape (num_blocks, block_bytes).
        num_sets: how many times all blocks fit into the file.
        num_threads: number of threads.
        num_call_blocks: neighbouring slots that a call moves.
        is_direct: whether to bypass the page cache.
        is_sealed: whether each row gets an envelope, and is checked.

    Attributes:
        path: likewise.
        num_bytes: of all rows.
    """

    def __init__(
        self,
        path: Path,
        rows: memoryview,
        num_sets: int,
        num_threads: int,
        num_call_blocks: int,
        *,
        is_direct: bool,
        is_sealed: bool,
    ) -> None:
        self.path = path
        self.num_bytes = rows.nbytes
        self._rows = flat_rows(rows)
        self._slot_bytes = HEADER_PAGE_BYTES + len(self._rows[0])
        self._num_sets = num_sets
        self._num_call_blocks = num_call_blocks
        self._is_sealed = is_sealed
        call_bytes = num_call_blocks * len(self._rows[0])
        self._num_ahead = plan_num_checksums_ahead(call_bytes, has_direct_io=is_direct) if is_sealed else 0
        self._pages = [memoryview(mmap.mmap(-1, HEADER_PAGE_BYTES)) for _ in self._rows]
        self._crew = Crew(num_threads)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if is_direct else 0), 0o600)
        os.posix_fallocate(self._fd, 0, num_sets * len(self._rows) * self._slot_bytes)

    def put(self, number: int, keys: Sequence[OffloadKey]) -> None:
        """Write every block of a round over those of ``num_sets`` rounds before; ``keys`` are for the envelopes."""

        def seal_run(run: range) -> range:
            if self._is_sealed:
                for block in run:
                    header = make_header(keys[block], DIGEST, self._rows[block])
                    self._pages[block][:ENVELOPE_BYTES] = header
            return run

        def put_runs(numbers: Iterator[int]) -> None:
            for run in checksum_ahead(map(self._run, numbers), seal_run, self._num_ahead):
                self._move(os.pwritev, number, run)

        self._crew.share(self._num_runs, put_runs)

    def get(self, number: int, keys: Sequence[OffloadKey]) -> None:
        """Read every block of a round."""

        def get_run(run_number: int) -> None:
            run = self._run(run_number)
            self._move(os.preadv, number, run)
            if self._is_sealed:
                for block in run:
                    found = check_block(self._pages[block], self._rows[block], keys[block], DIGEST)
                    assert found is HeaderCheck.OK

        self._crew.each(self._num_runs, get_run)

    def close(self) -> None:
        """End the threads and close the file."""
        self._crew.close()
        os.close(self._fd)

    @property
    def _num_runs(self) -> int:
        return -(-len(self._rows) // self._num_call_blocks)

    def _run(self, run_number: int) -> range:
        first = run_number * self._num_call_blocks
        return range(first, min(first + self._num_call_blocks, len(self._rows)))

    def _move(self, call: Callable[[int, Sequence[memoryview], int], int], number: int, run: range) -> None:
        buffers = [buffer for block in run for buffer in (self._pages[block], self._rows[block])]
        first_slot = number % self._num_sets * len(self._rows) + run.start
        num_moved = call(self._fd, buffers, first_slot * self._slot_bytes)
        assert num_moved == len(run) * self._slot_bytes
