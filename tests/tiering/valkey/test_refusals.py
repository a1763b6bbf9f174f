"""What a client library or a server says becomes a sentence with a remedy, and none of their words."""

import errno
import ssl

import pytest
import redis.exceptions

from kvtier.tiering.valkey.endpoint import Address
from kvtier.tiering.valkey.refusals import refused, unreachable

ADDRESS = Address("host", 6379)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (redis.exceptions.AuthenticationError("invalid sesame"), "WRONGPASS"),
        (redis.exceptions.AuthenticationError("Authentication required."), "NOAUTH"),
        (redis.exceptions.NoPermissionError("eve sesame"), "NOPERM"),
        (redis.exceptions.BusyLoadingError("sesame"), "LOADING"),
        (redis.exceptions.TimeoutError("sesame"), "within timeout_s"),
        (ssl.SSLError(1, "sesame"), "TLS fails"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "sesame"), "Connection refused"),
        (redis.exceptions.ConnectionError("sesame"), "is it running"),
    ],
)
def test_an_exception_becomes_a_sentence_of_our_own(error: Exception, remedy: str) -> None:
    text = str(unreachable(ADDRESS, error))
    assert "host:6379" in text
    assert remedy in text
    assert "sesame" not in text


def test_what_the_system_said_counts_before_what_the_client_made_of_it() -> None:
    outer = redis.exceptions.ConnectionError("wrapped")
    outer.__context__ = OSError(errno.EHOSTUNREACH, "no route")
    assert "No route to host" in str(unreachable(ADDRESS, outer))


def test_an_unknown_code_is_not_repeated() -> None:
    assert "sesame" not in str(refused(ADDRESS, "ERR,sesame"))
    assert "ERR" in str(refused(ADDRESS, "ERR"))
