"""Rounds of tests next to busy loops: what is said of them, and that no loop outlives them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.test_loaded import GUARD_S, main

PROJECT = Path(__file__).parents[2]
GUARD_OF_CHILD_S = 120.0


LOADED = [sys.executable, "-m", "scripts.test_loaded"]


def run_until_all_have_ended(command: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run a command; the loops that it starts have its standard output, which is closed when they have ended too."""
    return subprocess.run(
        command, cwd=PROJECT, capture_output=True, text=True, timeout=GUARD_OF_CHILD_S, check=False
    )


def say(*lines: str, status: int) -> list[str]:
    """Return a command that prints lines, as pytest does, and its arguments, and ends with a status."""
    code = f"import sys; print(*{lines!r}, *sys.argv[1:], sep=chr(10)); sys.exit({status})"
    return [sys.executable, "-c", code]


def test_the_tests_that_failed_are_named_for_each_round_and_its_status_is_returned(
    capfd: pytest.CaptureFixture[str],
) -> None:
    command = say("FAILED tests/test_a.py::test_b[1] - boom", "ERROR tests/test_c.py", "1 failed", status=1)

    assert main(["--rounds", "2", "--loops", "1", "--", *command]) == 1

    said = re.sub(r"after \d+ s", "after N s", capfd.readouterr().out)
    one = "round {}: FAILED with status 1 after N s\n  tests/test_a.py::test_b[1]\n  tests/test_c.py\n"
    assert said.endswith(one.format(1) + one.format(2))


def test_rounds_that_all_pass_are_a_success_and_their_guards_against_hangs_are_longer(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["--rounds", "2", "--loops", "1", "--", *say("3 passed", status=0)]) == 0

    said = capfd.readouterr().out
    assert said.count(f"timeout={GUARD_S}\n") == 2
    assert said.count("round 2: passed") == 2


def test_an_interrupted_round_is_the_last(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--rounds", "3", "--loops", "1", "--", *say("no tests ran", status=2)]) == 2

    assert "round 2" not in capfd.readouterr().out


def test_an_interrupt_ends_the_tests_and_the_loops() -> None:
    # The tests interrupt the process that runs them, and would go on for ever.
    code = "import os, signal\nos.kill(os.getppid(), signal.SIGINT)\nwhile True: signal.pause()"
    command = [*LOADED, "--loops", "2", "--", sys.executable, "-c", code]

    done = run_until_all_have_ended(command)
    assert done.returncode == 2
    assert "interrupted" in done.stdout


def test_the_loops_end_when_the_process_that_started_them_dies() -> None:
    code = "import os, scripts.test_loaded as it\nwith it.busy_loops(2): os._exit(3)"

    assert run_until_all_have_ended([sys.executable, "-c", code]).returncode == 3
