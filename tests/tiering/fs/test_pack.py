"""A pack holds what was written, says whose it is, and whatever is wrong with its file makes it none."""

import errno
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiering.fs.packed import (
    NAMESPACE,
    OTHER_NAMESPACE,
    ROW_BYTES,
    SLOT_BYTES,
    Clock,
    changes_of,
    create,
    make_directory,
    no_file_stays_open,
    read_slot,
    slot_of,
    stored,
)

from kvtier.tiering.fs.directory import PackDirectory
from kvtier.tiering.fs.pack import Pack
from kvtier.tiering.fs.pack_header import (
    MAX_PACK_BYTES,
    OWNER_OFFSET,
    SLOTS_OFFSET,
    OwnerMark,
    PackGeometry,
    PackHeader,
)
from kvtier.tiering.fs.system_calls import REAL_CALLS, Buffers, SystemCalls, fallocate

IDS = st.binary(min_size=16, max_size=16)
HEADER = PackHeader(PackGeometry(ROW_BYTES, 7), bytes(range(16)), bytes.fromhex(NAMESPACE))
MARK = OwnerMark(bytes(range(16)), "12x9f", bytes(range(16, 32)), is_closed=False)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[PackDirectory]:
    """A directory; no file of it stays open."""
    with no_file_stays_open(tmp_path):
        yield make_directory(tmp_path / "root")


def reopen(directory: PackDirectory, pack: Pack) -> Pack:
    """Open a pack for reading, which must work."""
    found = directory.open(NAMESPACE, pack.name)
    assert found is not None
    return found


# What the first pages say


@given(row_bytes=st.integers(1, 2**20), num_slots=st.integers(1, 2**16), pack_id=IDS, namespace=IDS)
def test_a_header_says_what_was_put_into_it(
    row_bytes: int, num_slots: int, pack_id: bytes, namespace: bytes
) -> None:
    header = PackHeader(PackGeometry(row_bytes, num_slots), pack_id, namespace)
    is_possible = num_slots == 1 or header.geometry.file_bytes <= MAX_PACK_BYTES
    assert PackHeader.unpack(header.pack().ljust(4096, b"\0")) == (header if is_possible else None)


@given(boot=IDS, process=st.from_regex(r"\A[0-9a-z]{1,32}\Z"), token=IDS, is_closed=st.booleans())
def test_a_mark_says_what_was_put_into_it(boot: bytes, process: str, token: bytes, is_closed: bool) -> None:
    mark = OwnerMark(boot, process, token, is_closed)
    assert OwnerMark.unpack(mark.pack().ljust(4096, b"\0")) == mark


@pytest.mark.parametrize("kind", [PackHeader, OwnerMark])
def test_a_page_with_one_wrong_byte_or_cut_says_nothing(kind: type[PackHeader | OwnerMark]) -> None:
    page = (HEADER if kind is PackHeader else MARK).pack()
    for at in range(len(page)):
        assert kind.unpack(page[:at]) is None
        assert kind.unpack(page[:at] + bytes([page[at] ^ 1]) + page[at + 1 :]) is None


