"""The tiering manager finds, promotes, waits and gives up as designed, with the right bytes throughout."""

import pytest
from tests.cpu.policies.learner import NOTING_LEARNER, NotingLearner
from tests.tiering.drivers import (
    ALWAYS,
    example_of,
    make_driver,
    make_example,
    make_faulty_driver,
    make_noting_driver,
)

from kvtier.base import OffloadKey, ReqContext
from kvtier.errors import BlockNotReadyError
from kvtier.misses import MissCause
from kvtier.testing.manager_suite import ManagerSuite
from kvtier.testing.tier_suite import key_of
from kvtier.testing.tiering_driver import ArrayRegion, TieringDriver, number_of
from kvtier.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager


class TestWithoutTiers(ManagerSuite):
    """Without secondary tiers it behaves as the plain manager."""

    def make_manager(self, num_blocks: int, *, enable_events: bool = False) -> TieringOffloadingManager:
        primary = CPUPrimaryTierOffloadingManager(
            num_blocks, ArrayRegion(num_blocks), enable_events=enable_events
        )
        return TieringOffloadingManager(primary, enable_events=enable_events)


def test_a_block_evicted_from_the_primary_comes_back_with_its_bytes() -> None:
    driver, request = make_driver(), ReqContext("a")
    driver.store([1, 2, 3])
    driver.evict_everything()
    assert driver.search([1, 2, 3], request) is None
    assert driver.search_until_known([1, 2, 3], request) == 3
    driver.load([1, 2, 3], request)


def test_promotions_of_a_request_are_one_job_in_lookup_order() -> None:
    driver, tier = make_faulty_driver()
    driver.store([1, 2, 3])
    driver.step()
    driver.evict_everything()
    num_before = tier.num_submitted
    driver.search([3, 1, 2], ReqContext("a"))
    driver.step()
    assert tier.num_submitted == num_before + 1


def test_nothing_is_submitted_before_the_end_of_the_step() -> None:
    driver, tier = make_faulty_driver()
    driver.store([1])
    driver.step()
    driver.evict_everything()
    num_before = tier.num_submitted
    assert driver.search([1], ReqContext("a")) is None
    assert driver.manager.has_pending_work()
    assert tier.num_submitted == num_before
    driver.step()
    assert tier.num_submitted == num_before + 1
    assert not driver.manager.has_pending_work()


def test_take_events_ends_the_step_for_callers_that_never_do() -> None:
    driver, request = make_driver(), ReqContext("a")
    driver.manager.prepare_store([key_of(1)], request)
    driver.manager.complete_store([key_of(1)], request)
    for _ in range(3):
        list(driver.manager.take_events())
    filler = [key_of(n) for n in range(10, 14)]
    driver.manager.prepare_store(filler, request)
    driver.manager.complete_store(filler, request, success=False)
    assert driver.manager.lookup(key_of(1), request) is None
    list(driver.manager.take_events())
    assert driver.manager.lookup(key_of(1), request) is True


def test_a_second_lookup_in_the_step_neither_promotes_twice_nor_differs() -> None:
    driver, request = make_driver(), ReqContext("a")
    driver.store([1])
    driver.evict_everything()
    num_free = driver.primary.table.slots.num_free
    assert [driver.search([1], request), driver.search([1], request)] == [None, None]
    assert driver.search([1], ReqContext("b")) is None
    assert driver.primary.table.slots.num_free == num_free - 1


def test_a_prefix_one_block_longer_than_the_primary_is_answered_with_what_fits() -> None:
    driver, request = make_driver(num_blocks=4), ReqContext("long")
    for number in range(5):
        driver.store([number])
        driver.step()
    driver.evict_everything()
    num_hits = driver.search_until_known(range(5), request, max_steps=6)
    assert num_hits == 4
    driver.load(range(num_hits), request)


