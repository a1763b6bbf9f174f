"""``kvtier why --simulate`` explains the misses of a simulation, from the records that its connector makes."""

import json
from pathlib import Path

import pytest

from kvtier.cli.main import main
from kvtier.cli.simulate.machine import EngineOptions, HostOptions
from kvtier.cli.traces import EXAMPLES, take_first
from kvtier.cli.why import explain_simulation
from kvtier.misses import RequestRecord
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.simulate import simulate

SIZES = ("--kv-bytes-per-token", "1KiB", "--device", "2MiB", "--host", "2MiB")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A prompt of 4 blocks that comes back after another one, when host memory of 4 blocks has lost it."""
    path = tmp_path / "trace.jsonl"
    prompts = ([1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4])
    lines = (
        {"timestamp": 60_000 * minute, "input_length": 2048, "output_length": 0, "hash_ids": ids}
        for minute, ids in enumerate(prompts)
    )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_a_host_that_is_too_small_is_named_with_what_to_do(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", "--simulate", str(trace), *SIZES]) == 0

    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert "3 requests of a simulation of trace.jsonl, 6,144 prompt tokens" in printed
    assert ["evicted", "host", "2,047", "33.3%", "1"] in rows
    assert "- 2,047 tokens had left host when they were asked for again, 60 s later (median)" in printed
    assert "Give the tier more room" in printed
    assert "For example request 2: 60 s earlier" in printed


def test_a_host_that_is_large_enough_is_an_origin(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "--simulate", str(trace), *SIZES[:-1], "1GiB", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["origins"] == {"host": 2047}
    assert "--simulate" in found["command"]
    assert {row["cause"] for row in found["causes"]} == {"never_seen", "partial_block"}


def test_a_tier_that_is_too_small_is_named(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*SIZES, "--tier", "disk:2MiB:3GB/s", "--json"]
    assert main(["why", "--simulate", str(trace), *options]) == 0

    found = json.loads(capsys.readouterr().out)
    assert "disk_too_small" in {finding["name"] for finding in found["findings"]}


def test_every_request_has_a_record_also_beyond_those_that_an_engine_keeps() -> None:
    chat = take_first(EXAMPLES["chat"].make(0), 1500)
    engine = EngineModel(chat.block_tokens, 2**20, 2000, 64, 20_000.0)
    records: list[RequestRecord] = []
    found = simulate(chat, engine, HostModel(2000), on_record=records.append)

    for record in records:
        record.check()
    missed: dict[str, int] = {}
    for record in records:
        for (cause, tier), num_tokens in record.missed_by_cause().items():
            name = f"{cause.value}.{tier}" if tier else cause.value
            missed[name] = missed.get(name, 0) + num_tokens
    assert len(records) == found.total.num_requests == 1500
    assert missed == found.missed_tokens
    assert found == simulate(chat, engine, HostModel(2000)), "records change nothing"


def test_a_simulation_that_serves_nothing_says_so(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "--simulate", str(trace), *SIZES[:2], "--device", "1MiB"]) == 1
    assert "each of 3 needs more device blocks than there are" in capsys.readouterr().out


def test_the_report_names_the_example_traffic() -> None:
    chat = take_first(EXAMPLES["chat"].make(0), 20)
    report = explain_simulation(
        "made-up traffic 'chat', seed 0", chat, EngineOptions("16GiB"), HostOptions("64GiB")
    )

    assert report.source == "a simulation of made-up traffic 'chat', seed 0"
    assert sum(report.tokens_by_origin.values()) + report.num_missed_tokens == report.num_prompt_tokens


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--host", "1GiB"], "--host='1GiB': describes a simulation: add --simulate"),
        (["--policy", "arc"], "--policy='arc': describes a simulation: add --simulate"),
        (["--simulate"], "give either a trace file or --example"),
        (["--simulate", "--example", "chat", "--policy", "lru,arc"], "name one policy"),
        (["--simulate", "--example", "chat", "--policy", ""], "--policy="),
        (["--simulate", "/nowhere/trace"], "/nowhere/trace"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", *arguments]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert what in line


def test_new_prompts_are_as_many_whatever_host_memory_holds(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    for host in ("64GiB", "4GiB", "1GiB"):
        assert (
            main(["why", "--simulate", "--example", "chat", "--requests", "600", "--host", host, "--json"])
            == 0
        )
        report = json.loads(capsys.readouterr().out)
        seen.append(sum(row["tokens"] for row in report["causes"] if row["cause"] == "never_seen"))

    assert seen[0] == seen[1] == seen[2] > 0


@pytest.mark.parametrize(
    ("options", "num_requests"), [(["--since", "1s"], 1), (["--request", "2"], 1), (["--since", "100d"], 3)]
)
def test_some_requests_are_chosen(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str], num_requests: int
) -> None:
    assert main(["why", "--simulate", str(trace), *SIZES, *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == num_requests


def test_an_id_that_no_request_has_is_refused_with_those_that_are_there(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", "--simulate", str(trace), *SIZES, "--request", "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err
