"""The oldest blocks go, whoever wrote them, until what is wanted fits; nothing else goes, and nothing is overrun."""

import errno
import itertools
import os
import time
from pathlib import Path

import pytest
from tests.tiering.fs.conftest import HANG_GUARD_S, StartTier

from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import NUM_ROWS, ROW_BYTES, TierDriver, content_of, key_of
from kvtier.tiering.fs import evictor
from kvtier.tiering.fs.evictor import WALK_TTL_S, Evictor
from kvtier.tiering.fs.recycled_files import MAX_RECYCLED_FILES, SLACK_SHARE, plan_excess, plan_num_recycled
from kvtier.tiering.fs.shared_usage import Change, MemberId, UsageRecord, unpack_record
from kvtier.tiering.fs.system import FOREIGN_OWNER_TIMEOUT_S, Owner, SystemCalls, current_owner

BLOCK_BYTES = ROW_BYTES + 4096


def blocks_in(root: Path) -> dict[int, Path]:
    """Return the files of the directory by block number."""
    paths = root.glob("*/*/*/*.kv")
    return {int.from_bytes(bytes.fromhex(path.stem)[:-4], "big"): path for path in paths}


def age(root: Path, number: int, seconds: float) -> None:
    """Make a block look as if it had last been used ``seconds`` ago."""
    path = blocks_in(root)[number]
    then_s = path.stat().st_mtime - seconds
    os.utime(path, (then_s, then_s))


def used_bytes(root: Path) -> int:
    """Return what the shared count says."""
    return unpack_record((root / ".usage").read_bytes()).used_bytes


def store_each(driver: TierDriver, *numbers: int) -> list[bool]:
    """Store blocks in one job each."""
    return [driver.store([number]).success for number in numbers]


@pytest.mark.parametrize(
    ("used_blocks", "capacity_blocks", "num_recycled", "excess_blocks"),
    [
        (0, 4, 0, -4),
        (4, 4, 0, 0),
        (5, 4, 0, 1),
        (31, 32, 0, 0),
        (32, 32, 0, 1),
        (32, 32, 1, 0),
        (100, 64, 0, 38),
        (64, 64, 2, 0),
        (64, 64, 1, 1),
        (62, 64, 2, -2),
    ],
)
def test_a_share_of_a_large_capacity_is_kept_free_or_recycled(
    used_blocks: int, capacity_blocks: int, num_recycled: int, excess_blocks: int
) -> None:
    assert SLACK_SHARE == 32
    member = MemberId(current_owner(), 1)
    record = UsageRecord(used_blocks * 10, is_counted=True).joined(member, capacity_blocks * 10, 0.0)
    assert plan_excess(record, 10, num_recycled * 10) == excess_blocks * 10


@pytest.mark.parametrize(
    ("capacity_blocks", "num_members", "num_recycled"),
    [
        (31, 1, 0),
        (32, 1, 1),
        (640, 1, 20),
        (640, 3, 6),
        (640, 21, 0),
        (10**6, 1, MAX_RECYCLED_FILES),
        (10**6, 99, MAX_RECYCLED_FILES),
    ],
)
def test_the_recycled_files_of_all_together_fit_into_what_is_kept_free(
    capacity_blocks: int, num_members: int, num_recycled: int
) -> None:
    record = UsageRecord(is_counted=True)
    for number in range(num_members):
        record = record.joined(MemberId(current_owner(), number), capacity_blocks * 10, 0.0)
    assert plan_num_recycled(record, 10) == num_recycled
    assert num_members * num_recycled <= capacity_blocks // SLACK_SHARE


def test_a_full_directory_makes_room_for_the_next_block(start_tier: StartTier, root: Path) -> None:
    driver = start_tier(capacity_bytes=4 * BLOCK_BYTES)
    assert store_each(driver, *range(4)) == [True] * 4
    assert set(blocks_in(root)) == {0, 1, 2, 3}
    assert store_each(driver, *range(4, 12)) == [True] * 8
    assert len(blocks_in(root)) == 4
    assert driver.tier.stats()["evicted_blocks"] == 8
    assert used_bytes(root) == 4 * BLOCK_BYTES


def test_the_block_used_longest_ago_goes_first(start_tier: StartTier, root: Path) -> None:
    driver = start_tier(capacity_bytes=4 * BLOCK_BYTES)
    store_each(driver, *range(4))
    for number, seconds in ((0, 100.0), (1, 400.0), (2, 300.0), (3, 200.0)):
        age(root, number, seconds)
    store_each(driver, 4, 5)
    assert set(blocks_in(root)) == {0, 3, 4, 5}


