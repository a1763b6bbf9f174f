"""``kvtier plan`` prints what a trace needs and what to buy, and refuses wrong arguments with one line."""

import html
import io
import json
import re
from importlib import resources
from pathlib import Path

import pytest
from rich.console import Console

from kvtier.cli.main import main
from kvtier.cli.plan import command

LLAMA = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "torch_dtype": "float16",
}
CHEAP = """
[gpu]
usd_per_hour = 3.0
date = "2026"
source = "made up"

[[media]]
name = "host"
tier = "memory"
usd_per_gib_month = 1024.0
sold_in_gib = 0.0000625
read_gb_s = 25
write_gb_s = 25
latency_ms = 0
streams = 1
date = "2026"
source = "made up"

[[media]]
name = "disk"
tier = "a disk"
usd_per_gib = 1024.0
sold_in_gib = 0.0000625
drive_writes_per_day = 100000.0
warranty_years = 5
read_gb_s = 3
write_gb_s = 3
latency_ms = 0.1
streams = 8
date = "2026"
source = "made up"
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Six chats of three blocks, asked again after all the others, four times."""
    path = tmp_path / "trace.jsonl"
    lines = (
        {
            "timestamp": 1000 * n,
            "input_length": 1536,
            "output_length": 4,
            "hash_ids": [3 * (n % 6) + k for k in range(3)],
        }
        for n in range(24)
    )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A model of 256 bytes a token."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    """Prices of media that are sold by the block."""
    path = tmp_path / "prices.toml"
    path.write_text(CHEAP)
    return path


def run(trace: Path, config: Path, *arguments: str) -> int:
    """Plan for an engine with four device blocks of 128 KiB that computes a prompt in 1.5 s."""
    engine = ["--device", "512KiB", "--prefill", "1024", "--decode", "1000"]
    return main(["plan", str(trace), "--config", str(config), *engine, *arguments])


def test_without_a_goal_it_says_what_the_trace_needs(
    trace: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(trace, config)

    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert status == 0
    assert "256 bytes a token; 24 requests in 23 s name 2.2 MiB of distinct blocks" in printed
    assert "blocks that are used again are used after p10 6 s, p50 6 s" in printed
    assert ["1", "min", "2.0", "MiB", ">=", "2.2", "MiB", "5", "s"] in rows
    assert ["2.2", "MiB", "75.0%", "1.00", "25"] in rows
    assert [row[:2] for row in rows if row[:1] == ["host"]] == [["host", "0"]]
    assert "Mixes" not in printed
    assert "- A token takes 256 bytes (float16)" in printed


def test_the_cheapest_mix_is_named_with_its_price_its_wear_and_its_times(
    trace: Path, config: Path, prices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(trace, config, "--prices", str(prices), "--hit-ratio", "0.4")

    printed = capsys.readouterr()
    rows = [line.split() for line in printed.out.splitlines()]
    assert status == 0
    assert "40.0% hits: cheapest is host " in printed.out
    assert next(row for row in rows if row[:1] == ["without"])[2] == "0.0%"
    assert any(row[:2] == ["+", "disk"] and row[-1] == "years" for row in rows)
    assert printed.out.startswith("buy host ")
    assert re.search(
        r"a month: would compute \d+% fewer prompt tokens; median first token \S+ -> \S+ m?s\n", printed.out
    )
    assert "tried " in printed.out
    assert "- disk (a disk), 2026: made up." in printed.out


def test_a_goal_out_of_reach_is_status_1_and_says_by_how_much(
    trace: Path, config: Path, prices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(trace, config, "--prices", str(prices), "--hit-ratio", "0.9", "--ttft-p90", "10ms")

    printed = capsys.readouterr().out
    assert status == 1
    assert "90.0% hits and first token within 0.01 s for nine requests in ten: no mix reaches it" in printed
    assert " points short and first token after " in printed
    assert (
        "not enough at its largest, or with less host memory than would do alone: host, host + disk"
        in printed
    )


def test_a_goal_that_needs_nothing_is_status_0(
    trace: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trace, config, "--ttft-p90", "1000s") == 0
    assert "the device cache alone reaches it, nothing to buy" in capsys.readouterr().out


def test_the_plan_is_written_as_json_with_its_assumptions(
    trace: Path, config: Path, prices: Path, tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"

    assert run(trace, config, "--prices", str(prices), "--hit-ratio", "0.4", "--json", str(out)) == 0

    written = json.loads(out.read_text())
    assert written["is_reached"] is True
    assert written["command"].startswith(f"kvtier plan {trace}")
    assert written["trace"]["num_requests"] == 24
    assert written["verdict"].startswith("buy host ")
    assert written["bytes_per_token"] == 256
    assert written["shown"][0]["candidate"]["outcome"]["hit_ratio"] >= 0.4
    assert any("2026: made up" in line for line in written["assumptions"])


def test_a_dash_prints_the_plan_as_json_on_stdout_and_the_tables_on_stderr(
    trace: Path, config: Path, prices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trace, config, "--prices", str(prices), "--hit-ratio", "0.4", "--json", "-") == 0

    printed = capsys.readouterr()
    assert json.loads(printed.out)["is_reached"] is True
    assert "buy host " in printed.err


def test_the_same_command_prints_the_same(
    trace: Path, config: Path, prices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed() -> str:
        assert run(trace, config, "--prices", str(prices), "--hit-ratio", "0.4") == 0
        return capsys.readouterr().out

    assert printed() == printed()


def test_a_trace_of_prompts_shorter_than_a_block_is_planned_with(
    trace: Path, config: Path, prices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"timestamp": 1000.0 * n, "input_length": 9, "output_length": 4, "hash_ids": []} for n in range(3)
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in ({"kvtier_trace": 1, "block_tokens": 16}, *lines))
    trace.write_text(text)

    assert run(trace, config, "--prices", str(prices), "--hit-ratio", "0.5") == 1
    assert "no mix reaches it" in capsys.readouterr().out


def test_tables_fit_a_terminal_of_eighty_columns_and_no_word_is_broken(
    trace: Path, config: Path, prices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(width=80, file=io.StringIO(), record=True, force_terminal=True)
    monkeypatch.setattr(command, "make_console", lambda **_: console)

    assert run(trace, config, "--prices", str(prices), "--hit-ratio", "0.4", "--ttft-p90", "4s") == 0

    lines = console.export_text().splitlines()
    words = " ".join(lines).split()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert "tensor-parallel" in words
    assert {"GPU", "hours", "saved"} <= set(words)


def test_made_up_traffic_needs_neither_a_trace_nor_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--example", "chat", "--requests", "50"]) == 0

    printed = capsys.readouterr().out
    assert "131,072 bytes a token; 50 requests" in printed
    assert " of host memory (" in printed.partition("\n")[0]


def test_a_page_has_the_verdict_the_plots_and_the_assumptions(
    trace: Path, config: Path, prices: Path, tmp_path: Path
) -> None:
    pytest.importorskip("plotly", reason="needs plotly: pip install 'kvtier[plot]'")
    page, numbers = tmp_path / "plan.html", tmp_path / "plan.json"

    files = ["--html", str(page), "--json", str(numbers)]
    assert run(trace, config, "--prices", str(prices), "--hit-ratio", "0.4", *files) == 0

    text, written = page.read_text(), json.loads(numbers.read_text())
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    assert set(json.loads(found[1])) == {"mixes", "curve-0", "working-sets", "loading-0"}
    assert text.index(html.escape(written["verdict"])) < text.index("<h2>")
    assert all(html.escape(line) in text for line in written["assumptions"])
    assert f"kvtier plan {trace} --config {config}" in text


def test_a_page_that_cannot_be_written_costs_no_replay(
    trace: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly", reason="needs plotly: pip install 'kvtier[plot]'")

    assert run(trace, config, "--html", "/no/such/place/plan.html") == 2
    assert "--html=" in capsys.readouterr().err


def test_no_line_is_cut_where_there_is_no_terminal(
    trace: Path, config: Path, prices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trace, config, "--prices", str(prices), "--ttft-p90", "4s") == 0
    assert "…" not in capsys.readouterr().out


def test_help_tells_nothing_of_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "Raises" not in printed
    assert "--ttft-p90" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "2"], "--config="),
        (["--hit-ratio", "30"], "--hit-ratio=30.0: must be above 0"),
        (["--ttft-p90", "soon"], "--ttft-p90='soon': must be a number"),
        (["--ttft-p90", "0"], "--ttft-p90=0.0"),
        (["--media", "tape"], "unknown medium for --media 'tape'"),
        (["--policy", "lr"], "unknown eviction policy for --policy 'lr'"),
        (["--dtype", "fp8"], "--dtype='fp8': goes with --layers"),
        (["--kv-dtype", "fp3"], "--kv-dtype='fp3': must be one of"),
        (["--max-tiers", "9"], "--max-tiers=9"),
        (["--gpus", "0"], "--gpus=0"),
        (["--host-max", "1KiB"], "--host-max=1024: must be at least"),
        (["--prices", "/no/such/file"], "--prices='/no/such/file': cannot be read"),
        (["--config", "/no/such/file"], "--config='/no/such/file': cannot be read"),
        (["--json", "/no/such/place/plan.json"], "--json="),
        (["--prefill", "0"], "--prefill=0.0: must be a finite number above zero"),
        (["--decode", "0"], "--decode=0.0"),
        (["--max-running", "0"], "--max-running=0"),
        (["--format", "moon"], "unknown trace format for --format 'moon'"),
        (["--device", "1KiB"], "--device='1KiB': is smaller than a block"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(
    trace: Path, config: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(trace, config, *arguments)

    printed = capsys.readouterr()
    assert status == 2
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_field_that_is_missing_in_a_config_is_named_with_a_remedy(
    trace: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(json.dumps({"hidden_size": 64, "torch_dtype": "float16"}))

    assert run(trace, config) == 2
    assert (
        "num_hidden_layers=None: is missing in the config: describe it with --layers"
        in capsys.readouterr().err
    )


def test_a_copy_of_the_prices_that_come_with_kvtier_is_taken(
    trace: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(resources.files("kvtier.planning").joinpath("prices.toml").read_text())

    assert run(trace, config, "--prices", str(path)) == 0
    given = capsys.readouterr().out
    assert run(trace, config) == 0
    assert capsys.readouterr().out == given


@pytest.mark.parametrize("more", [(), ("--state-interval", "1024")], ids=["each block", "an interval"])
def test_what_is_planned_with_states_is_what_the_simulator_finds(
    trace: Path, tmp_path: Path, prices: Path, more: tuple[str, ...]
) -> None:
    model = ["--kv-bytes-per-token", "256", "--state-bytes", "96KiB", *more]
    engine = ["--device", "1536KiB", "--prefill", "100000"]
    planned, served = tmp_path / "plan.json", tmp_path / "simulate.json"

    goal = ["--prices", str(prices), "--hit-ratio", "0.3", "--max-tiers", "0"]
    status = main(["plan", str(trace), *model, *engine, *goal, "--json", str(planned)])

    plan = json.loads(planned.read_text())
    assert status == 0, plan["verdict"]
    assert any("a state of 98,304 bytes" in line for line in plan["assumptions"])
    shown = plan["shown"][0]
    num_bytes = shown["candidate"]["bill"]["media"][0]["used_bytes"]
    assert (
        main(["simulate", str(trace), *model, *engine, "--host", str(num_bytes), "--json", str(served)]) == 0
    )
    total = json.loads(served.read_text())["results"]["lru"]["total"]
    hits = sum(total["hit_tokens"].values()) / total["num_prompt_tokens"]
    assert shown["timed"]["hit_ratio"] == pytest.approx(hits)
    assert 0.3 <= hits < 0.9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--kv-bytes-per-token", "256", "--state-interval", "512"],
            "--state-interval=512: is for models with",
        ),
        (["--model", "Qwen3-Next-80B-A3B", "--state-bytes", "1MiB"], "--state-bytes='1MiB': the model's"),
        (
            ["--kv-bytes-per-token", "256", "--state-bytes", "1MiB", "--state-interval", "700"],
            "--state-interval=700: must be a multiple of a block",
        ),
    ],
)
def test_states_that_do_not_fit_the_model_or_the_trace_are_refused(
    trace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["plan", str(trace), *arguments]) == 2

    assert message in " ".join(capsys.readouterr().err.split())
