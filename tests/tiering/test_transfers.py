"""Every job is settled once: failures, lies, budgets and resets cost hits, never a slot or a byte."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from tests.tiering.drivers import (
    ALWAYS,
    example_of,
    make_driver,
    make_example,
    make_faulty,
    make_faulty_driver,
)

from kvtier.base import OffloadKey, ReqContext
from kvtier.connector.load_or_compute import PromptCosts, plan_load_cut
from kvtier.cost_model import LinkRate, PrefillRate
from kvtier.testing.faults import FaultyTier
from kvtier.testing.tier_suite import key_of, make_config
from kvtier.testing.tiering_driver import ROW_BYTES, TieringDriver
from kvtier.tiering.base import FAILURES_TO_OPEN, JobResult, TierSettings
from kvtier.tiering.breaker import BACKOFF_S, OPEN_S, BreakerState
from kvtier.tiering.example import ExampleSecondaryTier


class TellingTier(ExampleSecondaryTier):
    """Says how long its jobs took."""

    took_s: float | None = None

    def get_finished(self) -> Iterable[JobResult]:
        return [replace(result, took_s=self.took_s) for result in super().get_finished()]


def state_of(driver: TieringDriver) -> BreakerState:
    """The state of the first tier's breaker."""
    return driver.manager._tiers[0].breaker.state


def test_a_failed_promotion_is_a_miss_and_is_left_alone_for_a_while() -> None:
    driver, tier = make_faulty_driver()
    driver.store([1])
    driver.step()
    driver.evict_everything()
    tier.faults.fail_ratio = ALWAYS
    request = ReqContext("a")
    assert driver.search_until_known([1], request, max_steps=4) == 0
    num_submitted = tier.num_submitted
    for _ in range(5):
        assert driver.search([1], request) == 0
        driver.step()
    assert tier.num_submitted == num_submitted
    tier.faults.fail_ratio = 0.0
    driver.clock.advance(BACKOFF_S)
    driver.step()
    assert driver.search_until_known([1], request) == 1


def test_a_partly_failed_promotion_keeps_what_arrived() -> None:
    driver, tier = make_faulty_driver()
    driver.store([1, 2, 3])
    driver.step()
    driver.evict_everything()
    assert isinstance(tier.inner, ExampleSecondaryTier)
    del tier.inner.blocks[key_of(2)]
    request = ReqContext("a")
    tier.faults.claims_everything = True
    assert driver.search_until_known([1, 2, 3], request) == 1
    assert driver.search([1, 3], ReqContext("b")) == 2


def test_a_refused_submit_is_a_failed_job() -> None:
    driver, tier = make_faulty_driver()
    driver.store([1])
    driver.step()
    driver.evict_everything()
    tier.faults.refuse_ratio = ALWAYS
    assert driver.search_until_known([1], ReqContext("a"), max_steps=3) == 0
    driver.store([2])
    assert driver.search([2], ReqContext("b")) == 1


def test_unknown_and_repeated_results_are_counted_and_change_nothing() -> None:
    driver, tier = make_faulty_driver()
    tier.faults.unknown_ratio = tier.faults.repeat_ratio = ALWAYS
    driver.store([1, 2])
    for _ in range(3):
        driver.step()
    driver.evict_everything()
    assert driver.search_until_known([1, 2], ReqContext("a")) == 2
    assert driver.manager.stats()["unknown_results"] >= 4


def test_a_tier_whose_poll_raises_is_out_of_service_and_the_rest_goes_on() -> None:
    driver, tier = make_faulty_driver()
    driver.store([1])
    driver.step()
    driver.evict_everything()
    driver.search([1], ReqContext("a"))
    driver.step()
    tier.faults.poll_raise_ratio = ALWAYS
    driver.step()
    driver.store([2, 3])
    assert driver.search([2, 3], ReqContext("b")) == 2
    assert driver.manager.stats()["tier.0.faulty.out_of_service"] == 1
    assert driver.search([1], ReqContext("c")) == 0


