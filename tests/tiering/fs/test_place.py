"""The directory of packs, seen and probed without an engine."""

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.tiering.fs.conftest import StartTier
from tests.tiering.fs.engine import AwakeTier, bytes_of_packs
from tests.tiering.fs.packed import Clock, open_files
from tests.tiering.fs.placed import (
    NAMESPACE,
    OTHER_NAMESPACE,
    SLOT_BYTES,
    Living,
    end,
    fill,
    numbers_of,
    remove,
    remove_all,
)

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.errors import ConfigError, TierError
from kvtier.testing.damage import flip_bit_in_files
from kvtier.testing.place_suite import MODELS, PlaceSuite
from kvtier.testing.tier_driver import ROW_BYTES, key_of
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.place import PackPlace, open_pack_place, probe_pack_place
from kvtier.tiering.kit.place import NOTHING, Amount, BlockState, Place


class TestPackPlace(PlaceSuite):
    """The contract of every place."""

    tier_class = FSTier
    settings: ClassVar[dict[str, object]] = {"capacity_bytes": "4MiB"}

    def setup_method(self) -> None:
        self.living = Living()

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        own: dict[str, Any] = dict(self.own_settings(directory))  # Any: as the tier's own
        self.living.tiers = [AwakeTier(config, rows, **own)]
        return self.living.tiers[0]

    def fill(self, directory: Path, model: str, numbers: list[int]) -> None:
        super().fill(directory, model, numbers)
        self.living.tiers = []

    @contextmanager
    def opened(self, directory: Path) -> Iterator[Place]:
        place = PackPlace(directory / "packs", clock=self.living.clock, pause=self.living.pause)
        try:
            yield place
        finally:
            place.close()

    def own_settings(self, directory: Path) -> Mapping[str, object]:
        return {"root_dir": str(directory / "packs"), **self.settings}

    def damage(self, directory: Path, key: OffloadKey) -> None:
        assert flip_bit_in_files(directory, key)


class TestBuffered(TestPackPlace):
    """Through the page cache, a block a pack."""

    settings: ClassVar[dict[str, object]] = {
        "capacity_bytes": "4MiB",
        "direct_io": False,
        "pack_bytes": "24KiB",
    }


def test_a_block_says_where_it_is_and_when_it_was_used(
    root: Path, start_tier: StartTier, place: PackPlace
) -> None:
    fill(start_tier, [1], wall_clock=Clock())
    (block,) = place.blocks()
    (path,) = root.glob("*/*.pack")
    assert (block.address, block.used_s, block.num_bytes) == (f"slot 0 of {path}", 1000, SLOT_BYTES)
    assert (block.key, block.name, block.tenant) == (key_of(1), key_of(1), 0)


def test_of_an_encrypted_namespace_neither_keys_nor_tenants_are_told(
    root: Path, start_tier: StartTier, place: PackPlace
) -> None:
    fill(start_tier, [1])
    (path,) = root.glob("*/namespace.json")
    path.write_text('{"layout_version": 2, "encryption": "aes-256-gcm"}')
    (block,) = place.blocks()
    assert (block.key, block.tenant, block.name) == (None, None, key_of(1))


def test_what_a_living_engine_stores_and_drops_is_listed_as_it_is(
    start_tier: StartTier, place: PackPlace
) -> None:
    driver = start_tier()
    driver.store([1, 2, 3])
    assert numbers_of(list(place.blocks())) == {1, 2, 3}
    driver.tier.drop([key_of(2)])
    driver.poll_until(lambda: numbers_of(list(place.blocks())) == {1, 3})


