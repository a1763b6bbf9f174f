"""Room is never given twice, not even to two processes, and a busy or broken count costs stores only."""

import fcntl
import os
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.testing.clock import ManualClock
from kvtier.tiering.fs import shared_usage as ledger_module
from kvtier.tiering.fs.owner import current_owner
from kvtier.tiering.fs.shared_usage import SharedUsage, UsageRecord, unpack_book


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the book is."""
    return tmp_path / ".usage"


def open_ledger(path: Path, capacity_bytes: int = 1000, found_bytes: int | None = 0) -> SharedUsage:
    """Return a ledger of this process, counted unless told otherwise."""
    ledger = SharedUsage(path, current_owner(), capacity_bytes, 0o600, ManualClock())
    if found_bytes is not None:
        begun = ledger.begin_recount()
        assert begun is not None
        ledger.end_recount(found_bytes, begun)
    return ledger


def read(path: Path) -> UsageRecord:
    """Return the book on disk."""
    return unpack_book(path.read_bytes())


def test_room_is_given_until_the_capacity_is_reached(path: Path) -> None:
    ledger = open_ledger(path)
    assert ledger.reserve(4, 300).num_blocks == 3
    assert ledger.reserve(1, 300).num_blocks == 0
    assert ledger.reserve(1, 100).num_blocks == 1
    assert read(path).used_bytes == 1000


def test_what_was_not_written_and_what_was_removed_is_room_again(path: Path) -> None:
    ledger = open_ledger(path)
    ledger.reserve(3, 300)
    ledger.settle(900, 300)
    ledger.remove(300)
    assert read(path).used_bytes == 0
    assert read(path).in_flight_bytes == 0


def test_the_count_is_exact_when_the_last_of_several_writers_has_settled(path: Path) -> None:
    ledger = open_ledger(path)
    ledger.reserve(2, 100)
    ledger.reserve(1, 100)
    ledger.settle(200, 200)
    assert read(path).used_bytes == 300
    ledger.settle(100, 100)
    book = read(path)
    assert (book.used_bytes, book.in_flight_bytes, book.finished_bytes) == (300, 0, 300)


def test_the_next_reservation_tells_what_was_finished_before_it(path: Path) -> None:
    ledger = open_ledger(path)
    ledger.reserve(2, 100)
    ledger.reserve(1, 100)
    ledger.settle(200, 200)
    ledger.reserve(1, 100)
    book = read(path)
    assert (book.used_bytes, book.in_flight_bytes, book.finished_bytes) == (400, 200, 200)


def test_what_was_not_written_is_room_for_others_while_this_tier_still_writes(path: Path) -> None:
    ledger, other = open_ledger(path), open_ledger(path, found_bytes=None)
    ledger.reserve(6, 100)
    ledger.reserve(4, 100)
    assert other.reserve(1, 100).num_blocks == 0
    ledger.settle(600, 500)
    assert other.reserve(2, 100).num_blocks == 1


def test_a_recount_by_others_misses_nothing_that_has_not_been_told_yet(path: Path) -> None:
    ledger, other = open_ledger(path), open_ledger(path, found_bytes=None)
    ledger.reserve(2, 100)
    ledger.reserve(1, 100)
    begun = other.begin_recount()
    assert begun is not None
    ledger.settle(200, 200)
    other.end_recount(0, begun)
    assert read(path).used_bytes >= 300
    ledger.settle(100, 100)
    assert read(path).used_bytes >= 300
    assert read(path).in_flight_bytes == 0


@pytest.mark.parametrize(
    ("found_bytes", "used_bytes"),
    [(500, 500), (200, 200)],
    ids=["walked before the removal", "walked after it"],
)
def test_a_recount_by_others_during_a_removal_does_not_have_it_counted_out_twice(
    path: Path, found_bytes: int, used_bytes: int
) -> None:
    ledger, other = open_ledger(path, found_bytes=500), open_ledger(path, found_bytes=None)
    ledger.begin_removal(300)
    begun = other.begin_recount()
    assert begun is not None
    other.end_recount(found_bytes, begun)
    ledger.end_removal(300, 300)
    book = read(path)
    assert (book.used_bytes, book.in_flight_bytes) == (used_bytes, 0)


def test_a_removal_counts_out_what_was_there(path: Path) -> None:
    ledger = open_ledger(path, found_bytes=500)
    ledger.begin_removal(300)
    ledger.end_removal(300, 100)
    book = read(path)
    assert (book.used_bytes, book.in_flight_bytes) == (400, 0)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=8), st.data())
def test_whatever_the_order_of_writers_the_count_ends_exact(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ".usage"
        ledger = open_ledger(path, capacity_bytes=10**6)
        for reserved, _ in sizes:
            assert ledger.reserve(reserved, 100).num_blocks == reserved
        for reserved, written in data.draw(st.permutations(sizes)):
            ledger.settle(reserved * 100, min(reserved, written) * 100)
        book = read(path)
    assert book.used_bytes == sum(min(size) for size in sizes) * 100
    assert book.in_flight_bytes == 0


def test_nothing_is_given_before_somebody_has_counted(path: Path) -> None:
    ledger = open_ledger(path, found_bytes=None)
    assert ledger.reserve(1, 10).num_blocks == 0


def test_two_tiers_share_one_count_and_the_smaller_capacity(path: Path) -> None:
    large, small = open_ledger(path, 1000), open_ledger(path, 500)
    assert large.reserve(9, 100).num_blocks == 5
    assert small.reserve(1, 100).num_blocks == 0
    small.leave()
    assert large.reserve(9, 100).num_blocks == 5


def test_threads_together_get_what_is_there_and_no_more(path: Path) -> None:
    ledgers = [open_ledger(path, 100_000, found_bytes=None) for _ in range(2)] + [open_ledger(path, 100_000)]
    granted: list[int] = []

    def take(ledger: SharedUsage) -> None:
        granted.extend(ledger.reserve(3, 300).num_blocks for _ in range(60))

    threads = [threading.Thread(target=take, args=(ledger,)) for ledger in ledgers for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(granted) == 333
    assert read(path).used_bytes == 333 * 300


def test_a_lost_or_broken_book_gives_no_room_until_the_next_count(path: Path) -> None:
    ledger = open_ledger(path)
    for damage in (path.unlink, lambda: path.write_bytes(b"garbage" * 1000)):
        damage()
        assert ledger.reserve(1, 10).num_blocks == 0
        begun = ledger.begin_recount()
        assert begun is not None
        ledger.end_recount(0, begun)
        assert ledger.reserve(1, 10).num_blocks == 1
        ledger.settle(10, 0)


def test_what_was_in_flight_when_the_book_was_lost_is_not_given_back_twice(path: Path) -> None:
    ledger, other = open_ledger(path), open_ledger(path, found_bytes=None)
    assert ledger.reserve(2, 100).num_blocks == 2
    path.unlink()
    begun = other.begin_recount()
    assert begun is not None
    other.end_recount(200, begun)
    ledger.settle(200, 100)
    assert read(path).used_bytes >= 200


def test_room_that_was_taken_ahead_needs_no_book_and_the_last_gives_it_back(path: Path) -> None:
    ledger = open_ledger(path, 10_000)
    assert ledger.reserve(2, 100).num_blocks == 2
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert [ledger.reserve(2, 100).num_blocks for _ in range(4)] == [2, 2, 2, 0]
    os.close(fd)
    for _ in range(4):
        ledger.settle(200, 200)
    book = read(path)
    assert (book.used_bytes, book.in_flight_bytes, book.finished_bytes) == (800, 0, 800)
    ledger.reserve(2, 100)
    ledger.settle(200, 200)
    book = read(path)
    assert (book.used_bytes, book.in_flight_bytes, book.finished_bytes) == (1000, 0, 1000)


def test_threads_that_wait_for_the_book_together_take_room_ahead_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, waiting, granted = open_ledger(path, 10_000), set[int](), list[int]()
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)

    def note_waiting(_: float) -> None:
        waiting.add(threading.get_ident())
        if len(waiting) == 4:
            fcntl.flock(fd, fcntl.LOCK_UN)

    monkeypatch.setattr(ledger_module, "LOCK_ATTEMPTS", 10**9)
    monkeypatch.setattr(time, "sleep", note_waiting)
    threads = [
        threading.Thread(target=lambda: granted.append(ledger.reserve(2, 100).num_blocks)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    assert granted == [2] * 4
    assert read(path).in_flight_bytes == 800


def test_a_tier_takes_no_more_ahead_than_its_part_of_what_is_free(path: Path) -> None:
    ledger = open_ledger(path, 1600)
    assert ledger.reserve(1, 100).num_blocks == 1
    assert read(path).in_flight_bytes == 200
    assert ledger.reserve(2, 100).num_blocks == 2
    assert read(path).in_flight_bytes == 400


def test_room_that_was_taken_ahead_leaves_others_most_of_what_is_free(path: Path) -> None:
    ledger, other = open_ledger(path), open_ledger(path, found_bytes=None)
    assert ledger.reserve(2, 100).num_blocks == 2
    assert other.reserve(9, 100).num_blocks == 7
    assert ledger.reserve(2, 100).num_blocks == 1, "what this tier has taken ahead is its own"
    assert read(path).used_bytes == 1000


def test_a_lock_that_is_held_for_too_long_costs_a_store_and_loses_no_change(path: Path) -> None:
    ledger = open_ledger(path, 800)
    assert ledger.reserve(3, 100).num_blocks == 3
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert ledger.reserve(1, 100).num_blocks == 0
    ledger.settle(300, 100)
    os.close(fd)
    assert ledger.reserve(1, 100).num_blocks == 1
    assert read(path).used_bytes == 200
    assert read(path).finished_bytes == 100


def test_a_book_that_is_removed_while_its_lock_is_waited_for_is_not_written(path: Path) -> None:
    ledger = open_ledger(path, 800)
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    granted: list[int] = []
    waiter = threading.Thread(target=lambda: granted.append(ledger.reserve(1, 100).num_blocks))
    waiter.start()
    inode = os.fstat(fd).st_ino
    while sum(_inode_of(link) == inode for link in Path("/proc/self/fd").iterdir()) < 2 and waiter.is_alive():
        continue  # it has not opened the book yet
    path.unlink()
    os.close(fd)
    waiter.join()
    assert granted == [0]
    assert open_ledger(path, 800).reserve(1, 100).num_blocks == 1
    ledger.refresh()
    assert read(path).used_bytes == 100


def _inode_of(link: Path) -> int | None:
    try:
        return link.stat().st_ino
    except OSError:
        return None  # closed meanwhile


def test_a_book_that_cannot_be_opened_costs_a_store(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.mkdir()
    ledger = open_ledger(path, found_bytes=None)
    assert ledger.reserve(1, 100).num_blocks == 0
    assert ledger.refresh() is None
    assert "cannot be changed" in caplog.text


def test_a_member_that_left_joins_again_with_its_next_change(path: Path) -> None:
    ledger = open_ledger(path, 500)
    ledger.leave()
    assert read(path).members == {}
    assert ledger.reserve(9, 100).num_blocks == 5
    assert len(read(path).members) == 1
