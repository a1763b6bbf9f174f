"""A credential that stands in a setting, however wrongly it is written, is in no message, error, log or output."""

import json
import logging
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.test_hostile_settings import own_settings

from kvtier.cli.config_checks import check_config
from kvtier.cli.main import main
from kvtier.config import parse_settings as parse_engine_settings
from kvtier.errors import ConfigError, KVTierError, NamedClassError, RecordError, TraceError, UnknownNameError
from kvtier.redaction import HIDDEN, redact, shorten
from kvtier.settings import parse_settings
from kvtier.tiering.base import parse_tier_settings
from kvtier.tiering.factory import TIERS, check_tier_config
from kvtier.tiering.places import open_place

MARK = "sEsame0123456789"
"""The secret."""

CREDENTIALS = {
    "no scheme": f"AKIA:{MARK}@bucket",
    "a scheme without slashes": f"s3:AKIA:{MARK}@b",
    "one slash": f"s3:/AKIA:{MARK}@b",
    "two slashes": f"s3://AKIA:{MARK}@b",
    "no scheme, two slashes": f"//AKIA:{MARK}@b",
    "no user": f"redis://:{MARK}@host",
    "no user, one slash": f"redis:/:{MARK}@host",
    "user only": f"https://{MARK}@host",
    "user only, one slash": f"https:/{MARK}@host",
    "a port that is none": f"redis://u:{MARK}@host:x",
    "no host": f"redis://u:{MARK}@",
    "an open bracket": f"redis://[::1:{MARK}@host",
    "a slash in it": f"redis://u:pa/{MARK}@host",
    "a question mark in it": f"redis://u:pa?{MARK}@host",
    "a hash in it": f"redis://u:pa#{MARK}@host",
    "an @ in it": f"redis://u:{MARK}@{MARK}@host",
    "upper case": f"S3://AKIA:{MARK}@B",
    "upper case, no slashes": f"REDIS:U:{MARK}@H",
    "percent-encoded": f"redis%3A%2F%2Fu%3A{MARK}%40host",
    "percent-encoded in part": f"redis://u%3A{MARK}%40host:x",
    "a line end in front of it": f"redis://u:\n{MARK}@h",
    "a line end behind it": f"redis://u:{MARK}\n@h",
    "a space in it": f"AKIA:a {MARK} b@bucket",
    "a signature": f"https://host/o?X-Amz-Signature={MARK}",
    "a signature without a scheme": f"bucket?X-Amz-Signature={MARK}",
    "a credential in a query": f"s3://bucket/o?X-Amz-Credential={MARK}",
    "a security token": f"X-Amz-Security-Token={MARK}",
    "a SAS token": f"az://container?sv=2022-11-02&sig={MARK}",
    "a SAS token without a scheme": f"container?sv=2022-11-02&sig={MARK}",
    "a SAS token alone": f"sv=2022-11-02&sig={MARK}",
    "a connection string": f"AccountName=a;AccountKey={MARK};EndpointSuffix=core.windows.net",
    "a variable": f"AWS_SECRET_ACCESS_KEY={MARK}",
    "a fragment": f"https://host/#{MARK}",
    "a bearer": f"Authorization: Bearer {MARK}",
}
"""Credentials in what may be meant as the address of a tier -> as a user may write them."""

ADDRESSES = CREDENTIALS | {
    "user and password alone": f"AKIA:{MARK}",
    "no @": f"s3://AKIA:{MARK}/bucket",
    "in front of a scheme": f"AKIA:{MARK}://bucket",
    "user alone, no scheme": f"{MARK}@bucket",
    "with three slashes": f"s3:///AKIA:{MARK}@b",
    "a query alone": f"?{MARK}",
}
"""More of them, which tell of a credential only where an address is expected."""

ADDRESS_SETTINGS = {("obj", "url"), ("obj", "endpoint"), ("valkey", "url"), ("mooncake", "master")}

NEEDED: dict[str, object] = {
    "root_dir": "/somewhere",
    "path": "/somewhere/file",
    "capacity_bytes": 2**40,
    "master": "host:1",
    "allow_any_interface": True,
}


def parts_of(error: BaseException) -> Iterator[str]:
    """Yield every text of an error and of its causes."""
    yield str(error)
    yield repr(error)
    yield repr(error.args)
    yield from (repr(value) for value in vars(error).values())
    known = ("doc", "msg", "object", "filename", "strerror", "name", "path")
    yield from (repr(getattr(error, name, None)) for name in known)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        yield from parts_of(cause)


@pytest.fixture
def check(caplog: pytest.LogCaptureFixture) -> Callable[[Callable[[], object]], None]:
    """Return what checks that a call shows nothing of the secret: not by its error, its result or the log."""
    caplog.set_level(logging.DEBUG)

    def check(call: Callable[[], object]) -> None:
        caplog.clear()
        try:
            shown = [repr(call())]
        except KVTierError as error:
            shown = list(parts_of(error)) + list(parts_of(pickle.loads(pickle.dumps(error))))  # noqa: S301  # our own
        found = [text for text in [*shown, caplog.text] if MARK in text]
        assert not found

    return check


Check = Callable[[Callable[[], object]], None]


