"""Each tier gets what it wants when it wants it, head first, as far as its budget reaches, and the rest later."""

import pytest
from tests.tiering.drivers import ALWAYS, ROOMY, example_of, make_example, make_faulty_driver

from kvtier.base import ReqContext
from kvtier.testing.tier_suite import key_of
from kvtier.testing.tiering_driver import ROW_BYTES, TieringDriver
from kvtier.tiering.base import CascadeMode, TierSettings

BUDGET = 2**30
WRITE_BACK = TierSettings(max_in_flight_store_bytes=BUDGET, cascade=CascadeMode.ON_EVICT)
TWICE = TierSettings(max_in_flight_store_bytes=BUDGET, store_threshold=2)
FILL = TierSettings(max_in_flight_store_bytes=BUDGET, fill=True)


def make_chain(*settings: TierSettings, num_blocks: int = 16, cache_policy: str = "lru") -> TieringDriver:
    """A manager over example tiers with these settings, fastest first."""
    return TieringDriver(
        num_blocks, lambda view: [make_example(view, own) for own in settings], cache_policy=cache_policy
    )


def numbers_in(driver: TieringDriver, position: int = 0) -> list[int]:
    """The blocks in a tier, those stored first in front."""
    keys = list(example_of(driver, position).blocks)
    return [number for key in keys for number in range(200) if key_of(number) == key]


def lost(driver: TieringDriver, position: int = 0) -> float:
    """How many blocks a tier never got."""
    return driver.manager.stats()[f"tier.{position}.example.declined_cascades"]


def test_each_tier_gets_what_fits_its_own_budget_head_first() -> None:
    narrow = TierSettings(max_in_flight_store_bytes=3 * ROW_BYTES)
    driver = make_chain(ROOMY, narrow)
    driver.store(range(5))
    assert numbers_in(driver, 0) == [0, 1, 2, 3, 4]
    assert numbers_in(driver, 1) == [0, 1, 2]
    driver.step()
    driver.step()
    assert numbers_in(driver, 1) == [0, 1, 2, 3, 4]


def test_a_tier_that_is_left_out_gets_the_backlog_when_it_is_back() -> None:
    driver, tier = make_faulty_driver(num_blocks=16)
    tier.faults.fail_ratio = ALWAYS
    for number in range(5):
        driver.store([number])
        driver.step()
    driver.store([7, 8])
    assert driver.manager.stats()["tier.0.faulty.due_blocks"] == 2
    tier.faults.fail_ratio = 0.0
    driver.clock.advance(30.0)
    for _ in range(3):
        driver.step()
    driver.evict_everything()
    assert driver.search_until_known([7, 8], ReqContext("a")) == 2


def test_draining_gives_every_tier_what_is_due() -> None:
    driver = make_chain(TierSettings(max_in_flight_store_bytes=ROW_BYTES))
    driver.store(range(9))
    assert driver.manager.drain(10.0)
    assert numbers_in(driver) == list(range(9))


def test_write_back_writes_nothing_while_there_is_room() -> None:
    driver = make_chain(WRITE_BACK)
    driver.store(range(14))
    driver.step()
    assert numbers_in(driver) == []


@pytest.mark.parametrize("cache_policy", ["lru", "arc"])
def test_write_back_writes_what_would_leave_next_before_it_leaves(cache_policy: str) -> None:
    driver = make_chain(WRITE_BACK, cache_policy=cache_policy)
    for number in range(16):
        driver.store([number])
        driver.step()
    written = numbers_in(driver)
    assert len(written) == 2
    driver.step()
    store = driver.begin_store([100, 101], ReqContext("b"))
    assert store is not None
    driver.end_store(store)
    assert lost(driver) == 0
    assert not any(driver.primary.is_ready(key_of(number)) for number in written)
    assert driver.search_until_known(written, ReqContext("a")) == 2


