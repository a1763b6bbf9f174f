"""What was reported as stored with ``fdatasync`` is there after a loss of power, and nothing is wrong without it."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.storm import power_loss
from tests.storm.power_loss import CASES, Survival, explain_no_mount

pytestmark = pytest.mark.slow

HANG_GUARD_S = 300.0


def test_every_reported_block_outlives_the_cut_and_without_it_none_is_wrong() -> None:
    reason = explain_no_mount()
    if reason is not None:
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, "-m", "tests.storm.power_loss", "--blocks", "16", "--cuts", "3"],
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| `")]
    assert len(rows) == len(CASES)
    for _, durability, _, num_cuts, num_reported, num_whole, num_wrong, num_refused in rows:
        assert (num_cuts, num_wrong, num_refused) == ("3", "0", "0")
        # A cut that loses nothing where nothing is synced would be none: this shows that the measurement can see it.
        assert (num_whole == num_reported) == (durability == "`fdatasync`")


def test_a_lost_block_is_a_failure_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose_one(case: power_loss.Case, folder: Path, **_: object) -> Survival:
        del folder
        return Survival(num_cuts=1, num_reported=2, num_whole=1 if case.durability == "fdatasync" else 0)

    monkeypatch.setattr(power_loss, "measure", lose_one)
    monkeypatch.setattr(power_loss, "_run", lambda *_: None)
    assert power_loss.main(["--is-apart"]) == 1
    assert "| 2 | 1 | 0 | 0 |" in capsys.readouterr().out


def test_where_nothing_can_be_mounted_it_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(power_loss, "explain_no_mount", lambda: "no loop device")
    assert power_loss.main([]) == 77
    assert capsys.readouterr().out == "skipped: no loop device\n"
