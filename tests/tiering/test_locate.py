"""Where blocks are is said without moving any, and a tier that nobody wants is measured without anybody waiting."""

from tests.tiering.drivers import NotingTier, make_driver, make_example, make_noting_driver

from kvtier.base import ReqContext
from kvtier.cost_model import LinkRate
from kvtier.locations import IN_HOST, BlockPlace, LocatedRun, TierLoad
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import key_of
from kvtier.testing.tiering_driver import ROW_BYTES, TieringDriver
from kvtier.testing.wrapped_tier import SlowTier
from kvtier.tiering.load_times import MAX_PROBE_ROWS

ASKING = ReqContext("asking")


class Clock:
    """A clock that tiers can be built on before the driver has one."""

    def __init__(self) -> None:
        self.reading: ManualClock = ManualClock()

    def __call__(self) -> float:
        return self.reading()


def make_slow_driver(num_blocks: int = 4, block_s: float = 1.0) -> tuple[TieringDriver, SlowTier]:
    """A manager over a tier that takes so long for a block."""
    clock = Clock()
    driver = TieringDriver(
        num_blocks, lambda view: [SlowTier(make_example(view), clock, block_s)], lookup_deadline_s=1000.0
    )
    clock.reading = driver.clock
    (tier,) = driver.tiers
    assert isinstance(tier, SlowTier)
    return driver, tier


def located(driver: TieringDriver, numbers: list[int]) -> LocatedRun:
    """Return where blocks are, which must be known."""
    run = driver.locate(numbers, ASKING)
    assert run is not None
    return run


def measure(driver: TieringDriver, numbers: list[int], request: ReqContext = ASKING) -> None:
    """Load blocks from their tier, second by second."""
    while driver.search(numbers, request) is None:
        driver.step()
        driver.clock.advance(1.0)
    driver.load(numbers, request)
    driver.manager.request_finished(request)


def test_a_run_ends_before_the_first_block_that_is_nowhere() -> None:
    driver = make_driver()
    driver.store([1, 2])
    driver.step()

    assert located(driver, [1, 2, 3, 1]).places == [IN_HOST, IN_HOST]


def test_blocks_that_have_left_the_host_are_in_the_first_tier_that_has_them() -> None:
    driver = make_driver(num_tiers=2)
    driver.store([1, 2])
    driver.evict_everything()
    driver.store([3])

    assert located(driver, [3, 1, 2]).places == [IN_HOST, BlockPlace(0), BlockPlace(0)]


def test_asking_promotes_nothing() -> None:
    driver, tier = make_slow_driver()
    driver.store([1, 2])
    driver.evict_everything()

    located(driver, [1, 2])
    driver.step()

    assert tier.num_loaded_blocks == 0
    assert driver.manager.stats()["waiting_requests"] == 0


def test_what_is_being_promoted_is_coming_from_its_tier() -> None:
    driver, _ = make_slow_driver()
    driver.store([1, 2])
    driver.evict_everything()
    driver.search([1], ReqContext("other"))
    driver.step()

    assert located(driver, [1, 2]).places == [BlockPlace(0, is_coming=True), BlockPlace(0)]


def test_what_the_device_is_storing_is_as_good_as_in_the_host() -> None:
    driver = make_driver()
    driver.begin_store([1], ReqContext("store"))

    assert located(driver, [1]).places == [IN_HOST]


def test_a_tier_s_load_is_described_once_it_has_been_measured() -> None:
    driver, _ = make_slow_driver(block_s=2.0)
    driver.store([1, 2])
    driver.evict_everything()
    assert located(driver, [1]).tiers == [TierLoad("slow", ROW_BYTES)]

    measure(driver, [1, 2])
    driver.evict_everything()

    assert located(driver, [1]).tiers == [TierLoad("slow", ROW_BYTES, LinkRate(ROW_BYTES / 2.0))]
    assert driver.manager.stats()["tier.0.slow.load_bytes_per_s"] == ROW_BYTES / 2.0


def test_a_request_waits_for_a_tier_that_cannot_tell_and_is_answered_then() -> None:
    driver, _ = make_noting_driver()
    (tier,) = driver.tiers
    assert isinstance(tier, NotingTier)
    driver.store([1])
    driver.evict_everything()
    tier.is_asking = True
    assert driver.locate([1], ASKING) is None
    driver.step()
    assert driver.manager.is_waiting(ASKING)
    assert driver.locate([1], ASKING) is None

    tier.is_asking = False
    tier.answered = [key_of(1)]
    driver.step()

    assert located(driver, [1]).places == [BlockPlace(0)]


