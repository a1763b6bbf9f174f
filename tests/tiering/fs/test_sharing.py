"""Several processes share one directory: they find each other's blocks and keep one capacity."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers import freeze
from tests.tiering.fs.conftest import HANG_GUARD_S, StartTier
from tests.tiering.fs.peer import Peer

from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import ROW_BYTES, key_of
from kvtier.tiering.fs import evictor
from kvtier.tiering.fs.folders import USAGE_NAME
from kvtier.tiering.fs.recycled_files import SLACK_SHARE
from kvtier.tiering.fs.shared_usage import read_record

BLOCK_BYTES = ROW_BYTES + 4096


class Peers:
    """Starts other processes and ends them with the test."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._peers: list[Peer] = []

    def start(self, *arguments: str, capacity_blocks: int = 100) -> Peer:
        """Start one."""
        self._peers.append(Peer(self._root, capacity_blocks * BLOCK_BYTES, *arguments))
        return self._peers[-1]

    def close(self) -> None:
        """End all."""
        for peer in self._peers:
            peer.close()


@pytest.fixture
def peers(root: Path) -> Iterator[Peers]:
    """Other processes on the same directory."""
    peers = Peers(root)
    yield peers
    peers.close()


def total_bytes(root: Path) -> int:
    """Return the bytes of every file of a block and of every temporary one."""
    total = 0
    for path in [*root.glob("*/*/*/*.kv"), *root.glob("tmp/*")]:
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def test_a_finds_what_b_wrote_after_a_started(start_tier: StartTier, peers: Peers) -> None:
    driver, peer = start_tier(negative_ttl_s=0.0), peers.start()
    assert driver.lookup(1) is False
    assert peer.store(1, 2) == [1, 2]
    assert driver.lookup(1) is True
    assert driver.load([1, 2]).success


def test_a_block_that_b_evicts_between_as_lookup_and_load_fails_alone(
    start_tier: StartTier, peers: Peers
) -> None:
    driver, peer = start_tier(), peers.start()
    driver.store([1, 2, 3])
    assert driver.lookup(2) is True
    assert peer.call("evict", 2) is True
    result = driver.load([1, 2, 3])
    assert result.successful_keys == frozenset({key_of(1), key_of(3)})
    assert driver.lookup(2) is False
    assert driver.tier.stats()["absent"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("limit_blocks", [48, 192])
def test_the_capacity_of_a_holds_while_b_writes(
    start_tier: StartTier, peers: Peers, root: Path, limit_blocks: int
) -> None:
    limit_bytes = limit_blocks * BLOCK_BYTES
    # By clocks that stand still, here and there, no walk takes so long that the next has to wait.
    driver = start_tier(capacity_bytes=limit_bytes, clock=ManualClock())
    peer = peers.start(capacity_blocks=2 * limit_blocks)
    seen = []
    peer.start("churn", 1000, 6 * limit_blocks)
    for number in range(0, 3 * limit_blocks, 8):
        driver.store(list(range(number, number + 8)))
        # Files are counted one after another: what is written while they are would be added to what was removed since.
        freeze(peer.process)
        seen.append(total_bytes(root))
        peer.process.send_signal(signal.SIGCONT)
    while peer.next_answer() != []:
        pass
    assert max(seen) <= limit_bytes
    assert peer.store(5000) == [5000]
    assert read_record(root / USAGE_NAME).in_flight_bytes == 0
    # A recount beside stores may count twice what is written meanwhile, and more goes than must. That of a tier which
    # is alone is exact: no evictor of another holds the lock or counts again when it has been idle.
    peer.close()
    assert driver.tier.shutdown(HANG_GUARD_S)
    last = start_tier(capacity_bytes=limit_bytes, clock=ManualClock())
    for number in range(10_000, 10_000 + limit_blocks):
        assert last.store([number]).success
    slack_blocks = limit_blocks // SLACK_SHARE
    assert limit_bytes - slack_blocks * BLOCK_BYTES <= total_bytes(root) <= limit_bytes


def test_both_write_the_same_blocks_and_each_is_there_once(
    start_tier: StartTier, peers: Peers, root: Path
) -> None:
    driver, peer = start_tier(), peers.start(capacity_blocks=300)
    peer.start("churn", 0, 160)
    for first in range(0, 160, 16):
        assert driver.store(list(range(first, first + 16))).success
    while peer.next_answer() != []:
        pass
    assert len(list(root.glob("*/*/*/*.kv"))) == 160
    assert all(driver.load([number]).success for number in range(0, 160, 7))


def test_another_model_sees_nothing_and_removes_nothing(start_tier: StartTier, peers: Peers) -> None:
    driver, peer = start_tier(), peers.start("--model", "model-b")
    driver.store([1])
    assert peer.call("lookup", 1) is False
    assert peer.call("load", 1) is False
    assert driver.load([1]).success


def test_while_another_process_evicts_a_store_is_declined_and_after_its_death_taken_over(
    start_tier: StartTier, peers: Peers, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, peer = start_tier(capacity_bytes=4 * BLOCK_BYTES), peers.start()
    assert driver.store([1, 2, 3, 4]).success
    assert peer.call("hold_eviction_lock") is True
    with monkeypatch.context() as patch:
        patch.setattr(evictor, "ROOM_WAIT_S", 0.01)
        assert not driver.store([5]).success
    assert driver.tier.stats()["declined"] == 1
    peer.kill()
    assert driver.store([5]).success
    assert total_bytes(root) == 4 * BLOCK_BYTES


def test_the_capacity_of_a_dead_process_no_longer_counts(
    start_tier: StartTier, peers: Peers, root: Path
) -> None:
    peer = peers.start(capacity_blocks=2)
    peer.store(1, 2)
    peer.kill()
    assert start_tier(capacity_bytes=8 * BLOCK_BYTES).store(list(range(10, 16))).success
    assert total_bytes(root) == 8 * BLOCK_BYTES