def test_a_load_saves_an_old_block_even_after_the_walk_that_saw_it_old(
    start_tier: StartTier, root: Path
) -> None:
    driver = start_tier(capacity_bytes=4 * BLOCK_BYTES)
    store_each(driver, *range(4))
    for number in range(4):
        age(root, number, 1000.0 - number)
    store_each(driver, 4)
    assert set(blocks_in(root)) == {1, 2, 3, 4}
    assert driver.load([1]).success
    store_each(driver, 5, 6)
    assert set(blocks_in(root)) == {1, 4, 5, 6}


def test_what_was_evicted_is_known_to_be_gone(start_tier: StartTier) -> None:
    driver = start_tier(capacity_bytes=2 * BLOCK_BYTES, shared=False)
    store_each(driver, 1, 2, 3)
    assert [driver.tier.lookup(key_of(n), driver.request) for n in (1, 2, 3)] == [False, True, True]


def test_blocks_of_every_namespace_count_and_the_oldest_of_all_goes(
    start_tier: StartTier, root: Path
) -> None:
    first, second = start_tier(capacity_bytes=4 * BLOCK_BYTES), start_tier("model-b", capacity_bytes="1MiB")
    store_each(first, 1, 2)
    store_each(second, 3, 4)
    for number, seconds in ((1, 50.0), (2, 200.0), (3, 300.0), (4, 100.0)):
        age(root, number, seconds)
    store_each(second, 5)
    assert set(blocks_in(root)) == {1, 2, 4, 5}
    store_each(first, 6)
    assert set(blocks_in(root)) == {1, 4, 5, 6}


def test_a_smaller_capacity_at_the_next_start_is_reached_by_evicting(
    start_tier: StartTier, root: Path
) -> None:
    driver = start_tier(capacity_bytes=10 * BLOCK_BYTES)
    store_each(driver, *range(10))
    assert driver.tier.shutdown(HANG_GUARD_S)
    store_each(start_tier(capacity_bytes=3 * BLOCK_BYTES, allow_shrink=True), 10)
    assert len(blocks_in(root)) == 3
    assert 10 in blocks_in(root)


def test_files_that_are_not_ours_neither_count_nor_go(start_tier: StartTier, root: Path) -> None:
    driver = start_tier(capacity_bytes=2 * BLOCK_BYTES)
    (root / "mine.bin").write_bytes(bytes(10 * BLOCK_BYTES))
    os.utime(root / "mine.bin", (0, 0))
    assert store_each(driver, 1, 2, 3) == [True] * 3
    assert (root / "mine.bin").exists()
    assert len(blocks_in(root)) == 2


def test_temporary_files_of_living_processes_count_and_those_of_dead_ones_go(
    start_tier: StartTier, root: Path
) -> None:
    here = current_owner()
    dead = Owner(here.host, here.pid, here.start_ticks + 1)
    (root / "tmp").mkdir(parents=True)
    for owner in (here, dead):
        (root / "tmp" / f"{owner}-aa").write_bytes(bytes(BLOCK_BYTES))
    driver = start_tier(capacity_bytes=3 * BLOCK_BYTES)
    assert [path.name for path in (root / "tmp").iterdir()] == [f"{here}-aa"]
    assert used_bytes(root) == BLOCK_BYTES
    store_each(driver, 1, 2, 3)
    assert len(blocks_in(root)) == 2


def test_room_that_a_dead_writer_had_reserved_is_found_at_the_next_start(
    start_tier: StartTier, root: Path
) -> None:
    store_each(start_tier(), 1)
    here = current_owner()
    dead = MemberId(Owner(here.host, here.pid, here.start_ticks + 1), 7)
    record = unpack_record((root / ".usage").read_bytes()).joined(dead, 5, 0.0)
    record = record.changed(dead, Change(used_bytes=10**9, in_flight_bytes=10**9))
    (root / ".usage").write_bytes(record.pack())
    driver = start_tier()
    assert used_bytes(root) == BLOCK_BYTES
    assert store_each(driver, 2) == [True]


def test_what_people_removed_by_hand_is_noticed_after_a_while(start_tier: StartTier, root: Path) -> None:
    clock = ManualClock()
    driver = start_tier(capacity_bytes=4 * BLOCK_BYTES, clock=clock)
    store_each(driver, *range(4))
    for number in (2, 3):
        blocks_in(root)[number].unlink()
    clock.advance(WALK_TTL_S + 1.0)
    store_each(driver, 4)
    assert set(blocks_in(root)) == {0, 1, 4}


def test_a_count_that_was_lost_is_made_again(start_tier: StartTier, root: Path) -> None:
    driver = start_tier(capacity_bytes=4 * BLOCK_BYTES)
    store_each(driver, 1, 2)
    (root / ".usage").unlink()
    assert store_each(driver, 3) == [True]
    assert used_bytes(root) == 3 * BLOCK_BYTES


