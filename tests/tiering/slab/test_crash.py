"""A writer killed at any instant leaves whole blocks only, and a file that the next engine can have at once."""

import random
import select
from pathlib import Path

import pytest
from tests.tiering.slab.conftest import StartTier, capacity_of
from tests.tiering.slab.disk import envelopes
from tests.tiering.slab.peer import Peer

from kvtier.errors import TierError
from kvtier.testing.tier_suite import NUM_ROWS, ROW_BYTES, content_of, key_of

NUM_SLOTS = 48
NUM_SEEDED_KILLS = 10
ENDLESS = 10**6


def assert_only_whole_blocks(start_tier: StartTier, path: Path, num_numbers: int) -> int:
    """Start anew and check every block that is found; return how many."""
    driver = start_tier(capacity_bytes=capacity_of(NUM_SLOTS))
    found = [number for number in range(num_numbers) if driver.lookup(number)]
    assert driver.tier.stats()["indexed_blocks"] == len(found)
    for number in found:
        assert driver.load([number]).success, f"block {number} is not whole"
        assert bytes(driver.rows[0]) == bytes(content_of(number))
    assert driver.tier.stats()["damaged"] == 0
    assert {entry.key for entry in envelopes(path, NUM_SLOTS).values()} == set(map(key_of, found))
    assert path.stat().st_size == capacity_of(NUM_SLOTS)
    assert driver.store([9999]).success
    return len(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_bytes", [0, 100, 4096, 4097, 8192, ROW_BYTES + 4095, ROW_BYTES + 4096 + 60, 10**9]
)
@pytest.mark.parametrize("kind", [(), ("--buffered",)], ids=["direct", "buffered"])
def test_a_writer_that_dies_within_a_write_leaves_whole_blocks_only(
    start_tier: StartTier, path: Path, num_bytes: int, kind: tuple[str, ...]
) -> None:
    peer = Peer(path, capacity_of(NUM_SLOTS), "--die-at", f"40:{num_bytes}", *kind)
    assert peer.greeting == "ready"
    peer.store(0, ENDLESS)
    last = 0
    while (answer := peer.next_answer()) is not None:
        assert isinstance(answer, int)
        last = answer
    peer.close()
    assert peer.process.returncode == -9
    assert assert_only_whole_blocks(start_tier, path, last + 3 * NUM_ROWS) >= NUM_SLOTS - 2 * NUM_ROWS


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SEEDED_KILLS))
def test_a_writer_killed_at_a_seeded_instant_leaves_whole_blocks_only(
    start_tier: StartTier, path: Path, seed: int
) -> None:
    choose = random.Random(seed)
    peer = Peer(path, capacity_of(NUM_SLOTS), *(("--buffered",) if seed % 2 else ()))
    peer.store(0, ENDLESS)
    for _ in range(choose.randrange(1, 40)):
        peer.next_answer()
    select.select([], [], [], choose.random() * 0.01)
    peer.kill()
    assert_only_whole_blocks(start_tier, path, 4096)


def test_a_file_is_one_owners_between_processes_and_free_when_that_is_dead(
    start_tier: StartTier, path: Path
) -> None:
    peer = Peer(path, capacity_of(NUM_SLOTS))
    with pytest.raises(TierError, match="belongs to an engine that is running"):
        start_tier(capacity_bytes=capacity_of(NUM_SLOTS))
    peer.store(0, NUM_ROWS)
    assert peer.next_answer() == 0
    peer.kill()
    driver = start_tier(capacity_bytes=capacity_of(NUM_SLOTS))
    assert driver.load(list(range(NUM_ROWS))).success
    second = Peer(path, capacity_of(NUM_SLOTS))
    assert str(path) in str(second.greeting)
    second.close()


def test_a_crash_while_the_file_is_made_leaves_one_that_is_made_anew(
    start_tier: StartTier, path: Path
) -> None:
    path.write_bytes(b"")  # made and locked, no superblock yet
    start_tier(capacity_bytes=capacity_of(NUM_SLOTS))
    page = path.read_bytes()[:4096]
    other = path.with_name("other.slab")
    other.write_bytes(page)  # superblock, no room yet
    driver = start_tier(path=other, capacity_bytes=capacity_of(NUM_SLOTS))
    assert driver.store([1]).success
    assert other.stat().st_size == capacity_of(NUM_SLOTS)


@pytest.mark.slow
def test_hundreds_of_blocks_with_random_kills_give_no_wrong_byte(start_tier: StartTier, path: Path) -> None:
    choose = random.Random(1)
    first = 0
    for _ in range(8):
        peer = Peer(path, capacity_of(NUM_SLOTS))
        assert peer.greeting == "ready"
        peer.store(first, ENDLESS)
        for _ in range(choose.randrange(2, 10)):
            answer = peer.next_answer()
            assert isinstance(answer, int)
            first = answer
        peer.kill()
    assert first > 300
    assert_only_whole_blocks(start_tier, path, first + 64 * NUM_ROWS)
