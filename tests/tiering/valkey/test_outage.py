"""A server that is away, dies, hangs or is cut off costs misses and faults, and the tier goes on when it is back."""

import logging
from collections.abc import Iterator

import numpy as np
import pytest
from tests.ports import free_port
from tests.tiering.valkey.conftest import StartTier
from tests.tiering.valkey.live import LiveServer
from tests.tiering.valkey.live_proxy import CuttingProxy

from kvtier.errors import TierError
from kvtier.settings import parse_settings
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import NUM_ROWS, ROW_BYTES, TierDriver, content_of, key_of
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES
from kvtier.tiering.valkey import ValkeyTier
from kvtier.tiering.valkey.connection import ServerConnections
from kvtier.tiering.valkey.endpoint import Address
from kvtier.tiering.valkey.resp import send_all
from kvtier.tiering.valkey.servers import PAUSE_S
from kvtier.tiering.valkey.settings import ValkeySettings

SHORT_TIMEOUT_S = 1.5
"""A wait of the tests for a server that hangs; one that has gone on must answer in that time on a busy machine."""

REPLY_BYTES = len(b"$%d\r\n\r\n" % (ENVELOPE_BYTES + ROW_BYTES)) + ENVELOPE_BYTES + ROW_BYTES
GREETING_BYTES = len(b"+OK\r\n")
"""What a new connection is answered before the first block."""


def tier_of(driver: TierDriver) -> ValkeyTier:
    """Return the driver's tier as what it is."""
    assert isinstance(driver.tier, ValkeyTier)
    return driver.tier


def assert_is_out(driver: TierDriver) -> None:
    """Check that everything fails, is a fault, and says so."""
    tier_of(driver).drain_unanswered()
    loaded, stored = driver.load([1]), driver.store([2])
    assert [(result.success, result.is_fault) for result in (loaded, stored)] == [(False, True)] * 2
    assert not driver.lookup(99)
    assert tier_of(driver).drain_unanswered() == 1


def test_nobody_at_the_address_is_said_and_costs_misses(start_tier: StartTier) -> None:
    port = free_port()
    driver = start_tier(f"redis://127.0.0.1:{port}")
    with pytest.raises(TierError, match=rf"127.0.0.1:{port} cannot be reached: Connection refused"):
        tier_of(driver).check_reachable()
    assert_is_out(driver)


def test_a_host_without_a_name_is_said(start_tier: StartTier) -> None:
    driver = start_tier("redis://no-such-host.invalid")
    with pytest.raises(TierError, match="its name is not known"):
        tier_of(driver).check_reachable()


def test_a_server_of_another_kind_is_said(start_tier: StartTier, tls_server: LiveServer) -> None:
    driver = start_tier(tls_server.tls_url.replace("rediss", "redis"), timeout_s=1.0)
    with pytest.raises(TierError, match="cannot be reached"):
        tier_of(driver).check_reachable()
    assert_is_out(driver)


def test_replies_that_come_too_late_are_not_taken_for_those_of_the_next_job(
    server: LiveServer, start_tier: StartTier, clock: ManualClock
) -> None:
    driver = start_tier(server.url, timeout_s=SHORT_TIMEOUT_S, num_threads=1, clock=clock)
    assert driver.store([1, 2]).success
    server.pause()
    assert not driver.load([1], [5]).success
    clock.advance(PAUSE_S)
    job_id = driver.submit([2], [6], is_promotion=True)
    driver.tier.drain(0.1)
    server.resume()
    assert driver.wait(job_id).success
    assert np.array_equal(driver.rows[6], content_of(2))
    assert driver.tier.stats()["damaged"] == 0


def test_a_server_that_hangs_is_left_alone_by_the_rest_of_a_job(
    server: LiveServer, start_tier: StartTier, clock: ManualClock
) -> None:
    driver = start_tier(server.url, timeout_s=SHORT_TIMEOUT_S, clock=clock)
    server.pause()
    with pytest.raises(TierError, match="timeout_s"):
        tier_of(driver).check_reachable()
    server.resume()
    assert not driver.store([1]).success
    clock.advance(PAUSE_S)
    assert driver.store([1]).success


def test_a_server_that_was_restarted_is_used_again(
    server: LiveServer, start_tier: StartTier, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    driver = start_tier(server.url, clock=clock)
    assert driver.store(list(range(NUM_ROWS))).success
    server.kill()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert_is_out(driver)
            clock.advance(PAUSE_S + 2.0)
    assert len(caplog.records) == 1
    server.start()
    result = driver.load([1])
    assert (result.success, result.is_fault) == (False, False)  # it has forgotten everything
    assert driver.store([1]).success
    assert driver.load([1]).success


def test_a_server_that_was_restarted_between_two_jobs_is_not_even_noticed(
    server: LiveServer, start_tier: StartTier
) -> None:
    driver = start_tier(server.url)
    assert driver.store(list(range(NUM_ROWS))).success
    server.kill()
    server.start()
    assert driver.store(list(range(NUM_ROWS))).success


@pytest.fixture(scope="module", params=[0, 1, 9, 60, 136, 137, 138, 4000, REPLY_BYTES - 2, REPLY_BYTES - 1])
def num_torn_bytes(request: pytest.FixtureRequest) -> int:
    """How much of the third block arrives."""
    return int(request.param)


@pytest.fixture
def cut(server: LiveServer, num_torn_bytes: int) -> Iterator[CuttingProxy]:
    """A wire that breaks in the third block."""
    proxy = CuttingProxy(server.port, GREETING_BYTES + 2 * REPLY_BYTES + num_torn_bytes)
    yield proxy
    proxy.close()


def test_a_value_cut_off_never_counts_and_those_before_it_do(
    server: LiveServer, cut: CuttingProxy, start_tier: StartTier
) -> None:
    start_tier(server.url).store([1, 2, 3, 4])
    driver = start_tier(cut.url, num_threads=1)
    result = driver.load([1, 2, 3, 4])
    assert result.successful_keys == frozenset({key_of(1), key_of(2)})
    assert result.is_fault
    for slot, number in enumerate((1, 2)):
        assert np.array_equal(driver.rows[slot], content_of(number))
    assert driver.tier.stats()["io_error"] == 2


def test_a_server_that_reads_no_more_ends_a_large_write_in_time(server: LiveServer) -> None:
    connections = ServerConnections(
        parse_settings(ValkeySettings, {"url": server.url, "timeout_s": SHORT_TIMEOUT_S, "num_threads": 1}),
        Address("127.0.0.1", server.port),
    )
    connection = connections.take()
    server.pause()
    try:
        with pytest.raises(TimeoutError, match="nothing was taken in time"):
            send_all(connection.lend_socket(), [bytes(64 * 2**20)])
    finally:
        server.resume()
        connections.give_back(connection, is_clean=False)
        connections.close()
