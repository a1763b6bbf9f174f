"""The tier's settings are refused when they cannot work, each with a remedy."""

import pytest

from kvtier.errors import ConfigError
from kvtier.settings import parse_settings
from kvtier.tiering.mooncake.settings import MooncakeSettings, Protocol


def parse(**changes: object) -> MooncakeSettings:
    """Parse good settings with some of them changed."""
    values: dict[str, object] = {
        "master": "127.0.0.1:50051",
        "segment_bytes": "1GiB",
        "num_replicas": 2,
        "local_host": "127.0.0.1",
        "protocol": "tcp",
        "timeout_s": 1.5,
        "num_threads": 3,
        "allow_any_interface": True,
    }
    return parse_settings(MooncakeSettings, values | changes)


@pytest.mark.parametrize("changes", [{"allow_any_interface": False}, {"allow_any_interface": None}, {}])
def test_listeners_without_authentication_are_opened_on_request_only(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_settings(MooncakeSettings, {"master": "127.0.0.1:50051"} | changes)
    text = str(refusal.value)
    if changes.get("allow_any_interface", False) is not None:
        assert all(
            word in text
            for word in ("every interface", "without authentication", "private network", "valkey")
        )
    assert text.startswith("allow_any_interface=")


def test_good_settings_are_typed() -> None:
    assert parse() == MooncakeSettings(
        master="127.0.0.1:50051",
        segment_bytes=2**30,
        num_replicas=2,
        local_host="127.0.0.1",
        protocol=Protocol.TCP,
        timeout_s=1.5,
        num_threads=3,
        allow_any_interface=True,
    )


def test_a_command_gets_what_it_takes_to_reach_the_blocks() -> None:
    assert parse(protocol="rdma").list_reach() == {
        "master": "127.0.0.1:50051",
        "protocol": "rdma",
        "allow_any_interface": True,
    }


@pytest.mark.parametrize("master", ["host.example:1", "10.0.0.5:65535", "[::1]:50051"])
def test_a_master_is_a_host_and_a_port(master: str) -> None:
    assert parse(master=master).master == master


def test_an_engine_that_contributes_nothing_says_zero() -> None:
    assert parse(segment_bytes=0).segment_bytes == 0


def test_rdma_is_known() -> None:
    assert parse(protocol="rdma").protocol is Protocol.RDMA


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("master", "", "host:port"),
        ("master", None, "host:port"),
        ("master", "host", "host:port"),
        ("master", "host:0", "host:port"),
        ("master", "host:70000", "host:port"),
        ("master", "http://host:5", "host:port"),
        ("master", "user:secret@host:5", "host:port"),
        ("master", "host:5 --flag", "host:port"),
        ("segment_bytes", "1MiB", "at least 16777216 bytes"),
        ("segment_bytes", -1, "from 1 to"),
        ("segment_bytes", False, "from 1 to"),
        ("segment_bytes", "many", "8GiB"),
        ("num_replicas", 0, "at least 1"),
        ("num_replicas", 17, "at most 16"),
        ("local_host", "", "without a port"),
        ("local_host", "host:5 x", "without a port"),
        ("local_host", None, "without a port"),
        ("protocol", "cxl", "one of 'tcp', 'rdma'"),
        ("timeout_s", 0, "from 0.001 to 30 seconds"),
        ("timeout_s", 31, "from 0.001 to 30 seconds"),
        ("timeout_s", "1", "seconds"),
        ("num_threads", 0, "at least 1"),
        ("num_threads", 65, "at most 64"),
        ("ttl_s", 60, "drops objects by its own order"),
        ("capacity_bytes", "1GiB", "the memory that is lent to it"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_a_remedy(setting: str, value: object, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        parse(**{setting: value})
    assert caught.value.setting == setting
