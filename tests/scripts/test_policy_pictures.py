"""The pictures of docs/policies.md say what was counted, whether it was kept in between or not."""

from pathlib import Path

import pytest

from kvtier.sim.trace import TraceRequest, make_trace
from scripts.policy_pictures import count_ratios, draw, read_ratios, write_ratios

pytest.importorskip("matplotlib")


def test_a_picture_of_the_same_counts_is_the_same_file_whether_they_were_kept_or_not(tmp_path: Path) -> None:
    chats = [
        TraceRequest(float(turn), 10 * 7, 1, tuple(range(turn % 13 * 100, turn % 13 * 100 + 7)))
        for turn in range(200)
    ]
    counted = count_ratios(make_trace(chats, block_tokens=10))
    write_ratios(counted, tmp_path / "ratios.csv")

    draw("chats", counted, tmp_path / "counted.svg")
    draw("chats", read_ratios(tmp_path / "ratios.csv"), tmp_path / "kept.svg")

    assert (tmp_path / "counted.svg").read_bytes() == (tmp_path / "kept.svg").read_bytes()
    assert {len(row) for row in counted.values()} == {7}
