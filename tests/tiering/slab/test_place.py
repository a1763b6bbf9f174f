"""The file of the slab tier, seen, checked and emptied without an engine."""

import fcntl
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.tiering.slab.conftest import StartTier, capacity_of, end, offset_of

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.errors import ConfigError, TierError
from kvtier.testing.damage import flip_bit_in_files
from kvtier.testing.place_suite import PlaceSuite
from kvtier.testing.tier_suite import ROW_BYTES
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES
from kvtier.tiering.kit.place import BlockState
from kvtier.tiering.slab import SlabTier
from kvtier.tiering.slab.place import find_owners, open_slab_place, probe_slab_place
from kvtier.tiering.slab.superblock import SlabGeometry, pack_superblock

SLOT_BYTES = HEADER_PAGE_BYTES + ROW_BYTES


class TestSlabPlace(PlaceSuite):
    """The contract of every place."""

    tier_class = SlabTier
    has_owner = True

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        tier = SlabTier(config, rows, **self.own_settings(directory))  # type: ignore[arg-type]  # a test's own
        assert tier.wait_indexed(60.0)
        return tier

    def own_settings(self, directory: Path) -> Mapping[str, object]:
        path = directory / "blocks.slab"
        return {"path": str(path), "capacity_bytes": capacity_of(64)}

    def damage(self, directory: Path, key: OffloadKey) -> None:
        assert flip_bit_in_files(directory, key)

    def test_a_setting_that_no_tier_has_is_refused(self, tmp_path: Path) -> None:
        self.fill(tmp_path, "model-a", [1])
        super().test_a_setting_that_no_tier_has_is_refused(tmp_path)


def test_a_living_owner_is_named(path: Path, start_tier: StartTier) -> None:
    driver = start_tier()
    place = open_slab_place({"path": str(path)})
    (owner,) = place.summary().users
    assert owner.startswith(f"process {os.getpid()}")
    with pytest.raises(TierError, match=f"process {os.getpid()}"):
        place.begin_removal()
    end(driver)
    assert place.summary().users == ()
    place.begin_removal()
    place.close()


def test_a_slot_of_holes_that_a_forged_first_page_makes_longer_than_memory_is_not_read(
    path: Path, start_tier: StartTier
) -> None:
    driver = start_tier()
    driver.store([1])
    end(driver)
    (block,) = open_slab_place({"path": str(path)}).blocks()
    geometry = SlabGeometry(2**42, 1)
    page = pack_superblock(geometry)
    slot = path.read_bytes()[offset_of(block.stamp[0]) :][:SLOT_BYTES]
    with path.open("r+b") as file:
        file.write(page)
        file.seek(geometry.offset_of(0))
        file.write(slot)
        file.truncate(geometry.offset_of(0) + geometry.slot_bytes)
        file.seek(-len(page), os.SEEK_END)
        file.write(page)
    place = open_slab_place({"path": str(path)})
    (forged,) = place.blocks()
    assert place.check(forged) is BlockState.DAMAGED


def tear(path: Path, slot: int) -> None:
    """Change the last byte of a slot, as if its payload were not all written."""
    with path.open("r+b") as file:
        file.seek(offset_of(slot) + SLOT_BYTES - 1)
        last = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last[0] ^ 1]))


def test_a_torn_slot_of_the_newest_writes_is_being_written_while_the_file_has_an_owner(
    path: Path, start_tier: StartTier
) -> None:
    driver = start_tier()
    for number in (1, 2):
        assert driver.store([number]).success
    place = open_slab_place({"path": str(path)})
    old, new = sorted(place.blocks(), key=lambda block: block.stamp[1])
    for block in (old, new):
        tear(path, block.stamp[0])
    assert [place.check(old), place.check(new)] == [BlockState.DAMAGED, BlockState.BEING_WRITTEN]
    end(driver)
    assert place.check(new) is BlockState.DAMAGED
    place.close()


