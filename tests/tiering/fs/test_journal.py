"""A journal is read by others as it is appended; what is wrong with its file costs records, and waits for nothing."""

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.tiering.fs.packed import Faults, changes_of, no_file_stays_open, stored

from kvtier.tiering.fs.journal import Journal
from kvtier.tiering.fs.pack_header import PackGeometry, PackHeader
from kvtier.tiering.fs.records import (
    RECORD_BYTES,
    Change,
    Records,
    long_records,
    pack_changes,
    reserved_bytes,
)
from kvtier.tiering.fs.system_calls import REAL_CALLS, SystemCalls

HEADER = PackHeader(PackGeometry(4096, 16), bytes(range(16)), bytes(16))
OTHER_HEADER = HEADER._replace(pack_id=bytes(range(1, 17)))
CHANGES = [stored(slot) for slot in range(6)]
DATA = pack_changes(CHANGES, HEADER.pack_id)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The file of a test's journals; none stays open."""
    with no_file_stays_open(tmp_path):
        yield tmp_path / "0123456789abcdef.index"


def own(path: Path, calls: SystemCalls = REAL_CALLS) -> Journal:
    """Open the journal as the pack's owner does."""
    return Journal(path, HEADER, is_own=True, calls=calls)


def reader(path: Path, calls: SystemCalls = REAL_CALLS) -> Journal:
    """Open the journal as others do."""
    return Journal(path, HEADER, is_own=False, calls=calls)


def read(journal: Journal) -> list[Change]:
    """Return what was appended since the last time."""
    return changes_of(journal.tail().records)


def content(path: Path) -> list[Change]:
    """Return what a new reader finds."""
    journal = reader(path)
    try:
        return read(journal)
    except OSError:
        return []
    finally:
        journal.close()


def test_others_read_what_is_appended_and_nothing_twice(path: Path) -> None:
    journal, other = own(path), reader(path)
    for first in (0, 2, 4):
        journal.append(CHANGES[first : first + 2])
        assert read(other) == CHANGES[first : first + 2]
        assert read(other) == []
    assert content(path) == CHANGES
    journal.close()
    other.close()


def test_an_owner_goes_on_where_the_last_one_ended(path: Path) -> None:
    first = own(path)
    first.append(CHANGES[:3])
    first.close()
    second = own(path)
    assert not second.is_lost
    assert read(second) == CHANGES[:3]
    second.append(CHANGES[3:])
    second.close()
    assert content(path) == CHANGES


def test_a_journal_that_is_missing_is_made_by_the_owner_and_awaited_by_others(path: Path) -> None:
    other = reader(path)
    assert other.is_lost
    with pytest.raises(FileNotFoundError):
        other.tail()
    journal = own(path)
    assert journal.is_lost
    journal.append(CHANGES)
    tailed = other.tail()
    assert tailed.is_new
    assert changes_of(tailed.records) == CHANGES
    journal.close()
    other.close()


