"""What a server keeps of a block, how long, and what it evicts. Damaged values are in ``test_roles.py``."""

from typing import Any

import pytest
from tests.tiering.valkey.conftest import StartServer, StartTier
from tests.tiering.valkey.live import LiveServer
from tests.tiering.valkey.live_cluster import name_of

from kvtier.base import OffloadKey
from kvtier.misses import Miss, MissCause
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import ROW_BYTES, TierDriver, content_of, key_of
from kvtier.tiering.kit import block_format
from kvtier.tiering.kit.blobs.recent import REMEMBERED_S
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, make_header
from kvtier.tiering.valkey import servers


@pytest.fixture
def driver(shared_server: LiveServer, start_tier: StartTier, clock: ManualClock) -> TierDriver:
    """A tier on an empty server that has stored block 1."""
    driver = start_tier(shared_server.url, clock=clock)
    driver.store([1])
    return driver


def stored_value(server: LiveServer, number: int) -> bytearray:
    """Return what the server has for a block."""
    with server.client() as client:
        value = client.get(name_of(number))
    assert isinstance(value, bytes)
    return bytearray(value)


def has(server: LiveServer, number: int) -> bool:
    """Return whether the server has something under the block's name."""
    with server.client() as client:
        return bool(client.exists(name_of(number)))


def test_a_value_is_an_envelope_and_the_row(driver: TierDriver, shared_server: LiveServer) -> None:
    value = stored_value(shared_server, 1)
    assert len(value) == ENVELOPE_BYTES + ROW_BYTES
    assert value[ENVELOPE_BYTES:] == content_of(1).tobytes()


def test_a_list_under_our_name_is_a_miss_and_left_alone(
    driver: TierDriver, shared_server: LiveServer
) -> None:
    with shared_server.client() as client:
        client.delete(name_of(1))
        client.rpush(name_of(1), "somebody's")
    assert not driver.load([1]).success
    assert driver.tier.stats()["foreign"] == 1
    assert has(shared_server, 1)


def test_a_list_under_our_name_is_not_found_and_stored_over(
    driver: TierDriver, shared_server: LiveServer, clock: ManualClock
) -> None:
    assert driver.lookup(1)
    with shared_server.client() as client:
        client.delete(name_of(1))
        client.rpush(name_of(1), "somebody's")
    clock.advance(5.0)
    assert not driver.lookup(1)
    assert driver.store([1]).success
    assert driver.load([1]).success


def test_a_held_block_is_not_sent_again(driver: TierDriver) -> None:
    assert driver.store([1, 2]).success
    stats = driver.tier.stats()
    assert (stats["stored_blocks"], stats["existed"]) == (2, 1)


def test_a_block_that_gets_no_header_fails_its_job_and_leaves_no_half_request(
    driver: TierDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_but_3(key: OffloadKey, *args: Any, **kwargs: Any) -> bytes:  # noqa: ANN401 - passed on
        if key == key_of(3):
            raise RuntimeError("no header for this one")
        return make_header(key, *args, **kwargs)

    with monkeypatch.context() as patches:
        patches.setattr(servers, "SEND_BYTES", 1)
        patches.setattr(block_format, "make_header", all_but_3)
        assert not driver.store([2, 3, 4]).success
    assert driver.store([5]).success
    assert 5 in driver.load_right([5])


def test_an_expiry_begins_with_the_last_use(
    shared_server: LiveServer, start_tier: StartTier, clock: ManualClock
) -> None:
    driver = start_tier(shared_server.url, ttl_s=1000, clock=clock)
    with shared_server.client() as client:
        for use in (driver.store, driver.load, driver.store):
            use([1])
            assert 990_000 < client.pttl(name_of(1)) <= 1_000_000
            client.pexpire(name_of(1), 5000)
            clock.advance(REMEMBERED_S)  # before that what was stored is not stored again


def test_an_expiry_that_is_not_renewed_counts_from_the_store(
    shared_server: LiveServer, start_tier: StartTier, clock: ManualClock
) -> None:
    driver = start_tier(shared_server.url, ttl_s=1000, renew_ttl=False, clock=clock)
    driver.store([1])
    clock.advance(REMEMBERED_S)
    with shared_server.client() as client:
        client.pexpire(name_of(1), 5000)
        for use in (driver.load, driver.store):
            use([1])
            assert client.pttl(name_of(1)) <= 5000


def test_without_a_ttl_a_block_does_not_expire(shared_server: LiveServer, start_tier: StartTier) -> None:
    driver = start_tier(shared_server.url, ttl_s=0)
    driver.store([1])
    driver.load([1])
    with shared_server.client() as client:
        assert client.pttl(name_of(1)) == -1


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_server_that_evicts_costs_misses_and_no_fault(
    kind: str, start_server: StartServer, start_tier: StartTier
) -> None:
    server = start_server(kind, "--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    driver = start_tier(server.url)
    for first in range(0, 480, 16):
        assert driver.store(list(range(first, first + 16))).success
    results = [driver.load(list(range(first, first + 16))) for first in range(0, 480, 16)]
    stats = driver.tier.stats()
    assert stats["absent"] > 0
    assert stats["absent"] + stats["hits"] == 480
    assert not any(result.is_fault for result in results if not result.success)


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_full_server_that_evicts_nothing_declines_and_is_no_fault(
    kind: str, start_server: StartServer, start_tier: StartTier
) -> None:
    server = start_server(kind, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    driver = start_tier(server.url)
    results = [driver.store(list(range(first, first + 16))) for first in range(0, 480, 16)]
    assert results[0].success
    assert (results[-1].success, results[-1].is_fault) == (False, False)
    assert driver.tier.stats()["declined"] > 0
    assert driver.tier.stats()["store_errors"] == 0
    assert driver.load(list(range(16))).success
    driver.tier.check_reachable()


def test_a_long_prefix_is_asked_for_at_once(driver: TierDriver) -> None:
    driver.store(list(range(16)))
    answers: dict[int, bool | None] = {}

    def ask() -> bool:
        answers.update({number: driver.tier.lookup(key_of(number), driver.request) for number in range(5000)})
        return None not in answers.values()

    driver.poll_until(ask)
    assert [number for number, answer in answers.items() if answer] == list(range(16))


def test_a_block_that_is_gone_was_evicted_or_has_outlived_its_time(
    shared_server: LiveServer, start_tier: StartTier, clock: ManualClock
) -> None:
    driver = start_tier(shared_server.url, clock=clock, ttl_s=60)
    driver.store([1, 2])
    clock.advance(40.0)
    driver.load([2])  # its time counts from now
    with shared_server.client() as client:
        client.delete(name_of(1), name_of(2))
    clock.advance(30.0)

    tier = driver.tier
    assert tier.explain(key_of(1), driver.request) == Miss(
        MissCause.EXPIRED, "valkey", {"ago_s": 10.0, "ttl_s": 60}
    )
    assert tier.explain(key_of(2), driver.request) == Miss(MissCause.EVICTED, "valkey")
    assert tier.explain(key_of(3), driver.request) is None
