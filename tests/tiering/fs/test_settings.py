"""The tier's settings are refused when they cannot work, each with a remedy."""

from pathlib import Path

import pytest
from tests.tiering.fs.conftest import StartTier
from tests.tiering.fs.engine import bytes_of_packs

from kvtier.errors import ConfigError, KVTierError
from kvtier.settings import parse_settings
from kvtier.testing.tier_driver import make_config, make_rows
from kvtier.tiering.factory import create_secondary_tier
from kvtier.tiering.fs.settings import PackSettings
from kvtier.tiering.kit.disk import Durability


def parse(**changes: object) -> PackSettings:
    """Parse good settings with some of them changed."""
    values: dict[str, object] = {
        "root_dir": "/data",
        "capacity_bytes": "1GiB",
        "pack_bytes": "16MiB",
        "file_mode": 0o600,
        "direct_io": "auto",
        "durability": "fdatasync",
        "ttl_s": 60,
        "num_threads": 4,
    }
    return parse_settings(PackSettings, values | changes)


def test_good_settings_are_typed() -> None:
    assert parse() == PackSettings(
        root_dir=Path("/data"),
        capacity_bytes=2**30,
        pack_bytes=2**24,
        file_mode=0o600,
        direct_io=None,
        durability=Durability.FDATASYNC,
        ttl_s=60.0,
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
        ("capacity_bytes", "many", "8GiB"),
        ("capacity_bytes", None, "8GiB"),
        ("capacity_bytes", 0, "from 1"),
        ("pack_bytes", "many", "8GiB"),
        ("pack_bytes", 0, "from 1"),
        ("file_mode", "0777", "no right to execute"),
        ("file_mode", 0o060, "owner read and write"),
        ("file_mode", "rw", "0660"),
        ("file_mode", True, "0660"),
        ("allow_shrink", "yes", "true or false"),
        ("direct_io", "yes", "auto"),
        ("durability", "always", "fdatasync"),
        ("num_threads", 0, "at least 1"),
        ("num_threads", 1000, "at most 128"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_a_remedy(setting: str, value: object, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        parse(**{setting: value})
    assert caught.value.setting == setting


@pytest.mark.parametrize("setting", ["shared", "negative_ttl_s", "path"])
def test_settings_of_earlier_versions_are_refused_by_name(setting: str, root: Path) -> None:
    entry = {"type": "fs", "root_dir": str(root), "capacity_bytes": "1MiB", setting: 1}
    with pytest.raises(KVTierError, match=setting):
        create_secondary_tier(entry, make_rows(), make_config())
    assert not root.exists()


def test_a_slab_is_refused_with_the_line_to_write(tmp_path: Path) -> None:
    entry = {"type": "slab", "path": str(tmp_path / "slab"), "capacity_bytes": "1MiB"}
    with pytest.raises(KVTierError, match=r'"type": "fs", "root_dir"'):
        create_secondary_tier(entry, make_rows(), make_config())


def test_capacity_for_exactly_one_block_is_enough_and_less_is_refused(start_tier: StartTier) -> None:
    one = bytes_of_packs(1, 1)
    with pytest.raises(ConfigError, match=f"one block takes {one} bytes") as caught:
        start_tier(capacity_bytes=one - 1, pack_bytes=None)
    assert caught.value.setting == "capacity_bytes"
    driver = start_tier(capacity_bytes=one, pack_bytes=None)
    assert driver.store([1]).success
    assert driver.load_right([1]) == {1}