@pytest.mark.parametrize(
    ("row_bytes", "num_slots"),
    [
        (0, 7),
        (ROW_BYTES, 0),
        (ROW_BYTES, 2**64 - 1),
        (2**64 - 1, 2),
        (1, 2**32 + 1),
        (ROW_BYTES, MAX_PACK_BYTES // SLOT_BYTES),
    ],
)
def test_counts_that_cannot_be_are_refused_though_the_digest_is_right(row_bytes: int, num_slots: int) -> None:
    assert PackHeader.unpack(HEADER._replace(geometry=PackGeometry(row_bytes, num_slots)).pack()) is None


def test_slots_stand_behind_the_two_pages_one_after_another() -> None:
    assert [HEADER.geometry.offset_of(slot) for slot in (0, 1)] == [8192, 8192 + SLOT_BYTES]
    assert HEADER.geometry.file_bytes == 8192 + 7 * SLOT_BYTES


# Slots


def test_what_is_read_is_what_was_written(directory: PackDirectory) -> None:
    pack = create(directory)
    pack.write(3, slot_of(b"three") + slot_of(b"four"))
    other = reopen(directory, pack)
    assert read_slot(other, 3) == bytes(slot_of(b"three")[0])
    assert read_slot(other, 4) == bytes(slot_of(b"four")[0])
    assert read_slot(other, 2) == read_slot(other, 5) == bytes(SLOT_BYTES)
    pack.sync()
    pack.close()
    other.close()


def test_slots_are_read_and_written_in_parts_where_the_system_takes_less(tmp_path: Path) -> None:
    calls = SystemCalls(
        pwritev=lambda fd, buffers, offset: os.pwritev(fd, [buffers[0][:4096]], offset),
        preadv=lambda fd, buffers, offset: os.preadv(fd, [buffers[0][:4096]], offset),
    )
    pack = create(make_directory(tmp_path, calls=calls))
    pack.write(1, slot_of(b"ab"))
    assert read_slot(pack, 1) == bytes(slot_of(b"ab")[0])
    pack.close()


def test_a_write_of_which_the_disk_takes_a_part_has_failed(tmp_path: Path) -> None:
    is_full = False

    def pwritev(fd: int, buffers: Buffers, offset: int) -> int:
        return 0 if is_full and offset >= SLOTS_OFFSET else os.pwritev(fd, buffers, offset)

    pack = create(make_directory(tmp_path, calls=SystemCalls(pwritev=pwritev)))
    is_full = True
    with pytest.raises(OSError, match="only a part"):
        pack.write(1, slot_of(b"ab"))
    pack.close()


@pytest.mark.parametrize("has_holes", [True, False])
def test_nothing_is_left_of_slots_that_are_punched(tmp_path: Path, has_holes: bool) -> None:
    def without_holes(fd: int, mode: int, offset: int, num_bytes: int) -> None:
        if mode & 2:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        fallocate(fd, mode, offset, num_bytes)

    calls = REAL_CALLS if has_holes else SystemCalls(fallocate=without_holes)
    pack = create(make_directory(tmp_path, calls=calls))
    for slot in range(6):
        pack.write(slot, slot_of(b"secret"))
    pack.punch([4, 1, 2])
    for slot in range(6):
        header = read_slot(pack, slot)[:4096]
        assert any(header) == (slot not in {1, 2, 4})
        assert not has_holes or any(read_slot(pack, slot)) == any(header)
    assert pack.path.stat().st_size == pack.geometry.file_bytes
    pack.close()


# Losses


def cut(pack: Pack) -> None:
    os.truncate(pack.path, pack.geometry.offset_of(3))


def empty(pack: Pack) -> None:
    os.truncate(pack.path, 0)


def remove(pack: Pack) -> None:
    pack.path.unlink()


def move(pack: Pack) -> None:
    pack.path.rename(pack.path.with_name("f" * 16 + ".pack"))


def replace(pack: Pack) -> None:
    data = pack.path.read_bytes()
    pack.path.unlink()
    pack.path.write_bytes(data)


def remove_folder(pack: Pack) -> None:
    pack.path.parent.rename(pack.path.parent.with_name("away"))


@pytest.mark.parametrize("spoil", [cut, empty, remove, move, replace, remove_folder])
def test_a_pack_that_was_removed_replaced_or_cut_is_lost(
    directory: PackDirectory, spoil: Callable[[Pack], None]
) -> None:
    pack = create(directory)
    other = reopen(directory, pack)
    assert not pack.is_lost()
    assert not other.is_lost()
    spoil(pack)
    assert pack.is_lost()
    assert other.is_lost()
    assert len(read_slot(other, 4)) in {0, SLOT_BYTES}
    pack.close()
    other.close()


# Headers that are not what they should be


def patch(pack: Pack, data: bytes, offset: int = 0) -> None:
    """Write over the file of a pack."""
    with pack.path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def with_geometry(row_bytes: int, num_slots: int) -> Callable[[Pack], None]:
    """Return what forges a pack's header, with the right digest."""
    return lambda pack: patch(pack, pack.header._replace(geometry=PackGeometry(row_bytes, num_slots)).pack())


def other_namespace(pack: Pack) -> None:
    patch(pack, pack.header._replace(namespace=bytes.fromhex(OTHER_NAMESPACE)).pack())


def other_version(pack: Pack) -> None:
    patch(pack, struct.pack("<I", 2), 16)


def sparse(pack: Pack) -> None:
    with_geometry(ROW_BYTES, MAX_PACK_BYTES // SLOT_BYTES + 1)(pack)
    os.truncate(pack.path, 2 * MAX_PACK_BYTES)


FORGERIES: dict[str, Callable[[Pack], None]] = {
    "cut": cut,
    "empty": empty,
    "zeros": lambda pack: patch(pack, bytes(4096)),
    "a flipped byte": lambda pack: patch(pack, b"\xff", 20),
    "more slots than bytes": with_geometry(ROW_BYTES, 10**6),
    "2^64 slots": with_geometry(ROW_BYTES, 2**64 - 1),
    "other rows": with_geometry(512, 4),
    "rows of 2^64": with_geometry(2**64 - 1, 1),
    "no slots": with_geometry(ROW_BYTES, 0),
    "more bytes than a pack may have": sparse,
    "another namespace": other_namespace,
    "another version": other_version,
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_pack_whose_header_is_wrong_is_left_alone(directory: PackDirectory, name: str) -> None:
    pack = create(directory)
    pack.close()
    FORGERIES[name](pack)
    assert directory.open(NAMESPACE, pack.name) is None
    assert directory.adopt(NAMESPACE, pack.name) is None
    assert pack.path.exists()


def test_packs_that_were_swapped_give_no_block_of_the_other(directory: PackDirectory) -> None:
    first, second = create(directory), create(directory)
    first.journal.append([stored(1)])
    second.journal.append([stored(2)])
    first.close()
    second.close()
    between = first.path.with_name("between")
    for old, new in ((first.path, between), (second.path, first.path), (between, second.path)):
        old.rename(new)
    for pack in (first, second):
        reader = reopen(directory, pack)
        assert len(reader.journal.tail().records) == 0
        own = directory.adopt(NAMESPACE, pack.name)
        assert own is not None
        assert len(own.journal.tail().records) == 0
        reader.close()
        own.close()


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_what_is_no_file_is_no_pack_and_is_not_waited_for(
    directory: PackDirectory, kind: str, tmp_path: Path
) -> None:
    pack = create(directory)
    pack.close()
    away = pack.path.rename(tmp_path / "away.pack")
    if kind == "fifo":
        os.mkfifo(pack.path)
    elif kind == "link":
        pack.path.symlink_to(away)
    else:
        pack.path.mkdir()
    assert directory.names(NAMESPACE) == set()
    assert directory.open(NAMESPACE, pack.name) is None
    assert directory.adopt(NAMESPACE, pack.name) is None


# Owners


def test_an_adopter_learns_whether_the_last_owner_ended_as_it_should(directory: PackDirectory) -> None:
    pack = create(directory)
    assert (pack.was_closed, pack.same_boot) == (True, True)
    pack.close()
    again = directory.adopt(NAMESPACE, pack.name)
    assert again is not None
    assert (again.was_closed, again.same_boot) == (True, True)
    again.close(unlock=False)
    third = directory.adopt(NAMESPACE, pack.name)
    assert third is not None
    assert (third.was_closed, third.same_boot) == (False, True)
    third.close()
    for page, expected in (
        (MARK._replace(is_closed=True).pack(), (True, False)),
        (MARK.pack(), (False, False)),
        (bytes(4096), (False, False)),
    ):
        patch(pack, page, OWNER_OFFSET)
        adopted = directory.adopt(NAMESPACE, pack.name)
        assert adopted is not None
        assert (adopted.was_closed, adopted.same_boot) == expected
        adopted.close()


def test_an_owner_notices_another_ones_mark_and_leaves_it(directory: PackDirectory) -> None:
    pack = create(directory)
    assert not pack.has_other_owner()
    patch(pack, bytes(4096), OWNER_OFFSET)
    assert not pack.has_other_owner()
    patch(pack, MARK.pack(), OWNER_OFFSET)
    assert pack.has_other_owner()
    pack.close()
    with pack.path.open("rb") as file:
        file.seek(OWNER_OFFSET)
        assert OwnerMark.unpack(file.read(4096)) == MARK


def test_a_pack_that_cannot_be_marked_as_closed_is_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    is_broken = False

    def pwritev(fd: int, buffers: Buffers, offset: int) -> int:
        if is_broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.pwritev(fd, buffers, offset)

    directory = make_directory(tmp_path, calls=SystemCalls(pwritev=pwritev))
    pack = create(directory)
    is_broken = True
    pack.close()
    pack.close()
    assert "could not be marked" in caplog.text
    is_broken = False
    again = directory.adopt(NAMESPACE, pack.name)
    assert again is not None
    assert not again.was_closed
    again.close()


def test_a_use_is_noted_once_a_minute(tmp_path: Path) -> None:
    clock = Clock()
    directory = make_directory(tmp_path, clock=clock)
    pack = create(directory)
    for passed_s, is_noted in ((0, True), (59, False), (1, True), (61, True)):
        clock.now_s += passed_s
        os.utime(pack.path, (0, 0))
        pack.touch()
        assert (pack.path.stat().st_mtime > 0) == is_noted
    pack.path.unlink()
    clock.now_s += 100
    pack.touch()
    pack.close()


def test_packs_of_a_process_have_numbers_of_their_own(directory: PackDirectory, tmp_path: Path) -> None:
    second = make_directory(tmp_path / "second")
    packs = [create(directory), create(second), create(directory)]
    packs.append(reopen(directory, packs[0]))
    assert len({pack.number for pack in packs}) == 4
    for pack in packs:
        pack.close()


def test_a_reader_learns_what_the_owner_records(directory: PackDirectory) -> None:
    pack = create(directory)
    reader = reopen(directory, pack)
    assert not reader.is_own
    pack.journal.append([stored(1)])
    assert changes_of(reader.journal.tail().records) == [stored(1)]
    pack.close()
    reader.close()
