"""A flipped bit in a superblock empties no slab: the other one is used, and repairs it."""

import os
from pathlib import Path

import pytest
from tests.tiering.slab.conftest import StartTier, capacity_of, end
from tests.tiering.slab.disk import change, flip

from kvtier.errors import ConfigError
from kvtier.testing.tier_suite import ROW_BYTES
from kvtier.tiering.slab.place import open_slab_place, probe_slab_place
from kvtier.tiering.slab.superblock import MAGIC, SlabGeometry, pack_superblock, read_superblocks

NUM_SLOTS = 64
GEOMETRY = SlabGeometry(ROW_BYTES, NUM_SLOTS)
USED_BYTES = len(pack_superblock(GEOMETRY))


def superblocks(path: Path) -> tuple[object, object]:
    """Return what the two pages say."""
    with path.open("rb") as file:
        return tuple(read_superblocks(file.fileno()))  # type: ignore[return-value]  # a tuple of two


@pytest.fixture
def filled(start_tier: StartTier, path: Path) -> Path:
    """A slab with a block, closed."""
    driver = start_tier()
    driver.store([1])
    end(driver)
    return path


def test_a_new_slab_has_two(filled: Path) -> None:
    assert superblocks(filled) == (GEOMETRY, GEOMETRY)
    assert filled.stat().st_size == capacity_of(NUM_SLOTS)


@pytest.mark.parametrize("offset", [0, GEOMETRY.copy_offset], ids=["first", "copy"])
@pytest.mark.parametrize("place", [0, len(MAGIC), len(MAGIC) + 8, USED_BYTES - 1])
def test_a_flipped_bit_is_repaired_with_one_line_and_costs_no_block(
    start_tier: StartTier, filled: Path, caplog: pytest.LogCaptureFixture, offset: int, place: int
) -> None:
    flip(filled, offset + place)
    place_of_slab = open_slab_place({"path": str(filled)})
    assert len(list(place_of_slab.blocks())) == 1
    place_of_slab.close()
    assert GEOMETRY in superblocks(filled)
    driver = start_tier()
    assert driver.load_right([1]) == {1}
    assert superblocks(filled) == (GEOMETRY, GEOMETRY)
    assert ["is repaired from its" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("first", [0, USED_BYTES - 1])
@pytest.mark.parametrize("copy", [len(MAGIC), USED_BYTES - 1])
def test_with_both_damaged_nothing_is_written_and_the_error_says_what_to_do(
    start_tier: StartTier, filled: Path, first: int, copy: int
) -> None:
    flip(filled, first)
    flip(filled, GEOMETRY.copy_offset + copy)
    before = filled.read_bytes()
    with pytest.raises(ConfigError, match="both damaged, and was left as it is: restore"):
        start_tier()
    assert filled.read_bytes() == before
    assert not probe_slab_place({"path": str(filled), "capacity_bytes": "1MiB"})[0].is_good
    flip(filled, first)
    assert start_tier().load_right([1]) == {1}


@pytest.mark.parametrize("more_bytes", [0, 4096, ROW_BYTES + 4095])
def test_a_slab_of_an_older_version_keeps_its_blocks_and_gets_its_copy(
    start_tier: StartTier, path: Path, filled: Path, more_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    os.truncate(filled, GEOMETRY.copy_offset)  # as versions left it that had no copy
    driver = start_tier(capacity_bytes=GEOMETRY.copy_offset + more_bytes)
    assert driver.tier.capacity_blocks == NUM_SLOTS
    assert driver.load_right([1]) == {1}
    assert driver.store([2]).success
    assert superblocks(path) == (GEOMETRY, GEOMETRY)
    assert caplog.records == []


def test_a_damaged_slab_of_an_older_version_is_refused(start_tier: StartTier, filled: Path) -> None:
    os.truncate(filled, GEOMETRY.copy_offset)
    flip(filled, USED_BYTES - 1)
    with pytest.raises(ConfigError, match="both damaged"):
        start_tier()


def test_a_row_with_the_bytes_of_a_superblock_is_none(start_tier: StartTier, filled: Path) -> None:
    os.truncate(filled, GEOMETRY.copy_offset)
    change(filled, GEOMETRY.copy_offset - 4096, pack_superblock(SlabGeometry(ROW_BYTES, 3)))
    flip(filled, 0)
    with pytest.raises(ConfigError, match="holds something else"):
        start_tier()