def test_slots_of_a_tier_out_of_service_come_back_only_when_it_is_gone() -> None:
    driver, tier = make_faulty_driver(num_blocks=2)
    driver.store([1])
    driver.step()
    driver.evict_everything()
    tier.faults.delay_ratio = ALWAYS
    driver.search([1], ReqContext("a"))
    driver.step()
    tier.faults.refuses_to_end = True
    tier.faults.poll_raise_ratio = ALWAYS
    for _ in range(3):
        driver.step()
    assert driver.begin_store([8, 9], ReqContext("b")) is None
    tier.faults.refuses_to_end = False
    driver.step()
    assert driver.begin_store([8, 9], ReqContext("b")) is not None


def test_a_block_that_is_gone_does_not_speak_against_its_tier() -> None:
    driver = TieringDriver(16, lambda view: [make_example(view)])
    tier = example_of(driver)
    for number in range(FAILURES_TO_OPEN + 1):
        driver.store([number])
    driver.evict_everything()
    for number in range(FAILURES_TO_OPEN):
        request = ReqContext(str(number))
        driver.search([number], request)
        del tier.blocks[key_of(number)]
        assert driver.search_until_known([number], request) in (0, 1)
    assert state_of(driver) is BreakerState.CLOSED
    assert driver.search_until_known([FAILURES_TO_OPEN], ReqContext("last")) == 1


def test_a_report_in_parts_is_believed_in_parts() -> None:
    driver, tier = make_faulty_driver()
    driver.store([1, 2])
    driver.step()
    driver.evict_everything()
    tier.faults.lose_ratio = ALWAYS
    tier.faults.claims_success = True
    assert driver.search_until_known([1, 2], ReqContext("a")) <= 1
    ready = [number for number in (1, 2) if driver.primary.is_ready(key_of(number))]
    assert len(ready) == 1
    driver.load(ready, ReqContext("b"))


def test_a_tier_that_hangs_costs_only_the_first_requests_their_deadline() -> None:
    driver, tier = make_faulty_driver(num_blocks=16)
    numbers = list(range(FAILURES_TO_OPEN + 1))
    driver.store(numbers)
    driver.step()
    driver.evict_everything()
    tier.faults.delay_ratio = ALWAYS
    for number in numbers[:-1]:
        request = ReqContext(str(number))
        assert driver.search([number], request) is None
        driver.step()
        driver.clock.advance(5.0)
        assert driver.search([number], request) == 0
    assert driver.search([numbers[-1]], ReqContext("last")) == 0


def test_while_a_tier_is_probed_other_requests_are_not_led_to_wait() -> None:
    driver, tier = make_faulty_driver(num_blocks=16)
    numbers = list(range(FAILURES_TO_OPEN + 2))
    driver.store(numbers)
    driver.step()
    driver.evict_everything()
    tier.faults.fail_ratio = ALWAYS
    for number in numbers[:FAILURES_TO_OPEN]:
        driver.search_until_known([number], ReqContext(str(number)))
    tier.faults.fail_ratio = 0.0
    driver.clock.advance(OPEN_S)
    driver.step()
    probe, other = ReqContext("probe"), ReqContext("other")
    assert driver.search([numbers[-1]], probe) is None
    assert driver.search([numbers[-2]], other) == 0
    assert driver.search_until_known([numbers[-1]], probe) == 1
    assert driver.search_until_known([numbers[-2]], other) == 1


def test_failing_loads_open_the_breaker_and_a_probe_closes_it() -> None:
    driver, tier = make_faulty_driver(num_blocks=16)
    numbers = list(range(FAILURES_TO_OPEN + 2))
    driver.store(numbers)
    driver.step()
    driver.evict_everything()
    tier.faults.fail_ratio = ALWAYS
    for number in numbers[:FAILURES_TO_OPEN]:
        driver.search_until_known([number], ReqContext(str(number)))
    assert state_of(driver) is BreakerState.OPEN
    num_submitted = tier.num_submitted
    assert driver.search([numbers[-1]], ReqContext("left out")) == 0
    driver.store([100])
    assert tier.num_submitted == num_submitted
    tier.faults.fail_ratio = 0.0
    driver.clock.advance(OPEN_S)
    driver.step()
    assert driver.search_until_known([numbers[-1]], ReqContext("probe")) == 1
    assert state_of(driver) is BreakerState.CLOSED


