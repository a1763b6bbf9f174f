"""A slot is damaged only if its journal says so afterwards; what another program has made of a pack is bounded."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.tiering.forged_blocks import AnyOpener, forge_header
from tests.tiering.fs.conftest import StartTier
from tests.tiering.fs.engine import bytes_of_packs
from tests.tiering.fs.placed import SLOT_BYTES, Living, fill, offset_of, pack_of, remove, write_at

from kvtier.testing.damage import flip_bit_in_files
from kvtier.testing.tier_driver import ROW_BYTES, key_of
from kvtier.tiering.fs import pack_view
from kvtier.tiering.fs.pack import Pack
from kvtier.tiering.fs.pack_header import SLOTS_OFFSET, PackGeometry, PackHeader
from kvtier.tiering.fs.pack_view import stamp_of
from kvtier.tiering.fs.place import PackPlace
from kvtier.tiering.fs.records import Change, Kind, pack_changes
from kvtier.tiering.kit import block_pieces
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, HEADER_PAGE_BYTES
from kvtier.tiering.kit.place import BlockState, PlaceBlock


def test_a_changed_byte_is_damage_while_the_pack_has_an_owner(
    root: Path, start_tier: StartTier, place: PackPlace
) -> None:
    start_tier().store([1, 2])
    assert flip_bit_in_files(root, key_of(1))
    assert {block.key: place.check(block) for block in place.blocks()} == {
        key_of(1): BlockState.DAMAGED,
        key_of(2): BlockState.WHOLE,
    }


def test_a_slot_that_was_written_again_is_neither_damaged_nor_emptied(
    start_tier: StartTier, place: PackPlace, living: Living
) -> None:
    one_slot = {"capacity_bytes": bytes_of_packs(1, 1), "pack_bytes": bytes_of_packs(1, 1)}
    driver = start_tier(**one_slot)
    living.tiers.append(driver.tier)
    driver.store([1])
    (before,) = place.blocks()
    assert driver.store([2]).success
    assert place.check(before) is BlockState.GONE
    assert remove(place, [before]) == 0
    assert driver.load_right([2]) == {2}


def test_a_block_under_the_name_of_another_is_moved(
    root: Path, start_tier: StartTier, place: PackPlace
) -> None:
    fill(start_tier, [1, 2])
    one, other = place.blocks()
    data = pack_of(other, root).read_bytes()[offset_of(other) :][:SLOT_BYTES]
    write_at(pack_of(one, root), offset_of(one), data)
    assert [place.check(one), place.check(other)] == [BlockState.MOVED, BlockState.WHOLE]


def plant_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("spoil", "state"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 4 * SLOT_BYTES), BlockState.GONE),
        (lambda path: os.truncate(path, 0), BlockState.GONE),
        (lambda path: write_at(path, SLOTS_OFFSET, b"KVTB\x09\0"), BlockState.OTHER_FORMAT),
        (lambda path: write_at(path, SLOTS_OFFSET, bytes(SLOT_BYTES)), BlockState.DAMAGED),
        (lambda path: path.unlink(), BlockState.GONE),
        (lambda path: (path.unlink(), path.mkdir()), BlockState.GONE),
        (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), BlockState.GONE),
        (plant_pipe, BlockState.GONE),
        (lambda path: path.with_suffix(".index").write_bytes(b""), BlockState.WHOLE),
    ],
    ids=["cut short", "empty", "another version", "zeros", "removed", "a folder", "a link", "a pipe", "no journal"],
)  # fmt: skip
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "not open"])
def test_whatever_a_pack_has_become_is_told_apart(
    root: Path, start_tier: StartTier, place: PackPlace, spoil: object, state: BlockState, *, is_open: bool
) -> None:
    fill(start_tier, [1])
    (block,) = place.blocks()
    if is_open:
        place.check(block)
    assert callable(spoil)
    spoil(pack_of(block, root))
    assert place.check(block) is state


def after_each_reading(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], object]) -> None:
    """Have something happen after each reading of a slot, which has a number from 1."""
    num_read = 0

    def check(*args: object, **options: object) -> BlockState:
        nonlocal num_read
        state = block_pieces.check_in_pieces(*args, **options)  # type: ignore[arg-type]  # as it was called
        num_read += 1
        act(num_read)
        return state

    monkeypatch.setattr(pack_view, "check_in_pieces", check)


def test_a_slot_that_is_written_while_it_is_read_is_read_again(
    root: Path, start_tier: StartTier, place: PackPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(start_tier, [1])
    (block,) = place.blocks()
    path = pack_of(block, root)
    whole = path.read_bytes()
    assert flip_bit_in_files(root, key_of(1))
    after_each_reading(monkeypatch, lambda _: write_at(path, 0, whole))
    assert place.check(block) is BlockState.WHOLE


def test_a_slot_to_which_the_block_returns_in_each_reading_is_being_written(
    root: Path, start_tier: StartTier, place: PackPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(start_tier, [1])
    (block,) = place.blocks()
    path = pack_of(block, root)
    header = PackHeader.unpack(path.read_bytes()[:HEADER_PAGE_BYTES])
    assert header is not None
    assert flip_bit_in_files(root, key_of(1))

    def store_again(number: int) -> None:
        change = Change(Kind.STORED, stamp_of(block).slot, bytes(key_of(1)), 5000 + number)
        with path.with_suffix(".index").open("ab") as journal:
            journal.write(pack_changes([change], header.pack_id))

    after_each_reading(monkeypatch, store_again)
    assert place.check(block) is BlockState.BEING_WRITTEN


def note_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the lengths of the readings of slots from now on."""
    real, lengths = Pack.read, []

    def read(self: Pack, slot: int, buffers: list[memoryview], skipped_bytes: int = 0) -> int:
        lengths.append(sum(map(len, buffers)))
        return real(self, slot, buffers, skipped_bytes)

    monkeypatch.setattr(Pack, "read", read)
    return lengths


