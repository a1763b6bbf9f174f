"""Users, passwords and certificates: whoever is not let in learns why, and no credential is ever shown."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiering.valkey.conftest import StartServer, StartTier
from tests.tiering.valkey.live import LiveServer
from tests.tiering.valkey.live_tls import Certificates

from kvtier.errors import TierError
from kvtier.testing.tier_suite import TierDriver
from kvtier.tiering.valkey import ValkeyTier
from kvtier.tiering.valkey.endpoint import PASSWORD_VARIABLE, USERNAME_VARIABLE
from kvtier.tiering.valkey.errors import NEEDED_PERMISSIONS

PASSWORD = "sesame/open#now"  # noqa: S105  # of a server that lives for a second
ESCAPED = "sesame%2Fopen%23now"


@pytest.fixture(scope="module", params=["valkey", "redis"])
def guarded(request: pytest.FixtureRequest, start_server: StartServer) -> LiveServer:
    """A server with users: one who may do what the tier needs, one who may only read; nobody else gets in."""
    server = start_server(request.param)
    with server.client() as client:
        for name, permissions in (
            ("writer", NEEDED_PERMISSIONS.split()),
            ("reader", ["~kvtier:*", "+@read"]),
        ):
            client.execute_command("ACL", "SETUSER", name, "on", f">{PASSWORD}", *permissions)
        client.execute_command("ACL", "SETUSER", "default", "resetkeys", "-@all", "resetpass", ">another")
    return server


@pytest.fixture
def no_leak(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail the test when a credential is in the log."""
    caplog.set_level(logging.DEBUG)
    yield
    assert "sesame" not in caplog.text
    assert "writer" not in caplog.text


def url_of(server: LiveServer, login: str) -> str:
    """Return the server's URL with a user and a password."""
    return server.url.replace("redis://", f"redis://{login}@")


def refusal_of(driver: TierDriver) -> str:
    """Return what the check at the start says; it has no credentials in it, and jobs and lookups fail too."""
    assert isinstance(driver.tier, ValkeyTier)
    with pytest.raises(TierError) as raised:
        driver.tier.check_reachable()
    stored = driver.store([1])
    assert (stored.success, stored.is_fault) == (False, True)
    text = str(raised.value)
    assert "sesame" not in text
    assert "eve" not in text
    return text


def test_a_user_with_just_these_permissions_is_enough(
    guarded: LiveServer, start_tier: StartTier, no_leak: None
) -> None:
    driver = start_tier(url_of(guarded, f"writer:{ESCAPED}"))
    driver.tier.check_reachable()
    assert driver.store([1]).success
    assert driver.lookup(1)
    assert driver.load([1]).success
    assert "sesame" not in repr(driver.tier)


def test_credentials_may_come_from_the_environment(
    guarded: LiveServer, start_tier: StartTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(USERNAME_VARIABLE, "writer")
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    driver = start_tier(guarded.url)
    assert driver.store([1]).success


def test_a_wrong_password_is_said(guarded: LiveServer, start_tier: StartTier, no_leak: None) -> None:
    text = refusal_of(start_tier(url_of(guarded, "eve:sesame")))
    assert "does not accept the user or the password" in text


def test_a_missing_password_is_said(guarded: LiveServer, start_tier: StartTier, no_leak: None) -> None:
    assert "wants a password" in refusal_of(start_tier(guarded.url))


def test_a_user_who_may_not_write_is_told_what_he_lacks(
    guarded: LiveServer, start_tier: StartTier, no_leak: None
) -> None:
    start_tier(url_of(guarded, f"writer:{ESCAPED}")).store([1])
    driver = start_tier(url_of(guarded, f"reader:{ESCAPED}"))
    with pytest.raises(TierError, match=r"lacks a permission: grant it .*\+set") as raised:
        driver.tier.check_reachable()
    assert "reader" not in str(raised.value)
    stored = driver.store([2])
    assert (stored.success, stored.is_fault) == (False, True)
    assert driver.load([1]).success


def test_an_unknown_authority_is_refused(
    tls_server: LiveServer, start_tier: StartTier, no_leak: None
) -> None:
    driver = start_tier(tls_server.tls_url.replace("://", "://eve:sesame@"))
    assert "certificate is not trusted" in refusal_of(driver)


def test_another_authority_is_refused(tls_server: LiveServer, start_tier: StartTier, tmp_path: Path) -> None:
    stranger = Certificates(tmp_path)
    assert "certificate is not trusted" in refusal_of(
        start_tier(tls_server.tls_url, ca_file=stranger.authority)
    )


def test_a_name_that_the_certificate_lacks_is_refused(
    tls_server: LiveServer, start_tier: StartTier, certificates: Certificates
) -> None:
    url = tls_server.tls_url.replace("127.0.0.1", "localhost")
    assert "certificate is not trusted" in refusal_of(start_tier(url, ca_file=certificates.authority))


def test_a_port_without_tls_is_said(
    tls_server: LiveServer, start_tier: StartTier, certificates: Certificates
) -> None:
    url = tls_server.url.replace("redis://", "rediss://")
    text = refusal_of(start_tier(url, ca_file=certificates.authority, timeout_s=1.0))
    assert "cannot be reached" in text


def test_user_and_password_travel_through_tls(
    tls_server: LiveServer, start_tier: StartTier, certificates: Certificates
) -> None:
    with tls_server.client() as client:
        client.execute_command("ACL", "SETUSER", "writer", "on", f">{PASSWORD}", *NEEDED_PERMISSIONS.split())
    url = tls_server.tls_url.replace("://", f"://writer:{ESCAPED}@")
    driver = start_tier(url, ca_file=certificates.authority)
    assert driver.store([1, 2]).success
    assert driver.load([2, 1]).success
