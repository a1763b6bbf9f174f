"""``kvtier simulate`` prints what it found, writes it as JSON, and refuses wrong arguments with one line."""

import importlib.util
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvtier.cli.main import main
from kvtier.cli.simulate.comparison import Comparison
from kvtier.cli.simulate.table import print_comparison
from kvtier.sim.formats.registry import read_trace
from kvtier.sim.link import LinkSpeed
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.sweep import plan_cases, run_cases
from kvtier.sim.tier import TierModel


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
    assert ["without", "0.0%", "0.0%", "0.0%", "0.0%", "25.0%"] in [row[:6] for row in rows]
    # Of the third prompt everything is loaded but its last token, which is computed in any case.
    assert ["lru", "0.0%", "0.0%", "33.3%", "33.3%", "33.3%"] in [row[:6] for row in rows]
    assert ["partial_block", "0.0%", "0.0%"] in rows
    assert ["lru", "fs", "2,048"] in [row[:3] for row in rows]
    assert "lru: 2,047 tokens loaded instead of computed (33.3%)" in printed.out
    assert "3 requests in 120 s, 12 blocks of 512 tokens, 8 of them unique" in printed.out
    assert "9/9" in printed.err


def test_a_dash_prints_the_numbers_on_stdout_and_the_tables_on_stderr(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(trace, "--json", "-") == 0

    printed = capsys.readouterr()
    assert json.loads(printed.out)["verdict"]
    assert "would not help" in printed.err
    assert not Path("-").exists()


def test_the_verdict_is_the_first_line(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trace) == 0
    assert capsys.readouterr().out.startswith(
        "would not help: as many prompt tokens would be computed; not computed: at most"
    )
    assert run(trace, "--host", "1GiB") == 0
    assert capsys.readouterr().out.startswith(
        "would compute 33% fewer prompt tokens; median first token 102 -> 102 ms\n"
    )


def test_what_was_simulated_is_said(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trace, "--tier", "fs:1GiB:3GB/s") == 0
    said = "simulated: device 2MiB; host 2MiB; fs 1GiB; 1KiB a token, 512KiB a block"
    assert said in capsys.readouterr().out
    assert run(trace, "--sweep", "host=2MiB,16MiB") == 0
    assert "simulated: device 2MiB; host 2MiB, 16MiB; 1KiB a token" in capsys.readouterr().out


def test_no_host_memory_is_a_run_without(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly", reason="needs plotly: pip install 'kvtier[plot]'")
    out, page = tmp_path / "numbers.json", tmp_path / "page.html"

    assert run(trace, "--host", "0", "--json", str(out), "--html", str(page)) == 0

    assert "simulated: device 2MiB; host none" in capsys.readouterr().out
    assert list(json.loads(out.read_text())["results"]) == ["without"]
    assert "without offloading 0% of the prompt tokens are not computed" in page.read_text()


def test_blocks_of_another_size_and_times_in_seconds_are_read_where_the_options_say_so(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write_text(trace.read_text().replace("2048", "256").replace("000,", ","))

    assert run(trace, "--block-tokens", "64", "--time-unit", "s") == 0

    assert "3 requests in 120 s, 12 blocks of 64 tokens" in capsys.readouterr().out


def test_made_up_traffic_needs_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--example", "chat", "--requests", "60", "--seed", "3"]) == 0
    first = capsys.readouterr().out
    assert main(["simulate", "--example", "chat", "--requests", "60", "--seed", "3"]) == 0
    assert capsys.readouterr().out == first
    assert main(["simulate", "--example", "chat", "--requests", "60", "--seed", "4"]) == 0
    assert capsys.readouterr().out != first
    assert "60 requests in " in first


def test_the_derived_rate_is_said_and_a_given_one_is_not(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trace) == 0
    assert "prefill: 20,000 tokens a second, derived from the trace" in capsys.readouterr().out
    assert run(trace, "--prefill", "20000") == 0
    assert "derived" not in capsys.readouterr().out


def test_times_of_a_queue_are_not_shown_at_a_derived_rate(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = trace.read_text().splitlines()
    trace.write_text("".join(f"{line}\n" for line in lines for _ in range(500)))

    assert run(trace, "--max-running", "1", "--sweep", "host=2MiB,16MiB") == 0

    printed = capsys.readouterr().out
    assert "so no times are shown" in printed
    assert "p50" not in printed
    assert "median first token" not in printed


def test_no_number_is_cut_where_there_is_no_terminal(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = [f"--tier=a-tier-with-a-long-name-{number}:{4 + number}GiB:3GB/s" for number in range(5)]

    assert run(trace, *tiers) == 0

    printed = capsys.readouterr().out
    assert "…" not in printed
    assert "a-tier-with-a-long-name-4" in printed


def test_two_tiers_fit_a_terminal_of_eighty_columns(trace: Path) -> None:
    read = read_trace(trace)
    engine = EngineModel(512, 2**19, num_device_blocks=4)
    speed = LinkSpeed(1e9, 1e9)
    host = HostModel(4, tiers=(TierModel("fs", 10**8, speed), TierModel("obj", 10**9, speed)))
    console = Console(width=80, record=True, file=io.StringIO())

    cases = plan_cases(engine, host, ["hazard"])
    found = run_cases(read, cases)
    print_comparison(Comparison("", read, engine, host, None, tuple(cases), tuple(found)), console)

    printed = console.export_text()
    assert "…" not in printed
    assert "1,000,000,000" in printed


def test_when_nothing_was_served_there_are_no_numbers_and_the_status_says_so(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(trace, "--device", "1MiB")

    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert status == 1
    assert ["lru", "-", "-", "-", "-"] in rows
    assert ["lru", "-", "-", "-", "-", "0", "3"] in rows


def test_a_saturated_engine_is_told_in_one_line(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def warnings(*arguments: str) -> list[str]:
        assert run(trace, *arguments) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]

    assert warnings() == []
    lines = trace.read_text().splitlines()
    trace.write_text("".join(f"{line}\n" for line in lines for _ in range(500)))
    (warning,) = warnings("--prefill", "100")
    assert "the engine is saturated (without)" in warning


def test_help_tells_nothing_of_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--help"]) == 0
    assert "Raises" not in capsys.readouterr().out


def test_a_disk_that_fills_up_costs_the_file_and_not_the_tables(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(trace, "--json", "/dev/full")

    printed = capsys.readouterr()
    assert status == 2
    assert "--json='/dev/full': cannot be written" in printed.err
    assert "Prompt tokens by origin" in printed.out


def test_the_numbers_are_written_as_json(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "numbers.json"

    status = run(trace, "--host", "1GiB", "--json", str(out))

    written = json.loads(out.read_text())
    assert status == 0
    assert list(written) == [
        *("kvtier", "command", "trace", "engine", "is_saturated", "capacities", "verdict", "results"),
    ]
    assert written["command"].startswith(f"kvtier simulate {trace} --device 2MiB")
    assert written["trace"]["name"] == str(trace)
    assert written["capacities"]["host_blocks"] == 2048
    assert written["verdict"]["fewer_ratio"] == pytest.approx(2047 / 6144)
    results = written["results"]
    assert list(results) == ["without", "lru"]
    assert results["lru"]["total"]["hit_tokens"] == {"device": 0, "host": 2047}
    assert results["without"]["num_loaded_tokens"] == 0
    ratios = [results["lru"][name] for name in ("not_computed_ratio", "at_most_ratio")]
    assert ratios == pytest.approx([2047 / 6144, 2048 / 6144])
    assert not [name for one in results.values() for name in one["counters"] if "CPU" in name]


def test_a_sweep_is_one_table_with_a_row_for_each_size_and_policy(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(trace, "--sweep", "host=16MiB,2MiB", "--policy", "lru,arc")

    printed = capsys.readouterr()
    rows = [line.split() for line in printed.out.splitlines()]
    assert status == 0
    assert [row[:7] for row in rows if row[1:2] in (["without"], ["lru"], ["arc"])] == [
        ["-", "without", "0.0%", "25.0%", "0.0%", "0.0%", "0.10"],
        ["2MiB", "lru", "0.0%", "33.3%", "0.0%", "0.0%", "0.10"],
        ["2MiB", "arc", "0.0%", "33.3%", "0.0%", "0.0%", "0.10"],
        ["16MiB", "lru", "33.3%", "33.3%", "0.0%", "33.3%", "0.10"],
        ["16MiB", "arc", "33.3%", "33.3%", "0.0%", "33.3%", "0.10"],
    ]
    assert "15/15" in printed.err


def test_processes_write_the_same_json(trace: Path, tmp_path: Path) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]

    for jobs, file in zip(("1", "2"), files, strict=True):
        assert run(trace, "--sweep", "host=2MiB,16MiB", "--jobs", jobs, "--json", str(file)) == 0

    one, two = (json.loads(file.read_text()) for file in files)
    assert one["runs"] == two["runs"]
    assert [run["size"] for run in one["runs"]] == [None, "2MiB", "16MiB"]


def test_the_page_says_what_was_asked(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="needs plotly: pip install 'kvtier[plot]'")
    page = tmp_path / "page.html"

    assert run(trace, "--tier", "fs:1GiB:3GB/s", "--tier-setting", "fs.fill=true", "--html", str(page)) == 0

    text = page.read_text()
    assert f"kvtier simulate {trace} --device 2MiB --host 2MiB --tier fs:1GiB:3GB/s" in text
    assert "fill on" in text


def test_a_hit_that_computes_sooner_is_computed_where_that_was_asked_for(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly", reason="needs plotly: pip install 'kvtier[plot]'")
    page, numbers = tmp_path / "page.html", tmp_path / "numbers.json"
    first, second, _ = trace.read_text().splitlines()
    third = second.replace("60000", "90000").replace("[5, 6, 7, 8]", "[9, 10, 11, 12]")
    returns = [first.replace(": 0,", ": 120000,", 1), second.replace("60000", "180000")]
    trace.write_text("".join(f"{line}\n" for line in (first, second, third, *returns)))
    slow = ["--tier", "fs:1GiB:1MB/s,1GB/s", "--html", str(page), "--json", str(numbers)]

    assert run(trace, *slow) == 0
    assert "which was faster" not in capsys.readouterr().out
    assert "every hit is loaded" in page.read_text()
    assert run(trace, *slow, "--load-if", "faster") == 0

    # At the first return the speed of the tier is unknown, at the second it is known to be slower.
    assert "lru: 2,048 tokens found in fs and computed, which was faster" in capsys.readouterr().out
    assert "connector.not_loaded_tokens.fs" in page.read_text()
    assert "a hit that would be faster to compute is computed" in page.read_text()
    assert (
        json.loads(numbers.read_text())["results"]["lru"]["counters"]["connector.not_loaded_tokens.fs"]
        == 2048
    )


@pytest.mark.slow
def test_a_tier_writes_less_where_it_takes_only_what_is_likely_to_come_back(tmp_path: Path) -> None:
    trace, numbers = tmp_path / "trace.jsonl", tmp_path / "numbers.json"
    chats = ([chat, 10 + chat, 20 + chat] for _ in range(120) for chat in range(5))
    once = ([1000 + 3 * n, 1001 + 3 * n, 1002 + 3 * n] for n in range(600))
    prompts = [ids for pair in zip(chats, once, strict=True) for ids in pair]
    lines = (
        {"timestamp": 4000 * number, "input_length": 1536, "output_length": 0, "hash_ids": ids}
        for number, ids in enumerate(prompts)
    )
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def written_per_unique_block(*setting: str) -> float:
        assert run(trace, "--tier", "fs:1GiB:3GB/s", *setting, "--json", str(numbers)) == 0
        tiers = json.loads(numbers.read_text())["results"]["lru"]["tiers"]
        return float(next(tier["writes_per_unique_block"] for tier in tiers if tier["name"] == "fs"))

    likely = 'fs.admission={"min_reuse_probability": 0.3, "horizon_s": 60}'

    assert written_per_unique_block() > 0.99
    assert written_per_unique_block("--tier-setting", likely) < 0.7


def test_an_old_file_is_kept_when_the_run_is_refused(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("older")

    assert run(trace, "--html", str(page), "--json", "/no/such/place/numbers.json") == 2

    assert page.read_text() == "older"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tier", "fs"], "--tier='fs': must be NAME"),
        (["--device", "1KiB"], "--device='1KiB': is smaller than a block"),
        (["--policy", "lr"], "unknown eviction policy"),
        (["--format", "moon"], "unknown trace format for --format 'moon'"),
        (["--json", "/no/such/place/numbers.json"], "--json="),
        (["--json", "/proc/numbers.json"], "--json="),
        (["--json", "/"], "--json="),
        (["--sweep", "host"], "--sweep='host': must be PLACE=SIZE"),
        (["--sweep", "hots=1GiB,2GiB"], "unknown place to sweep for --sweep 'hots': did you mean 'host'"),
        (["--tier-setting", "fs.cascade=on_evict"], "unknown tier for --tier-setting 'fs'"),
        (["--load-if", "quicker"], "--load-if='quicker': must be one of 'always', 'faster'"),
        (["--jobs", "0"], "--jobs=0"),
        (["--prefill", "0"], "--prefill=0.0: must be a finite number above zero"),
        (["--decode", "inf"], "--decode=inf"),
        (["--max-running", "0"], "--max-running=0"),
        (["--store-threshold=-1"], "--store-threshold=-1: must be an integer"),
        (["--tier", "fs:1GiB:3GB/s:1ms:0"], "--tier='fs:1GiB:3GB/s:1ms:0': STREAMS must be"),
        (["--tier", "host:1GiB:3GB/s"], "--tier='host': each tier"),
        (["--tier", "a b:1GiB:3GB/s"], "--tier='a b': must consist of"),
        (["--requests", "0"], "--requests=0"),
        (["--block-tokens", "0"], "--block-tokens=0: must be an integer from 1"),
        (["--time-unit", "h"], "--time-unit='h': must be s or ms"),
        (["--host", "0", "--tier", "fs:1GiB:3GB/s"], "--host='0': is a run without offloading"),
        (["--example", "chat"], "give either a trace file or --example chat or agents"),
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


@pytest.mark.parametrize("place", ["/no/such/place/page.html", "/"])
def test_a_page_that_cannot_be_written_is_refused_before_the_simulation(
    trace: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly", reason="needs plotly: pip install 'kvtier[plot]'")

    assert run(trace, "--html", place) == 2

    printed = capsys.readouterr()
    assert f"--html={place!r}" in printed.err
    assert printed.out == ""


def test_without_the_library_for_plots_the_extra_is_named(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "plotly" else find_spec(name)
    )

    assert run(trace, "--html", str(tmp_path / "page.html")) == 2
    assert "pip install '.[plot]'" in capsys.readouterr().err
    assert run(trace) == 0


def test_a_trace_with_a_bad_line_is_refused_with_its_number(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write_text(trace.read_text() + "{}\n")

    assert run(trace) == 2
    assert f"{trace}:4: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "TRACE: give either a trace file or --example chat or agents"),
        (["--example", "chats"], "unknown traffic for --example 'chats': did you mean 'chat'"),
        (["--example", "chat", "--block-tokens", "64"], "--block-tokens=64: is about a trace file"),
        (["--example", "chat", "--seed=-1"], "--seed=-1: must be an integer from 0"),
    ],
)
def test_without_a_trace_a_known_example_is_needed(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == 2
    assert message in capsys.readouterr().err
