"""Processes that are killed while they store: what the next one finds is counted, and a tier that lies is caught."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.storm.crash import FINDINGS, Totals, Word, run_kills

from kvtier.base import OffloadKey
from kvtier.tiering.fs.block_writer import BlockWriter
from kvtier.tiering.fs.folders import FSNamespace
from kvtier.tiering.fs.index import KeyIndex
from kvtier.tiering.fs.recycled_files import StoreOutcome

NUM_KILLS = 6


def run(tier: str, folder: Path, seed: int = 3) -> Totals:
    """Return the sums of a few kills."""
    return list(run_kills(tier, NUM_KILLS, seed, folder))[-1]


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["fs", "slab"])
def test_what_was_acknowledged_is_there_after_each_kill(tier: str, tmp_path: Path) -> None:
    totals = run(tier, tmp_path)
    assert totals.kills == NUM_KILLS
    assert totals.acknowledged > 0
    assert totals.right > 0
    assert {name: totals.findings[word] for word, name in FINDINGS.items()} == dict.fromkeys(
        FINDINGS.values(), 0
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_tier_that_acknowledges_what_it_does_not_write_is_caught(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = BlockWriter.write

    def write_half(
        self: BlockWriter, namespace: FSNamespace, blocks: Sequence[tuple[OffloadKey, int]]
    ) -> dict[OffloadKey, StoreOutcome]:
        write(self, namespace, blocks[: len(blocks) // 2])
        return {key: StoreOutcome.WRITTEN for key, _ in blocks}

    monkeypatch.setattr(BlockWriter, "write", write_half)
    totals = run("fs", tmp_path, seed=5)  # a place with room for all
    assert totals.findings[Word.LOST] + totals.findings[Word.FAILED] > 0
    assert list(tmp_path.iterdir()), "a place with a finding is kept"


@pytest.mark.slow
def test_a_tier_that_finds_everything_is_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(KeyIndex, "__contains__", lambda self, key: True)
    assert run("fs", tmp_path).findings[Word.PHANTOM] > 0
