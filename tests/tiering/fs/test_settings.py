"""The tier's settings are refused when they cannot work, each with a remedy."""

from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.settings import parse_settings
from kvtier.tiering.fs.settings import FSSettings, plan_num_store_threads, require_capacity
from kvtier.tiering.kit.disk import DEFAULT_NUM_THREADS

ROW_BYTES = 8192


def parse(**changes: object) -> FSSettings:
    """Parse good settings with some of them changed."""
    values: dict[str, object] = {
        "root_dir": "/data",
        "capacity_bytes": "1GiB",
        "shared": True,
        "negative_ttl_s": 2.0,
        "file_mode": 0o600,
        "direct_io": "auto",
        "num_threads": 4,
    }
    settings = parse_settings(FSSettings, values | changes)
    require_capacity(settings, ROW_BYTES + 4096)
    return settings


def test_good_settings_are_typed() -> None:
    assert parse() == FSSettings(
        root_dir=Path("/data"),
        capacity_bytes=2**30,
        shared=True,
        negative_ttl_s=2.0,
        file_mode=0o600,
        direct_io=None,
        num_threads=4,
    )


@pytest.mark.parametrize("text", ["0660", "660", "0o660", 0o660])
def test_a_file_mode_is_a_number_or_octal_text(text: object) -> None:
    assert parse(file_mode=text).file_mode == 0o660


def test_the_home_directory_is_understood() -> None:
    assert parse(root_dir="~/blocks").root_dir == Path.home() / "blocks"


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("root_dir", "", "absolute path of a file or directory"),
        ("root_dir", 5, "absolute path of a file or directory"),
        ("root_dir", "relative/path", "must be an absolute path"),
        ("root_dir", "~nobody-of-that-name/x", "absolute path"),
        ("capacity_bytes", ROW_BYTES + 4095, f"one block takes {ROW_BYTES + 4096} bytes"),
        ("capacity_bytes", "many", "8GiB"),
        ("capacity_bytes", None, "8GiB"),
        ("capacity_bytes", 0, "from 1"),
        ("shared", "yes", "true or false"),
        ("negative_ttl_s", -1, "seconds"),
        ("negative_ttl_s", float("inf"), "seconds"),
        ("file_mode", "0777", "no right to execute"),
        ("file_mode", 0o060, "owner read and write"),
        ("file_mode", "rw", "0660"),
        ("file_mode", True, "0660"),
        ("direct_io", "yes", "auto"),
        ("num_threads", 0, "at least 1"),
        ("num_threads", 1000, "at most 128"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_a_remedy(setting: str, value: object, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        parse(**{setting: value})
    assert caught.value.setting == setting


def test_a_time_for_searches_that_never_happen_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"negative_ttl_s=5\.0: has no effect with shared=False"):
        parse(shared=False, negative_ttl_s=5.0)


def test_capacity_for_exactly_one_block_is_enough() -> None:
    assert parse(capacity_bytes=ROW_BYTES + 4096).capacity_bytes == ROW_BYTES + 4096


@pytest.mark.parametrize(
    ("num_threads", "num_cores", "has_direct_io", "planned"),
    [(None, 2, False, 2), (None, 64, False, DEFAULT_NUM_THREADS), (None, 2, True, None), (6, 2, False, None)],
)
def test_no_more_threads_store_through_the_page_cache_than_there_are_cores(
    num_threads: int | None, num_cores: int, *, has_direct_io: bool, planned: int | None
) -> None:
    settings = parse(num_threads=num_threads)
    assert plan_num_store_threads(settings, num_cores, has_direct_io=has_direct_io) == planned
