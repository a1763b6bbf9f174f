"""A secondary tier in private memory: the one to read first and to copy from.

It really keeps the bytes of each block, evicts its oldest when full, and answers every job exactly once. It
has no thread: a synchronous tier does its work in submit and reports it at the next poll; an asynchronous one
(``simulate_async``) does it one poll later, as a tier behind a network would.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.errors import ConfigError, TierError
from kvtier.tiering.base import EvictionReporter, JobMetadata, JobResult, SecondaryTierManager

MAX_UNTOLD_KEYS = 65_536
"""Evicted keys that are remembered until they are asked for; nobody asks where events are off."""


class ExampleSecondaryTier(SecondaryTierManager, EvictionReporter):
    """Keeps rows in a dictionary.

    Args:
        config: what the engine said of itself.
        primary_kv_view: the primary's rows, shape (num_blocks, row_stride), format 'b'.
        max_blocks: rows kept; beyond them the oldest is evicted.
        simulate_async: whether a job ends one poll after the next instead of at the next.

    Attributes:
        blocks: the rows by key, oldest first.
        completed_jobs: what the next poll will report.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        max_blocks: int = 1000,
        simulate_async: bool = False,
    ) -> None:
        super().__init__(config, primary_kv_view)
        if max_blocks < 1:
            raise ConfigError("max_blocks", max_blocks, "must be at least one block")
        self.max_blocks = max_blocks
        self.simulate_async = simulate_async
        self.blocks: OrderedDict[OffloadKey, bytes] = OrderedDict()
        self.completed_jobs: list[JobResult] = []
        self._begun: list[JobMetadata] = []
        self._evicted: deque[OffloadKey] = deque(maxlen=MAX_UNTOLD_KEYS)
        self._is_shut_down = False

    @staticmethod
    def get_tier_type() -> str:
        """Return "example"."""
        return "example"

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return whether the block is held."""
        return key in self.blocks

    def submit_store(self, job: JobMetadata) -> None:
        """Copy the job's slots into the tier."""
        self._begin(job)

    def submit_load(self, job: JobMetadata) -> None:
        """Copy the tier's blocks into the job's slots."""
        self._begin(job)

    def get_finished(self) -> Iterable[JobResult]:
        """Return what has ended since the last poll; begin what was submitted meanwhile."""
        finished, self.completed_jobs = self.completed_jobs, []
        begun, self._begun = self._begun, []
        for job in begun:
            self._carry_out(job)
        return finished

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Make ``keys`` the most recent, the first of them most."""
        for key in reversed(list(keys)):
            if key in self.blocks:
                self.blocks.move_to_end(key)

    def take_evicted(self) -> Collection[OffloadKey]:
        """Return what has been evicted since the last call, the oldest of very many left out."""
        evicted = tuple(self._evicted)
        self._evicted.clear()
        return evicted

    def reset(self, epoch: bytes) -> None:
        """Forget the blocks: this memory is private, so nobody else can miss them."""
        del epoch
        self._abandon_begun()
        self.clear()

    def shutdown(self, timeout_s: float) -> bool:
        """End with nothing in flight: what had not begun is reported as failed."""
        del timeout_s
        self._is_shut_down = True
        self._abandon_begun()
        return True

    def drain(self, timeout_s: float) -> bool:
        """Carry out whatever has been submitted; there is nothing to wait for."""
        del timeout_s
        begun, self._begun = self._begun, []
        for job in begun:
            self._carry_out(job)
        return True

    def stats(self) -> dict[str, float]:
        """Return how full the tier is."""
        return {"blocks": float(len(self.blocks)), "max_blocks": float(self.max_blocks)}

    def get_num_blocks(self) -> int:
        """Return how many blocks are held."""
        return len(self.blocks)

    def clear(self) -> None:
        """Drop every block."""
        self.blocks.clear()

    def _begin(self, job: JobMetadata) -> None:
        if self._is_shut_down:
            raise TierError(self.get_tier_type(), f"job {job.job_id} came after shutdown: build a new tier")
        if self.simulate_async:
            self._begun.append(job)
        else:
            self._carry_out(job)

    def _carry_out(self, job: JobMetadata) -> None:
        done = frozenset(self._load(job) if job.is_promotion else self._store(job))
        is_whole = done.issuperset(job.keys)
        # A block that was evicted before its load speaks not against the tier.
        self.completed_jobs.append(
            JobResult(job.job_id, is_whole, None if is_whole else done, is_fault=False)
        )

    def _store(self, job: JobMetadata) -> Iterable[OffloadKey]:
        # A memoryview of more than one dimension has no rows of its own, so the rows are cut from the bytes.
        for key, row in zip(job.keys, self._rows(job), strict=True):
            self.blocks[key] = bytes(row)
            self.blocks.move_to_end(key)
            yield key
        while len(self.blocks) > self.max_blocks:
            self._evicted.append(self.blocks.popitem(last=False)[0])

    def _load(self, job: JobMetadata) -> Iterable[OffloadKey]:
        for key, row in zip(job.keys, self._rows(job), strict=True):
            block = self.blocks.get(key)
            if block is not None:
                row[:] = block
                self.blocks.move_to_end(key)
                yield key

    def _rows(self, job: JobMetadata) -> Iterable[memoryview]:
        whole = self.primary_kv_view.cast("B")
        row_bytes = whole.nbytes // len(self.primary_kv_view)
        for block_id in job.block_ids.tolist():
            yield whole[block_id * row_bytes : (block_id + 1) * row_bytes]

    def _abandon_begun(self) -> None:
        self.completed_jobs += [JobResult(job.job_id, success=False) for job in self._begun]
        self._begun.clear()
