"""The first page says how a slab is divided, and whose a file is."""

import pytest

from kvtier.tiering.slab.superblock import (
    MAGIC,
    SUPERBLOCK_BYTES,
    Origin,
    SlabGeometry,
    Superblock,
    Superblocks,
    fit_geometry,
    pack_superblock,
    unpack_superblock,
)

GEOMETRY = SlabGeometry(row_bytes=8192, num_slots=7)
PAGE = pack_superblock(GEOMETRY).ljust(SUPERBLOCK_BYTES, b"\0")


def test_what_is_unpacked_is_what_was_packed() -> None:
    assert unpack_superblock(PAGE) == GEOMETRY


def test_an_empty_file_is_nobodys() -> None:
    assert unpack_superblock(b"") is Origin.EMPTY


@pytest.mark.parametrize("page", [b"\0" * SUPERBLOCK_BYTES, b"a letter to a friend", MAGIC[:-1]])
def test_anything_else_is_foreign(page: bytes) -> None:
    assert unpack_superblock(page) is Origin.FOREIGN


@pytest.mark.parametrize("place", range(len(MAGIC), len(pack_superblock(GEOMETRY))))
def test_a_damaged_page_with_our_magic_is_ours_and_of_no_use(place: int) -> None:
    damaged = bytearray(PAGE)
    damaged[place] ^= 1
    assert unpack_superblock(bytes(damaged)) is Origin.DAMAGED


GOOD, OTHER = GEOMETRY, SlabGeometry(4096, 3)


@pytest.mark.parametrize(
    ("first", "last", "counts"),
    [
        (GOOD, GOOD, GOOD),
        (GOOD, OTHER, GOOD),
        (GOOD, Origin.EMPTY, GOOD),
        (GOOD, Origin.DAMAGED, GOOD),
        (Origin.DAMAGED, GOOD, GOOD),
        (Origin.FOREIGN, GOOD, GOOD),
        (Origin.DAMAGED, Origin.DAMAGED, Origin.DAMAGED),
        (Origin.DAMAGED, Origin.FOREIGN, Origin.DAMAGED),
        (Origin.FOREIGN, Origin.DAMAGED, Origin.DAMAGED),
        (Origin.FOREIGN, Origin.FOREIGN, Origin.FOREIGN),
        (Origin.EMPTY, Origin.EMPTY, Origin.EMPTY),
        (Origin.OTHER_VERSION, Origin.EMPTY, Origin.OTHER_VERSION),
    ],
)
def test_one_good_page_is_enough(first: Superblock, last: Superblock, counts: Superblock) -> None:
    assert Superblocks(first, last).geometry == counts


@pytest.mark.parametrize("length", [len(MAGIC), len(pack_superblock(GEOMETRY)) - 1])
def test_a_page_that_ends_early_is_ours_and_of_no_use(length: int) -> None:
    assert unpack_superblock(PAGE[:length]) is Origin.DAMAGED


@pytest.mark.parametrize(
    ("capacity_bytes", "num_slots"), [(0, 0), (8192 + 12287, 0), (8192 + 12288, 1), (8192 + 5 * 12288 + 1, 5)]
)
def test_a_slab_never_exceeds_its_capacity(capacity_bytes: int, num_slots: int) -> None:
    assert fit_geometry(capacity_bytes, 8192).num_slots == num_slots


def test_slots_stand_behind_the_first_page_one_after_another() -> None:
    assert [GEOMETRY.offset_of(slot) for slot in (0, 1)] == [4096, 4096 + 12288]
    assert GEOMETRY.copy_offset == 4096 + 7 * 12288
    assert GEOMETRY.file_bytes == GEOMETRY.copy_offset + 4096