def test_a_journal_has_its_room_from_the_beginning(path: Path) -> None:
    journal = own(path)
    room_bytes = path.stat().st_blocks * 512
    if room_bytes:
        assert room_bytes == reserved_bytes(16)
        journal.append([stored(0)] * (reserved_bytes(16) // RECORD_BYTES))
        assert path.stat().st_blocks * 512 == room_bytes
    journal.close()


def test_it_is_long_when_it_has_more_than_two_records_a_slot_and_some(path: Path) -> None:
    journal = own(path)
    journal.append([stored(0)] * long_records(16))
    assert not journal.is_long
    journal.append([stored(0)])
    assert journal.is_long
    journal.close()


def test_no_journal_becomes_longer_than_readers_read(path: Path) -> None:
    journal = own(path)
    batch = [stored(0)] * long_records(16)
    journal.append(batch)
    journal.append(batch)
    with pytest.raises(OSError, match="too long"):
        journal.append([stored(1)])
    assert content(path) == batch + batch
    journal.rewrite(lambda records: records[:1], is_durable=False)
    journal.append([stored(1)])
    assert content(path) == [stored(0), stored(1)]
    journal.close()


def test_readers_notice_that_a_journal_was_written_again(path: Path) -> None:
    journal, other, late = own(path), reader(path), reader(path)
    journal.append(CHANGES)
    assert read(other) == CHANGES
    for is_durable in (False, True):
        journal.rewrite(lambda records: records[::-1][:2], is_durable=is_durable)
        tailed = other.tail()
        assert tailed.is_new
        assert len(tailed.records) == 2
    journal.append([stored(9)])
    assert other.tail().is_new is False
    assert changes_of(late.tail().records)[-1] == stored(9)
    assert [path.name for path in path.parent.iterdir()] == [path.name]
    for one in (journal, other, late):
        one.close()


def test_no_record_is_lost_that_is_appended_while_the_journal_is_written_again(path: Path) -> None:
    journal = own(path)
    is_chosen, may_go_on = threading.Event(), threading.Event()

    def select(records: Records) -> Records:
        is_chosen.set()
        assert may_go_on.wait(60)
        return records

    writer = threading.Thread(target=journal.rewrite, args=(select,), kwargs={"is_durable": False})
    journal.append(CHANGES[:3])
    writer.start()
    assert is_chosen.wait(60)
    appender = threading.Thread(target=journal.append, args=(CHANGES[3:],))
    appender.start()
    may_go_on.set()
    writer.join()
    appender.join()
    assert content(path) == CHANGES
    journal.close()


def test_a_forked_child_closes_its_copy_while_a_thread_of_the_parent_appends(path: Path) -> None:
    journal = own(path)
    with journal._lock:
        journal.close_in_child()


def test_an_owner_cuts_what_is_no_whole_record(path: Path) -> None:
    for end in range(3 * RECORD_BYTES + 1):
        path.write_bytes(DATA[:end])
        whole = CHANGES[: end // RECORD_BYTES]
        assert content(path) == whole
        journal = own(path)
        assert read(journal) == whole
        journal.append([stored(9)])
        journal.close()
        assert content(path) == [*whole, stored(9)]


def test_a_wrong_byte_costs_its_record_and_writing_goes_on(path: Path) -> None:
    for at in range(3 * RECORD_BYTES):
        path.write_bytes(DATA[:at] + bytes([DATA[at] ^ 0x55]) + DATA[at + 1 :])
        other, journal = reader(path), own(path)
        assert read(other) == [change for change in CHANGES if change.slot != at // RECORD_BYTES]
        journal.append([stored(9)])
        assert read(other) == [stored(9)]
        journal.close()
        other.close()


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (bytes(len(DATA)), []),
        (random.Random(1).randbytes(len(DATA)), []),
        (pack_changes(CHANGES, OTHER_HEADER.pack_id), []),
        (pack_changes(CHANGES[::-1], HEADER.pack_id), CHANGES[::-1]),
        (DATA + DATA, CHANGES + CHANGES),
        (pack_changes([stored(16), stored(2**32 - 1), stored(3)], HEADER.pack_id), [stored(3)]),
    ],
    ids=["zeros", "random", "another pack's", "reversed", "doubled", "slots out of range"],
)
def test_a_journal_of_other_content_gives_what_is_whole(path: Path, data: bytes, found: list[Change]) -> None:
    path.write_bytes(data)
    assert content(path) == found
    journal = own(path)
    assert read(journal) == found
    journal.append([stored(9)])
    journal.rewrite(lambda records: records[-1:], is_durable=True)
    journal.close()
    assert content(path) == [stored(9)]


def test_bad_records_at_the_end_are_read_again_when_the_journal_grows(path: Path) -> None:
    path.write_bytes(DATA[: 2 * RECORD_BYTES] + bytes(RECORD_BYTES))
    other = reader(path)
    assert read(other) == CHANGES[:2]
    assert [read(other) for _ in range(3)] == [[], [], []]
    path.write_bytes(DATA[: 4 * RECORD_BYTES])
    assert read(other) == CHANGES[2:4]
    other.close()


def test_bad_records_at_the_end_are_not_read_for_ever(path: Path) -> None:
    path.write_bytes(bytes(2**20))
    lengths: list[int] = []

    def pread(fd: int, num_bytes: int, offset: int) -> bytes:
        lengths.append(num_bytes)
        return os.pread(fd, num_bytes, offset)

    other = reader(path, SystemCalls(pread=pread))
    for _ in range(20):
        assert read(other) == []
    assert len(lengths) == 2
    assert max(lengths) == 2 * long_records(16) * RECORD_BYTES
    other.close()


def test_a_journal_of_hostile_length_is_cut_by_the_owner(path: Path) -> None:
    path.write_bytes(DATA)
    os.truncate(path, 2**40)
    assert content(path) == CHANGES
    journal = own(path)
    assert read(journal) == CHANGES
    assert journal.is_long
    journal.rewrite(lambda records: records, is_durable=False)
    journal.close()
    assert path.stat().st_size == len(DATA)
    assert content(path) == CHANGES


@pytest.mark.parametrize("kind", ["fifo", "link", "dangling link", "folder"])
def test_what_is_no_file_is_refused_without_waiting(path: Path, kind: str) -> None:
    target = path.with_name("target")
    target.write_bytes(DATA)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(target if kind == "link" else path.with_name("nothing"))
    assert content(path) == []
    if kind == "folder":
        with pytest.raises(OSError, match="directory"):
            own(path)
    else:
        journal = own(path)
        assert journal.is_lost
        journal.append([stored(9)])
        journal.close()
        assert content(path) == [stored(9)]
    assert target.read_bytes() == DATA


def test_what_lies_under_the_temporary_name_is_not_written_to(path: Path) -> None:
    target, temporary = path.with_name("target"), path.with_suffix(".index.tmp")
    target.write_bytes(b"precious")
    journal = own(path)
    plants: list[Callable[[], None]] = [lambda: temporary.symlink_to(target), lambda: os.mkfifo(temporary)]
    for plant in plants:
        plant()
        journal.append([stored(1)])
        journal.rewrite(lambda records: records[-1:], is_durable=False)
        assert content(path) == [stored(1)]
    assert target.read_bytes() == b"precious"
    journal.close()


@pytest.mark.parametrize("num_taken", [0, 1, RECORD_BYTES, RECORD_BYTES + 7, len(DATA) - 1])
def test_an_append_that_finds_the_disk_full_leaves_nothing(path: Path, num_taken: int) -> None:
    is_full = False

    def write(fd: int, data: bytes) -> int:
        if not is_full:
            return os.write(fd, data)
        if not num_taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(fd, data[:num_taken])

    journal = own(path, SystemCalls(write=write))
    journal.append(CHANGES + CHANGES)
    is_full = True
    with pytest.raises(OSError, match=r"[Nn]o space|only a part"):
        journal.append(CHANGES)
    assert content(path) == CHANGES + CHANGES
    with pytest.raises(OSError, match=r"[Nn]o space|only a part"):
        journal.rewrite(lambda records: records, is_durable=False)
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    is_full = False
    journal.append([stored(8)])
    journal.close()
    assert content(path) == [*CHANGES, *CHANGES, stored(8)]


def test_what_a_failed_append_left_is_cut_before_the_next_one(path: Path) -> None:
    can_cut = False

    def write(fd: int, data: bytes) -> int:
        return os.write(fd, data if can_cut else data[:100])

    def truncate(fd: int, length: int) -> None:
        if not can_cut:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.ftruncate(fd, length)

    journal = own(path, SystemCalls(write=write, truncate=truncate))
    for _ in range(3):
        with pytest.raises(OSError, match=r"part|output"):
            journal.append(CHANGES)
    assert path.stat().st_size == 100
    can_cut = True
    journal.append([stored(8)])
    journal.close()
    assert content(path) == [stored(8)]


def use(path: Path, calls: SystemCalls) -> set[str]:
    """Use a journal as a pack's owner does, each step twice where it fails; return what stands in it for certain."""
    promised: list[Change] = []
    journal = None
    for _ in range(2):
        try:
            journal = own(path, calls)
            break
        except OSError:
            continue
    assert journal is not None
    for slot in range(6):
        for _ in range(2):
            try:
                journal.append([stored(slot)])
                promised.append(stored(slot))
                if slot == 3:
                    journal.rewrite(lambda records: records[-2:], is_durable=True)
                journal.sync()
                break
            except OSError:
                continue
    assert [change for change in content(path) if change.slot > 3] == [
        change for change in promised if change.slot > 3
    ]
    journal.close()
    return {change.name.decode() for change in promised}


def test_each_call_may_fail_once(path: Path) -> None:
    faults = Faults()
    use(path, faults.calls)
    for at in range(faults.num_calls):
        for one in path.parent.iterdir():
            one.unlink()
        with no_file_stays_open(path.parent):
            broken = Faults(at)
            assert len(use(path, broken.calls)) == 6, broken.failed
            assert broken.failed
            assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_name_that_is_not_on_the_device_is_synced_before_the_next_records_count(path: Path) -> None:
    synced: list[str] = []
    fails = True

    def sync_folder(folder: str) -> None:
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        synced.append(folder)

    journal = own(path, SystemCalls(sync_folder=sync_folder))
    journal.append(CHANGES)
    with pytest.raises(OSError, match="output"):
        journal.rewrite(lambda records: records, is_durable=True)
    with pytest.raises(OSError, match="output"):
        journal.sync()
    fails = False
    journal.sync()
    journal.sync()
    assert synced == [str(path.parent)]
    journal.close()


def test_a_journal_without_its_name_is_gone(path: Path) -> None:
    journal, other = own(path), reader(path)
    journal.append(CHANGES)
    assert read(other) == CHANGES
    path.unlink()
    with pytest.raises(FileNotFoundError):
        other.tail()
    journal.close()
    other.close()