def test_a_request_past_its_deadline_finds_what_is_in_the_host() -> None:
    driver, _ = make_noting_driver()
    (tier,) = driver.tiers
    assert isinstance(tier, NotingTier)
    driver.store([1, 2])
    driver.evict_everything()
    tier.is_asking = True
    driver.store([3])
    assert driver.locate([3, 1], ASKING) is None
    driver.step()
    driver.clock.advance(1000.0)

    assert located(driver, [3, 1]).places == [IN_HOST]


def test_the_end_of_a_wait_lets_go_of_what_was_held() -> None:
    driver, _ = make_noting_driver()
    (tier,) = driver.tiers
    assert isinstance(tier, NotingTier)
    driver.store([1])
    driver.store([2])
    tier.is_asking = True
    assert driver.locate([1, 9], ASKING) is None

    driver.manager.locator.end_wait(ASKING)

    assert driver.manager.stats()["waiting_requests"] == 0
    driver.manager.check()


def test_blocks_brought_up_to_measure_a_tier_keep_nobody_waiting() -> None:
    driver, tier = make_slow_driver()
    driver.store([1, 2])
    driver.evict_everything()

    driver.probe(0, [1, 2])
    driver.step()

    assert tier.num_loaded_blocks == 2
    assert driver.manager.stats()["waiting_requests"] == 0
    assert driver.manager.stats()["tier.0.slow.probe_blocks"] == 2
    driver.clock.advance(2.0)
    driver.step()
    assert located(driver, [1]).tiers[0].rate is None  # in host memory: no tier is asked
    assert driver.manager.stats()["tier.0.slow.load_bytes_per_s"] == ROW_BYTES


def test_a_tier_is_not_measured_again_before_it_has_rested() -> None:
    driver, tier = make_slow_driver()
    driver.store([1, 2])
    driver.evict_everything()
    driver.probe(0, [1])
    driver.step()
    driver.clock.advance(1.0)
    driver.step()

    driver.clock.advance(8.9)
    driver.probe(0, [2])
    driver.step()
    assert tier.num_loaded_blocks == 1
    driver.clock.advance(0.2)
    driver.probe(0, [2])
    driver.step()

    assert tier.num_loaded_blocks == 2


def test_only_a_few_blocks_are_brought_up_to_measure() -> None:
    driver, tier = make_slow_driver(num_blocks=32)
    numbers = list(range(20))
    driver.store(numbers)
    driver.evict_everything()

    driver.probe(0, numbers)
    driver.step()

    assert tier.num_loaded_blocks == MAX_PROBE_ROWS


def test_blocks_that_came_up_meanwhile_or_are_gone_are_left_out_of_a_measurement() -> None:
    driver, tier = make_slow_driver()
    driver.store([1, 2])
    driver.evict_everything()
    driver.store([1])

    driver.probe(0, [1, 2, 99])
    driver.step()

    assert tier.num_loaded_blocks == 1


def test_requests_that_begin_in_one_step_measure_a_tier_once() -> None:
    driver, tier = make_slow_driver(num_blocks=32)
    numbers = list(range(20))
    driver.store(numbers)
    driver.evict_everything()

    driver.probe(0, numbers[:10])
    driver.probe(0, numbers[10:])
    driver.step()

    assert tier.num_loaded_blocks == MAX_PROBE_ROWS


def test_a_tier_that_somebody_loads_from_in_this_step_is_measured_by_that() -> None:
    driver, tier = make_slow_driver()
    driver.store([1, 2])
    driver.evict_everything()
    driver.search([1], ReqContext("other"))

    driver.probe(0, [2])
    driver.step()

    assert tier.num_loaded_blocks == 1


def test_a_tier_that_has_recovered_is_believed_after_one_measurement() -> None:
    driver, tier = make_slow_driver(block_s=100.0)
    driver.store([1, 2])
    driver.evict_everything()
    measure(driver, [1, 2])
    driver.evict_everything()
    tier.block_s = 1.0
    driver.clock.advance(10_000.0)

    driver.probe(0, [1, 2])
    driver.step()
    driver.clock.advance(1.0)
    driver.step()

    assert driver.manager.stats()["tier.0.slow.load_bytes_per_s"] == ROW_BYTES
