"""Errors: fields carry the data, messages say what to do, classes fit the builtin ones."""

import inspect
import pickle

import pytest

from kvtier import errors
from kvtier.errors import (
    BlockNotReadyError,
    ConfigError,
    KVTierError,
    MissingExtraError,
    NamedClassError,
    TierError,
    UnknownNameError,
    WorkerAreaError,
)


def test_every_error_is_a_kvtier_error() -> None:
    found = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, Exception)]
    assert KVTierError in found
    assert all(issubclass(each, KVTierError) for each in found)


def test_a_config_error_names_setting_value_and_remedy() -> None:
    error = ConfigError("block_size", 17, "must be a multiple of 16")
    assert (error.setting, error.value, error.remedy) == ("block_size", 17, "must be a multiple of 16")
    assert str(error) == "block_size=17: must be a multiple of 16"
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    ("setting", "value", "begin"),
    [
        ("--all", False, "--all: "),
        ("PLACE", None, "PLACE: "),
        ("--timeout", 0, "--timeout=0: "),
        ("required", True, "required=True: "),
        ("capacity_bytes", None, "capacity_bytes=None: "),
    ],
)
def test_a_switch_or_a_missing_argument_is_named_without_a_value(
    setting: str, value: object, begin: str
) -> None:
    assert str(ConfigError(setting, value, "say which")).startswith(begin)


def test_an_unknown_name_without_a_likely_neighbour_lists_the_known_ones() -> None:
    error = UnknownNameError("tier", "qqqq", ["obj", "fs"])
    assert error.nearest is None
    assert str(error) == "unknown tier 'qqqq': known are fs, obj"


def test_an_unknown_name_where_nothing_is_known_says_so() -> None:
    assert str(UnknownNameError("tier", "fs", [])) == "unknown tier 'fs': known are none"


def test_a_missing_extra_says_how_to_install_it() -> None:
    error = MissingExtraError("obstore", "obj")
    assert isinstance(error, ImportError)
    assert (error.name, error.extra) == ("obstore", "obj")
    assert "pip install '.[obj]'" in str(error)


def test_a_block_that_is_not_ready_is_named_in_hex() -> None:
    error = BlockNotReadyError(b"\x01\xab", "absent")
    assert isinstance(error, KeyError)
    assert error.key == b"\x01\xab"
    assert str(error).startswith("block 01ab is absent")


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("block_size", 17, "must be a multiple of 16"),
        UnknownNameError("tier", "f", ["fs"]),
        UnknownNameError("tier", "redis", ["valkey"], meant=["valkey"], also="a class"),
        NamedClassError("tier", "a:B", "is none"),
        MissingExtraError("obstore", "obj"),
        BlockNotReadyError(b"\x01", "absent"),
        WorkerAreaError("view exceeds worker area end"),
    ],
)
def test_an_error_reaches_another_process_whole(error: KVTierError) -> None:
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own

    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.args == error.args
    assert vars(again) == vars(error)
    assert getattr(again, "name", None) == getattr(error, "name", None)


def test_running_over_the_workers_area_is_an_assertion_error_too() -> None:
    with pytest.raises(AssertionError, match="exceeds"):
        raise WorkerAreaError("view exceeds worker area end")


def test_a_tier_error_names_its_tier() -> None:
    error = TierError("fs", "the disk is full")
    assert error.tier == "fs"
    assert str(error) == "tier 'fs': the disk is full"


def test_a_refused_setting_is_named_without_the_password_in_it() -> None:
    tiers = [{"type": "valkey", "url": "redis://someone:hunter2@host:6379/0"}]
    message = str(ConfigError("secondary_tiers", tiers, "must be a mapping"))
    assert "hunter2" not in message
    assert "redis://***@host:6379/0" in message


def test_a_very_long_name_is_cut() -> None:
    message = str(UnknownNameError("tier", "x" * 10_000, ["fs"]))
    assert len(message) < 150
    assert "xxx...: known are fs" in message
