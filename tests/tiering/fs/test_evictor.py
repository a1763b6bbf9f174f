"""The oldest blocks go, whoever wrote them, until what is wanted fits; nothing else goes, and nothing is overrun."""

import os
from pathlib import Path

import pytest
from tests.tiering.fs.conftest import HANG_GUARD_S, StartTier

from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import ROW_BYTES, TierDriver, key_of
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.book import Book, Change, MemberId, unpack_book
from kvtier.tiering.fs.evictor import SLACK_SHARE, WALK_TTL_S, plan_excess
from kvtier.tiering.fs.owner import Owner, current_owner

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
    return unpack_book((root / ".usage").read_bytes()).used_bytes


def store_each(driver: TierDriver, *numbers: int) -> list[bool]:
    """Store blocks in one job each."""
    return [driver.store([number]).success for number in numbers]


@pytest.mark.parametrize(
    ("used_blocks", "capacity_blocks", "excess_blocks"),
    [(0, 4, -4), (4, 4, 0), (5, 4, 1), (31, 32, 0), (32, 32, 1), (100, 64, 38)],
)
def test_a_part_of_a_large_capacity_is_kept_free(
    used_blocks: int, capacity_blocks: int, excess_blocks: int
) -> None:
    assert SLACK_SHARE == 32
    member = MemberId(current_owner(), 1)
    book = Book(used_blocks * 10, is_counted=True).joined(member, capacity_blocks * 10, 0.0)
    assert plan_excess(book, 10) == excess_blocks * 10


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
    store_each(start_tier(capacity_bytes=3 * BLOCK_BYTES), 10)
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
    book = unpack_book((root / ".usage").read_bytes()).joined(dead, 5, 0.0)
    book = book.changed(dead, Change(used_bytes=10**9, in_flight_bytes=10**9))
    (root / ".usage").write_bytes(book.pack())
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


def test_a_child_forked_during_a_round_does_not_keep_the_lock(start_tier: StartTier, root: Path) -> None:
    tier = start_tier(capacity_bytes=4 * BLOCK_BYTES).tier
    assert isinstance(tier, FSTier)
    read_fd, write_fd = os.pipe()
    with tier._evictor._leadership() as is_leader:
        assert is_leader
        child = os.fork()
        if child == 0:
            os.read(read_fd, 1)
            os._exit(0)
    try:
        with tier._evictor._leadership() as is_leader:
            assert is_leader
    finally:
        os.write(write_fd, b"x")
        os.waitpid(child, 0)
        os.close(read_fd)
        os.close(write_fd)
