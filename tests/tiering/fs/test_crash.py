"""A writer killed at any instant leaves whole blocks only, and packs that the next engine has at once."""

import random
from pathlib import Path

import pytest
from tests.tiering.fs.conftest import StartTier
from tests.tiering.fs.engine import bytes_of_packs
from tests.tiering.fs.peer import Peer

from kvtier.testing.tier_driver import NUM_ROWS, TierDriver

pytestmark = pytest.mark.slow

NUM_JOBS = 8
NUM_BLOCKS = NUM_JOBS * NUM_ROWS
CAPACITY, PACK = bytes_of_packs(64), bytes_of_packs(1)
"""Room for everything; packs are made all the time."""

SMALL = bytes_of_packs(8)
"""Room for a fourth of it."""

CALLS = (
    "open",
    "write",
    "pwritev",
    "preadv",
    "fallocate",
    "try_lock",
    "rename",
    "unlink",
    "sync",
    "sync_folder",
)


def check_whole(driver: TierDriver, acknowledged: set[int], *, has_room: bool) -> None:
    """What is found can be loaded with its own bytes; with room what was reported is found; storing goes on."""
    found = [number for number in range(NUM_BLOCKS) if driver.lookup(number)]
    for first in range(0, len(found), NUM_ROWS):
        part = found[first : first + NUM_ROWS]
        assert driver.load_right(part) == set(part)
    if has_room:
        assert acknowledged <= set(found)
    assert driver.tier.stats()["damaged"] == 0
    assert driver.store([10_000]).success
    assert driver.load_right([10_000]) == {10_000}


def churn(peer: Peer) -> set[int]:
    """Have a peer store everything; return what it has reported before it died or ended."""
    peer.start("churn", 0, NUM_BLOCKS)
    reported: set[int] = set()
    while isinstance(first := peer.next_answer(), int):
        reported.update(range(first, first + NUM_ROWS))
    return reported


@pytest.mark.parametrize("capacity_bytes", [CAPACITY, SMALL], ids=["roomy", "evicting"])
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", CALLS)
def test_a_writer_that_dies_at_a_system_call_leaves_whole_blocks_only(
    start_tier: StartTier, root: Path, call: str, is_after: bool, capacity_bytes: int
) -> None:
    choose = random.Random(f"{call} {is_after} {capacity_bytes}")
    number = choose.randrange(2, 40)
    die_at = f"{call}{'-after' if is_after else ''}:{number}"
    peer = Peer(
        root, capacity_bytes, "--pack-bytes", str(PACK), "--die-at", die_at, "--durability", "fdatasync"
    )
    acknowledged = churn(peer) if peer.greeting == "ready" else set()
    peer.close()
    driver = start_tier(capacity_bytes=capacity_bytes, pack_bytes=PACK, allow_shrink=True)
    check_whole(driver, acknowledged, has_room=capacity_bytes == CAPACITY)
    assert not list(root.rglob("*.new")) or driver.tier.stats()["own_packs"]
    assert driver.tier.stats()["neighbour_packs"] == 0, "a dead process owns nothing"


@pytest.mark.parametrize("seed", range(6))
def test_a_writer_killed_at_a_seeded_instant_leaves_whole_blocks_only(
    start_tier: StartTier, root: Path, seed: int
) -> None:
    choose = random.Random(seed)
    capacity_bytes = choose.choice([CAPACITY, SMALL])
    peer = Peer(root, capacity_bytes, "--pack-bytes", str(PACK))
    peer.start("churn", 0, NUM_BLOCKS)
    acknowledged: set[int] = set()
    for _ in range(choose.randrange(NUM_JOBS)):
        first = peer.next_answer()
        assert isinstance(first, int)
        acknowledged.update(range(first, first + NUM_ROWS))
    peer.kill()
    driver = start_tier(capacity_bytes=capacity_bytes, pack_bytes=PACK, allow_shrink=True)
    check_whole(driver, acknowledged, has_room=capacity_bytes == CAPACITY)


def test_packs_are_their_living_owners_and_the_next_ones_when_that_is_dead(
    start_tier: StartTier, root: Path
) -> None:
    peer = Peer(root, CAPACITY, "--pack-bytes", str(PACK))
    assert peer.store(1, 2, 3) == [1, 2, 3]
    neighbour = start_tier(capacity_bytes=CAPACITY, pack_bytes=PACK)
    assert neighbour.load_right([1, 2, 3]) == {1, 2, 3}
    assert neighbour.tier.stats()["own_packs"] == 0
    peer.kill()
    later = start_tier(capacity_bytes=CAPACITY, pack_bytes=PACK)
    assert later.load_right([1, 2, 3]) == {1, 2, 3}
    assert not neighbour.tier.stats()["own_packs"]


def test_another_process_finds_and_loads_what_this_one_stores(start_tier: StartTier, root: Path) -> None:
    driver = start_tier(capacity_bytes=CAPACITY, pack_bytes=PACK)
    assert driver.store([1, 2]).success
    peer = Peer(root, CAPACITY, "--pack-bytes", str(PACK))
    assert peer.greeting == "ready"
    assert [peer.call("load", 1), peer.call("load", 2), peer.call("lookup", 3)] == [True, True, False]
    assert peer.store(2, 4) == [2, 4]
    driver.poll_until(lambda: driver.lookup(4))
    assert driver.load_right([1, 2, 4]) == {1, 2, 4}
    peer.close()