def test_the_next_tier_is_tried_when_the_first_cannot_deliver() -> None:
    driver = TieringDriver(4, lambda view: [make_faulty(view), make_example(view)])
    driver.store([1])
    driver.evict_everything()
    broken = driver.tiers[0]
    assert isinstance(broken, FaultyTier)
    broken.faults.fail_ratio = ALWAYS
    # The first attempt fails and is a miss; the key is then left alone in the first tier, so the second has it.
    assert driver.search_until_known([1], ReqContext("a")) == 1


def test_only_what_became_ready_is_cascaded() -> None:
    driver, request = make_driver(num_blocks=4), ReqContext("a")
    driver.store([1])
    driver.step()
    example_of(driver).clear()
    store = driver.begin_store([2], request)
    assert store is not None
    driver.manager.complete_store([key_of(1), key_of(2), key_of(99)], request)
    assert list(example_of(driver).blocks) == [key_of(2)]


def test_a_callers_complete_store_cannot_end_a_promotion() -> None:
    driver, tier = make_faulty_driver()
    driver.store([1])
    driver.evict_everything()
    tier.faults.delay_ratio = ALWAYS
    driver.search([1], ReqContext("a"))
    driver.step()
    driver.manager.complete_store([key_of(1)], ReqContext("b"))
    driver.manager.check()
    assert driver.search([1], ReqContext("c")) is None


def test_a_failed_store_is_not_cascaded() -> None:
    driver, request = make_driver(), ReqContext("a")
    store = driver.begin_store([1], request)
    assert store is not None
    driver.end_store(store, success=False)
    assert not example_of(driver).blocks
    assert driver.search([1], request) == 0


def test_every_tier_gets_a_store() -> None:
    driver = make_driver(num_tiers=3)
    driver.store([1, 2])
    assert [example_of(driver, p).get_num_blocks() for p in range(3)] == [2, 2, 2]


def test_a_cascade_pins_its_blocks_until_it_is_reported() -> None:
    driver, tier = make_faulty_driver(num_blocks=2)
    tier.faults.delay_ratio = ALWAYS
    driver.store([1, 2])
    driver.step()
    assert driver.begin_store([3], ReqContext("b")) is None
    tier.faults.delay_ratio = 0.0
    driver.step()
    assert driver.begin_store([3], ReqContext("b")) is not None


def test_a_cascade_beyond_the_budget_waits_unpinned_and_is_given_later() -> None:
    driver, tier = make_faulty_driver(num_blocks=16, settings=TierSettings())
    tier.faults.delay_ratio = ALWAYS
    driver.store(range(5))
    assert driver.manager.stats()["tier.0.faulty.pending_blocks"] == 3
    assert driver.manager.stats()["tier.0.faulty.in_flight_store_bytes"] == 2 * ROW_BYTES
    driver.store(range(5, 8))
    assert driver.manager.stats()["tier.0.faulty.pending_blocks"] == 6
    tier.faults.delay_ratio = 0.0
    for _ in range(5):
        driver.step()
    assert driver.manager.stats()["tier.0.faulty.in_flight_store_bytes"] == 0
    assert driver.manager.stats()["tier.0.faulty.declined_cascades"] == 0
    driver.evict_everything()
    assert driver.search_until_known(range(8), ReqContext("a")) == 8


def events_of(driver: TieringDriver, medium: str) -> list[tuple[list[OffloadKey], bool]]:
    """What a medium has told since the last call."""
    return [(event.keys, event.removed) for event in driver.manager.take_events() if event.medium == medium]


def test_a_tier_tells_what_it_gains_evicts_and_has_lost_when_asked_to() -> None:
    telling = TierSettings(max_in_flight_store_bytes=2**30, emit_events=True)
    driver = TieringDriver(4, lambda view: [make_example(view, telling), make_example(view)])
    for position in (0, 1):
        example_of(driver, position).max_blocks = 2
    driver.store([1, 2])
    driver.step()
    driver.store([3])
    driver.step()
    driver.step()
    stored, evicted = ([key_of(1), key_of(2)], False), ([key_of(1)], True)
    assert events_of(driver, "example") == [stored, ([key_of(3)], False), evicted]
    assert events_of(driver, "example") == []


