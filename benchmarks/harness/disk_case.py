"""The measured cases of a tier on a local disk: sizes, jobs, threads, kinds of I/O. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.harness.rounds import RoundCount
from kvtier.tiering.kit.disk import plan_num_threads

MAX_BLOCKS, MAX_BYTES = 128, 128 * 2**20
"""Limits of a round; the second keeps large blocks from taking most of the run."""

MANY_JOBS, ONE_JOB = 8, 1
SMALL_FACTOR = 8
"""Small blocks have up to this many times the rounds: a round takes milliseconds, which vary more than longer times."""

BUFFERED_FACTOR = 2
"""The same for large blocks through the page cache: tens of milliseconds, with write-back in the background."""

BLOCK_SIZES_BYTES = (64 * 2**10, 2**20, 4 * 2**20)
QUICK_SIZES_BYTES = BLOCK_SIZES_BYTES[1:2]
BAR_BLOCK_BYTES = 2**20
THREAD_COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class DiskCase:
    """A measured case.

    Attributes:
        block_bytes: length of a row.
        num_jobs: jobs submitted at once.
        is_direct: whether to bypass the page cache.
        num_threads: of the tier and the floors.
        is_cold: whether blocks are dropped from the page cache before reads; then only reads are reported.
        has_usual_threads: whether the tier has its default number of threads.
    """

    block_bytes: int
    num_jobs: int
    is_direct: bool
    num_threads: int
    is_cold: bool = False
    has_usual_threads: bool = True

    @property
    def num_blocks(self) -> int:
        """Number of rows."""
        return min(MAX_BLOCKS, MAX_BYTES // self.block_bytes)

    @property
    def is_usual(self) -> bool:
        """Whether a peer without settings for threads and the page cache does the same work."""
        return self.has_usual_threads and not self.is_cold

    def rounds_of(self, num_rounds: RoundCount) -> RoundCount:
        """Return the rounds of this case, given ``num_rounds`` of large blocks."""
        if self.num_blocks * self.block_bytes < MAX_BYTES:
            return num_rounds.with_most(SMALL_FACTOR)
        return num_rounds if self.is_direct or self.is_cold else num_rounds.with_most(BUFFERED_FACTOR)

    def labels(self, operation: str) -> dict[str, str | int]:
        """Return the labels of a line."""
        return {
            "operation": operation,
            "block": f"{self.block_bytes // 1024} KiB",
            "jobs": f"{self.num_jobs} of {self.num_blocks // self.num_jobs}",
            "threads": self.num_threads,
            "I/O": "direct" if self.is_direct else "buffered, cold" if self.is_cold else "buffered",
        }


def plan_cases(sizes_bytes: Sequence[int]) -> Iterator[DiskCase]:
    """Yield the cases of a tier: the usual ones, then cold reads, then other numbers of threads. Pure.

    Args:
        sizes_bytes: of blocks.
    """
    for block_bytes in sizes_bytes:
        for is_direct in (True, False):
            for num_jobs in (MANY_JOBS, ONE_JOB):
                num_threads = plan_num_threads(None, block_bytes, has_direct_io=is_direct)
                yield DiskCase(block_bytes, num_jobs, is_direct, num_threads)
    for block_bytes in sizes_bytes:
        num_threads = plan_num_threads(None, block_bytes, has_direct_io=False)
        yield DiskCase(block_bytes, MANY_JOBS, is_direct=False, num_threads=num_threads, is_cold=True)
    for num_threads in THREAD_COUNTS:
        if num_threads != plan_num_threads(None, BAR_BLOCK_BYTES, has_direct_io=True):
            yield DiskCase(
                BAR_BLOCK_BYTES, MANY_JOBS, is_direct=True, num_threads=num_threads, has_usual_threads=False
            )
