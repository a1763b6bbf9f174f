"""A writer killed at any instant leaves whole blocks only, and no temporary file after the next start."""

import random
import select
from pathlib import Path

import pytest
from tests.tiering.fs.conftest import StartTier
from tests.tiering.fs.peer import Peer

from kvtier.base import OffloadKey
from kvtier.testing.tier_suite import NUM_ROWS, ROW_BYTES, content_of, key_of

BLOCK_BYTES = ROW_BYTES + 4096
CAPACITY_BLOCKS = 64
NUM_SEEDED_KILLS = 10


def assert_only_whole_blocks(start_tier: StartTier, root: Path) -> None:
    """Start anew and check every block that is there, and everything else that is."""
    driver = start_tier(capacity_bytes=CAPACITY_BLOCKS * BLOCK_BYTES)
    paths = list(root.glob("*/*/*/*.kv"))
    for path in paths:
        key = OffloadKey(bytes.fromhex(path.stem))
        number = int.from_bytes(key[:-4], "big")
        assert key == key_of(number)
        assert driver.lookup(number) is True
        assert driver.load([number]).success, f"block {number} is not whole"
        assert bytes(driver.rows[0]) == bytes(content_of(number))
    assert driver.tier.stats()["damaged"] == 0
    assert list((root / "tmp").iterdir()) == []
    assert sum(path.stat().st_size for path in paths) <= CAPACITY_BLOCKS * BLOCK_BYTES
    others = [path for path in root.rglob("*") if path.is_file() and path.suffix != ".kv"]
    assert {path.name for path in others} <= {".lock", ".usage", "namespace.json"}
    assert driver.store([9999]).success


INSTANTS = ["open:9", "pwritev:9", "pwritev-after:9", "open-after:30"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [(instant,) for instant in (*INSTANTS, "link:5", "link-after:5")]
    + [(instant, "--named") for instant in INSTANTS],
    ids=" ".join,
)
def test_a_writer_that_dies_inside_publishing_leaves_whole_blocks_only(
    start_tier: StartTier, root: Path, arguments: tuple[str, ...]
) -> None:
    peer = Peer(root, CAPACITY_BLOCKS * BLOCK_BYTES, "--die-at", *arguments)
    for first in range(0, 10 * NUM_ROWS, NUM_ROWS):
        if peer.call("store", *range(first, first + NUM_ROWS)) is None:
            break
    peer.close()
    assert peer.process.returncode == -9
    assert_only_whole_blocks(start_tier, root)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SEEDED_KILLS))
def test_a_writer_killed_at_a_seeded_instant_leaves_whole_blocks_only(
    start_tier: StartTier, root: Path, seed: int
) -> None:
    choose = random.Random(seed)
    kind = ("--named",) if seed % 2 else ()
    peer = Peer(root, CAPACITY_BLOCKS * BLOCK_BYTES, *kind)
    peer.start("churn", 0, 4096)
    for _ in range(choose.randrange(1, 12)):
        peer.next_answer()
    select.select([], [], [], choose.random() * 0.01)
    peer.kill()
    assert_only_whole_blocks(start_tier, root)