def test_a_long_block_is_read_by_pieces(
    root: Path, start_tier: StartTier, place: PackPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(start_tier, [1])
    (block,) = place.blocks()
    lengths = note_reads(monkeypatch)
    monkeypatch.setattr(block_pieces, "PIECE_BYTES", 1000)
    assert place.check(block) is BlockState.WHOLE
    assert lengths == [HEADER_PAGE_BYTES, *[1000] * 8, 192]
    assert flip_bit_in_files(root, key_of(1))
    assert place.check(block) is BlockState.DAMAGED


def forge_length(root: Path, block: PlaceBlock, num_bytes: int) -> None:
    """Make a pack's first page say that it has one slot, of a row that is so long, and of holes."""
    path = pack_of(block, root)
    found = PackHeader.unpack(path.read_bytes()[:HEADER_PAGE_BYTES])
    assert found is not None
    forged = found._replace(geometry=PackGeometry(num_bytes, 1))
    write_at(path, 0, forged.pack())
    os.truncate(path, SLOTS_OFFSET + HEADER_PAGE_BYTES)
    os.truncate(path, forged.geometry.file_bytes)


def test_a_slot_of_holes_that_a_forged_first_page_makes_longer_than_memory_is_not_read(
    root: Path, start_tier: StartTier, place: PackPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(start_tier, [1])
    (block,) = place.blocks()
    forge_length(root, block, 2**42)
    (forged,) = place.blocks()
    lengths = note_reads(monkeypatch)
    assert place.check(forged) is BlockState.DAMAGED
    assert lengths == 2 * [HEADER_PAGE_BYTES]


@pytest.mark.parametrize(
    ("num_bytes", "is_encrypted"),
    [(2**40 - 1, False), (2**40 - 1, True), (2**27, True)],
    ids=["plain", "encrypted", "encrypted and short"],
)
def test_a_slot_of_holes_whose_header_says_its_length_is_damaged_and_not_read(
    root: Path,
    start_tier: StartTier,
    place: PackPlace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_bytes: int,
    *,
    is_encrypted: bool,
) -> None:
    fill(start_tier, [1])
    (block,) = place.blocks()
    path, forged = pack_of(block, root), tmp_path / "forged"
    forged.write_bytes(path.read_bytes()[offset_of(block) :][:SLOT_BYTES])
    forge_header(str(forged), HEADER_PAGE_BYTES, num_bytes, is_encrypted=is_encrypted)
    forge_length(root, block, num_bytes)
    with forged.open("rb") as file:
        write_at(path, SLOTS_OFFSET, file.read(ENVELOPE_BYTES))
    place.unlock(AnyOpener())
    (listed,) = place.blocks()
    lengths = note_reads(monkeypatch)
    assert place.check(listed) is BlockState.DAMAGED
    assert lengths == 2 * [HEADER_PAGE_BYTES]


@pytest.mark.parametrize("geometry", [PackGeometry(ROW_BYTES, 2**22), PackGeometry(2**62, 1)])
def test_a_first_page_that_tells_of_more_than_the_file_has_is_not_believed(
    root: Path, start_tier: StartTier, place: PackPlace, geometry: PackGeometry
) -> None:
    fill(start_tier, [1])
    (path,) = root.glob("*/*.pack")
    header = PackHeader.unpack(path.read_bytes()[:HEADER_PAGE_BYTES])
    assert header is not None
    write_at(path, 0, header._replace(geometry=geometry).pack())
    assert list(place.blocks()) == []
    assert place.summary().other_format.num == 1
