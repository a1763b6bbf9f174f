"""Wrong arguments are one line and status 2 before anything slow begins, and leave nothing behind."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvtier.cli.main import main

REFUSE_TORCH = """
import sys
sys.modules["torch"] = None
from kvtier.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty place for temporary directories."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return temporary


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--docs", "/no/such/place"], "--docs"),
        (["--trace", "/no/such/trace"], "--trace"),
        (["--trace", __file__], "--trace"),
        (["--model", "/no/such/model"], "--model"),
        (["--dir", "/proc/nowhere/blocks"], "--dir"),
        (["--json", "/no/such/place/numbers.json"], "--json"),
        (["--plot", "/no/such/place/turns.png"], "--plot"),
        (["--cpu-bytes", "much"], "--cpu-bytes"),
        (["--tier", "sf"], "--tier"),
        (["--turns", "0"], "--turns"),
        (["--scale", "7", "--trace", "/no/such/trace"], "--scale"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(
    arguments: list[str], option: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["demo", *arguments])

    message = capsys.readouterr().err
    assert status == 2
    assert message.count("\n") == 1
    assert option in message
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), (["--docs", "/no/such/place"], 2)])
def test_help_and_wrong_arguments_do_not_wait_for_torch(arguments: list[str], status: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", REFUSE_TORCH, "demo", *arguments],
        capture_output=True,
        timeout=120,
        check=False,
    )

    assert ended.returncode == status, ended.stderr.decode()
