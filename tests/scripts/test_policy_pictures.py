"""The pictures of docs/concepts/policies.md are the same whether the numbers were kept in between or not."""

from pathlib import Path

from kvtier.sim.trace import TraceRequest, make_trace
from scripts.policy_pictures import count_ratios, read_ratios, write_ratios


def test_what_was_kept_is_what_was_counted(tmp_path: Path) -> None:
    chats = [
        TraceRequest(float(turn), 10 * 7, 1, tuple(range(turn % 13 * 100, turn % 13 * 100 + 7)))
        for turn in range(200)
    ]
    counted = count_ratios(make_trace(chats, block_tokens=10))
    write_ratios(counted, tmp_path / "ratios.csv")

    assert read_ratios(tmp_path / "ratios.csv") == counted
    assert {len(row) for row in counted.values()} == {7}
