"""Jobs of a tier are joined that were submitted at about the same time, in one namespace, to a store that allows it."""

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from tests.tiering.kit.test_threaded_tier import DictStore

from kvtier.base import OffloadKey
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import HANG_GUARD_S, TierDriver, make_config, make_rows
from kvtier.tiering.base import TierSettings
from kvtier.tiering.kit.backend import rows_of
from kvtier.tiering.kit.io_pool import MAX_JOINED_BYTES, TransferOutcome, plan_max_joined_blocks
from kvtier.tiering.kit.threaded_tier import SAME_DEADLINE_RATIO, ThreadedTier, ThreadOptions

TIMEOUT_S = 10.0


class HeldStore(DictStore):
    """A store whose calls wait until they are let through, and that notes how many blocks each had."""

    def __init__(self, memory: memoryview) -> None:
        super().__init__(rows_of(memory), {})
        self.calls: list[tuple[str, float | None, int]] = []
        self.end_s: float | None = None
        self.may_go = threading.Event()
        self.has_entered = threading.Semaphore(0)

    def with_deadline(self, end_s: float) -> "HeldStore":
        bound = object.__new__(HeldStore)
        bound.__dict__ = self.__dict__ | {"end_s": end_s}
        return bound

    def store(self, namespace: str, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        self.calls.append((namespace, self.end_s, len(keys)))
        self.has_entered.release()
        assert self.may_go.wait(HANG_GUARD_S)
        return super().store(namespace, keys, slots)


class HeldTier(ThreadedTier[str]):
    """A tier of one thread over such a store."""

    def __init__(self, rows: memoryview, *, joins_jobs: bool = True) -> None:
        self.clock = ManualClock()
        self.held = HeldStore(rows)
        super().__init__(
            make_config(),
            rows,
            TierSettings(job_timeout_s=TIMEOUT_S),
            block_store=self.held,
            options=ThreadOptions(1, max_task_blocks=64, positive_ttl_s=0.0, joins_jobs=joins_jobs),
            clock=self.clock,
        )

    @staticmethod
    def get_tier_type() -> str:
        return "held"


def calls_of(tier: HeldTier, rows: memoryview, between: Callable[[], object]) -> list[int]:
    """Submit four small stores while the thread is busy, ``between`` the first two and the others; return the calls."""
    driver = TierDriver(tier, rows)
    jobs = [driver.submit([0], [0], is_promotion=False)]
    assert tier.held.has_entered.acquire(timeout=HANG_GUARD_S)
    jobs += [driver.submit([number], [number], is_promotion=False) for number in (1, 2)]
    between()
    jobs += [driver.submit([number], [number], is_promotion=False) for number in (3, 4)]
    tier.held.may_go.set()
    assert all(driver.wait(job_id).success for job_id in jobs)
    return [num_blocks for _, _, num_blocks in tier.held.calls[1:]]


@pytest.fixture
def rows() -> memoryview:
    return make_rows()


@pytest.fixture
def tier(rows: memoryview) -> Iterator[HeldTier]:
    tier = HeldTier(rows)
    yield tier
    assert tier.shutdown(HANG_GUARD_S)


def test_jobs_of_a_moment_are_one_call(tier: HeldTier, rows: memoryview) -> None:
    assert calls_of(tier, rows, lambda: tier.clock.advance(SAME_DEADLINE_RATIO * TIMEOUT_S)) == [4]


def test_no_job_gets_the_deadline_of_a_much_earlier_one(tier: HeldTier, rows: memoryview) -> None:
    later_s = 2 * SAME_DEADLINE_RATIO * TIMEOUT_S
    assert calls_of(tier, rows, lambda: tier.clock.advance(later_s)) == [2, 2]
    ends_s = [end_s for _, end_s, _ in tier.held.calls]
    assert ends_s == pytest.approx([TIMEOUT_S, TIMEOUT_S, TIMEOUT_S + later_s])


def test_jobs_before_and_after_a_reset_share_no_call(tier: HeldTier, rows: memoryview) -> None:
    assert calls_of(tier, rows, lambda: tier.reset(bytes(16))) == [2, 2]
    first, _, last = (namespace for namespace, _, _ in tier.held.calls)
    assert first != last


def test_a_store_that_was_not_made_for_it_gets_one_job_in_a_call(rows: memoryview) -> None:
    tier = HeldTier(rows, joins_jobs=False)
    assert calls_of(tier, rows, lambda: None) == [1, 1, 1, 1]
    assert tier.shutdown(HANG_GUARD_S)


@pytest.mark.parametrize("row_bytes", [1, 4096, 65_536, MAX_JOINED_BYTES, 2**30])
def test_a_call_has_a_bounded_number_of_bytes_and_at_least_a_block(row_bytes: int) -> None:
    num_blocks = plan_max_joined_blocks(row_bytes)
    assert num_blocks == 1 or num_blocks * row_bytes <= MAX_JOINED_BYTES
    assert num_blocks >= 1
