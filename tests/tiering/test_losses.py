"""What is lost on its way to a tier is counted in blocks, said in the log with a remedy, and returned by a drain."""

import logging
from collections.abc import Iterable
from dataclasses import replace

import pytest
from tests.tiering.drivers import ALWAYS, ROOMY, make_driver, make_faulty_driver

from kvtier.base import ReqContext
from kvtier.misses import MissCause
from kvtier.operating import DrainResult
from kvtier.testing.tier_suite import key_of, make_config
from kvtier.testing.tiering_driver import ROW_BYTES, TieringDriver
from kvtier.tiering.base import CascadeMode, JobMetadata, JobResult, TierSettings
from kvtier.tiering.departures import WARNING_PERIOD_S
from kvtier.tiering.example import ExampleSecondaryTier

NARROW = TierSettings(max_in_flight_store_bytes=ROW_BYTES)
REQUEST = ReqContext("request")


class FullTier(ExampleSecondaryTier):
    """Is well, and has no room for any block."""

    def __init__(self, view: memoryview, settings: TierSettings) -> None:
        super().__init__(make_config(), view, settings=settings)
        self.declined: list[JobResult] = []
        self.is_busy = False

    def submit_store(self, job: JobMetadata) -> None:
        self.declined.append(JobResult(job.job_id, success=False, is_fault=False))

    def drain(self, timeout_s: float) -> bool:
        return not self.is_busy

    def get_finished(self) -> Iterable[JobResult]:
        if self.is_busy:
            return []
        reports, self.declined = self.declined, []
        return reports


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "kvtier.tiering.departures" and record.levelno == logging.WARNING
    ]


def reason_of(driver: TieringDriver, number: int) -> tuple[MissCause, str, object]:
    miss = driver.manager.explain(key_of(number), REQUEST)
    assert miss is not None
    return miss.cause, miss.tier, miss.detail.get("reason")


def test_a_drain_says_how_many_blocks_left_before_the_tier_had_them_and_a_warning_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver, tier = make_faulty_driver(4, NARROW)
    tier.faults.delay_ratio = ALWAYS
    driver.store(range(4))
    driver.store(range(4, 7))
    tier.faults.delay_ratio = 0.0
    driver.step()

    (line,) = warnings_in(caplog)
    assert line.startswith("3 computed blocks will not reach a tier, 3 since the start")
    assert "cpu_bytes_to_use" in line
    assert "max_in_flight_store_bytes" in line
    assert '"must_write"' in line
    assert reason_of(driver, 1) == (MissCause.NOT_STORED, "faulty", "declined")

    drained = driver.manager.drain(10.0)
    assert not drained
    assert drained == DrainResult(has_ended=True, num_lost_blocks=3)
    assert driver.manager.drain(10.0), "a drain counts from the last one"


def test_what_was_stored_is_in_host_memory_or_in_the_tier_or_lost() -> None:
    driver, tier = make_faulty_driver(4, NARROW)
    tier.faults.delay_ratio = 0.5
    num_stored = 0
    for number in range(0, 60, 3):
        store = driver.begin_store(range(number, number + 3), REQUEST)
        if store is not None:
            driver.end_store(store)
            num_stored += 3
        if number % 2:
            driver.step()
    tier.faults.delay_ratio = 0.0
    drained = driver.manager.drain(10.0)
    assert len(tier.inner.blocks) + drained.num_lost_blocks == num_stored  # type: ignore[attr-defined]  # example


def test_a_drain_that_has_not_ended_leaves_the_count_to_the_next() -> None:
    driver = TieringDriver(4, lambda view: [FullTier(view, NARROW)])
    (tier,) = driver.tiers
    assert isinstance(tier, FullTier)
    tier.is_busy = True
    driver.store(range(4))
    driver.store(range(4, 7))
    assert driver.manager.drain(0.0) == DrainResult(has_ended=False)
    tier.is_busy = False
    assert driver.manager.drain(10.0) == DrainResult(num_lost_blocks=7)


def test_a_write_that_fails_is_a_lost_block_with_its_own_remedy(caplog: pytest.LogCaptureFixture) -> None:
    driver, tier = make_faulty_driver(8)
    tier.faults.fail_ratio = ALWAYS
    driver.store([0, 1])
    driver.step()
    driver.step()
    tier.faults.fail_ratio = 0.0
    tier.faults.refuse_ratio = ALWAYS
    driver.store([2])
    driver.step()
    assert driver.manager.drain(10.0).num_lost_blocks == 3
    assert "failed to write 2: the lines about this tier in the log name the error" in warnings_in(caplog)[0]
    tier.faults.refuse_ratio = 0.0
    driver.evict_everything()
    assert reason_of(driver, 0) == reason_of(driver, 2) == (MissCause.NOT_STORED, "faulty", "job_failed")


@pytest.mark.parametrize("cascade", [CascadeMode.ON_STORE, CascadeMode.MUST_WRITE])
def test_a_tier_without_room_loses_blocks_at_once(
    caplog: pytest.LogCaptureFixture, cascade: CascadeMode
) -> None:
    driver = TieringDriver(8, lambda view: [FullTier(view, replace(ROOMY, cascade=cascade))])
    driver.store([0, 1])
    driver.step()
    driver.step()
    assert driver.manager.drain(10.0).num_lost_blocks == 2
    assert "did not take 2: it has no room, so give it more capacity" in warnings_in(caplog)[0]
    driver.evict_everything()
    assert reason_of(driver, 0) == (MissCause.NOT_STORED, "example", "no_room")


def test_blocks_that_host_memory_had_no_room_for_are_lost_when_their_request_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = make_driver()
    driver.store([0])
    driver.manager.on_unstored([key_of(number) for number in range(3)], REQUEST)
    driver.step()
    assert "host memory had no room for 2: raise cpu_bytes_to_use" in warnings_in(caplog)[0]
    assert driver.manager.drain(10.0).num_lost_blocks == 2


def test_there_is_one_warning_a_minute_and_the_last_when_the_engine_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = make_driver()
    numbers = iter(range(1000))
    for _ in range(int(3 * WARNING_PERIOD_S) + 1):
        driver.manager.on_unstored([key_of(next(numbers))], REQUEST)
        driver.step()
        driver.clock.advance(1.0)
    told = [int(line.split()[0]) for line in warnings_in(caplog)]
    assert told == [1, 60, 60, 60]
    driver.manager.on_unstored([key_of(next(numbers))], REQUEST)
    driver.step()
    driver.manager.shutdown()
    assert [int(line.split()[0]) for line in warnings_in(caplog)][4:] == [1]


def test_what_a_tier_had_not_got_when_the_engine_ended_is_said(caplog: pytest.LogCaptureFixture) -> None:
    driver, tier = make_faulty_driver(8, NARROW)
    driver.store([0])
    for _ in range(2):
        driver.step()
    tier.faults.fail_ratio = ALWAYS
    for number in range(1, 6):
        driver.store([number])
        driver.step()
    driver.store([6, 7])
    driver.manager.shutdown()
    (*_, last) = warnings_in(caplog)
    assert "7 since the start" in last


def test_write_back_loses_no_block_that_waits_for_its_eviction() -> None:
    driver, tier = make_faulty_driver(8, replace(NARROW, cascade=CascadeMode.ON_EVICT))
    driver.store(range(6))
    assert driver.manager.drain(10.0)
    tier.faults.delay_ratio = ALWAYS
    driver.store(range(6, 12))
    assert driver.manager.stats()["tier.0.faulty.lost_blocks"] == 4
    tier.faults.delay_ratio = 0.0
    assert driver.manager.drain(10.0).num_lost_blocks == 4
