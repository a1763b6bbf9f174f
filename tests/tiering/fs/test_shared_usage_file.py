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
from kvtier.tiering.fs import shared_usage
from kvtier.tiering.fs.shared_usage import SharedUsage, UsageRecord, unpack_record
from kvtier.tiering.fs.system import current_owner


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the record is."""
    return tmp_path / ".usage"


def open_usage(path: Path, capacity_bytes: int = 1000, found_bytes: int | None = 0) -> SharedUsage:
    """Return the count of this process, counted unless told otherwise."""
    usage = SharedUsage(path, current_owner(), capacity_bytes, 0o600, ManualClock())
    if found_bytes is not None:
        begun = usage.begin_recount()
        assert begun is not None
        usage.end_recount(found_bytes, begun)
    return usage


def read(path: Path) -> UsageRecord:
    """Return the record on disk."""
    return unpack_record(path.read_bytes())


def test_room_is_given_until_the_capacity_is_reached(path: Path) -> None:
    usage = open_usage(path)
    assert usage.reserve(4, 300).num_blocks == 3
    assert usage.reserve(1, 300).num_blocks == 0
    assert usage.reserve(1, 100).num_blocks == 1
    assert read(path).used_bytes == 1000


def test_what_was_not_written_and_what_was_removed_is_room_again(path: Path) -> None:
    usage = open_usage(path)
    usage.reserve(3, 300)
    usage.end_reservation(900, 300)
    usage.remove(300)
    assert read(path).used_bytes == 0
    assert read(path).in_flight_bytes == 0


def test_the_count_is_exact_when_the_last_of_several_writers_has_ended(path: Path) -> None:
    usage = open_usage(path)
    usage.reserve(2, 100)
    usage.reserve(1, 100)
    usage.end_reservation(200, 200)
    assert read(path).used_bytes == 300
    usage.end_reservation(100, 100)
    record = read(path)
    assert (record.used_bytes, record.in_flight_bytes, record.finished_bytes) == (300, 0, 300)


def test_the_next_reservation_tells_what_was_finished_before_it(path: Path) -> None:
    usage = open_usage(path)
    usage.reserve(2, 100)
    usage.reserve(1, 100)
    usage.end_reservation(200, 200)
    usage.reserve(1, 100)
    record = read(path)
    assert (record.used_bytes, record.in_flight_bytes, record.finished_bytes) == (400, 200, 200)


def test_what_was_not_written_is_room_for_others_while_this_tier_still_writes(path: Path) -> None:
    usage, other = open_usage(path), open_usage(path, found_bytes=None)
    usage.reserve(6, 100)
    usage.reserve(4, 100)
    assert other.reserve(1, 100).num_blocks == 0
    usage.end_reservation(600, 500)
    assert other.reserve(2, 100).num_blocks == 1


def test_a_recount_by_others_misses_nothing_that_has_not_been_told_yet(path: Path) -> None:
    usage, other = open_usage(path), open_usage(path, found_bytes=None)
    usage.reserve(2, 100)
    usage.reserve(1, 100)
    begun = other.begin_recount()
    assert begun is not None
    usage.end_reservation(200, 200)
    other.end_recount(0, begun)
    assert read(path).used_bytes >= 300
    usage.end_reservation(100, 100)
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
    usage, other = open_usage(path, found_bytes=500), open_usage(path, found_bytes=None)
    usage.begin_removal(300)
    begun = other.begin_recount()
    assert begun is not None
    other.end_recount(found_bytes, begun)
    usage.end_removal(300, 300)
    record = read(path)
    assert (record.used_bytes, record.in_flight_bytes) == (used_bytes, 0)


def test_a_removal_counts_out_what_was_there(path: Path) -> None:
    usage = open_usage(path, found_bytes=500)
    usage.begin_removal(300)
    usage.end_removal(300, 100)
    record = read(path)
    assert (record.used_bytes, record.in_flight_bytes) == (400, 0)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=8), st.data())
def test_whatever_the_order_of_writers_the_count_ends_exact(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ".usage"
        usage = open_usage(path, capacity_bytes=10**6)
        for reserved, _ in sizes:
            assert usage.reserve(reserved, 100).num_blocks == reserved
        for reserved, written in data.draw(st.permutations(sizes)):
            usage.end_reservation(reserved * 100, min(reserved, written) * 100)
        record = read(path)
    assert record.used_bytes == sum(min(size) for size in sizes) * 100
    assert record.in_flight_bytes == 0


def test_nothing_is_given_before_somebody_has_counted(path: Path) -> None:
    usage = open_usage(path, found_bytes=None)
    assert usage.reserve(1, 10).num_blocks == 0


def test_two_tiers_share_one_count_and_the_smaller_capacity(path: Path) -> None:
    large, small = open_usage(path, 1000), open_usage(path, 500)
    assert large.reserve(9, 100).num_blocks == 5
    assert small.reserve(1, 100).num_blocks == 0
    small.leave()
    assert large.reserve(9, 100).num_blocks == 5


def test_threads_together_get_what_is_there_and_no_more(path: Path) -> None:
    usages = [open_usage(path, 100_000, found_bytes=None) for _ in range(2)] + [open_usage(path, 100_000)]
    granted: list[int] = []

    def take(usage: SharedUsage) -> None:
        granted.extend(usage.reserve(3, 300).num_blocks for _ in range(60))

    threads = [threading.Thread(target=take, args=(usage,)) for usage in usages for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(granted) == 333
    assert read(path).used_bytes == 333 * 300


def test_a_lost_or_broken_record_gives_no_room_until_the_next_count(path: Path) -> None:
    usage = open_usage(path)
    for damage in (path.unlink, lambda: path.write_bytes(b"garbage" * 1000)):
        damage()
        assert usage.reserve(1, 10).num_blocks == 0
        begun = usage.begin_recount()
        assert begun is not None
        usage.end_recount(0, begun)
        assert usage.reserve(1, 10).num_blocks == 1
        usage.end_reservation(10, 0)


def test_what_was_in_flight_when_the_record_was_lost_is_not_given_back_twice(path: Path) -> None:
    usage, other = open_usage(path), open_usage(path, found_bytes=None)
    assert usage.reserve(2, 100).num_blocks == 2
    path.unlink()
    begun = other.begin_recount()
    assert begun is not None
    other.end_recount(200, begun)
    usage.end_reservation(200, 100)
    assert read(path).used_bytes >= 200


def test_a_walk_that_saw_the_record_lost_counts_nothing_and_the_next_counts_all(path: Path) -> None:
    usage, other = open_usage(path), open_usage(path, found_bytes=None)
    begun = other.begin_recount()
    assert begun is not None
    assert usage.reserve(2, 100).num_blocks == 2
    usage.end_reservation(200, 200)  # behind the walk, which finds nothing
    path.unlink()
    assert other.end_recount(0, begun) is None
    assert other.reserve(1, 100).num_blocks == 0
    begun = other.begin_recount()
    assert begun is not None
    other.end_recount(200, begun)
    assert read(path).used_bytes == 200


def test_surplus_room_needs_no_record_and_the_last_gives_it_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_usage, "LOCK_ATTEMPTS", 1)
    usage = open_usage(path, 10_000)
    assert usage.reserve(2, 100).num_blocks == 2
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert [usage.reserve(2, 100).num_blocks for _ in range(4)] == [2, 2, 2, 0]
    os.close(fd)
    for _ in range(4):
        usage.end_reservation(200, 200)
    record = read(path)
    assert (record.used_bytes, record.in_flight_bytes, record.finished_bytes) == (800, 0, 800)
    usage.reserve(2, 100)
    usage.end_reservation(200, 200)
    record = read(path)
    assert (record.used_bytes, record.in_flight_bytes, record.finished_bytes) == (1000, 0, 1000)


def test_threads_that_wait_for_the_record_together_take_a_surplus_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage, waiting, granted = open_usage(path, 10_000), set[int](), list[int]()
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)

    class CountedTurn:
        def __init__(self) -> None:
            self._lock = threading.Lock()
            self.release = self._lock.release

        def acquire(self, timeout: float) -> bool:
            waiting.add(threading.get_ident())
            if len(waiting) == 4:
                fcntl.flock(fd, fcntl.LOCK_UN)
            return self._lock.acquire(timeout=timeout)

    monkeypatch.setattr(shared_usage, "LOCK_ATTEMPTS", 10**9)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(usage, "_turn", CountedTurn())
    threads = [
        threading.Thread(target=lambda: granted.append(usage.reserve(2, 100).num_blocks)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    assert granted == [2] * 4
    assert read(path).in_flight_bytes == 800


def test_a_surplus_is_no_more_than_its_share_of_what_is_free(path: Path) -> None:
    usage = open_usage(path, 1600)
    assert usage.reserve(1, 100).num_blocks == 1
    assert read(path).in_flight_bytes == 200
    assert usage.reserve(2, 100).num_blocks == 2
    assert read(path).in_flight_bytes == 400


def test_a_surplus_leaves_others_most_of_what_is_free(path: Path) -> None:
    usage, other = open_usage(path), open_usage(path, found_bytes=None)
    assert usage.reserve(2, 100).num_blocks == 2
    assert other.reserve(9, 100).num_blocks == 7
    assert usage.reserve(2, 100).num_blocks == 1, "the surplus of this tier is its own"
    assert read(path).used_bytes == 1000


def test_a_lock_that_is_held_for_too_long_costs_a_store_and_loses_no_change(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_usage, "LOCK_ATTEMPTS", 1)
    usage = open_usage(path, 800)
    assert usage.reserve(3, 100).num_blocks == 3
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert usage.reserve(1, 100).num_blocks == 0
    usage.end_reservation(300, 100)
    os.close(fd)
    assert usage.reserve(1, 100).num_blocks == 1
    assert read(path).used_bytes == 200
    assert read(path).finished_bytes == 100


def test_a_record_that_is_removed_while_its_lock_is_waited_for_is_not_written(path: Path) -> None:
    usage = open_usage(path, 800)
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    granted: list[int] = []
    waiter = threading.Thread(target=lambda: granted.append(usage.reserve(1, 100).num_blocks))
    waiter.start()
    inode = os.fstat(fd).st_ino
    while sum(_inode_of(link) == inode for link in Path("/proc/self/fd").iterdir()) < 2 and waiter.is_alive():
        continue  # it has not opened the record yet
    path.unlink()
    os.close(fd)
    waiter.join()
    assert granted == [0]
    assert open_usage(path, 800).reserve(1, 100).num_blocks == 1
    usage.refresh()
    assert read(path).used_bytes == 100


def test_a_directory_that_is_moved_while_a_count_is_changed_leaves_nothing_in_flight(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    usage = open_usage(root / ".usage")
    usage.reserve(1, 100)
    joining = threading.Thread(target=usage.refresh)

    def move_once() -> float:
        usage._wall_clock = ManualClock()
        root.rename(tmp_path / "elsewhere")
        root.mkdir()
        joining.start()
        joining.join(0.2)  # it joins in the new directory, and must not yet
        return 0.0

    usage._wall_clock = move_once
    usage.end_reservation(100, 100)
    joining.join()
    assert read(root / ".usage").in_flight_bytes == 0


def _inode_of(link: Path) -> int | None:
    try:
        return link.stat().st_ino
    except OSError:
        return None  # closed meanwhile


def test_a_record_that_cannot_be_opened_costs_a_store(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.mkdir()
    usage = open_usage(path, found_bytes=None)
    assert usage.reserve(1, 100).num_blocks == 0
    assert usage.refresh() is None
    assert "cannot be changed" in caplog.text


def test_a_member_that_left_joins_again_with_its_next_change(path: Path) -> None:
    usage = open_usage(path, 500)
    usage.leave()
    assert read(path).members == {}
    assert usage.reserve(9, 100).num_blocks == 5
    assert len(read(path).members) == 1
