"""Of sixty-four short requests at once a damaged block, an abort and a deadline cost only the request they meet."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiering.fs.slots import stored_blocks

from kvtier.base import ReqContext
from kvtier.testing.tier_driver import HANG_GUARD_S, make_config
from kvtier.testing.tier_suite import key_of
from kvtier.testing.tiering_driver import ROW_BYTES, TieringDriver
from kvtier.tiering.base import TierSettings
from kvtier.tiering.fs import FSTier

NUM_REQUESTS, REQUEST_BLOCKS = 64, 2
NUM_BLOCKS = NUM_REQUESTS * REQUEST_BLOCKS
MANY_STEPS = 1_000_000
"""A guard: a thread answers what is looked up after a reset while steps go on."""

PREFIXES = [list(range(start, start + REQUEST_BLOCKS)) for start in range(0, NUM_BLOCKS, REQUEST_BLOCKS)]


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[TieringDriver]:
    """A manager over an fs tier that holds every prefix; host memory holds none."""
    settings = TierSettings(max_in_flight_store_bytes=NUM_BLOCKS * ROW_BYTES)
    driver = TieringDriver(
        NUM_BLOCKS,
        lambda view: [
            FSTier(
                make_config(row_bytes=ROW_BYTES),
                view,
                settings,
                root_dir=str(tmp_path / "blocks"),
                capacity_bytes="64Mi",
                num_threads=1,
            )
        ],
    )
    for prefix in PREFIXES:
        driver.store(prefix)
    driver.settle(HANG_GUARD_S)
    driver.evict_everything()
    yield driver
    driver.manager.shutdown()


def search_all(driver: TieringDriver) -> list[ReqContext]:
    """Search every prefix in one step, on behalf of a request each, and begin to load them."""
    requests = [ReqContext(f"request-{number}") for number in range(NUM_REQUESTS)]
    answers = [driver.search(prefix, request) for prefix, request in zip(PREFIXES, requests, strict=True)]
    assert answers == [None] * NUM_REQUESTS
    driver.step()
    return requests


def hits_of(driver: TieringDriver, requests: list[ReqContext]) -> list[int]:
    """Let the loads end, search again, load what is there, compare its bytes; return how many blocks each had."""
    driver.settle(HANG_GUARD_S)
    found: list[int] = []
    for prefix, request in zip(PREFIXES, requests, strict=True):
        num_hits = driver.search_until_known(prefix, request, MANY_STEPS)
        driver.load(prefix[:num_hits], request)
        driver.manager.request_finished(request)
        found.append(num_hits)
    return found


def test_each_of_many_requests_gets_its_own_blocks(driver: TieringDriver) -> None:
    assert hits_of(driver, search_all(driver)) == [REQUEST_BLOCKS] * NUM_REQUESTS
    assert driver.manager.stats()["tier.0.fs.joined_jobs"] > 0, "nothing was joined, so nothing was shown"
    assert driver.manager.stats()["open_jobs"] == 0


def test_a_damaged_block_costs_the_request_that_wanted_it(driver: TieringDriver, tmp_path: Path) -> None:
    damaged = key_of(PREFIXES[20][1])
    (block,) = [block for block in stored_blocks(tmp_path) if block.name == damaged]
    block.flip()
    expected = [REQUEST_BLOCKS] * NUM_REQUESTS
    expected[20] = 1
    assert hits_of(driver, search_all(driver)) == expected
    assert driver.manager.stats()["tier.0.fs.breaker_open"] == 0
    assert driver.manager.stats()["tier.0.fs.failed_promotion_jobs"] == 1


def test_an_aborted_request_costs_no_other(driver: TieringDriver) -> None:
    requests = search_all(driver)
    driver.manager.request_finished(requests[7])
    requests[7] = ReqContext("another for the same prefix")
    assert hits_of(driver, requests) == [REQUEST_BLOCKS] * NUM_REQUESTS


def test_a_reset_in_the_middle_leaves_nothing_and_pins_nothing(driver: TieringDriver) -> None:
    requests = search_all(driver)
    driver.reset()
    assert hits_of(driver, requests) == [0] * NUM_REQUESTS
    assert driver.manager.stats()["open_jobs"] == 0
    driver.evict_everything()


def test_requests_past_their_deadline_are_computed_and_what_comes_late_is_kept(driver: TieringDriver) -> None:
    requests = search_all(driver)
    driver.clock.advance(10.0)  # beyond every deadline; what has not been reported by now is late
    late = [driver.search(prefix, request) for prefix, request in zip(PREFIXES, requests, strict=True)]
    assert None not in late
    for request in requests:
        driver.manager.request_finished(request)
    again = [ReqContext(f"again-{number}") for number in range(NUM_REQUESTS)]
    assert hits_of(driver, again) == [REQUEST_BLOCKS] * NUM_REQUESTS
