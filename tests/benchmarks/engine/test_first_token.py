"""In a round the same prompt comes from everywhere it can be, which the engine's own account says."""

from pathlib import Path

from benchmarks.engine.first_token import FirstTokens, of_length
from benchmarks.engine.models import make_model
from benchmarks.harness.measurement import FLOOR, OURS


def test_a_round_has_a_time_from_everywhere_and_lines_for_host_and_fs(tmp_path: Path) -> None:
    bench = FirstTokens(make_model(1, 64), tmp_path)

    rounds = [bench.measure_round(32, number) for number in range(2)]

    for found in rounds:
        assert set(found) == {"computed", "device", "host", "fs", "copy", "read"}
        assert all(seconds > 0 for seconds in found.values())
    lines = list(of_length(32, rounds))
    assert [line.labels for line in lines] == [
        {"prompt from": origin, "tokens": 32} for origin in ("host", "fs")
    ]
    for line, origin in zip(lines, ("host", "fs"), strict=True):
        assert line.values[OURS] == tuple(1e3 * found[origin] for found in rounds)
        assert set(line.values) == {OURS, FLOOR, "allowed", "device", "computed"}