def test_two_prefixes_that_do_not_fit_together_are_both_answered() -> None:
    driver = make_driver(num_blocks=4)
    first, second = ReqContext("first"), ReqContext("second")
    for number in range(8):
        driver.store([number])
        driver.step()
    driver.evict_everything()
    answers: dict[str, int] = {}
    for _ in range(10):
        for request, numbers in ((first, range(3)), (second, range(4, 7))):
            if request.req_id in answers:
                continue
            num_hits = driver.search(numbers, request)
            if num_hits is not None:
                answers[request.req_id] = num_hits
                driver.load(numbers[:num_hits], request)
        driver.step()
    assert answers["first"] == 3
    assert answers["second"] in (1, 2, 3)


def test_a_reservation_never_evicts_what_this_search_has_found() -> None:
    driver, request = make_driver(num_blocks=2), ReqContext("a")
    for number in (1, 2, 3):
        driver.store([number])
        driver.step()
    # 2 and 3 are in the primary, 1 is only below: finding 2 and 3 first leaves no room for 1.
    assert driver.search([2, 3, 1], request) == 2
    driver.load([2, 3], request)


def test_a_store_never_evicts_what_a_waiting_request_has_found() -> None:
    driver, request = make_driver(num_blocks=3), ReqContext("a")
    driver.store([1])
    driver.step()
    driver.evict_everything()
    driver.store([2])
    assert driver.search([2, 1], request) is None
    driver.step()
    assert driver.begin_store([7, 8, 9], ReqContext("other")) is None
    assert driver.search_until_known([2, 1], request) == 2
    assert driver.begin_store([7, 8], ReqContext("other")) is None
    driver.load([2, 1], request)
    assert driver.begin_store([7, 8, 9], ReqContext("other")) is not None


def test_one_waiters_abort_does_not_release_another_waiters_block() -> None:
    driver = make_driver(num_blocks=2)
    first, second = ReqContext("first"), ReqContext("second")
    driver.store([1])
    driver.evict_everything()
    assert driver.search([1], first) is None
    assert driver.search([1], second) is None
    driver.step()
    driver.manager.request_finished(first)
    assert driver.begin_store([8, 9], ReqContext("other")) is None
    assert driver.search_until_known([1], second) == 1
    driver.load([1], second)


def test_an_aborted_requests_promotion_still_ends_and_its_slot_is_not_lost() -> None:
    driver, request = make_driver(), ReqContext("a")
    driver.store([1])
    driver.evict_everything()
    driver.search([1], request)
    driver.manager.request_finished(request)
    for _ in range(3):
        driver.step()
    assert driver.search([1], ReqContext("b")) == 1


def test_the_deadline_ends_the_wait_with_what_is_ready() -> None:
    driver, tier = make_faulty_driver()
    driver.store([1, 2])
    driver.step()
    driver.evict_everything()
    driver.store([5])
    tier.faults.delay_ratio = ALWAYS
    request = ReqContext("a")
    assert driver.search([5, 1, 2], request) is None
    driver.step()
    driver.clock.advance(4.9)
    assert driver.manager.is_waiting(request)
    driver.step()
    driver.clock.advance(0.1)
    assert not driver.manager.is_waiting(request)
    assert driver.search([5, 1, 2], request) == 1
    driver.load([5], request)


def test_a_deadline_ends_no_job_and_frees_no_slot_that_is_still_written() -> None:
    driver, tier = make_faulty_driver(num_blocks=4)
    driver.store([1, 2])
    driver.step()
    driver.evict_everything()
    tier.faults.delay_ratio = ALWAYS
    request = ReqContext("a")
    driver.search([1, 2], request)
    driver.step()
    driver.clock.advance(10.0)
    driver.step()
    assert driver.search([1, 2], request) == 0
    driver.manager.request_finished(request)
    # Two slots are still the tier's: only two blocks fit, and their bytes survive the late write.
    assert driver.begin_store([10, 11, 12], ReqContext("b")) is None
    driver.store([10, 11])
    tier.faults.delay_ratio = 0.0
    driver.step()
    driver.step()
    driver.load([10, 11], ReqContext("b"))
    assert driver.search_until_known([1, 2], ReqContext("c")) == 2


