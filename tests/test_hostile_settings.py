"""Every setting takes what it can use and refuses the rest in one short line, whatever its type."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvtier.config import parse_settings as parse_engine_settings
from kvtier.errors import (
    ConfigError,
    KVTierError,
    MissingExtraError,
    NamedClassError,
    TraceError,
    describe_foreign,
    format_foreign,
)
from kvtier.redaction import hide_secrets, shorten
from kvtier.settings import parse_settings, settings_of
from kvtier.tiering.base import TierSettings, parse_tier_settings
from kvtier.tiering.factory import TIERS, check_tier_config

MARK = "sesame"


def nested(depth: int) -> list[Any]:
    """Return lists in lists."""
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


VALUES: dict[str, object] = {
    "400 digits": 10**400,
    "5000 digits": 10**5000,
    "text of 400 digits": "9" * 400,
    "negative": -1,
    "zero": 0,
    "true": True,
    "not a number": float("nan"),
    "infinite": float("inf"),
    "minus infinite": float("-inf"),
    "2^64": 2**64,
    "a float beyond use": 1e300,
    "a zero byte": "/a\0b",
    "half a surrogate pair": "/a\ud800b",
    "empty text": "",
    "long text": "/" + "zq" * 50_000,
    "a list": [1, "a"],
    "a mapping": {"a": 1},
    "deep lists": nested(100_000),
    "bytes": b"/bytes",
    "an object": object(),
    "a secret": f"redis://:{MARK}@host:1/x?sig={MARK}",
    "a secret in a list": [{"url": f"redis://:{MARK}@host", "password": MARK}],
    "a URL that goes on": f"redis://:{MARK}" + "x" * 100_000,
}

TIER_NAMES = ("example", "fs", "obj", "valkey", "mooncake")


def own_settings() -> list[tuple[str, str]]:
    """Return every tier's own settings, as far as their libraries are installed."""
    found = []
    for name in TIER_NAMES:
        try:
            kind = TIERS.resolve(name).own_settings
        except MissingExtraError:
            continue
        found += [] if kind is None else [(name, one) for one in settings_of(kind)]
    return found


def check_refusal(parse: Callable[[], object]) -> None:
    """Check that a value is taken, or refused in one short line without a secret."""
    try:
        parsed = parse()
    except KVTierError as error:
        text = str(error)
        assert MARK not in text
        assert "\n" not in text
        assert len(text) < 1200
        assert "9" * 100 not in text
        assert "0" * 100 not in text
        assert "zq" * 60 not in text
        return
    if MARK in repr(parsed):
        pytest.fail("the secret is in a repr")


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize(("tier", "name"), own_settings())
def test_a_tier_s_own_setting_takes_a_value_or_refuses_it_in_a_line(tier: str, name: str, kind: str) -> None:
    settings_class = TIERS.resolve(tier).own_settings
    assert settings_class is not None
    needed = {
        "root_dir": "/somewhere",
        "path": "/somewhere/file",
        "capacity_bytes": 2**40,
        "url": "s3://bucket" if tier == "obj" else "redis://host",
        "master": "host:1",
        "allow_any_interface": True,
    }
    own = {one: needed[one] for one in settings_of(settings_class) if one in needed} | {name: VALUES[kind]}
    if kind == "a secret" and (tier, name) == ("obj", "prefix"):
        return  # a name of objects, refused or not, is no secret
    check_refusal(lambda: parse_settings(settings_class, own, tier))


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", settings_of(TierSettings))
def test_a_setting_of_every_tier_does(name: str, kind: str) -> None:
    if name == "policy" and kind in {"a secret", "a secret in a list", "a URL that goes on"}:
        return  # the name of a class
    check_refusal(lambda: parse_tier_settings({name: VALUES[kind]}))


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize(
    "name",
    [
        "cpu_bytes_to_use",
        "store_threshold",
        "max_tracker_size",
        "block_size",
        "lookup_deadline_s",
        "load_if",
        "tenant_salt",
        "record_max_bytes",
        "control_socket",
        "metrics_port",
        "secondary_tiers",
    ],
)
def test_a_setting_of_the_engine_does(name: str, kind: str) -> None:
    check_refusal(lambda: parse_engine_settings({name: VALUES[kind]}))


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "30", None, 1e9, 10**400])
def test_a_job_s_time_out_is_a_time_that_threads_can_wait(value: object) -> None:
    with pytest.raises(ConfigError, match="job_timeout_s"):
        parse_tier_settings({"job_timeout_s": value})


@pytest.mark.parametrize("kind", VALUES)
def test_an_entry_of_tiers_does(kind: str) -> None:
    for entry in (
        {"type": VALUES[kind]},
        {"type": "fs", "no-such": VALUES[kind]},
        {"type": "example", "root_dir": 1},
    ):
        check_refusal(lambda entry=entry: check_tier_config(entry))  # type: ignore[misc]  # mypy infers no default


def test_a_salt_is_never_shown() -> None:
    for value in (MARK, [MARK], {"a": MARK}):
        text = str(ConfigError("tenant_salt", value, "must be text"))
        assert text == "tenant_salt=***: must be text"
    assert MARK not in repr(parse_engine_settings({"tenant_salt": MARK}))
    assert MARK not in repr(parse_engine_settings({"secondary_tiers": [{"type": "x", "url": MARK}]}))


@pytest.mark.parametrize(
    "text",
    [
        f"redis://user:{MARK}@host:1/0",
        f"redis://:{MARK}/with/slashes@host",
        f"redis://:{MARK}@with@at@host",
        f"https://host/object?X-Amz-Signature={MARK}&X-Amz-Credential={MARK}",
        f"https://host/object?{MARK}",
        f"https://host/#{MARK}",
        f'{{"password": "{MARK}"}}',
        f"{{'aws_secret_access_key': '{MARK}'}}",
        f"secret={MARK}",
        f"SharedAccessSignature={MARK}",
        f"AccountKey={MARK};",
        f"token: {MARK}",
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str) -> None:
    assert MARK not in hide_secrets(text)
    assert MARK not in shorten(text)
    assert MARK not in str(ConfigError("url", text, text))
    assert MARK not in str(TraceError("file", 1, text, "no"))
    assert MARK not in str(NamedClassError("tier", text, f"{text!r} is no class"))


@pytest.mark.parametrize(
    "text",
    ["num_tokens=5", "kv_bytes_per_token='much'", "cpu_bytes_to_use=1: see the guide", "a: b", "x/y@z"],
)
def test_what_is_none_is_shown(text: str) -> None:
    assert hide_secrets(text) == text


def test_a_foreign_error_is_named_and_not_quoted() -> None:
    try:
        try:
            int(MARK)
        except ValueError as inner:
            raise OSError(28, MARK) from inner
    except OSError as error:
        found = error
    assert describe_foreign(found).startswith("No space left on device, test_hostile_settings.py:")
    text = format_foreign(found)
    assert "ValueError" in text
    assert "which led to" in text
    assert json.dumps(text).count(MARK) == 0
