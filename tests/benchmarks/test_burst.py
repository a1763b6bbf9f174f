"""The benchmark of short requests loads the right bytes, and counts fewer calls than jobs."""

from pathlib import Path

from benchmarks.burst.suite import ONE_BY_ONE, as_measurements, make_page, run
from benchmarks.harness.measurement import FLOOR, OURS
from benchmarks.harness.rounds import fixed


def test_requests_of_a_burst_share_calls_and_the_page_says_so(tmp_path: Path) -> None:
    values = run("slab", 32, tmp_path, fixed(1))
    calls = values["load, calls"]
    assert calls[ONE_BY_ONE][0] >= 32
    assert calls[OURS][0] < calls[ONE_BY_ONE][0]
    assert set(values["load, ms"]) == {OURS, FLOOR, ONE_BY_ONE}
    page = make_page(list(as_measurements("slab", 32, values)), {"cores": 2})
    lines = [line for line in page.splitlines() if line.startswith("| slab")]
    assert [line.split(" | ")[1] for line in lines] == ["load", "store"]
    assert {line.count("|") for line in lines} == {10}