def test_a_waiting_request_costs_no_search_until_something_has_changed() -> None:
    driver, tier = make_faulty_driver()
    driver.store([1])
    driver.step()
    driver.evict_everything()
    tier.faults.delay_ratio = ALWAYS
    request = ReqContext("a")
    driver.search([1], request)
    for _ in range(3):
        driver.step()
        assert driver.manager.is_waiting(request)
        assert driver.manager.lookup(key_of(1), request) is None
    tier.faults.delay_ratio = 0.0
    driver.step()
    driver.step()
    assert not driver.manager.is_waiting(request)
    assert driver.search([1], request) == 1


def test_blocks_that_came_up_for_a_request_are_known_by_their_tier_until_it_loads_them() -> None:
    driver = make_driver()
    first, second, late = ReqContext("first"), ReqContext("second"), ReqContext("late")
    driver.store([1, 2])
    driver.evict_everything()
    driver.store([3])
    for request in (first, second):
        assert driver.search([3, 1, 2], request) is None
    assert driver.manager.promoted_for(first) == {}
    for request in (first, second):
        assert driver.search_until_known([3, 1, 2], request) == 3
    assert driver.search([3, 1, 2], late) == 3
    expected = {key_of(1): "example", key_of(2): "example"}
    assert [driver.manager.promoted_for(request) for request in (first, second, late)] == [
        expected,
        expected,
        {},
    ]
    driver.load([3, 1, 2], first)
    assert driver.manager.promoted_for(first) == {}


def test_a_block_that_failed_to_come_up_wakes_who_waits_and_counts_as_stored_when_it_is() -> None:
    driver, tier = make_faulty_driver()
    request = ReqContext("a")
    driver.store([1])
    driver.step()
    driver.evict_everything()
    tier.faults.fail_ratio = ALWAYS
    assert driver.search([1], request) is None
    driver.step()
    driver.step()
    assert not driver.manager.is_waiting(request)
    driver.store([1])
    assert driver.search([1], request) == 1
    assert driver.manager.promoted_for(request) == {}


def test_host_memory_does_not_remember_a_block_that_failed_to_come_up_as_one_that_was_not_stored() -> None:
    driver, tier = make_faulty_driver()
    driver.store([1])
    driver.step()
    driver.evict_everything()
    tier.faults.fail_ratio = ALWAYS
    driver.search_until_known([1], ReqContext("a"))

    remembered = driver.primary.departed.explain(key_of(1))
    assert remembered is None or remembered.cause is MissCause.EVICTED
    missed = driver.manager.explain(key_of(1), ReqContext("b"))
    assert missed is not None
    assert (missed.cause, missed.tier) == (MissCause.LOAD_FAILED, "faulty")


def test_a_key_that_is_gone_at_prepare_load_is_an_error_and_ends_the_wait() -> None:
    driver, request = make_driver(), ReqContext("a")
    with pytest.raises(BlockNotReadyError):
        driver.manager.prepare_load([key_of(1)], request)
    driver.manager.check()


def test_touch_reaches_the_primary_and_every_tier() -> None:
    driver = make_driver(num_blocks=2, num_tiers=2)
    driver.store([1, 2])
    driver.manager.touch([key_of(1)], ReqContext("a"))
    driver.step()
    driver.store([3])
    assert driver.search([1], ReqContext("b")) == 1
    for position in range(2):
        assert list(example_of(driver, position).blocks)[-2:] == [key_of(1), key_of(3)]


def test_without_secondary_tiers_it_behaves_as_the_plain_manager() -> None:
    driver, request = TieringDriver(2, lambda view: []), ReqContext("a")
    driver.store([1, 2])
    assert driver.search([1, 2, 3], request) == 2
    driver.load([1, 2], request)
    driver.manager.touch([key_of(1), key_of(2)], request)
    driver.store([3])
    assert driver.search([1], request) == 1
    assert driver.search([2], request) == 0