def test_what_is_there_beside_blocks_is_counted_and_left_alone(
    root: Path, start_tier: StartTier, place: PackPlace
) -> None:
    driver = start_tier(capacity_bytes="8MiB")
    driver.store([1])
    start_tier(capacity_bytes="7MiB")
    (root / "notes.txt").write_bytes(b"12345")
    (root / "left.new").write_bytes(b"123")
    (root / NAMESPACE / ("0" * 16 + ".new")).write_bytes(b"1234")
    (root / "blocks.slab").write_bytes(b"kvtier-slab\r\n\x1a\n\xf3 and more")
    older = root / ("7" * 32) / "0" / "1"
    older.mkdir(parents=True)
    (older / "01.kv").write_bytes(b"x" * 4096)
    (root / NAMESPACE / ("1" * 16 + ".pack")).write_bytes(b"of a later version")
    list(place.blocks())
    summary = place.summary()
    assert summary.foreign == Amount(2, 8)
    assert summary.temporary == Amount(1, 4)
    assert summary.other_format.num == 3
    assert summary.capacity_bytes == 7 * 2**20
    assert summary.users == (f"process {os.getpid()}",)
    end(driver)
    place.begin_removal()
    place.remove(list(place.blocks()), unless_changed=False)
    place.end_removal([NAMESPACE])
    left = {path.name for path in root.iterdir() if path.suffix != ".notes"}
    assert left == {".lock", "notes.txt", "left.new", "blocks.slab", "7" * 32, NAMESPACE}
    assert {path.name for path in (root / NAMESPACE).iterdir()} == {"1" * 16 + ".pack", "namespace.json"}


def test_without_a_living_engine_there_is_neither_a_capacity_nor_a_user(
    start_tier: StartTier, place: PackPlace
) -> None:
    fill(start_tier, [1])
    assert (place.summary().capacity_bytes, place.summary().users) == (None, ())


def test_an_engine_replaces_the_description_that_an_older_version_left(
    root: Path, start_tier: StartTier, place: PackPlace
) -> None:
    fill(start_tier, [1])
    (fresh,) = place.namespaces()
    (root / fresh.name / "namespace.json").write_text('{"layout_version": 1, "tenant_salt": "a digest"}')
    start_tier().store([2, 3, 4, 5, 6])
    assert place.namespaces() == [fresh]


def test_packs_of_any_row_length_are_seen(start_tier: StartTier, place: PackPlace) -> None:
    fill(start_tier, [1])
    driver = start_tier(MODELS[1], row_bytes=2 * ROW_BYTES)
    driver.store([1])
    found = {block.num_bytes: place.check(block) for block in place.blocks()}
    assert found == dict.fromkeys((SLOT_BYTES, SLOT_BYTES + ROW_BYTES), BlockState.WHOLE)
    end(driver)
    assert remove_all(place) == 2
    assert place.namespaces() == []


def test_blocks_of_a_pack_whose_journal_is_lost_are_read_from_its_slots(
    root: Path, start_tier: StartTier, place: PackPlace
) -> None:
    fill(start_tier, [1, 2, 3])
    (journal,) = root.glob("*/*.index")
    journal.unlink()
    blocks = list(place.blocks())
    assert numbers_of(blocks) == {1, 2, 3}
    assert {block.used_s for block in blocks} == {None}
    assert {place.check(block) for block in blocks} == {BlockState.WHOLE}
    assert remove(place, [block for block in blocks if block.key == key_of(2)]) == 1
    assert start_tier().load_right([1, 2, 3]) == {1, 3}


def test_no_file_stays_open(root: Path, start_tier: StartTier) -> None:
    fill(start_tier, list(range(12)))
    place = PackPlace(root)
    for block in place.blocks():
        place.check(block)
    blocks = list(place.blocks())
    remove(place, blocks[:5])
    next(place.blocks())
    place.close()
    assert not open_files(root)


def test_nothing_behind_a_link_is_seen_or_removed(
    root: Path, start_tier: StartTier, place: PackPlace, tmp_path: Path
) -> None:
    fill(start_tier, [1])
    (block,) = place.blocks()
    elsewhere = tmp_path / "elsewhere"
    (root / NAMESPACE).rename(elsewhere)
    (root / NAMESPACE).symlink_to(elsewhere)
    (elsewhere / f"{8:016x}.index").write_bytes(b"left")
    assert [*place.blocks(), *place.blocks([NAMESPACE])] == []
    assert place.namespaces() == []
    place.begin_removal()
    assert place.remove([block], unless_changed=False) == NOTHING
    place.end_removal([NAMESPACE])
    assert len(list(elsewhere.iterdir())) == 4