def test_with_write_back_an_evicted_block_is_below_or_counted() -> None:
    driver = make_chain(WRITE_BACK)
    for number in range(0, 60, 3):
        driver.store([number, number + 1, number + 2])
        driver.step()
    num_evicted = driver.manager.stats()["primary.evicted"]
    assert num_evicted > 40
    gone = [number for number in range(60) if not driver.primary.is_ready(key_of(number))]
    num_below = len(set(gone) & set(numbers_in(driver)))
    assert num_below + lost(driver) == num_evicted == len(gone)


def test_write_back_waits_for_nobody() -> None:
    driver, tier = make_faulty_driver(num_blocks=8, settings=WRITE_BACK)
    tier.faults.delay_ratio = ALWAYS
    driver.store(range(8))
    driver.step()
    store = driver.begin_store(range(100, 107), ReqContext("b"))
    assert store is not None
    assert driver.manager.stats()["tier.0.faulty.declined_cascades"] == 7


def test_a_promoted_block_keeps_its_copy_below_and_is_not_due_again() -> None:
    driver = make_chain(WRITE_BACK, num_blocks=8)
    driver.store([1])
    driver.store(range(50, 57))
    driver.step()
    driver.evict_everything()
    request = ReqContext("a")
    assert driver.search_until_known([1], request) == 1
    driver.load([1], request)
    jobs = list(example_of(driver).completed_jobs)
    driver.evict_everything()
    assert 1 in numbers_in(driver)
    assert list(example_of(driver).completed_jobs) == jobs


def test_a_tier_with_a_threshold_gets_blocks_on_their_second_use() -> None:
    driver = make_chain(TWICE)
    driver.store([1, 2], ReqContext("a"))
    driver.step()
    assert numbers_in(driver) == []
    driver.manager.touch([key_of(1)], ReqContext("b"))
    driver.step()
    assert numbers_in(driver) == [1]


def test_a_request_uses_a_block_once_however_often_it_touches_it() -> None:
    driver, request = make_chain(TWICE), ReqContext("a")
    driver.manager.touch([key_of(1)], request)
    driver.store([1], request)
    driver.manager.touch([key_of(1)], request)
    driver.step()
    assert numbers_in(driver) == []


def test_uses_count_while_a_block_is_away() -> None:
    driver = make_chain(TWICE)
    driver.manager.touch([key_of(1)], ReqContext("a"))
    driver.store([1], ReqContext("b"))
    assert numbers_in(driver) == [1]


def test_a_hit_in_a_slow_tier_is_copied_into_the_faster_ones_that_want_it() -> None:
    driver = make_chain(FILL, ROOMY, FILL, ROOMY)
    driver.store([1])
    for position in (0, 1, 2):
        example_of(driver, position).clear()
    driver.evict_everything()
    assert driver.search_until_known([1], ReqContext("a")) == 1
    driver.step()
    assert [numbers_in(driver, position) for position in range(4)] == [[1], [], [1], [1]]


def test_a_tier_below_the_one_that_had_the_block_is_not_filled() -> None:
    driver = make_chain(FILL, ROOMY, FILL)
    driver.store([1])
    for position in (0, 2):
        example_of(driver, position).clear()
    driver.evict_everything()
    assert driver.search_until_known([1], ReqContext("a")) == 1
    driver.step()
    assert [numbers_in(driver, position) for position in range(3)] == [[1], [1], []]


def test_nothing_due_survives_a_reset() -> None:
    driver, tier = make_faulty_driver(
        num_blocks=16, settings=TierSettings(max_in_flight_store_bytes=ROW_BYTES)
    )
    tier.faults.delay_ratio = ALWAYS
    driver.store(range(5))
    driver.reset()
    assert driver.manager.stats()["tier.0.faulty.due_blocks"] == 0
    tier.faults.delay_ratio = 0.0
    driver.store([1])
    for _ in range(4):
        driver.step()
    driver.evict_everything()
    assert driver.search_until_known([1], ReqContext("a")) == 1
