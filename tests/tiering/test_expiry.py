"""Time to live and quotas in host memory with tiers behind it: nothing leaks, and what is over is fetched again."""

import random

import pytest
from tests.tiering.drivers import make_example

from kvtier.base import ReqContext
from kvtier.cpu.policies import CACHE_POLICIES
from kvtier.misses import MissCause
from kvtier.tenants import parse_tenants
from kvtier.testing.tier_suite import key_of
from kvtier.testing.tiering_driver import ROW_BYTES, TieringDriver

TTL_S = 10.0


def make(num_blocks: int = 8, policy: str = "lru", quota_blocks: int | None = None) -> TieringDriver:
    tenants = None
    if quota_blocks is not None:
        tenants = parse_tenants({"*": {"quota_bytes": quota_blocks * ROW_BYTES}}, "", ("host",))
    return TieringDriver(
        num_blocks, lambda view: [make_example(view)], cache_policy=policy, ttl_s=TTL_S, tenants=tenants
    )


def test_what_is_over_in_host_memory_comes_back_from_a_tier() -> None:
    driver, request = make(), ReqContext("a")
    driver.store([1, 2])
    driver.step()
    driver.clock.advance(TTL_S)
    driver.step()
    assert driver.manager.stats()["primary.held_blocks"] == 0
    assert driver.search_until_known([1, 2], request) == 2
    driver.load([1, 2], request)
    driver.manager.request_finished(request)


def test_what_a_waiting_request_has_found_stays_until_it_is_loaded() -> None:
    driver, request = make(), ReqContext("a")
    driver.store([1, 2])
    assert driver.search([1, 2], request) == 2
    driver.clock.advance(TTL_S)
    driver.manager.note_request([[key_of(1)]], ReqContext("b"))
    driver.load([1, 2], request)
    driver.manager.request_finished(request)
    driver.step()
    driver.step()  # the tier has reported its stores of them, which pinned them too
    assert driver.manager.stats()["primary.held_blocks"] == 0


def test_a_block_in_use_beyond_its_time_is_no_hit_and_no_promotion_until_its_load_has_ended() -> None:
    driver, loading, other = make(), ReqContext("a"), ReqContext("b")
    driver.store([1])
    driver.step()
    assert driver.search([1], loading) == 1
    driver.manager.prepare_load([key_of(1)], loading)
    driver.clock.advance(TTL_S)
    driver.step()
    assert driver.manager.lookup(key_of(1), other) is False
    miss = driver.manager.explain(key_of(1), other)
    assert miss is not None
    assert miss.cause is MissCause.EXPIRED
    driver.manager.request_finished(other)
    driver.manager.complete_load([key_of(1)], loading)
    driver.manager.request_finished(loading)
    driver.step()
    assert driver.search_until_known([1], other) == 1
    driver.load([1], other)
    driver.manager.request_finished(other)
    driver.manager.check()


def test_without_a_copy_behind_it_the_cause_is_expired() -> None:
    driver = TieringDriver(8, lambda _: [], ttl_s=TTL_S)
    driver.store([1])
    driver.clock.advance(TTL_S)
    driver.step()
    miss = driver.manager.explain(key_of(1), ReqContext("a"))
    assert miss is not None
    assert miss.cause is MissCause.EXPIRED


@pytest.mark.parametrize("policy", CACHE_POLICIES.names())
def test_random_traffic_with_a_lifetime_and_a_quota_breaks_no_law(policy: str) -> None:
    random_ = random.Random(7)
    driver = make(num_blocks=4, policy=policy, quota_blocks=2)
    for number in range(150):
        numbers = random_.sample(range(8), random_.randrange(1, 4))
        request = ReqContext(f"r{number}")
        driver.manager.note_request([[key_of(one) for one in numbers]], request)
        found = driver.search_until_known(numbers, request)
        if found:
            driver.load(numbers[:found], request)
        store = driver.begin_store(numbers, request)
        if random_.random() < 0.5:
            driver.clock.advance(random_.choice((1.0, TTL_S)))
        if store is not None:
            driver.end_store(store, success=random_.random() < 0.8)
        driver.manager.request_finished(request)
        driver.step()
    driver.clock.advance(2 * TTL_S)
    driver.step()
    driver.step()
    driver.manager.check()
    assert driver.manager.stats()["primary.held_blocks"] == 0
