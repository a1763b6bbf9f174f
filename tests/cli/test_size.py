"""``kvtier size`` says how many tokens fit into host memory, from a model's shape alone."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvtier.cli import size as command
from kvtier.cli.main import main
from kvtier.sim.known_models import list_models

PAGE = Path(__file__).parents[2] / "docs/guide/sizing.md"
CONFIG = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "torch_dtype": "float16",
}
"""A model of 2 x 2 x 4 x 64 x 2 = 2,048 bytes a token."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a model's configuration."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    """Return what the command prints as JSON."""
    assert main(["size", *arguments, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_known_model_is_printed_with_its_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "meta-llama/Llama-3.1-8B-Instruct", "--host", "64GiB"]) == 0

    printed = capsys.readouterr().out
    assert "meta-llama/Llama-3.1-8B: a token takes 128 KiB, so 8,192 tokens fit into a GiB" in printed
    assert ["64GiB", "524,288", "64"] in [line.split() for line in printed.splitlines()]


@pytest.mark.parametrize("name", ["config.json", "."])
def test_a_file_and_its_folder_are_read(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of(capsys, str(folder / name), "--host", "1MiB,1GiB")

    assert found["bytes_per_token"] == 2048
    assert found["tokens_per_gib"] == 2**19
    assert found["hosts"] == [
        {"host_bytes": 2**20, "tokens": 512},
        {"host_bytes": 2**30, "tokens": 2**19},
    ]


def test_another_type_halves_the_bytes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of(capsys, str(folder), "--dtype", "fp8")

    assert (found["bytes_per_token"], found["kv_dtype"]) == (1024, "float8_e4m3fn")


@pytest.mark.parametrize(
    ("model", "tp", "expected"),
    [
        ("Llama-3.1-8B", 8, 131_072),
        ("Llama-3.1-8B", 16, 131_072),
        ("DeepSeek-V3", 1, 70_272),
        ("DeepSeek-V3", 8, 70_272),
        # Latents beside states, which belong to one worker each: each worker stores its part of both.
        ("Kimi-Linear-48B-A3B", 8, 31_061 + 7 * 7 * 576 * 2),
    ],
)
def test_what_several_workers_hold_is_stored_once_where_a_row_can_have_it_so(
    model: str, tp: int, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert json_of(capsys, model, "--tp", str(tp))["bytes_per_token"] == expected


def test_copies_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "DeepSeek-V3", "--tp", "8"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "alone with a smaller /dev/shm each stores its copy, and a token takes 549 KiB" in printed
    assert main(["size", "Kimi-Linear-48B-A3B", "--tp", "8"]) == 0
    assert (
        "each of 8 workers stores what it holds, copies included: without copies" in capsys.readouterr().out
    )


def test_without_a_model_every_known_one_is_listed_within_eighty_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = Console(width=80, file=io.StringIO(), record=True)
    monkeypatch.setattr(command, "make_console", lambda: console)

    assert main(["size"]) == 0

    printed = console.export_text()
    names = [one.name.rpartition("/")[2] for one in list_models()]
    assert len(names) >= 20
    assert all(name in printed for name in names)
    assert "…" not in printed


def test_the_table_of_the_guide_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "--markdown"]) == 0
    assert capsys.readouterr().out in PAGE.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Llama-3.1-8C"], "unknown model 'Llama-3.1-8C': did you mean 'Llama-3.1-8B'"),
        (["Llama-3.1-8B", "--dtype", "fp3"], "--dtype='fp3': must be one of"),
        (["Llama-3.1-8B", "--tp", "0"], "--tp=0: must divide 8 KV heads"),
        (["Llama-3.1-8B", "--tp", "3"], "--tp=3: must divide 8 KV heads"),
        (["Llama-3.1-8B", "--host", "much"], "--host='much': must be a whole number"),
        (["Llama-3.1-8B", "--host", ","], "--host=',': give at least one size"),
        (["Llama-3.1-8B", "--json", "--markdown"], "--markdown='--json': print one of them"),
        (["/"], "MODEL='/': is a folder without config.json"),
        (["/dev/null"], "MODEL='/dev/null': is no regular file"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["size", *arguments])

    printed = capsys.readouterr()
    assert status == 2
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_model_with_states_of_an_unknown_kind_is_refused_with_a_remedy(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"attn_layer_period": 8}))

    assert main(["size", str(folder)]) == 2
    assert "attn_layer_period=8: some layers store states" in capsys.readouterr().err
