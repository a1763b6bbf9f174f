"""A master or provider that is dead, hung or full costs its own hits; each job is reported once, no byte is wrong."""

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from tests.ports import free_port
from tests.tiering.mooncake.conftest import StartTier
from tests.tiering.mooncake.live import HANG_GUARD_S, LiveStore

from kvtier.errors import TierError
from kvtier.testing.tier_suite import (
    NUM_ROWS,
    TierDriver,
    content_of,
    key_of,
)

pytestmark = pytest.mark.servers


@pytest.fixture
def two_providers() -> Iterator[LiveStore]:
    """A store whose blocks can be in two places."""
    store = LiveStore(num_providers=2)
    yield store
    store.close()


def check_reachable(driver: TierDriver) -> None:
    """Ask the tier's place once."""
    driver.tier.check_reachable()


def drain_unanswered(driver: TierDriver) -> int:
    """Return what the circuit breaker would hear."""
    return driver.tier.drain_unanswered()


def load_what_is_left(driver: TierDriver, numbers: list[int]) -> set[int]:
    """Load blocks and check the bytes of those that came."""
    result = driver.load(numbers)
    keys = {key_of(number) for number in numbers}
    succeeded = keys if result.success else (result.successful_keys or frozenset())
    for slot, number in enumerate(numbers):
        if key_of(number) in succeeded:
            assert bytes(driver.rows[slot]) == bytes(content_of(number)), f"block {number} has wrong bytes"
    return {number for number in numbers if key_of(number) in succeeded}


def assert_comes_back(driver: TierDriver, number: int) -> None:
    """Store and load a new block as soon as that works again."""
    driver.poll_until(lambda: driver.store([number]).success)
    driver.poll_until(lambda: load_what_is_left(driver, [number]) == {number})


def test_nobody_at_the_address_is_said_so_and_costs_only_hits(start_tier: StartTier) -> None:
    driver = start_tier(f"127.0.0.1:{free_port()}")
    with pytest.raises(TierError, match="is mooncake_master running there"):
        check_reachable(driver)
    for result in (driver.store([1]), driver.load([1])):
        assert not result.success
        assert result.is_fault
    drain_unanswered(driver)
    assert not driver.lookup(2)
    assert drain_unanswered(driver) == 1


def test_somebody_else_at_the_address_is_refused(start_tier: StartTier) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            try:
                while True:
                    listener.accept()[0].close()
            except OSError:
                return

        threading.Thread(target=hang_up, daemon=True).start()
        driver = start_tier(f"127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(TierError, match=r"does not answer|joining the store"):
            check_reachable(driver)
        listener.shutdown(socket.SHUT_RDWR)


def test_a_tier_that_started_without_a_master_finds_it_later(start_tier: StartTier) -> None:
    store = LiveStore(num_providers=0)
    store.master.kill()
    driver = start_tier(store)
    assert not driver.store([1]).success
    store.start_master()
    store.add_provider()
    try:
        assert_comes_back(driver, 1)
    finally:
        store.close()


def test_a_store_without_room_declines_and_is_no_fault(start_tier: StartTier) -> None:
    store = LiveStore(num_providers=0)
    try:
        driver = start_tier(store)
        result = driver.store([1, 2])
        assert not result.success
        assert not result.is_fault
        assert driver.tier.stats()["declined"] == 2
        assert not driver.lookup(1)
    finally:
        store.close()


def test_a_master_killed_amid_jobs_leaves_each_reported_once_and_its_successor_is_used(
    store: LiveStore, start_tier: StartTier
) -> None:
    driver = start_tier(store)
    assert driver.store([100]).success
    for number in range(NUM_ROWS):
        driver.rows[number] = content_of(number)
    jobs = [driver.submit([number], [number], is_promotion=False) for number in range(NUM_ROWS)]
    store.master.kill()
    driver.poll_until(lambda: set(jobs) <= set(driver.results))
    assert not driver.lookup(50)
    store.start_master()
    assert_comes_back(driver, 200)
    assert load_what_is_left(driver, [100]) == set()


def test_a_hung_provider_ends_jobs_and_writes_into_no_slot_afterwards(
    store: LiveStore, start_tier: StartTier
) -> None:
    driver = start_tier(store)
    assert driver.store([1, 2]).success
    (provider,) = store.providers
    provider.freeze()
    result = driver.load([1, 2])
    assert not result.success
    assert result.is_fault
    driver.rows[:] = 77
    provider.thaw()
    # A load of something else shows that the provider is at work again.
    driver.poll_until(lambda: driver.wait(driver.submit([1], [9], is_promotion=True)).success)
    assert bytes(driver.rows[9]) == bytes(content_of(1))
    assert np.all(driver.rows[[*range(9), *range(10, NUM_ROWS)]] == 77)


def test_a_dead_provider_takes_its_blocks_along_and_no_others(
    two_providers: LiveStore, start_tier: StartTier
) -> None:
    driver = start_tier(two_providers)
    numbers = list(range(NUM_ROWS))
    assert driver.store(numbers).success
    two_providers.providers[0].kill()
    left = load_what_is_left(driver, numbers)
    assert set() < left < set(numbers)
    # Until the master has given the provider up, a put finds its blocks there and leaves them as they are.
    driver.poll_until(
        lambda: driver.store(numbers).success and load_what_is_left(driver, numbers) == set(numbers)
    )


def test_with_two_replicas_a_dead_provider_costs_no_block(
    two_providers: LiveStore, start_tier: StartTier
) -> None:
    driver = start_tier(two_providers, num_replicas=2)
    numbers = list(range(NUM_ROWS))
    assert driver.store(numbers).success
    two_providers.providers[1].kill()
    driver.poll_until(lambda: load_what_is_left(driver, numbers) == set(numbers))


def test_jobs_open_at_a_shutdown_without_a_master_are_reported(
    store: LiveStore, start_tier: StartTier
) -> None:
    driver = start_tier(store, segment_bytes="16MiB")
    assert driver.store([1]).success
    store.master.kill()
    jobs = [driver.submit([number], [number], is_promotion=False) for number in range(NUM_ROWS)]
    assert driver.tier.shutdown(HANG_GUARD_S)
    driver.poll()
    assert set(jobs) <= set(driver.results)
