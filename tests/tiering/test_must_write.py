"""Host memory keeps what a tier must get until the tier has it; what a failing tier loses is counted."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.tiering.drivers import ALWAYS, ROOMY, example_of, make_example, make_faulty_driver

from kvtier.base import ReqContext
from kvtier.testing.faults import Faults, FaultyTier
from kvtier.testing.tier_suite import key_of
from kvtier.testing.tiering_driver import ROW_BYTES, TieringDriver
from kvtier.tiering.admission import TierAdmission
from kvtier.tiering.base import CascadeMode, TierSettings
from kvtier.tiering.cascade import MAX_WRITES

MUST_WRITE = replace(ROOMY, cascade=CascadeMode.MUST_WRITE)
ONE_AT_A_TIME = replace(MUST_WRITE, max_in_flight_store_bytes=ROW_BYTES)
REQUEST = ReqContext("request")
OPEN_S = 30.0
"""Longer than the first pause of a breaker."""


def make_held(num_blocks: int = 4, settings: TierSettings = MUST_WRITE) -> tuple[TieringDriver, FaultyTier]:
    """A tier whose jobs do not end before ``let_go``."""
    driver, tier = make_faulty_driver(num_blocks, settings)
    tier.faults.delay_ratio = ALWAYS
    return driver, tier


def let_go(driver: TieringDriver, tier: FaultyTier, num_steps: int = 3) -> None:
    """Let the tier end its jobs, and the manager learn of it."""
    tier.faults.delay_ratio = 0.0
    for _ in range(num_steps):
        driver.step()


def lost_by(driver: TieringDriver) -> float:
    """Blocks that the tiers were to get and never will."""
    return sum(value for name, value in driver.manager.stats().items() if name.endswith(".lost_blocks"))


@pytest.mark.parametrize("settings", [MUST_WRITE, ONE_AT_A_TIME])
def test_a_store_finds_no_room_until_the_tier_has_what_is_kept_for_it(settings: TierSettings) -> None:
    driver, tier = make_held(settings=settings)
    driver.store([0, 1, 2, 3])
    for _ in range(3):
        driver.step()
        assert driver.begin_store([4], REQUEST) is None
        assert driver.manager.will_have_room()
    let_go(driver, tier, num_steps=8)
    assert not driver.manager.will_have_room()
    driver.store([4, 5, 6, 7])
    assert driver.manager.drain(10.0)
    assert set(tier.inner.blocks) == {key_of(number) for number in range(8)}  # type: ignore[attr-defined]  # example
    assert lost_by(driver) == 0


def test_what_is_kept_can_be_loaded_and_a_promotion_has_no_room_and_does_not_wait() -> None:
    driver, tier = make_held()
    let_go(driver, tier)
    driver.store([9])
    driver.evict_everything()
    let_go(driver, tier)
    tier.faults.delay_ratio = ALWAYS
    driver.store([0, 1, 2, 3])
    assert driver.search([0, 1], REQUEST) == 2
    driver.load([0, 1], REQUEST)
    assert driver.search([9], ReqContext("another")) == 0


def test_a_tier_without_the_mode_takes_no_room_in_host_memory() -> None:
    driver, _ = make_held(settings=replace(ROOMY, max_in_flight_store_bytes=ROW_BYTES))
    driver.store([0, 1, 2, 3])
    assert driver.begin_store([4, 5, 6], REQUEST) is not None
    assert not driver.manager.will_have_room()
    assert lost_by(driver) == 3


def test_blocks_are_kept_until_the_last_of_several_tiers_has_them() -> None:
    driver = TieringDriver(
        4,
        lambda view: [
            make_example(view, MUST_WRITE),
            FaultyTier(make_example(view, MUST_WRITE), Faults(delay_ratio=ALWAYS), random.Random(1)),
        ],
    )
    slow = driver.tiers[1]
    assert isinstance(slow, FaultyTier)
    driver.store([0, 1, 2, 3])
    driver.step()
    assert len(example_of(driver).blocks) == 4
    assert driver.begin_store([4], REQUEST) is None
    let_go(driver, slow)
    driver.store([4])


def test_a_tier_that_is_left_out_keeps_nothing_and_gets_the_rest_when_it_is_back() -> None:
    driver, tier = make_faulty_driver(num_blocks=8, settings=MUST_WRITE)
    tier.faults.fail_ratio = ALWAYS
    for number in range(8):
        driver.store([number])
        driver.step()
    assert driver.manager.stats()["tier.0.faulty.breaker_open"] == 1
    num_pending = driver.manager.stats()["tier.0.faulty.pending_blocks"]
    num_failed = lost_by(driver)
    assert num_pending + num_failed == 8
    drained = driver.manager.drain(10.0)
    assert not drained
    assert (drained.num_lost_blocks, drained.num_pending_blocks) == (num_failed, num_pending)

    driver.store([10, 11, 12, 13])  # nothing is kept for it: the least recent blocks make room
    assert lost_by(driver) > num_failed
    tier.faults.fail_ratio = 0.0
    driver.clock.advance(OPEN_S)
    for _ in range(4):
        driver.step()
    num_lost = lost_by(driver)
    assert len(tier.inner.blocks) == 12 - num_lost  # type: ignore[attr-defined]  # example
    assert driver.manager.drain(10.0).num_lost_blocks == num_lost - num_failed
    assert driver.manager.drain(10.0)


def test_a_block_that_fails_to_be_written_is_written_again_and_given_up_in_the_end() -> None:
    driver, tier = make_faulty_driver(num_blocks=8, settings=MUST_WRITE)
    driver.store([7])
    driver.step()
    tier.faults.fail_ratio = ALWAYS
    driver.store([0])
    for _ in range(MAX_WRITES - 1):
        assert lost_by(driver) == 0
        driver.step()
    tier.faults.fail_ratio = 0.0
    for _ in range(3):
        driver.step()
    assert (lost_by(driver), len(tier.inner.blocks)) == (0, 2)  # type: ignore[attr-defined]  # example

    tier.faults.fail_ratio = ALWAYS
    driver.store([1])
    for _ in range(MAX_WRITES + 1):
        driver.step()
    assert lost_by(driver) == 1
    assert not driver.manager.will_have_room()


def test_a_submit_that_raises_is_a_failed_write_and_tried_again() -> None:
    driver, tier = make_faulty_driver(num_blocks=8, settings=MUST_WRITE)
    tier.faults.refuse_ratio = ALWAYS
    driver.store([0])
    assert lost_by(driver) == 0
    assert driver.manager.will_have_room()
    tier.faults.refuse_ratio = 0.0
    for _ in range(2):
        driver.step()
    assert driver.manager.drain(10.0)
    assert set(tier.inner.blocks) == {key_of(0)}  # type: ignore[attr-defined]  # example


def test_a_tier_that_goes_out_of_service_releases_what_it_kept() -> None:
    driver, tier = make_held()
    driver.store([0, 1, 2, 3])
    tier.faults.poll_raise_ratio = ALWAYS
    for _ in range(3):
        driver.step()
    assert not driver.manager.will_have_room()
    driver.store([4, 5, 6, 7])
    assert lost_by(driver) == 4
    assert driver.manager.drain(10.0).num_lost_blocks == 4


@pytest.mark.parametrize(
    "forget",
    [
        lambda driver: driver.reset(),
        lambda driver: driver.manager.purge(None),
        lambda driver: driver.manager.drop([key_of(number) for number in range(4)]),
    ],
    ids=["reset", "purge", "drop"],
)
def test_what_an_operator_forgets_is_kept_no_longer_and_is_not_lost(
    forget: Callable[[TieringDriver], object],
) -> None:
    driver, tier = make_held(num_blocks=6, settings=ONE_AT_A_TIME)
    driver.store([0, 1, 2, 3])
    forget(driver)
    driver.manager.check()
    let_go(driver, tier, num_steps=6)
    assert lost_by(driver) == 0
    assert not driver.manager.will_have_room()
    driver.store([4, 5, 6, 7, 8, 9])


def test_a_block_whose_time_is_over_is_written_and_then_leaves() -> None:
    driver = TieringDriver(4, lambda view: [make_example(view, ONE_AT_A_TIME)], ttl_s=5.0)
    driver.store([0, 1, 2])
    driver.clock.advance(6.0)
    for _ in range(6):
        driver.step()
    assert len(example_of(driver).blocks) == 3
    assert driver.manager.stats()["primary.held_blocks"] == 0
    assert lost_by(driver) == 0


def test_only_what_the_tier_wants_is_kept() -> None:
    choosy = replace(MUST_WRITE, store_threshold=2)
    driver, tier = make_held(settings=choosy)
    driver.store([0, 1, 2, 3])
    assert driver.begin_store([4], REQUEST) is not None
    driver.manager.touch([key_of(1), key_of(2)], ReqContext("again"))
    let_go(driver, tier)
    assert set(tier.inner.blocks) == {key_of(1), key_of(2)}  # type: ignore[attr-defined]  # example

    unlikely = replace(MUST_WRITE, admission=TierAdmission(min_reuse_probability=0.9, horizon_s=10.0))
    driver, tier = make_held(settings=unlikely)
    for seed in range(50):
        driver.manager.note_request([[key_of(100 + seed)]], ReqContext(str(seed)))
        driver.clock.advance(20.0)
    driver.store([0, 1, 2, 3])
    let_go(driver, tier)
    driver.store([4, 5])


def test_what_a_faster_tier_is_filled_with_is_kept_for_it_too() -> None:
    driver = TieringDriver(
        4,
        lambda view: [
            FaultyTier(make_example(view, replace(MUST_WRITE, fill=True)), Faults(), random.Random(1)),
            make_example(view),
        ],
    )
    near = driver.tiers[0]
    assert isinstance(near, FaultyTier)
    driver.store([0])
    driver.step()
    driver.evict_everything()
    near.inner.blocks.clear()  # type: ignore[attr-defined]  # example
    assert driver.search(range(1), REQUEST) is None
    driver.step()
    near.faults.delay_ratio = ALWAYS
    assert driver.search_until_known([0], REQUEST) == 1
    driver.manager.request_finished(REQUEST)
    driver.step()
    assert driver.begin_store([1, 2, 3, 4], REQUEST) is None
    let_go(driver, near)
    assert key_of(0) in near.inner.blocks  # type: ignore[attr-defined]  # example
    driver.store([1, 2, 3, 4])
