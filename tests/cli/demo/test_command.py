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
        (["--model", "/no/such/model"], "--model"),
        (["--dir", "/proc/nowhere/blocks"], "--dir"),
        (["--json", "/no/such/place/numbers.json"], "--json"),
        (["--cpu-bytes", "much"], "--cpu-bytes"),
        (["--tier", "sf"], "--tier"),
        (["--tier-setting", "max_blocks"], "--tier-setting"),
        (["--tier-setting", "a=1", "--tier-setting", "a=2"], "--tier-setting"),
        (["--tier-setting", "type=slab"], "--tier-setting"),
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


@pytest.mark.parametrize(
    "arguments", [["--turns", "1"], ["--conversations", "0"], ["--document-tokens", "0"]]
)
def test_a_number_out_of_range_is_refused(
    arguments: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), (["--model", "/no/such/model"], 2)])
def test_help_and_wrong_arguments_do_not_wait_for_torch(arguments: list[str], status: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", REFUSE_TORCH, "demo", *arguments],
        capture_output=True,
        timeout=120,
        check=False,
    )

    assert ended.returncode == status, ended.stderr.decode()