def test_a_tier_tells_that_a_block_it_was_thought_to_have_is_gone() -> None:
    telling = TierSettings(max_in_flight_store_bytes=2**30, emit_events=True)
    driver, tier = make_faulty_driver(settings=telling)
    driver.store([1])
    driver.evict_everything()
    assert isinstance(tier.inner, ExampleSecondaryTier)
    tier.faults.claims_everything = True
    tier.inner.clear()
    driver.manager.take_events()
    driver.search([1], ReqContext("a"))
    driver.step()
    driver.step()
    assert events_of(driver, "faulty") == [([key_of(1)], True)]


def test_a_block_that_is_evicted_before_its_cascade_is_lost_to_the_tier_and_counted() -> None:
    driver, tier = make_faulty_driver(num_blocks=16, settings=TierSettings())
    tier.faults.delay_ratio = ALWAYS
    driver.store(range(5))
    assert driver.begin_store(range(100, 114), ReqContext("b")) is not None
    assert driver.manager.stats()["tier.0.faulty.declined_cascades"] == 3
    assert driver.manager.stats()["tier.0.faulty.pending_blocks"] == 0


def test_jobs_open_at_a_reset_only_settle_their_slots() -> None:
    driver, tier = make_faulty_driver(num_blocks=4)
    driver.store([1, 2])
    driver.step()
    driver.evict_everything()
    tier.faults.delay_ratio = ALWAYS
    driver.search([1, 2], ReqContext("a"))
    driver.store([5])
    driver.step()
    driver.manager.reset()
    driver.manager.check()
    assert driver.search([1, 2, 5], ReqContext("b")) == 0
    # Key 1 is stored anew while the old promotion of it still writes into its old slot.
    driver.store([1])
    assert driver.begin_store([6], ReqContext("c")) is None
    tier.faults.delay_ratio = 0.0
    for _ in range(3):
        driver.step()
    driver.load([1], ReqContext("d"))
    assert driver.search([2], ReqContext("e")) == 0
    driver.store([7, 8, 9])


def test_a_device_store_and_a_promotion_of_one_key_across_a_reset_do_not_mix() -> None:
    driver, tier = make_faulty_driver(num_blocks=4)
    driver.store([1])
    driver.step()
    driver.evict_everything()
    tier.faults.delay_ratio = ALWAYS
    driver.search([1], ReqContext("a"))
    driver.step()
    driver.manager.reset()
    store = driver.begin_store([1], ReqContext("b"))
    assert store is not None
    driver.end_store(store)
    assert driver.search([1], ReqContext("c")) == 1
    assert driver.begin_store([2, 3, 4], ReqContext("d")) is None
    tier.faults.delay_ratio = 0.0
    driver.step()
    driver.step()
    driver.load([1], ReqContext("c"))


@pytest.mark.parametrize(
    ("told_s", "expected_s", "num_wanted"), [(0.5, 0.5, 2), (None, 100.0, 0), (500.0, 100.0, 0)]
)
def test_what_a_tier_says_of_a_load_decides_whether_it_is_loaded_from(
    told_s: float | None, expected_s: float, num_wanted: int
) -> None:
    """A load of two blocks is reported after an engine's step of 100 s; computing the two would take 1 s."""
    driver = TieringDriver(4, lambda view: [TellingTier(make_config(), view)], lookup_deadline_s=1000.0)
    (tier,) = driver.tiers
    assert isinstance(tier, TellingTier)
    tier.took_s = told_s
    driver.store([1, 2])
    driver.step()
    driver.evict_everything()
    request = ReqContext("a")
    assert driver.search([1, 2], request) is None
    driver.step()
    driver.clock.advance(100.0)
    assert driver.search([1, 2], request) == 2
    driver.load([1, 2], request)
    driver.manager.request_finished(request)
    driver.evict_everything()

    run = driver.locate([1, 2], ReqContext("b"))

    assert run is not None
    assert [load.rate for load in run.tiers] == [LinkRate(2 * ROW_BYTES / expected_s)]
    costs = PromptCosts(0, 32, block_tokens=16, block_bytes=ROW_BYTES, prefill=PrefillRate(1 / 32))
    assert plan_load_cut(run.places, run.tiers, costs) == num_wanted
