"""The example tier keeps the contract, evicts its oldest and refuses nonsense."""

from pathlib import Path

import numpy as np
import pytest
from tests.cpu.policies.learner import NOTING_LEARNER, NotingLearner

from kvtier.base import JobId, OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.cpu.policies import CACHE_POLICIES
from kvtier.errors import ConfigError
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import TierDriver, TierSuite, key_of, make_config, make_rows
from kvtier.tiering.base import JobMetadata, SecondaryTierManager, TierSettings
from kvtier.tiering.example import ExampleSecondaryTier


class TestExampleTier(TierSuite):
    """The contract, with jobs that end at once."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> ExampleSecondaryTier:
        return ExampleSecondaryTier(config, rows)

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> bool:
        return False  # private memory


class TestAsynchronousExampleTier(TierSuite):
    """The contract, with jobs that the next poll carries out."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> ExampleSecondaryTier:
        return ExampleSecondaryTier(config, rows, simulate_async=True)

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> bool:
        return False  # private memory


@pytest.mark.parametrize("simulate_async", [False, True])
def test_the_first_poll_after_a_submit_reports_the_job(simulate_async: bool) -> None:
    rows = make_rows()
    tier = ExampleSecondaryTier(make_config(), rows, simulate_async=simulate_async)
    job = JobMetadata(JobId(1), (key_of(1),), np.array([0]), is_promotion=False, req_context=ReqContext("r"))

    tier.submit_store(job)

    assert tier.get_num_blocks() == (0 if simulate_async else 1)
    assert [(result.job_id, result.success) for result in tier.get_finished()] == [(1, True)]
    assert tier.get_num_blocks() == 1
    assert not tier.get_finished()


def test_a_full_tier_evicts_its_oldest() -> None:
    rows = make_rows()
    tier = ExampleSecondaryTier(make_config(), rows, max_blocks=2)
    driver = TierDriver(tier, rows)
    driver.store([1, 2])
    driver.load([1])
    driver.store([3])
    assert list(tier.blocks) == [key_of(1), key_of(3)]
    assert tier.get_num_blocks() == 2


def test_a_touch_makes_the_first_key_the_most_recent() -> None:
    rows = make_rows()
    tier = ExampleSecondaryTier(make_config(), rows)
    driver = TierDriver(tier, rows)
    driver.store([1, 2, 3])
    tier.touch([key_of(1), key_of(2)], driver.request)
    assert list(tier.blocks) == [key_of(3), key_of(2), key_of(1)]


def test_a_tier_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_blocks=0"):
        ExampleSecondaryTier(make_config(), make_rows(), max_blocks=0)


def make_ordered(policy: str, max_blocks: int = 4) -> tuple[ExampleSecondaryTier, TierDriver]:
    """Return a tier that evicts by a policy of host memory."""
    rows = make_rows()
    settings = TierSettings(policy=policy, emit_events=True)
    tier = ExampleSecondaryTier(
        make_config(), rows, max_blocks=max_blocks, settings=settings, clock=ManualClock()
    )
    return tier, TierDriver(tier, rows)


@pytest.mark.parametrize("policy", [name for name in CACHE_POLICIES.names() if " " not in name])
def test_under_any_policy_a_full_tier_holds_as_much_as_it_may_and_keeps_what_a_job_names(policy: str) -> None:
    tier, driver = make_ordered(policy)
    for number in range(0, 40, 2):
        assert driver.store([number, number + 1]).success
        assert driver.load([number, number + 1]).success
        assert driver.store([number]).success
    assert tier.get_num_blocks() == 4
    assert len(tier.drain_evicted() or ()) == 36


def test_the_policy_decides_who_leaves() -> None:
    survivors = {}
    for policy in ("lru", "arc"):
        tier, driver = make_ordered(policy)
        driver.store([1, 2])
        tier.touch([key_of(1), key_of(2)], driver.request)
        for number in range(10, 20):
            driver.store([number])
        survivors[policy] = [number for number in (1, 2) if driver.lookup(number)]
    assert survivors == {"lru": [], "arc": [1, 2]}


def test_a_policy_that_learns_is_told_of_requests_and_their_ends() -> None:
    tier, driver = make_ordered(NOTING_LEARNER)
    tier.note_request([[key_of(1)]], ReqContext("r", {"a": 1}))
    tier.request_finished(ReqContext("r"))
    driver.store([1])
    learner = NotingLearner.made[-1]
    assert [(request.req_id, request.params) for request in learner.requests] == [("r", {"a": 1})]
    assert learner.finished == ["r"]


def test_a_job_larger_than_the_tier_keeps_its_last_blocks() -> None:
    tier, driver = make_ordered("lru", max_blocks=2)
    assert driver.store([1, 2, 3]).success
    assert list(tier.blocks) == [key_of(2), key_of(3)]


def test_after_a_reset_the_policy_orders_nothing() -> None:
    tier, driver = make_ordered("lru", max_blocks=2)
    driver.store([1, 2])
    tier.reset(bytes(16))
    driver.store([3, 4, 5])
    assert list(tier.blocks) == [key_of(4), key_of(5)]
