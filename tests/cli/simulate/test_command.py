"""``kvtier simulate`` prints what it found, writes it as JSON, and refuses wrong arguments with one line."""

import json
from pathlib import Path

import pytest

from kvtier.cli.main import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A chat that comes back when its blocks have left the device: 4 blocks, 4 others, the first 4 again."""
    path = tmp_path / "trace.jsonl"
    prompts = ([1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4])
    lines = (
        {"timestamp": 60_000 * minute, "input_length": 2048, "output_length": 0, "hash_ids": ids}
        for minute, ids in enumerate(prompts)
    )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def run(trace: Path, *arguments: str) -> int:
    """Simulate with blocks of 512 KiB, four of them on the device."""
    sizes = ["--kv-bytes-per-token", "1KiB", "--device", "2MiB", "--host", "2MiB"]
    return main(["simulate", str(trace), *sizes, *arguments])


def test_hits_times_and_traffic_are_printed(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = run(trace, "--tier", "fs:1GiB:3GB/s", "--policy", "lru,arc")

    printed = capsys.readouterr()
    rows = [line.split() for line in printed.out.splitlines()]
    assert status == 0
    assert ["without", "0.0%", "0.0%", "0.0%", "100.0%"] in [row[:5] for row in rows]
    assert ["lru", "0.0%", "0.0%", "25.0%", "75.0%"] in [row[:5] for row in rows]
    assert ["lru", "fs", "2,048"] in [row[:3] for row in rows]
    assert "lru: 1,536 tokens loaded instead of computed (25.0%)" in printed.out
    assert "3 requests in 120 s, 12 blocks of 512 tokens, 8 of them unique" in printed.out
    assert "3/3" in printed.err


def test_the_numbers_are_written_as_json(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "numbers.json"

    status = run(trace, "--host", "1GiB", "--json", str(out))

    written = json.loads(out.read_text())
    assert status == 0
    assert list(written) == ["without", "lru"]
    assert written["lru"]["total"]["hit_tokens"] == {"device": 0, "CPU": 1536}
    assert written["without"]["num_saved_tokens"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tier", "fs"], "--tier='fs': must be NAME"),
        (["--device", "1KiB"], "--device='1KiB': a block"),
        (["--policy", "lr"], "unknown eviction policy"),
        (["--format", "moon"], "unknown trace format"),
        (["--json", "/no/such/place/numbers.json"], "--json="),
        (["--prefill", "0"], "prefill_tokens_per_s="),
        (["--requests", "0"], "--requests=0"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(
    trace: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(trace, *arguments)

    printed = capsys.readouterr()
    assert status == 2
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_trace_with_a_bad_line_is_refused_with_its_number(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write_text(trace.read_text() + "{}\n")

    assert run(trace) == 2
    assert f"{trace}:4: " in capsys.readouterr().err
