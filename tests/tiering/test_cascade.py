"""Each tier gets what it wants when it wants it, head first, as far as its budget reaches, and the rest later."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from tests.cpu.policies.learner import NOTING_LEARNER, NotingLearner
from tests.tiering.drivers import ALWAYS, ROOMY, example_of, make_example, make_faulty_driver

from kvtier.base import ReqContext
from kvtier.testing.tier_suite import key_of, make_config
from kvtier.testing.tiering_driver import ROW_BYTES, TieringDriver
from kvtier.tiering.admission import TierAdmission
from kvtier.tiering.base import CascadeMode, SecondaryTierManager, TierSettings
from kvtier.tiering.cascade import MAX_REMEMBERED_BLOCKS, REMEMBERED_PER_BLOCK, plan_num_remembered
from kvtier.tiering.example import ExampleSecondaryTier

BUDGET = 2**30
WRITE_BACK = TierSettings(max_in_flight_store_bytes=BUDGET, cascade=CascadeMode.ON_EVICT)
TWICE = TierSettings(max_in_flight_store_bytes=BUDGET, store_threshold=2)
LIKELY = TierSettings(
    max_in_flight_store_bytes=BUDGET, admission=TierAdmission(min_reuse_probability=0.3, horizon_s=200.0)
)
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
    assert driver.manager.stats()["tier.0.faulty.pending_blocks"] == 2
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
    assert driver.manager.stats()["tier.0.faulty.pending_blocks"] == 0
    tier.faults.delay_ratio = 0.0
    driver.store([1])
    for _ in range(4):
        driver.step()
    driver.evict_everything()
    assert driver.search_until_known([1], ReqContext("a")) == 1


def teach(driver: TieringDriver, num_requests: int = 1_000) -> None:
    """Let prompts of two blocks come again once, after 50 s, and longer ones never."""
    for number in range(1_000, 1_000 + num_requests):
        driver.clock.advance(1.0)
        prompts = [(10 * number, 10 * number + 1), tuple(range(10 * number + 2, 10 * number + 8))]
        if number >= 1_050:
            prompts.append((10 * (number - 50), 10 * (number - 50) + 1))
        for prompt in prompts:
            tell(driver, prompt)


def tell(driver: TieringDriver, prompt: Iterable[int], req_id: str = "taught") -> ReqContext:
    """A request arrives."""
    request = ReqContext(req_id)
    driver.manager.note_request([[key_of(number) for number in prompt]], request)
    return request


@pytest.mark.parametrize("cache_policy", ["lru", "hazard"])
def test_a_tier_gets_what_is_likely_to_come_back_and_not_the_rest(cache_policy: str) -> None:
    driver = make_chain(LIKELY, cache_policy=cache_policy)
    teach(driver)
    driver.store([0, 1], tell(driver, [0, 1]))
    driver.store(range(2, 8), tell(driver, range(2, 8)))
    driver.step()
    assert numbers_in(driver) == [0, 1]
    # What the tier does not want LRU holds all the same; hazard refuses it too.
    stats = driver.manager.stats()
    num_refused = 6 if cache_policy == "lru" else 0
    assert (stats["tier.0.example.pending_blocks"], stats["tier.0.example.refused_blocks"]) == (
        0,
        num_refused,
    )


def test_before_anything_is_learned_a_tier_gets_every_block() -> None:
    driver = make_chain(LIKELY)
    driver.store(range(8), tell(driver, range(8)))
    assert numbers_in(driver) == list(range(8))


def test_a_policy_of_the_primary_that_remembers_enough_is_asked_again_with_each_use() -> None:
    def make_tiers(view: memoryview) -> list[SecondaryTierManager]:
        return [ExampleSecondaryTier(make_config(), view, max_blocks=16, settings=LIKELY)]

    driver = TieringDriver(16, make_tiers, cache_policy=NOTING_LEARNER)
    expected = NotingLearner.made[-1].expected
    expected |= {key_of(1): 0.9, key_of(2): 0.1, key_of(3): 0.1}
    driver.store([1, 2, 3])
    driver.step()
    assert numbers_in(driver) == [1]
    expected[key_of(2)] = 0.5
    driver.step()
    assert numbers_in(driver) == [1]
    driver.manager.touch([key_of(2), key_of(3)], ReqContext("a"))
    driver.step()
    assert numbers_in(driver) == [1, 2]


@pytest.mark.parametrize("cascade", list(CascadeMode))
def test_a_block_that_leaves_was_given_refused_or_declined(cascade: CascadeMode) -> None:
    driver = make_chain(replace(LIKELY, cascade=cascade))
    teach(driver)
    for number in range(40):
        prompt = range(8 * number, 8 * number + (2 if number % 2 else 6))
        driver.store(prompt, tell(driver, prompt))
        driver.step()
    stats = driver.manager.stats()
    num_left = stats["primary.evicted"]
    gone = [n for n in range(320) if not driver.primary.is_ready(key_of(n))]
    num_below = sum(key_of(number) in example_of(driver).blocks for number in gone)
    num_refused = stats["tier.0.example.refused_by_admission"]
    num_stored = 40 * 8 // 2
    assert num_left == num_stored - 16
    assert num_below + num_refused + lost(driver) == num_left
    assert num_below > 0
    assert num_refused > 0


def test_a_reset_forgets_what_was_learned_and_what_was_refused() -> None:
    driver = make_chain(LIKELY)
    teach(driver)
    driver.store(range(2, 8), tell(driver, range(2, 8)))
    driver.reset()
    assert driver.manager.stats()["tier.0.example.refused_blocks"] == 0
    driver.store(range(2, 8), tell(driver, range(2, 8)))
    assert numbers_in(driver) == list(range(2, 8))


def test_what_the_policy_of_the_primary_refuses_passes_through_it_to_a_tier_that_wants_it() -> None:
    driver = make_chain(ROOMY, cache_policy=NOTING_LEARNER)
    NotingLearner.made[-1].refused = {key_of(2), key_of(3)}
    driver.store([1, 2, 3])
    assert numbers_in(driver) == [1, 2, 3]


def test_what_the_policy_refuses_and_no_tier_wants_is_not_stored() -> None:
    driver = make_chain(TWICE, cache_policy=NOTING_LEARNER)
    NotingLearner.made[-1].refused = {key_of(2), key_of(3)}
    driver.store([1, 2, 3])
    assert not driver.primary.is_ready(key_of(2))
    driver.manager.touch([key_of(2)], ReqContext("a"))
    driver.manager.touch([key_of(2)], ReqContext("b"))
    driver.store([2, 3])
    assert numbers_in(driver) == [2]


def test_without_tiers_the_policy_of_the_primary_has_the_last_word() -> None:
    driver = make_chain(cache_policy=NOTING_LEARNER)
    NotingLearner.made[-1].refused = {key_of(2)}
    driver.store([1, 2])
    assert not driver.primary.is_ready(key_of(2))


def remembered(*tiers: tuple[int | None, TierSettings]) -> int:
    """Return what is remembered for tiers of these capacities and settings."""
    made = make_chain(*(settings for _, settings in tiers)).tiers
    for tier, (capacity_blocks, _) in zip(made, tiers, strict=True):
        tier.capacity_blocks = capacity_blocks
    return plan_num_remembered(made)


def test_as_many_blocks_are_remembered_as_the_largest_tier_that_asks_needs_and_no_more_than_a_bound() -> None:
    assert remembered((100, LIKELY), (200, LIKELY), (10**6, ROOMY)) == 200 * REMEMBERED_PER_BLOCK
    assert remembered((10**9, LIKELY)) == MAX_REMEMBERED_BLOCKS
    assert remembered((100, LIKELY), (None, LIKELY)) == MAX_REMEMBERED_BLOCKS
    assert remembered((100, ROOMY)) == remembered() == 0


def test_the_blocks_of_an_answer_are_judged_as_those_of_its_prompt_while_the_request_runs() -> None:
    driver = make_chain(LIKELY)
    teach(driver)
    request = tell(driver, range(2, 8), "running")
    driver.store(range(2, 10), request)
    driver.step()
    assert numbers_in(driver) == []
    driver.manager.request_finished(request)
    driver.store([10, 11], request)
    assert numbers_in(driver) == [10, 11]
