"""Processes that are killed while they store: what the next one finds is counted, and a tier that lies is caught."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest
from tests.storm.crash import FINDINGS, Totals, Word, run_kills

from kvtier.base import OffloadKey
from kvtier.tiering.fs.catalog import PackCatalog
from kvtier.tiering.fs.neighbours import PackNamespace
from kvtier.tiering.fs.own_blocks import SlotPin
from kvtier.tiering.fs.pack import Pack
from kvtier.tiering.fs.slot_table import SlotTable

NUM_KILLS = 6


def run(tier: str, folder: Path, seed: int = 3) -> Totals:
    """Return the sums of a few kills."""
    return list(run_kills(tier, NUM_KILLS, seed, folder))[-1]


@pytest.mark.slow
def test_what_was_acknowledged_is_there_after_each_kill(tmp_path: Path) -> None:
    totals = run("fs", tmp_path)
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
    record = PackCatalog.record

    def record_half(
        self: PackCatalog, namespace: PackNamespace, packs: Mapping[int, Pack], pins: Sequence[SlotPin]
    ) -> Collection[OffloadKey]:
        record(self, namespace, packs, pins[: len(pins) // 2])
        return {pin.key for pin in pins}

    monkeypatch.setattr(PackCatalog, "record", record_half)
    totals = run("fs", tmp_path, seed=5)  # a place with room for all
    assert totals.findings[Word.LOST] + totals.findings[Word.FAILED] > 0
    assert list(tmp_path.iterdir()), "a place with a finding is kept"


@pytest.mark.slow
def test_a_tier_that_finds_everything_is_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(SlotTable, "is_held", lambda self, namespace, key: True)
    assert run("fs", tmp_path).findings[Word.PHANTOM] > 0
