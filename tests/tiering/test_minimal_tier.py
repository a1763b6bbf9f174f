"""A tier with the five methods that must be written and nothing else serves stores, loads, evictions and a reset."""

from collections.abc import Iterable

import numpy as np
import pytest

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import ModelIdentity, OffloadingConfig
from kvtier.testing.tier_suite import make_config
from kvtier.testing.tiering_driver import TieringDriver
from kvtier.tiering.base import CascadeMode, JobMetadata, JobResult, SecondaryTierManager
from kvtier.tiering.factory import create_secondary_tier


class MinimalTier(SecondaryTierManager):
    """Keeps rows in a dictionary; its constructor knows of no settings."""

    def __init__(self, config: OffloadingConfig, primary_kv_view: memoryview, max_blocks: int = 100) -> None:
        del config
        self.max_blocks = max_blocks
        self.rows = np.asarray(primary_kv_view)
        self.kept: dict[OffloadKey, bytes] = {}
        self.ended: list[JobResult] = []

    @staticmethod
    def get_tier_type() -> str:
        return "minimal"

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return key in self.kept

    def submit_store(self, job: JobMetadata) -> None:
        for key, slot in zip(job.keys, job.block_ids, strict=True):
            self.kept[key] = self.rows[slot].tobytes()
            if len(self.kept) > self.max_blocks:
                del self.kept[next(iter(self.kept))]
        self.ended.append(JobResult(job.job_id, success=True))

    def submit_load(self, job: JobMetadata) -> None:
        for key, slot in zip(job.keys, job.block_ids, strict=True):
            self.rows[slot] = np.frombuffer(self.kept[key], dtype=np.int8)
        self.ended.append(JobResult(job.job_id, success=True))

    def get_finished(self) -> Iterable[JobResult]:
        ended, self.ended = self.ended, []
        return ended


NAME = f"{MinimalTier.__module__}:{MinimalTier.__qualname__}"


def make_driver(**settings: object) -> TieringDriver:
    config = make_config()
    return TieringDriver(8, lambda rows: [create_secondary_tier({"type": NAME} | settings, rows, config)])


def test_what_host_memory_evicts_comes_back_from_it_until_it_evicts_too() -> None:
    driver = make_driver(max_blocks=2)
    for number in (1, 2, 3):  # the tier's budget is one block at a time
        driver.store([number])
        driver.step()
    driver.evict_everything()

    request = ReqContext("a")
    assert driver.search_until_known([2, 3], request) == 2
    driver.load([2, 3], request)
    assert driver.search_until_known([1], ReqContext("b")) == 0


def test_the_settings_that_every_tier_has_hold_for_it() -> None:
    driver = make_driver(cascade="on_evict", required=True)
    driver.store([1])
    driver.step()
    (tier,) = driver.tiers
    assert isinstance(tier, MinimalTier)

    assert tier.settings.cascade is CascadeMode.ON_EVICT
    assert tier.kept == {}


def test_a_load_under_way_keeps_its_slot_over_a_reset_until_the_tier_has_reported_it() -> None:
    driver = make_driver()
    (tier,) = driver.tiers
    assert isinstance(tier, MinimalTier)
    driver.store([1])
    driver.evict_everything()
    assert driver.search([1], ReqContext("a")) is None
    driver.step()
    reports, tier.ended = tier.ended, []  # it goes on writing

    driver.reset()
    for _ in range(3):
        driver.step()
    assert driver.manager.stats()["primary.free_blocks"] == 7

    tier.ended = reports
    driver.step()
    driver.step()
    assert driver.manager.stats()["primary.free_blocks"] == 8


def test_a_reset_leaves_it_out_for_good_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    driver = make_driver()
    driver.store([1, 2])
    driver.evict_everything()
    assert driver.search([1], ReqContext("a")) is None
    driver.step()  # its load is under way, and its slot in use, while the reset comes

    driver.reset()
    driver.reset()

    driver.step()
    assert driver.manager.stats()["primary.free_blocks"] == 8
    assert driver.manager.stats()["tier.0.minimal.out_of_service"] == 1
    assert driver.search_until_known([1], ReqContext("b")) == 0
    driver.store([1])
    driver.evict_everything()
    assert driver.search_until_known([1], ReqContext("c")) == 0
    lines = [one.getMessage() for one in caplog.records if "reset" in one.getMessage()]
    assert len(lines) == 1
    assert "'minimal' has no reset: it is left out until the engine restarts" in lines[0]
    driver.manager.shutdown()


def test_other_weights_are_a_reset_to_it() -> None:
    driver = make_driver()
    driver.store([1])
    driver.manager.switch_model(ModelIdentity("other"))

    driver.evict_everything()
    assert driver.search_until_known([1], ReqContext("a")) == 0


def test_it_serves_a_manager_that_is_given_it_without_a_factory() -> None:
    driver = TieringDriver(4, lambda rows: [MinimalTier(make_config(), rows)])
    driver.store([1])
    driver.evict_everything()

    request = ReqContext("a")
    assert driver.search_until_known([1], request) == 1
    driver.load([1], request)