def test_a_block_that_cannot_be_evicted_declines_stores_and_harms_nobody(
    start_tier: StartTier, root: Path
) -> None:
    driver = start_tier(capacity_bytes=2 * BLOCK_BYTES)
    store_each(driver, 1, 2)
    for path in blocks_in(root).values():
        target = root / path.name
        path.rename(target)
        path.mkdir()  # a folder of that name is neither ours nor in our way
    assert store_each(driver, 3) == [True]
    assert not driver.load([1]).success


def test_a_task_whose_room_another_takes_is_not_declined_while_there_is_more_to_evict(
    start_tier: StartTier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = start_tier(capacity_bytes=8 * BLOCK_BYTES, num_threads=1)
    store_each(driver, *range(1, 9))
    real_make_room = Evictor.make_room
    taken: list[int] = []

    def make_room_and_lose_it(self: Evictor, num_bytes: int, *, is_disk_full: bool = False) -> bool:
        found = real_make_room(self, num_bytes, is_disk_full=is_disk_full)
        if len(taken) < 3:
            taken.append(self._directory.usage.reserve(num_bytes // BLOCK_BYTES, BLOCK_BYTES).num_blocks)
        return found

    monkeypatch.setattr(Evictor, "make_room", make_room_and_lose_it)
    assert driver.store([21, 22]).success
    assert taken == [2, 2, 2]
    assert driver.tier.stats()["declined"] == 0


def test_an_evictor_that_nobody_needs_does_not_walk(start_tier: StartTier, root: Path) -> None:
    driver = start_tier()
    store_each(driver, *range(8))
    assert driver.tier.stats()["evicted_blocks"] == 0
    assert len(blocks_in(root)) == 8


def test_a_directory_beyond_the_capacity_is_cut_back_at_the_start(start_tier: StartTier, root: Path) -> None:
    first = start_tier(capacity_bytes=64 * BLOCK_BYTES)
    store_each(first, *range(6))
    first.tier.shutdown(HANG_GUARD_S)
    second = start_tier(capacity_bytes=3 * BLOCK_BYTES)
    second.poll_until(lambda: len(blocks_in(root)) <= 3)
    assert len(blocks_in(root)) == 3


LARGE_BLOCKS = 32 * NUM_ROWS
"""A capacity of which as many blocks as there are rows are kept free, and may be recycled files."""


def fill(driver: TierDriver, first: int, num_blocks: int) -> None:
    """Store blocks, each job as many as there are rows; some may be declined while others are being evicted."""
    for number in range(first, first + num_blocks, NUM_ROWS):
        driver.store(list(range(number, number + NUM_ROWS)))


def recycled_files(root: Path) -> list[Path]:
    """Return the files with temporary names."""
    return list((root / "tmp").iterdir())


def recycle_one(driver: TierDriver, root: Path) -> None:
    """Store blocks one by one until a recycled file waits: where none does, a store takes from what is kept free."""
    numbers = itertools.count(10_000)

    def waits() -> bool:
        if recycled_files(root):
            return True
        driver.store([next(numbers)])
        return False

    driver.poll_until(waits)


def test_the_file_of_an_evicted_block_is_written_over(start_tier: StartTier, root: Path) -> None:
    driver = start_tier(capacity_bytes=LARGE_BLOCKS * BLOCK_BYTES)
    fill(driver, 0, LARGE_BLOCKS // 2)
    first_files = [os.open(blocks_in(root)[number], os.O_RDONLY) for number in range(NUM_ROWS)]

    fill(driver, 1000, LARGE_BLOCKS)

    try:
        found = [os.pread(fd, ROW_BYTES, 4096) for fd in first_files]
    finally:
        for fd in first_files:
            os.close(fd)
    newer = {bytes(content_of(number)) for number in range(1000, 1000 + LARGE_BLOCKS)}
    assert any(content in newer for content in found)
    for number, path in blocks_in(root).items():
        assert path.read_bytes()[4096:] == bytes(content_of(number)), f"block {number} is another's"


def test_recycled_files_count_and_end_with_the_tier(start_tier: StartTier, root: Path) -> None:
    driver = start_tier(capacity_bytes=LARGE_BLOCKS * BLOCK_BYTES)
    fill(driver, 0, 2 * LARGE_BLOCKS)
    # Repeated, because a file that is evicted between the two lists is in both.
    driver.poll_until(
        lambda: used_bytes(root) >= (len(blocks_in(root)) + len(recycled_files(root))) * BLOCK_BYTES
    )
    assert driver.tier.shutdown(HANG_GUARD_S)
    assert recycled_files(root) == []
    assert LARGE_BLOCKS // 2 <= len(blocks_in(root)) <= LARGE_BLOCKS
    # A recount beside stores may count twice what is written meanwhile, however much that is, and never misses a block.
    assert used_bytes(root) >= len(blocks_in(root)) * BLOCK_BYTES
    start_tier(capacity_bytes=LARGE_BLOCKS * BLOCK_BYTES)  # which recounts, and nothing is stored meanwhile
    assert used_bytes(root) == len(blocks_in(root)) * BLOCK_BYTES


def test_a_tier_that_stores_nothing_gives_its_recycled_files_back(
    start_tier: StartTier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evictor, "REFRESH_S", 0.02)
    driver = start_tier(capacity_bytes=LARGE_BLOCKS * BLOCK_BYTES)
    fill(driver, 0, LARGE_BLOCKS + 2 * NUM_ROWS)
    given_up_s = time.monotonic() + HANG_GUARD_S
    while recycled_files(root):
        assert time.monotonic() < given_up_s
    assert used_bytes(root) >= len(blocks_in(root)) * BLOCK_BYTES
    assert driver.store([5000]).success


def test_the_files_of_another_namespace_are_removed(start_tier: StartTier, root: Path) -> None:
    other = start_tier("model-b", capacity_bytes=LARGE_BLOCKS * BLOCK_BYTES)
    fill(other, 0, LARGE_BLOCKS // 2)
    driver = start_tier(capacity_bytes=LARGE_BLOCKS * BLOCK_BYTES)
    theirs = next(iter(blocks_in(root).values()))
    with theirs.open("rb") as file:
        before = file.read()
        fill(driver, 1000, 2 * LARGE_BLOCKS)
        file.seek(0)
        assert file.read() == before
    assert not theirs.exists()


def test_a_block_that_somebody_has_linked_is_not_written_over(start_tier: StartTier, root: Path) -> None:
    driver = start_tier(capacity_bytes=LARGE_BLOCKS * BLOCK_BYTES)
    fill(driver, 0, LARGE_BLOCKS // 2)
    backups = root / "backups"
    backups.mkdir()
    for number, path in blocks_in(root).items():
        os.link(path, backups / str(number))
    fill(driver, 1000, 2 * LARGE_BLOCKS)
    evicted = set(range(LARGE_BLOCKS // 2)) - blocks_in(root).keys()
    assert len(evicted) > NUM_ROWS
    for number in evicted:
        assert (backups / str(number)).read_bytes()[4096:] == bytes(content_of(number))


def test_a_disk_without_room_for_new_files_takes_blocks_over_old_ones(
    start_tier: StartTier, root: Path
) -> None:
    is_full = False

    def open_or_refuse(path: str, flags: int, mode: int) -> int:
        if is_full and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.ENOSPC, "no room for a new file", path)
        return os.open(path, flags, mode)

    driver = start_tier(
        capacity_bytes=LARGE_BLOCKS * BLOCK_BYTES, calls=SystemCalls(open=open_or_refuse), num_threads=1
    )
    fill(driver, 0, LARGE_BLOCKS)
    is_full = True
    fill(driver, 1000, LARGE_BLOCKS)
    assert sum(number >= 1000 for number in blocks_in(root)) > NUM_ROWS


def test_recycled_files_that_others_remove_cost_no_block(start_tier: StartTier, root: Path) -> None:
    driver = start_tier(capacity_bytes=LARGE_BLOCKS * BLOCK_BYTES, num_threads=1)
    fill(driver, 0, LARGE_BLOCKS + 2 * NUM_ROWS)
    num_declined = driver.tier.stats()["declined"]
    for first in range(1000, 1000 + 4 * NUM_ROWS, NUM_ROWS):
        for path in recycled_files(root):
            path.unlink(missing_ok=True)
        result = driver.store(list(range(first, first + NUM_ROWS)))
        assert result.success or not result.is_fault
    stats = driver.tier.stats()
    num_held = sum(number >= 1000 for number in blocks_in(root))
    assert num_held + stats["declined"] - num_declined == 4 * NUM_ROWS
    assert num_held >= NUM_ROWS
    assert stats["store_errors"] == 0
    assert used_bytes(root) >= len(blocks_in(root)) * BLOCK_BYTES


def test_a_recycled_file_shows_another_host_that_its_owner_lives(start_tier: StartTier, root: Path) -> None:
    driver = start_tier(capacity_bytes=LARGE_BLOCKS * BLOCK_BYTES, num_threads=1)
    fill(driver, 0, LARGE_BLOCKS // 2)
    now_s = time.time()
    for path in blocks_in(root).values():
        os.utime(path, (now_s, now_s - 10 * FOREIGN_OWNER_TIMEOUT_S))
    fill(driver, 1000, LARGE_BLOCKS // 2 + 2 * NUM_ROWS)
    assert not blocks_in(root).keys().isdisjoint(range(LARGE_BLOCKS // 2))
    recycle_one(driver, root)
    assert all(now_s - path.stat().st_mtime < FOREIGN_OWNER_TIMEOUT_S for path in recycled_files(root))
