"""A test after a failed one passes, whatever the failed one has left open."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

TESTS = """
import gc
import socket

def test_that_fails_with_a_socket_open():
    frame_keeps = socket.socket()
    assert frame_keeps is None

def test_that_fails_with_a_socket_in_a_circle():
    circle = [socket.socket()]
    circle.append(circle)
    assert False

def test_that_only_collects():
    gc.collect()

def test_that_leaves_a_socket_open_itself():
    socket.socket()
"""


def test_a_failure_s_leftovers_fail_no_later_test_and_a_test_s_own_still_fail_it(tmp_path: Path) -> None:
    hooks = "from tests.leftovers import pytest_runtest_makereport, pytest_runtest_protocol\n"
    (tmp_path / "conftest.py").write_text(hooks)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")

    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )

    outcomes = {
        name.rpartition("::")[2].partition(" ")[0]: outcome
        for outcome, _, name in (line.partition(" ") for line in ended.stdout.splitlines())
        if outcome in ("PASSED", "FAILED")
    }
    assert outcomes == {
        "test_that_fails_with_a_socket_open": "FAILED",
        "test_that_fails_with_a_socket_in_a_circle": "FAILED",
        "test_that_only_collects": "PASSED",
        "test_that_leaves_a_socket_open_itself": "FAILED",
    }, ended.stdout
