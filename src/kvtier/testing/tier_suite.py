"""What every secondary tier must do, as tests to inherit.

Subclass ``TierSuite``, implement ``make_tier`` and run pytest; twenty lines test a new tier against the
contract of ``kvtier.tiering.base``. A tier that needs a server starts it in a fixture of its own.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.base import JobId, OffloadKey, ReqContext, make_offload_key
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.errors import TierError
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


def key_of(number: int) -> OffloadKey:
    """Return the key of block ``number``."""
    return make_offload_key(number.to_bytes(32, "big"), 0)


def content_of(number: int, row_bytes: int = ROW_BYTES) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    """Return the bytes that block ``number`` must have, different for each block, shape (row_bytes,)."""
    return np.random.default_rng(number).integers(-128, 128, row_bytes, dtype=np.int8)


class TierDriver:
    """Submits jobs to a tier and collects their results, as the manager would.

    Args:
        tier: the tier.
        rows: its primary's rows.
    """

    def __init__(self, tier: SecondaryTierManager, rows: memoryview) -> None:
        self.tier = tier
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

    def store(self, numbers: list[int], slots: list[int] | None = None) -> JobResult:
        """Write the blocks' bytes into slots and store them; wait for the result."""
        slots = list(range(len(numbers))) if slots is None else slots
        for number, slot in zip(numbers, slots, strict=True):
            self.rows[slot] = content_of(number, self.rows.shape[1])
        return self.wait(self.submit(numbers, slots, is_promotion=False))

    def load(self, numbers: list[int], slots: list[int] | None = None) -> JobResult:
        """Clear slots and load the blocks into them; wait for the result."""
        slots = list(range(len(numbers))) if slots is None else slots
        self.rows[slots] = 0
        return self.wait(self.submit(numbers, slots, is_promotion=True))

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
        end_s = time.monotonic() + HANG_GUARD_S
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


