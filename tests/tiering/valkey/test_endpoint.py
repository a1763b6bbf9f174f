"""A URL says where the server is and who we are, and what is wrong with one is said without repeating it."""

import pytest

from kvtier.errors import ConfigError
from kvtier.tiering.valkey.endpoint import (
    PASSWORD_VARIABLE,
    USERNAME_VARIABLE,
    Address,
    Endpoint,
    parse_endpoint,
)


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("redis://host", Endpoint(Address("host", 6379))),
        ("valkey://host:7000/", Endpoint(Address("host", 7000))),
        ("rediss://host/3", Endpoint(Address("host", 6379), True, 3)),
        ("valkeys://u:p@[::1]:1", Endpoint(Address("::1", 1), True, 0, "u", "p")),
        ("redis://:a%2Fb%23@host", Endpoint(Address("host", 6379), False, 0, "", "a/b#")),
    ],
)
def test_a_url_is_read(url: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(url, {}) == endpoint


def test_credentials_that_the_url_lacks_come_from_the_environment() -> None:
    environ = {USERNAME_VARIABLE: "eve", PASSWORD_VARIABLE: "secret"}
    endpoint = parse_endpoint("redis://host", environ)
    assert (endpoint.username, endpoint.password) == ("eve", "secret")
    own = parse_endpoint("redis://u:p@host", environ)
    assert (own.username, own.password) == ("u", "p")


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        (None, "must be text"),
        ("http://:sesame@host", "redis://"),
        ("redis://:sesame@", "names no host"),
        ("redis://:ses/ame@host", "%XX"),
        ("redis://:ses#ame@host", "%XX"),
        ("redis://:ses?ame@host", "%XX"),
        ("redis://:sesame@host?ssl_cert_reqs=none", "nothing behind"),
        ("redis://:sesame@host:70000", "%XX"),
        ("redis://:sesame@[host", "%XX"),
        ("redis://:sesame@" + "h" * 70, "check host"),
        ("redis://:sesame@host/zero", "by its number"),
        ("redis://sesame@host", "without a password"),
    ],
)
def test_a_url_that_cannot_work_is_refused_without_showing_it(url: object, remedy: str) -> None:
    with pytest.raises(ConfigError, match="url=") as raised:
        parse_endpoint(url, {})
    assert remedy in str(raised.value)
    assert "ses" not in str(raised.value)
    assert "ses" not in repr(raised.value.value)
    assert raised.value.__cause__ is None


def test_an_endpoint_does_not_show_its_credentials() -> None:
    shown = repr(parse_endpoint("redis://eve:sesame@host", {}))
    assert "host" in shown
    assert "eve" not in shown
    assert "sesame" not in shown
