"""A server that keeps answering a little is given up at the job's deadline, however alive it seems."""

import itertools
import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.tiering.valkey.conftest import StartTier
from tests.tiering.valkey.live import LiveServer
from tests.tiering.valkey.live_proxy import TricklingProxy

from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import content_of, key_of
from kvtier.tiering.base import TierSettings
from kvtier.tiering.valkey.endpoint import Address
from kvtier.tiering.valkey.errors import unreachable
from kvtier.tiering.valkey.resp import Deadline, OverdueError, Reply, ReplyReader, read_reply, send_all

NUM_REPLIES = 1000
SECOND_BYTES = 64
"""What a trickling server sends in a second of the manual clock: a block takes two minutes."""


def ticking(end_s: float) -> Deadline:
    """Return a deadline on a clock that moves a second whenever it is read."""
    return Deadline(itertools.count().__next__, end_s)


def read_replies(reader: ReplyReader, count: int) -> None:
    """Read so many values of eight bytes."""
    for _ in range(count):
        assert read_reply(reader) == Reply("$", 8)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection, with a time-out that does not pass."""
    near, far = socket.socketpair()
    near.settimeout(60.0)
    with near, far:
        yield near, far


def test_replies_that_keep_coming_are_read_until_the_deadline(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    near, far = ends
    value = b"$8\r\n%b\r\n" % bytes(8)

    def answer() -> None:
        while near.fileno() >= 0:
            try:
                far.sendall(value * NUM_REPLIES)
            except OSError:
                return

    thread = threading.Thread(target=answer)
    thread.start()
    reader = ReplyReader(near, ticking(20.0))
    with pytest.raises(OverdueError):
        read_replies(reader, 100 * NUM_REPLIES)
    near.close()
    far.close()
    thread.join()


def test_a_request_that_is_taken_bit_by_bit_is_sent_until_the_deadline(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    near, far = ends

    def take() -> None:
        while far.recv(65_536):
            pass

    thread = threading.Thread(target=take)
    thread.start()
    with pytest.raises(OverdueError):
        send_all(near, [b"x" * 100] * 20_000, ticking(20.0))
    near.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_a_deadline_that_has_passed_reads_and_sends_nothing(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    near, far = ends
    far.sendall(b"+OK\r\n")
    over = Deadline(lambda: 5.0, 5.0)
    attempts: list[Callable[[], object]] = [
        lambda: read_reply(ReplyReader(near, over)),
        lambda: send_all(near, [b"PING"], over),
    ]
    for attempt in attempts:
        with pytest.raises(OverdueError):
            attempt()
    assert near.recv(5) == b"+OK\r\n"


def test_it_is_told_from_a_server_that_says_nothing() -> None:
    assert "too slowly" in str(unreachable(Address("host", 1), OverdueError()))


@pytest.fixture
def trickle(server: LiveServer, clock: ManualClock) -> Iterator[TricklingProxy]:
    """A wire on which replies come a little every second, and never stop."""
    proxy = TricklingProxy(server.port, SECOND_BYTES, lambda: clock.advance(1.0))
    yield proxy
    proxy.close()


def test_a_load_from_a_server_that_trickles_ends_at_the_job_s_deadline(
    server: LiveServer, trickle: TricklingProxy, start_tier: StartTier, clock: ManualClock
) -> None:
    start_tier(server.url).store([1, 2, 3, 4])
    driver = start_tier(trickle.url, num_threads=1, clock=clock)
    driver.tier.settings = TierSettings(job_timeout_s=30.0)

    result = driver.load([1, 2, 3, 4])

    assert (result.success, result.is_fault) == (False, True)
    assert set(result.successful_keys or ()) <= {key_of(1)}
    assert driver.tier.stats()["io_error"] >= 3
    driver.tier.settings = TierSettings(job_timeout_s=3600.0)
    clock.advance(3600.0)
    assert driver.load([1, 2, 3, 4]).success
    assert np.array_equal(driver.rows[3], content_of(4))