class TierSuite(ABC):
    """The contract of SecondaryTierManager; inherit it and implement make_tier."""

    @abstractmethod
    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        """Build a tier over ``rows`` that holds at least 64 blocks.

        Args:
            config: the engine; another model is another namespace.
            rows: shape (16, 8192), format 'b', page-aligned.
            directory: an empty folder of the test; two tiers of one test get the same one.
        """

    @pytest.fixture
    def driver(self, tmp_path: Path) -> Iterator[TierDriver]:
        """A tier with something that drives it."""
        rows = make_rows()
        tier = self.make_tier(make_config(), rows, tmp_path)
        yield TierDriver(tier, rows)
        assert tier.shutdown(HANG_GUARD_S)

    def test_what_is_loaded_is_what_was_stored(self, driver: TierDriver) -> None:
        assert driver.store([1, 2, 3]).success
        assert driver.load([3, 1, 2], [7, 8, 9]).success
        for number, slot in ((3, 7), (1, 8), (2, 9)):
            assert np.array_equal(driver.rows[slot], content_of(number))

    def test_other_slots_are_left_alone_by_a_load(self, driver: TierDriver) -> None:
        driver.store([1])
        driver.rows[:] = 77
        driver.wait(driver.submit([1], [4], is_promotion=True))
        assert np.all(driver.rows[[0, 1, 2, 3, *range(5, NUM_ROWS)]] == 77)

    def test_lookup_finds_what_was_stored_and_nothing_else(self, driver: TierDriver) -> None:
        driver.store([1, 2])
        assert driver.lookup(1)
        assert driver.lookup(2)
        assert not driver.lookup(3)

    def test_a_second_store_of_a_held_block_is_reported_too(self, driver: TierDriver) -> None:
        driver.store([1, 2])
        assert driver.store([1, 2]).success
        assert driver.load([1, 2]).success

    def test_a_load_of_an_absent_block_fails_that_block_only(self, driver: TierDriver) -> None:
        driver.store([1, 3])
        result = driver.load([1, 2, 3])
        assert not result.success
        assert result.successful_keys == frozenset({key_of(1), key_of(3)})
        assert np.array_equal(driver.rows[2], content_of(3))

    def test_every_one_of_many_jobs_is_reported_once(self, driver: TierDriver) -> None:
        for number in range(NUM_ROWS):
            driver.rows[number] = content_of(number)
        jobs = [driver.submit([number], [number], is_promotion=False) for number in range(NUM_ROWS)]
        jobs += [driver.submit([number], [number], is_promotion=False) for number in range(NUM_ROWS)]
        driver.poll_until(lambda: len(driver.results) == len(jobs))
        driver.poll()
        assert sorted(driver.results) == jobs
        assert all(result.success for result in driver.results.values())

    def test_an_empty_job_is_reported(self, driver: TierDriver) -> None:
        assert driver.wait(driver.submit([], [], is_promotion=False)).success
        assert driver.wait(driver.submit([], [], is_promotion=True)).success

    def test_jobs_open_at_shutdown_are_reported_once(self, driver: TierDriver) -> None:
        jobs = [driver.submit([number], [number], is_promotion=False) for number in range(NUM_ROWS)]
        assert driver.tier.shutdown(HANG_GUARD_S)
        driver.poll()
        assert sorted(driver.results) == jobs
        driver.poll()

    def test_a_submit_after_shutdown_is_a_raise_or_a_failed_job(self, driver: TierDriver) -> None:
        assert driver.tier.shutdown(HANG_GUARD_S)
        try:
            job_id = driver.submit([1], [0], is_promotion=True)
        except TierError as error:
            assert str(error)
        else:
            driver.poll()
            assert not driver.results[job_id].success

    def test_shutdown_is_idempotent(self, driver: TierDriver) -> None:
        assert driver.tier.shutdown(HANG_GUARD_S)
        assert driver.tier.shutdown(HANG_GUARD_S)

    def test_after_a_reset_nothing_old_is_found(self, driver: TierDriver) -> None:
        driver.store([1, 2])
        driver.tier.reset(bytes(range(16)))
        assert not driver.lookup(1)
        result = driver.load([1])
        assert not result.success
        assert not result.successful_keys

    def test_after_a_reset_the_tier_goes_on(self, driver: TierDriver) -> None:
        driver.store([1])
        driver.tier.reset(bytes(range(16)))
        assert driver.store([2, 1]).success
        assert driver.lookup(1)
        assert driver.load([1, 2]).success
        assert np.array_equal(driver.rows[0], content_of(1))

    def test_jobs_under_way_at_a_reset_are_reported_once_and_leave_nothing_behind(
        self, driver: TierDriver
    ) -> None:
        driver.store([1])
        jobs = [driver.submit([2], [3], is_promotion=False), driver.submit([1], [4], is_promotion=True)]
        driver.tier.reset(bytes(range(16)))
        for job_id in jobs:
            driver.wait(job_id)
        driver.poll()
        assert sorted(driver.results)[-2:] == jobs
        assert not driver.lookup(2)
        assert not driver.load([2]).success

    def test_loads_and_stores_of_the_same_blocks_at_once_bring_only_right_bytes(
        self, driver: TierDriver
    ) -> None:
        numbers = list(range(NUM_ROWS // 2))
        driver.store(numbers)
        loads = {}
        for number in numbers:
            slot = NUM_ROWS // 2 + number
            driver.submit([number], [number], is_promotion=False)
            loads[driver.submit([number], [slot], is_promotion=True)] = (number, slot)
        for job_id, (number, slot) in loads.items():
            assert driver.wait(job_id).success
            assert np.array_equal(driver.rows[slot], content_of(number))

    def test_a_finished_request_cancels_no_job(self, driver: TierDriver) -> None:
        driver.store([1])
        job_id = driver.submit([1], [5], is_promotion=True)
        driver.tier.request_finished(driver.request)
        assert driver.wait(job_id).success
        assert np.array_equal(driver.rows[5], content_of(1))

    def test_another_model_sees_nothing(self, driver: TierDriver, tmp_path: Path) -> None:
        driver.store([1])
        rows = make_rows()
        other = TierDriver(self.make_tier(make_config("model-b"), rows, tmp_path), rows)
        assert not other.lookup(1)
        assert not other.load([1]).success
        assert other.tier.shutdown(HANG_GUARD_S)
        assert driver.load([1]).success

    def test_touch_of_known_and_unknown_keys_is_harmless(self, driver: TierDriver) -> None:
        driver.store([1])
        driver.tier.touch([key_of(1), key_of(2)], driver.request)
        assert driver.lookup(1)
        assert not driver.lookup(2)

    def test_a_drained_tier_has_reported_everything_at_the_next_poll(self, driver: TierDriver) -> None:
        jobs = [driver.submit([number], [number], is_promotion=False) for number in range(8)]
        assert driver.tier.drain(HANG_GUARD_S)
        driver.poll()
        assert sorted(driver.results) == jobs

    def test_stats_are_numbers(self, driver: TierDriver) -> None:
        driver.store([1])
        assert all(isinstance(value, int | float) for value in driver.tier.stats().values())