def test_a_slot_that_was_written_again_is_neither_damaged_nor_emptied(
    path: Path, start_tier: StartTier
) -> None:
    driver = start_tier(capacity_bytes=capacity_of(1))
    driver.store([1])
    place = open_slab_place({"path": str(path)})
    (before,) = place.blocks()
    driver.store([2])
    assert place.check(before) is BlockState.GONE
    end(driver)
    place.begin_removal()
    assert place.remove([before], unless_changed=False).num == 0
    place.close()
    assert start_tier(capacity_bytes=capacity_of(1)).load_right([2]) == {2}


def test_one_that_empties_slots_waits_for_another_that_does(path: Path, start_tier: StartTier) -> None:
    driver = start_tier()
    driver.store([1, 2])
    end(driver)
    first, second = (open_slab_place({"path": str(path)}) for _ in range(2))
    first.begin_removal()
    removed = []

    def purge() -> None:
        second.begin_removal()
        removed.append(second.remove(list(second.blocks()), unless_changed=False).num)
        second.end_removal(())

    other = threading.Thread(target=purge)
    other.start()
    assert first.remove(list(first.blocks()), unless_changed=False).num == 2
    first.end_removal(())
    other.join(60.0)
    assert removed == [0]
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"holiday" * 1000, "is no slab"),
        (b"kvtier-slab\r\n\x1a\n\xf3" * 9, "is empty"),
        (b"kvtier-slab\r\n\x1a\n\xf3" * 999, "are damaged"),
    ],
)
def test_a_file_that_is_no_slab_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        open_slab_place({"path": str(tmp_path / "file")})


@pytest.mark.parametrize("geometry", [SlabGeometry(ROW_BYTES, 2**60), SlabGeometry(2**62, 2**62)])
def test_a_first_page_that_tells_of_more_than_the_file_has_is_not_believed(
    path: Path, start_tier: StartTier, geometry: SlabGeometry
) -> None:
    driver = start_tier()
    driver.store([1])
    end(driver)
    superblock = pack_superblock(geometry)
    path.write_bytes(superblock + path.read_bytes()[len(superblock) :])
    place = open_slab_place({"path": str(path)})
    num_blocks = 1 if geometry.row_bytes == ROW_BYTES else 0
    assert [place.check(block) for block in place.blocks()] == num_blocks * [BlockState.WHOLE]
    place.close()


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing"):
        with pytest.raises(ConfigError):
            open_slab_place({"path": str(tmp_path / name)})


def test_locks_of_other_files_and_readers_name_no_owner(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    fd = os.open(path, os.O_RDWR)
    status = os.fstat(fd)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    table = tmp_path / "locks"
    table.write_text(
        f"1: FLOCK  ADVISORY  READ  11 {place} 0 EOF\n"
        f"2: POSIX  ADVISORY  WRITE 12 {place} 0 EOF\n"
        f"3: FLOCK  ADVISORY  WRITE 13 00:01:1 0 EOF\n"
        f"4: FLOCK  ADVISORY  WRITE 999999999 {place} 0 EOF\n"
        f"4: -> FLOCK  ADVISORY  WRITE 15 {place} 0 EOF\n"
    )
    assert find_owners(fd, table) == ("process 999999999",)
    (unknown,) = find_owners(fd, tmp_path / "missing")
    assert "unknown" in unknown
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert len(find_owners(fd)) == 1
    os.close(fd)


def test_the_probe_says_what_is_wrong_and_makes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "blocks.slab"

    def is_good(**settings: object) -> bool:
        return all(
            one.is_good for one in probe_slab_place({"path": str(path), "capacity_bytes": "1MiB"} | settings)
        )

    assert is_good()
    assert not path.exists()
    assert not is_good(capacity_bytes="1000TiB")
    assert not is_good(path=str(tmp_path / "missing" / "blocks.slab"))
    path.touch()
    assert is_good()
    path.write_bytes(b"holiday")
    assert not is_good()


def test_the_probe_names_the_engine_that_has_the_file(path: Path, start_tier: StartTier) -> None:
    start_tier()
    (finding,) = probe_slab_place({"path": str(path), "capacity_bytes": capacity_of(64)})
    assert not finding.is_good
    assert f"process {os.getpid()}" in finding.text
