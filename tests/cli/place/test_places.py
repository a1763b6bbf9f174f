"""From what a user writes to a place: paths, URLs, entries; what is none is one line."""

import json
import os
from pathlib import Path

import pytest
from tests.cli.place.conftest import PLACE, Run
from tests.servers import MOONCAKE_MISSING
from tests.tiering.fs.slots import stored_blocks

from kvtier.cli.place.options import duration_in_words, parse_duration
from kvtier.testing.tier_driver import TierDriver, make_config, make_rows
from kvtier.tiering.fs import FSTier
from kvtier.tiering.places import names_of_place_tiers, open_place


def fill_fs(root: Path) -> None:
    rows = make_rows()
    driver = TierDriver(FSTier(make_config(), rows, root_dir=root, capacity_bytes="4MiB"), rows)
    driver.store([1, 2])
    driver.tier.shutdown(60.0)


def test_a_directory_is_one_of_fs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_fs(tmp_path / "kv")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for text in (str(tmp_path / "kv"), "kv", "~/kv"):
        place = open_place(text)
        assert place.tier == "fs"
        place.close()


def test_a_url_is_one_of_the_tier_that_knows_its_scheme(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="the obj tier needs its client: pip install 'kvtier[obj]'")
    assert open_place(f"file://{tmp_path}").tier == "obj"
    assert open_place(f"FILE://{tmp_path}").tier == "obj"


def test_an_entry_of_the_configuration_is_one_of_the_tier_that_it_names(tmp_path: Path) -> None:
    fill_fs(tmp_path / "kv")
    entry = {"type": "fs", "root_dir": str(tmp_path / "kv"), "capacity_bytes": "4MiB", "required": True}
    assert open_place(json.dumps(entry)).tier == "fs"
    assert open_place(PLACE).where == "here"


def test_all_tiers_with_lasting_blocks_can_be_seen() -> None:
    pytest.importorskip("obstore", reason="the obj tier needs its client: pip install 'kvtier[obj]'")
    pytest.importorskip("redis", reason="the valkey tier needs redis-py: pip install 'kvtier[valkey]'")
    pytest.importorskip("mooncake.store", reason=MOONCAKE_MISSING, exc_type=ImportError)
    assert names_of_place_tiers() == ["fs", "mooncake", "obj", "valkey"]


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["purge", "--all"]], ids=" ".join)
@pytest.mark.parametrize(
    "place",
    [
        "", "no/such/place", "s4://bucket", "://", "/dev/null", "/", "a\0b", "~no-such-user/kv", "{", "{}",
        '{"type": 1}', '{"type": "fs"}', '{"type": "ffs"}', '{"type": "fs", "rootdir": "/tmp"}', "memory://", "http://127.0.0.1:9",
        '{"type": "example"}', "file:///no/such/place", "s3://", "{" * 100_000, "x" * 5000, "obj://bucket",
    ],
)  # fmt: skip
def test_what_is_no_place_is_one_line(run: Run, command: list[str], place: str) -> None:
    status, shown, said = run(*command, place)
    assert (status, shown) == (2, "")
    assert len(said.splitlines()) == 1, said
    assert len(said) < 1000


def test_a_tier_that_cannot_be_seen_says_which_can(run: Run) -> None:
    _, _, said = run("inspect", '{"type": "example"}')
    assert "fs" in said
    assert "obj" in said


@pytest.mark.skipif(os.getuid() == 0, reason="the superuser may read everything: run as another user")
def test_a_place_without_leave_to_read_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0)
    status, _, said = run("inspect", str(tmp_path / "kv"))
    assert status == 2
    assert "Permission denied" in said


def test_a_real_directory_is_inspected_verified_and_purged(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "kv"
    fill_fs(root)
    assert "2 blocks" in run("inspect", str(root))[1]
    assert "2 whole" in run("verify", str(root))[1]
    block = stored_blocks(root)[0]
    block.flip()
    status, shown, _ = run("verify", str(root), "--delete")
    assert status == 1
    assert str(block.pack) in shown
    assert run("verify", str(root))[0] == 0
    assert "removed 1 block," in run("purge", str(root), "--all")[1]
    assert "0 blocks" in run("inspect", str(root))[1]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("1h30m", 5400), ("7d", 604_800), ("0.5h", 1800), ("2W", 1_209_600)],
)
def test_durations_have_units(text: str, seconds: float) -> None:
    assert parse_duration("--older-than", text) == seconds


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (10 * 86_400, "10 days")],
)
def test_durations_are_told_with_one_unit(seconds: float, words: str) -> None:
    assert duration_in_words(seconds) == words
