"""Drives one secondary tier as the manager would, with bytes that follow from a block's number.

It knows no tier: what it needs is the contract of ``kvtier.tiering.base``. A result that comes twice, or not at
all, fails the test that waits for it.
"""

import time
from collections.abc import Callable, Iterable

import numpy as np

from kvtier.base import JobId, OffloadKey, ReqContext, make_offload_key
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.tiering.base import JobMetadata, JobResult, SecondaryTierManager

NUM_ROWS = 16
ROW_BYTES = 8192
HANG_GUARD_S = 60.0
"""Only a guard against hanging for ever; a tier answers in milliseconds."""


def make_config(model: str = "model-a", row_bytes: int = ROW_BYTES) -> OffloadingConfig:
    """Return what an engine with one KV group would say of itself."""
    group = KVGroup(block_size_tokens=16, layer_names=("layer.0",), page_size_bytes=row_bytes)
    return OffloadingConfig("engine", ModelIdentity(model), (group,), hash_block_size=16)


def make_rows(num_rows: int = NUM_ROWS, row_bytes: int = ROW_BYTES) -> memoryview:
    """Return rows like a primary tier's: page-aligned, writable, shape (num_rows, row_bytes), format 'b'."""
    raw = np.zeros(num_rows * row_bytes + 4096, dtype=np.int8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + num_rows * row_bytes].reshape(num_rows, row_bytes).data


FIRST_STATE = 2**256
"""Numbers from here on are recurrent states: blocks of KV group 1."""


def key_of(number: int) -> OffloadKey:
    """Return the key of block ``number``."""
    group_idx, block = divmod(number, FIRST_STATE)
    return make_offload_key(block.to_bytes(32, "big"), group_idx)


def content_of(number: int, row_bytes: int = ROW_BYTES) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    """Return the bytes that block ``number`` must have, different for each block, shape (row_bytes,)."""
    return np.random.default_rng(number).integers(-128, 128, row_bytes, dtype=np.int8)


class TierDriver:
    """Submits jobs to a tier and collects their results, as the manager would.

    Args:
        tier: the tier.
        rows: its primary's rows.
        hang_guard_s: seconds of wall clock after which an answer that has not come fails the test.
    """

    def __init__(
        self, tier: SecondaryTierManager, rows: memoryview, hang_guard_s: float = HANG_GUARD_S
    ) -> None:
        self.tier = tier
        self.hang_guard_s = hang_guard_s
        self.rows = np.asarray(rows)
        self.request = ReqContext("request")
        self.results: dict[int, JobResult] = {}
        self._next_job_id = 0

    def submit(self, numbers: list[int], slots: list[int], *, is_promotion: bool) -> int:
        """Start a job for blocks ``numbers`` in ``slots``; return its id."""
        job_id = self._next_job_id
        self._next_job_id += 1
        keys = tuple(key_of(number) for number in numbers)
        block_ids = np.array(slots, dtype=np.int64)
        job = JobMetadata(JobId(job_id), keys, block_ids, is_promotion, self.request)
        if is_promotion:
            self.tier.submit_load(job)
        else:
            self.tier.submit_store(job)
        return job_id

    def place(self, numbers: Iterable[int], slots: Iterable[int]) -> None:
        """Write the blocks' bytes into slots."""
        for number, slot in zip(numbers, slots, strict=True):
            self.rows[slot] = content_of(number, self.rows.shape[1])

    def store(self, numbers: list[int], slots: list[int] | None = None) -> JobResult:
        """Write the blocks' bytes into slots and store them; wait for the result."""
        slots = list(range(len(numbers))) if slots is None else slots
        self.place(numbers, slots)
        return self.wait(self.submit(numbers, slots, is_promotion=False))

    def load(self, numbers: list[int], slots: list[int] | None = None) -> JobResult:
        """Clear slots and load the blocks into them; wait for the result."""
        slots = list(range(len(numbers))) if slots is None else slots
        self.rows[slots] = 0
        return self.wait(self.submit(numbers, slots, is_promotion=True))

    def load_right(self, numbers: list[int], slots: list[int] | None = None) -> set[int]:
        """Load blocks and return those that came; one that came with wrong bytes fails the test."""
        slots = list(range(len(numbers))) if slots is None else slots
        arrived = arrived_of(self.load(numbers, slots), numbers)
        self.require_right(
            [(number, slot) for number, slot in zip(numbers, slots, strict=True) if number in arrived]
        )
        return arrived

    def require_right(self, placed: Iterable[tuple[int, int]]) -> None:
        """Fail the test unless each block's bytes are in its slot.

        Args:
            placed: pairs of block number and slot.
        """
        for number, slot in placed:
            is_right = np.array_equal(self.rows[slot], content_of(number, self.rows.shape[1]))
            assert is_right, f"wrong bytes under {number}"

    def wait(self, job_id: int) -> JobResult:
        """Poll until the job is reported."""
        self.poll_until(lambda: job_id in self.results)
        return self.results[job_id]

    def lookup(self, number: int) -> bool:
        """Ask step after step until the tier knows."""
        answers: list[bool] = []

        def ask() -> bool:
            answer = self.tier.lookup(key_of(number), self.request)
            if answer is not None:
                answers.append(answer)
            return answer is not None

        self.poll_until(ask)
        return answers[-1]

    def poll_until(self, is_done: Callable[[], bool]) -> None:
        """Run empty steps until ``is_done``; a result that comes twice fails the test."""
        end_s = time.monotonic() + self.hang_guard_s
        while not is_done():
            assert time.monotonic() < end_s, "the tier has not answered: a job was never reported"
            self.tier.end_step()
            self.tier.drain(0.01)
            self.poll()

    def poll(self) -> None:
        """Take the reports of one step."""
        for result in self.tier.get_finished():
            assert result.job_id not in self.results, f"job {result.job_id} was reported twice"
            self.results[result.job_id] = result


def arrived_of(result: JobResult, numbers: Iterable[int]) -> set[int]:
    """Return which of a job's blocks have arrived, by its own word. Pure."""
    if result.success:
        return set(numbers)
    return {number for number in numbers if key_of(number) in (result.successful_keys or ())}
