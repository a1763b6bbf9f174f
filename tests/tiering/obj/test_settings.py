"""The tier's settings are refused when they cannot work, each with a remedy and none with a password in it."""

from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.settings import parse_settings
from kvtier.testing.tier_suite import ROW_BYTES, make_config, make_rows
from kvtier.tiering.kit.blobs.settings import require_capacity
from kvtier.tiering.obj import ObjTier
from kvtier.tiering.obj.settings import ObjSettings
from kvtier.tiering.obj.target import Service, StoreTarget

BLOCK_BYTES = ROW_BYTES + 128
PASSWORD = "pa55word"  # noqa: S105  # refused, never used


def parse(**changes: object) -> ObjSettings:
    """Parse good settings with some of them changed."""
    values: dict[str, object] = {
        "url": "s3://bucket",
        "prefix": "kvtier",
        "capacity_bytes": "1GiB",
        "timeout_s": 5.0,
        "num_threads": 16,
        "endpoint": "https://127.0.0.1:8333",
        "region": "eu-central-1",
        "allow_http": False,
        "ca_file": "/etc/ca.pem",
    }
    settings = parse_settings(ObjSettings, values | changes)
    require_capacity(settings, BLOCK_BYTES)
    return settings


def test_good_settings_are_typed() -> None:
    assert parse().target == StoreTarget(Service.S3, "bucket", "kvtier")
    assert parse() == ObjSettings(
        url="s3://bucket",
        prefix="kvtier",
        capacity_bytes=2**30,
        timeout_s=5.0,
        num_threads=16,
        endpoint="https://127.0.0.1:8333",
        region="eu-central-1",
        allow_http=False,
        ca_file=Path("/etc/ca.pem"),
    )


@pytest.mark.parametrize(
    ("url", "prefix", "target"),
    [
        ("s3://bucket/team/a/", "x", StoreTarget(Service.S3, "bucket", "team/a/x")),
        ("s3://bucket", "", StoreTarget(Service.S3, "bucket", "")),
        ("gs://bucket", "/x/", StoreTarget(Service.GCS, "bucket", "x")),
        ("az://container", "x", StoreTarget(Service.AZURE, "container", "x")),
        ("https://host:8080/dav", "x", StoreTarget(Service.HTTP, "https://host:8080", "dav/x")),
        ("file:///var/kvtier", "x", StoreTarget(Service.FILE, "/var/kvtier", "x")),
        ("memory://", "x", StoreTarget(Service.MEMORY, "", "x")),
    ],
)
def test_a_url_and_a_prefix_name_a_target(url: str, prefix: str, target: StoreTarget) -> None:
    found = parse(url=url, prefix=prefix, endpoint=None, ca_file=None, region=None, capacity_bytes=None)
    assert found.target == target


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("url", "", "must be a URL"),
        ("url", 5, "must be a URL"),
        ("url", "bucket", "must be a URL"),
        ("url", "ftp://bucket", "s3://, gs://, az://"),
        ("url", "s3://", "name a bucket"),
        ("url", "s3://bucket/a/../b", "letters, digits"),
        ("url", "file://relative/path", "name a directory"),
        ("url", "file:///", "name a directory"),
        ("url", "memory://name", "has no name"),
        ("url", "http://host", "unencrypted"),
        ("prefix", "a//b", "letters, digits"),
        ("prefix", "../b", "letters, digits"),
        ("prefix", "a b", "letters, digits"),
        ("prefix", "x" * 513, "letters, digits"),
        ("prefix", None, "must be a string"),
        ("capacity_bytes", "many", "8GiB"),
        ("capacity_bytes", 64 * BLOCK_BYTES - 1, f"64 blocks of {BLOCK_BYTES} bytes"),
        ("blocks_per_object", 1, "was removed .* leave it out"),
        ("blocks_per_object", 4, "was removed .* leave it out"),
        ("timeout_s", 0, "above zero"),
        ("timeout_s", -1, "seconds"),
        ("num_threads", 0, "at least 1"),
        ("num_threads", 129, "at most 128"),
        ("endpoint", "127.0.0.1:8333", "must be a URL"),
        ("endpoint", "https://host/path", "without a path"),
        ("endpoint", "ftp://host", "must be a URL"),
        ("endpoint", "http://127.0.0.1:8333", "allow_http"),
        ("region", "eu central", "name of a region"),
        ("allow_http", "yes", "true or false"),
        ("ca_file", "relative.pem", "absolute path"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_a_remedy(setting: str, value: object, remedy: str) -> None:
    others: dict[str, object] = {}
    if setting == "url":
        others = {"endpoint": None, "region": None, "capacity_bytes": None}
    with pytest.raises(ConfigError, match=remedy) as caught:
        parse(**(others | {setting: value}))
    assert caught.value.setting == setting


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("url", f"s3://user:{PASSWORD}@bucket"),
        ("url", f"s3://user:a/{PASSWORD}@bucket"),
        ("url", f"https://host/container?sig={PASSWORD}"),
        ("url", f"s3://bucket#{PASSWORD}"),
        ("endpoint", f"https://user:{PASSWORD}@host"),
        ("endpoint", f"https://host?key={PASSWORD}"),
    ],
)
def test_credentials_in_a_setting_are_refused_and_not_repeated(setting: str, value: str) -> None:
    with pytest.raises(ConfigError, match="credentials come from the environment") as caught:
        parse(**{setting: value})
    assert PASSWORD not in str(caught.value) + repr(caught.value) + str(caught.value.value)


@pytest.mark.parametrize(
    ("url", "setting", "value"),
    [
        ("gs://bucket", "endpoint", "https://host"),
        ("file:///var/kvtier", "endpoint", "https://host"),
        ("az://container", "region", "eu-central-1"),
    ],
)
def test_a_setting_without_a_meaning_for_the_service_is_refused(url: str, setting: str, value: str) -> None:
    none = {"endpoint": None, "region": None, "capacity_bytes": None}
    with pytest.raises(ConfigError, match="leave it out") as caught:
        parse(**({"url": url} | none | {setting: value}))
    assert caught.value.setting == setting


@pytest.mark.parametrize("url", ["file:///var/kvtier", "memory://", "http://127.0.0.1:1"])
def test_certificates_without_tls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"ca_file='/etc/ca\.pem': has no effect without TLS"):
        parse(url=url, endpoint=None, region=None, capacity_bytes=None, allow_http=True)


def test_a_missing_file_of_certificates_is_refused_when_the_tier_is_built() -> None:
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        ObjTier(make_config(), make_rows(), url="s3://bucket", ca_file="/no/such.pem")
    assert caught.value.setting == "ca_file"


def test_a_directory_that_cannot_be_made_is_refused_when_the_tier_is_built(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        ObjTier(make_config(), make_rows(), url=f"file://{tmp_path}/file/inner")


def test_a_missing_directory_is_made_with_its_parents_and_is_private(tmp_path: Path) -> None:
    tier = ObjTier(make_config(), make_rows(), url=f"file://{tmp_path}/a/b/store")
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/store")]
    assert modes == [0o700] * 3
    assert tier.shutdown(1.0)
