"""The tier's settings are refused when they cannot work, each with a remedy."""

from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.settings import parse_settings
from kvtier.tiering.valkey.endpoint import Address, Endpoint
from kvtier.tiering.valkey.settings import ValkeySettings


def parse(**changes: object) -> ValkeySettings:
    """Parse good settings with some of them changed."""
    values: dict[str, object] = {
        "url": "redis://host",
        "cluster": False,
        "ttl_s": 60,
        "timeout_s": 2.0,
        "ca_file": None,
        "num_threads": 4,
    }
    return parse_settings(ValkeySettings, values | changes)


def test_good_settings_are_typed() -> None:
    endpoint = Endpoint(Address("host", 6379))
    assert parse() == ValkeySettings(
        url=endpoint, cluster=False, ttl_s=60.0, timeout_s=2.0, ca_file=None, num_threads=4
    )


@pytest.mark.parametrize("value", [0, 0.0, None])
def test_no_expiry_can_be_written_in_two_ways(value: object) -> None:
    assert parse(ttl_s=value).ttl_s is None


def test_a_file_of_certificates_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    with pytest.raises(ConfigError, match="is no file"):
        parse(url="rediss://host", ca_file=path)
    path.touch()
    assert parse(url="rediss://host", ca_file=path).ca_file == str(path)


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("cluster", "yes", "true or false"),
        ("ttl_s", 0.5, "at least a second"),
        ("ttl_s", 1e12, "at most ten years"),
        ("ttl_s", -1, "zero or more"),
        ("ttl_s", "a day", "number of seconds"),
        ("timeout_s", 0, "from 0.001 to 60 seconds"),
        ("timeout_s", 3600, "from 0.001 to 60 seconds"),
        ("ca_file", 5, "path of a file"),
        ("ca_file", "/ca.pem", "rediss://"),
        ("num_threads", 0, "at least 1"),
        ("num_threads", 1000, "at most 128"),
    ],
)
def test_a_value_that_cannot_work_is_refused(setting: str, value: object, remedy: str) -> None:
    with pytest.raises(ConfigError, match=setting) as raised:
        parse(**{setting: value})
    assert remedy in str(raised.value)


def test_a_cluster_has_one_database() -> None:
    with pytest.raises(ConfigError, match="database 0"):
        parse(url="redis://:sesame@host/1", cluster=True)


def test_a_way_of_renewing_a_time_that_no_block_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="renew_ttl=False: has no effect with ttl_s=0"):
        parse(ttl_s=0, renew_ttl=False)


def test_settings_do_not_show_the_password() -> None:
    assert "sesame" not in repr(parse(url="redis://eve:sesame@host"))
