"""The tier's settings are refused when they cannot work, each with a remedy."""

from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.settings import parse_settings
from kvtier.tiering.slab.settings import SlabSettings, plan_geometry
from kvtier.tiering.slab.superblock import SlabGeometry

ROW_BYTES = 8192


def parse(**changes: object) -> SlabSettings:
    """Parse good settings with some of them changed."""
    values: dict[str, object] = {
        "path": "/data/slab",
        "capacity_bytes": "1MiB",
        "direct_io": "auto",
        "num_threads": 4,
    }
    settings = parse_settings(SlabSettings, values | changes)
    plan_geometry(settings, ROW_BYTES)
    return settings


def test_good_settings_are_typed() -> None:
    assert parse() == SlabSettings(Path("/data/slab"), 2**20, direct_io=None, num_threads=4)
    assert plan_geometry(parse(), ROW_BYTES) == SlabGeometry(ROW_BYTES, 84)


def test_the_home_directory_is_understood() -> None:
    assert parse(path="~/slab").path == Path.home() / "slab"


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("path", "", "absolute path of a file"),
        ("path", 5, "absolute path of a file"),
        ("path", "relative/path", "must be an absolute path"),
        ("path", "/a\0b", "zero byte"),
        ("path", "~nobody-of-that-name/x", "absolute path"),
        ("capacity_bytes", ROW_BYTES + 12287, f"one block takes {ROW_BYTES + 12288} bytes"),
        ("capacity_bytes", "many", "8GiB"),
        ("capacity_bytes", None, "8GiB"),
        ("capacity_bytes", 0, "from 1 to"),
        ("direct_io", "yes", "auto"),
        ("direct_io", 1, "auto"),
        ("num_threads", 0, "at least 1"),
        ("num_threads", 1000, "at most 128"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_a_remedy(setting: str, value: object, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        parse(**{setting: value})
    assert caught.value.setting == setting


def test_capacity_for_exactly_one_block_is_enough() -> None:
    assert plan_geometry(parse(capacity_bytes=ROW_BYTES + 12288), ROW_BYTES).num_slots == 1