@pytest.mark.parametrize(("tier", "name"), own_settings())
def test_no_setting_of_a_tier_shows_a_credential(tier: str, name: str, check: Check) -> None:
    settings_class = TIERS.resolve(tier).own_settings
    assert settings_class is not None
    needed = NEEDED | {"url": "s3://bucket" if tier == "obj" else "redis://host"}
    own = {one: value for one, value in needed.items() if (tier, one) in own_settings()}
    values = (ADDRESSES if (tier, name) in ADDRESS_SETTINGS else CREDENTIALS).values()
    for given in (form for one in values for form in (one, [one], {"a": one}, one.encode())):
        settings = own | {name: given}
        parse = partial(parse_settings, settings_class, settings, tier)
        # A path or a prefix that is accepted is what the user chose; an address that is accepted hides its password.
        check(parse if (tier, name) in ADDRESS_SETTINGS else partial(_refusal_of, parse))
        check(partial(_refusal_of, partial(check_tier_config, {"type": tier} | settings)))


def _refusal_of(call: Callable[[], object]) -> None:
    """Call what returns the user's own entry where it is right."""
    call()


@pytest.mark.parametrize("kind", ADDRESSES)
def test_no_command_about_a_place_shows_a_credential(
    kind: str, check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    value = ADDRESSES[kind]
    entries = [
        json.dumps({"type": tier, name: value} | ({"url": "s3://b"} if name == "endpoint" else {}))
        for tier, name in sorted(ADDRESS_SETTINGS)
    ]
    entries += [json.dumps({"type": CREDENTIALS.get(kind, "?")})]
    for place in (value, *entries, *(entry[:-1] for entry in entries)):
        check(partial(open_place, place))
        assert main(["inspect", "--", place]) == 2
        printed = capsys.readouterr()
        assert MARK not in printed.out + printed.err


@pytest.mark.parametrize("kind", CREDENTIALS)
def test_no_name_and_no_setting_of_an_engine_shows_one(kind: str, check: Check) -> None:
    value = CREDENTIALS[kind]
    calls: list[Callable[[], object]] = [
        partial(check_tier_config, {"type": value}),
        partial(check_tier_config, {"type": "fs", value: 1}),
        partial(check_tier_config, {"type": {"url": value}}),
        partial(parse_tier_settings, {"cascade": value}),
        partial(parse_engine_settings, {value: 1}),
        partial(parse_engine_settings, {"secondary_tiers": value}),
        partial(parse_engine_settings, {"secondary_tiers": {"url": value}}),
        partial(parse_engine_settings, {"encryption": {"key_file": value}}),
        partial(parse_engine_settings, {"tenant_salt": [value]}),
        partial(parse_engine_settings, {"cpu_bytes_to_use": value}),
    ]
    for call in calls:
        check(partial(_refusal_of, call))


@pytest.mark.parametrize("kind", ADDRESSES)
def test_doctor_shows_none(kind: str, check: Check) -> None:
    value = ADDRESSES[kind]
    tiers = [{"type": tier, name: value} for tier, name in sorted(ADDRESS_SETTINGS)]
    config = {"cpu_bytes_to_use": "1MiB", "secondary_tiers": [*tiers, {"type": CREDENTIALS.get(kind, "?")}]}
    check(lambda: [one for one in check_config(config) if one.subject.startswith("tier")])


@pytest.mark.parametrize("kind", CREDENTIALS)
def test_no_error_keeps_one_in_a_field(kind: str) -> None:
    value = CREDENTIALS[kind]
    errors: list[KVTierError] = [
        ConfigError("anything", value, f"the library says {value!r}"),
        ConfigError("anything", {"a": [value]}, "no"),
        UnknownNameError("setting", value, ()),
        NamedClassError("tier", value, f"{value!r} is no class"),
        TraceError("file", 1, value, "no"),
        RecordError({"a": value}, "no"),
    ]
    for error in errors:
        assert not [text for text in parts_of(error) if MARK in text]


def test_a_key_in_place_of_its_file_is_not_shown() -> None:
    for name in ("key_file", "record_salt_file"):
        assert redact(name, MARK) == HIDDEN
    assert redact("key_file", "/run/secrets/ring.json") == "/run/secrets/ring.json"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("url", "ftp://host/path"),
        ("url", "s3://My_Bucket"),
        ("endpoint", "https://storage.example.com:9000/path"),
        ("master", "10.0.0.5:70000"),
        ("PLACE", "/mnt/kv cache/a=b"),
        ("PLACE", "~/blocks"),
        ("root_dir", "/data/model@v2"),
        ("capacity_bytes", "8GiBs"),
        ("secondary_tiers", [{"type": "fs", "num_threads": 3}]),
        ("type", "package.module:MyTier"),
    ],
)
def test_what_is_no_credential_is_shown(name: str, value: object) -> None:
    error = ConfigError(name, value, "no")
    assert error.value == value
    assert shorten(value) in str(error)


def test_what_goes_deep_or_has_any_type_is_searched() -> None:
    deep: Any = f"redis://:{MARK}@host"  # Any: lists in lists
    for _ in range(100):
        deep = [deep]
    for value in (deep, {"password": {"a": MARK}}, (f"a:{MARK}@b",), {f"a:{MARK}@b": 1}, Path(f"a:{MARK}@b")):
        assert MARK not in repr(redact("anything", value))
    assert redact("num_threads", 10**5000) == 10**5000
