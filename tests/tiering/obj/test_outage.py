"""A server that is away, hangs, refuses or is another one costs its own hits, in bounded time, and says so once."""

import logging
import threading

import pytest
from tests.tiering.obj.conftest import (
    HANG_GUARD_S,
    Bucket,
    StartTier,
)
from tests.tiering.obj.server import ACCESS_KEY, SECRET_KEY, S3Server

from kvtier.errors import TierError
from kvtier.testing.tier_suite import TierDriver

WRONG_SECRET = "wrong-secret-never-logged"  # noqa: S105  # wrong on purpose
NOBODY = "http://127.0.0.1:9"


def assert_out(driver: TierDriver) -> None:
    """Check that jobs fail as faults and lookups are misses that the breaker hears of."""
    stored, loaded = driver.store([1, 2]), driver.load([1])
    assert not stored.success
    assert stored.is_fault
    assert not loaded.success
    assert loaded.is_fault
    assert not driver.lookup(1)
    assert driver.tier.drain_unanswered() > 0


def refusal(driver: TierDriver) -> str:
    """Return what the check at the start says."""
    with pytest.raises(TierError) as caught:
        driver.tier.check_reachable()
    assert caught.value.tier == "obj"
    assert caught.value.__cause__ is None
    assert ACCESS_KEY not in str(caught.value)
    return str(caught.value)


def test_a_server_that_lets_us_in_passes_the_check(start_tier: StartTier, bucket: Bucket) -> None:
    driver = start_tier()
    for _ in range(2):
        driver.tier.check_reachable()
    assert len(bucket.names("namespace.json")) == 1


def test_the_check_says_that_nobody_listens(start_tier: StartTier) -> None:
    driver = start_tier(endpoint=NOBODY)
    assert "cannot be reached (connection refused)" in refusal(driver)
    assert_out(driver)


def test_the_check_says_that_there_is_no_such_host(start_tier: StartTier) -> None:
    assert "cannot be reached (no such host)" in refusal(start_tier(endpoint="http://nobody.invalid"))


def test_the_check_says_that_the_server_speaks_no_tls(start_tier: StartTier, server: S3Server) -> None:
    reason = refusal(start_tier(endpoint=server.endpoint.replace("http:", "https:")))
    assert "cannot be reached (it does not speak TLS)" in reason


def test_the_check_says_that_the_bucket_is_missing(start_tier: StartTier) -> None:
    message = refusal(start_tier(url="s3://no-such-bucket"))
    assert "s3://no-such-bucket" in message
    assert "does not exist (404 NoSuchBucket): create it" in message


@pytest.mark.parametrize(
    ("variable", "value", "code"),
    [
        ("AWS_ACCESS_KEY_ID", "nobody-knows-this-key", "403 InvalidAccessKeyId"),
        ("AWS_SECRET_ACCESS_KEY", WRONG_SECRET, "403 SignatureDoesNotMatch"),
    ],
)
def test_the_check_says_that_credentials_are_wrong_without_repeating_them(
    start_tier: StartTier,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    value: str,
    code: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(variable, value)
    driver = start_tier()
    message = refusal(driver)
    assert f"refuses us ({code}): check AWS_ACCESS_KEY_ID" in message
    assert_out(driver)
    for secret in (value, ACCESS_KEY, SECRET_KEY):
        assert secret not in message
        assert secret not in caplog.text
        assert secret not in repr(driver.tier)
        assert secret not in str(driver.tier.stats())


def test_without_credentials_the_check_says_which_are_missing(
    start_tier: StartTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    # Where instances ask for their credentials; nobody is there.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    message = refusal(start_tier(timeout_s=1.0))
    assert "AWS_ACCESS_KEY_ID" in message


def test_no_thread_outlives_its_tier(start_tier: StartTier) -> None:
    driver = start_tier(capacity_bytes="1MiB")
    driver.store([1])
    driver.lookup(1)
    assert driver.tier.shutdown(HANG_GUARD_S)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvtier-obj")]