def test_a_directory_that_no_tier_has_used_is_none(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").touch()
    with pytest.raises(ConfigError, match="no fs tier has used"):
        open_pack_place({"root_dir": str(tmp_path)})


def test_what_is_no_directory_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing"):
        with pytest.raises(ConfigError, match="cannot be read"):
            open_pack_place({"root_dir": str(tmp_path / name)})


def test_a_directory_that_is_shared_with_a_group_is_one_for_the_commands(
    root: Path, start_tier: StartTier
) -> None:
    fill(start_tier, [1, 2], file_mode="0660")
    with_it, without = (
        open_pack_place({"root_dir": str(root)} | mode) for mode in ({"file_mode": "0660"}, {})
    )
    assert {without.check(block) for block in with_it.blocks()} == {BlockState.WHOLE}
    assert remove(without, list(without.blocks())[:1]) == 1
    assert stat.S_IMODE((root / ".lock").stat().st_mode) == 0o660
    with_it.close()
    without.close()


def test_a_directory_that_others_may_write_to_is_refused(
    root: Path, start_tier: StartTier, place: PackPlace
) -> None:
    fill(start_tier, [1])
    (root / NAMESPACE).chmod(0o777)
    with pytest.raises(TierError, match="every user may write"):
        list(place.blocks())
    root.chmod(0o777)
    with pytest.raises(TierError, match="every user may write"):
        place.begin_removal()


def test_a_namespace_that_may_not_be_read_is_not_taken_for_an_empty_one(
    root: Path, start_tier: StartTier, place: PackPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model in MODELS:
        fill(start_tier, [1], model=model)
    private, real_scandir = str(root / NAMESPACE), os.scandir

    def refuse_one(path: str) -> Iterator[os.DirEntry[str]]:
        if str(path) == private:
            raise PermissionError(errno.EACCES, "Permission denied", private)
        return real_scandir(path)

    monkeypatch.setattr(os, "scandir", refuse_one)
    with pytest.raises(TierError, match="may not be read"):
        list(place.blocks())
    assert len(list(place.blocks([OTHER_NAMESPACE]))) == 1


@pytest.mark.skipif(os.getuid() == 0, reason="the superuser may write anywhere: run as another user")
def test_a_directory_without_leave_to_write_is_not_emptied(
    root: Path, start_tier: StartTier, place: PackPlace
) -> None:
    fill(start_tier, [1])
    mode = stat.S_IMODE(root.stat().st_mode)
    root.chmod(0o500)
    try:
        with pytest.raises(TierError, match="not writable"):
            place.begin_removal()
    finally:
        root.chmod(mode)


def test_the_probe_says_what_is_wrong_and_makes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "er"
    (finding,) = probe_pack_place({"root_dir": str(root), "capacity_bytes": "1MiB"})
    assert finding.is_good
    assert not root.exists()
    (tmp_path / "file").touch()
    (finding,) = probe_pack_place({"root_dir": str(tmp_path / "file"), "capacity_bytes": "1MiB"})
    assert not finding.is_good
    *_, note = probe_pack_place({"root_dir": str(root), "capacity_bytes": "1000TiB"})
    assert note.is_note
    assert "capacity_bytes" in note.text


def test_the_probe_says_what_an_engine_would_be_refused_for(root: Path, start_tier: StartTier) -> None:
    driver = start_tier()
    driver.store(list(range(16)))

    def faults(**settings: object) -> list[str]:
        found = probe_pack_place({"root_dir": str(root), "capacity_bytes": bytes_of_packs(16)} | settings)
        return [one.text for one in found if not one.is_good]

    assert faults() == []
    (text,) = faults(capacity_bytes=bytes_of_packs(1))
    assert "allow_shrink" in text
    assert faults(capacity_bytes=bytes_of_packs(1), allow_shrink=True) == []
    (root / OTHER_NAMESPACE).symlink_to(root / NAMESPACE)
    (text,) = faults()
    assert "symbolic link" in text
    root.chmod(0o777)
    assert "every user may write" in faults()[0]
    assert root.joinpath(NAMESPACE).exists()