def test_a_promotion_is_announced_and_passes_the_reuse_filter() -> None:
    driver = TieringDriver(4, lambda view: [make_example(view)], store_threshold=2)
    request = ReqContext("a")
    tier = example_of(driver)
    other = make_driver()
    other.store([1])
    tier.blocks[key_of(1)] = example_of(other).blocks[key_of(1)]
    assert driver.search_until_known([1], request) == 1
    stored = [key for event in driver.manager.take_events() if not event.removed for key in event.keys]
    assert stored == [key_of(1)]


def test_after_a_reset_no_old_block_is_found_anywhere() -> None:
    driver = make_driver()
    driver.store([1, 2])
    driver.step()
    driver.manager.reset()
    driver.manager.check()
    assert driver.search([1], ReqContext("a")) == 0
    driver.store([1])
    assert driver.search([1], ReqContext("b")) == 1


def test_shutdown_drains_and_ends_the_tiers_before_the_memory_once() -> None:
    driver, tier = make_noting_driver()
    view = driver.primary.get_kv_memoryview()
    driver.store([1])
    tier.notes.clear()
    driver.manager.shutdown()
    driver.manager.shutdown()
    told = [note for note in tier.notes if note != "poll"]
    assert told == ["drain", "shutdown with memory True"]
    assert driver.region.is_cleaned
    with pytest.raises(ValueError, match="released"):
        view.nbytes  # noqa: B018 - a released view refuses every use


def test_rows_stay_mapped_while_a_tier_that_did_not_end_may_touch_them() -> None:
    driver, tier = make_noting_driver()
    tier.is_gone = False
    view = driver.primary.get_kv_memoryview()
    driver.manager.shutdown()
    assert view.nbytes > 0
    assert driver.region.is_cleaned


def test_tiers_are_polled_once_a_step() -> None:
    driver, tier = make_noting_driver()
    for _ in range(2):
        tier.notes.clear()
        driver.search([1, 2], ReqContext("a"))
        driver.store([3])
        assert tier.notes == ["poll"]
        driver.step()
        assert tier.notes == ["poll", "end_step"]


def test_a_tier_with_nothing_to_do_is_not_polled() -> None:
    driver, tier = make_noting_driver()
    for _ in range(3):
        driver.step()
    tier.notes.clear()
    for _ in range(3):
        driver.step()
    assert tier.notes == ["end_step"] * 3


def test_an_answer_that_a_tier_has_fetched_wakes_who_waits_for_it() -> None:
    driver, tier = make_noting_driver()
    request = ReqContext("a")
    tier.is_asking = True
    assert driver.search([1], request) is None
    driver.step()
    assert driver.manager.is_waiting(request)
    driver.step()
    tier.is_asking = False
    tier.answered = [key_of(1)]
    assert not driver.manager.is_waiting(request)
    assert driver.search([1], request) == 0


def test_the_end_of_a_request_reaches_the_tiers() -> None:
    driver, tier = make_noting_driver()
    driver.manager.request_finished(ReqContext("a"))
    assert "finished a" in tier.notes


def test_events_are_silent_unless_they_are_wanted() -> None:
    driver = make_driver()
    quiet = TieringOffloadingManager(driver.primary, driver.tiers, enable_events=False)
    driver.store([1])
    assert list(quiet.take_events()) == []


def test_a_waiter_for_a_device_store_is_woken_by_its_end() -> None:
    driver, request = make_driver(), ReqContext("a")
    store = driver.begin_store([1], ReqContext("b"))
    assert store is not None
    assert driver.search([1], request) is None
    driver.step()
    assert driver.manager.is_waiting(request)
    driver.end_store(store)
    assert driver.search([1], request) == 1


def test_numbers_and_keys_are_inverse() -> None:
    assert number_of(OffloadKey(key_of(77))) == 77


def test_a_request_that_arrives_is_told_to_the_primary() -> None:
    driver = TieringDriver(4, lambda view: [make_example(view)], cache_policy=NOTING_LEARNER)

    driver.manager.note_request([[key_of(1)]], ReqContext("r"))
    driver.manager.request_finished(ReqContext("r"))

    learner = NotingLearner.made[-1]
    assert [request.req_id for request in learner.requests] == learner.finished == ["r"]
