"""What one run has passed another leaves out, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HOOKS = """
from tests.passed import leave_out_passed, pytest_addoption, pytest_configure

def pytest_collection_modifyitems(config, items):
    leave_out_passed(config, items)
"""

TESTS = """
import os
import pytest

HAS_SERVER = "HAS_SERVER" in os.environ

@pytest.fixture
def broken_at_its_end():
    yield
    assert HAS_SERVER

@pytest.mark.parametrize("size", [1, 2])
def test_that_passes(size): pass

def test_that_fails(): assert HAS_SERVER

@pytest.mark.skipif(not HAS_SERVER, reason="no server")
def test_that_is_skipped(): pass

def test_whose_end_fails(broken_at_its_end): pass
"""


def run(folder: Path, *arguments: str, **environment: str) -> list[str]:
    """Run the tests of a folder and return which of them ran, with their outcomes."""
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        | {"PYTHONPATH": str(ROOT)}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    kinds = ("PASSED", "FAILED", "ERROR")
    lines = (line.partition(" - ")[0] for line in ended.stdout.splitlines() if line.startswith(kinds))
    return sorted(line.replace("test_some.py::", "") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_a_second_run_has_what_did_not_pass_in_the_first(tmp_path: Path, workers: tuple[str, ...]) -> None:
    (tmp_path / "conftest.py").write_text(HOOKS)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    run(tmp_path, "--passed-to=passed", *workers)

    second = run(tmp_path, "--without=passed", *workers, HAS_SERVER="1")

    assert second == ["PASSED test_that_fails", "PASSED test_that_is_skipped", "PASSED test_whose_end_fails"]


@pytest.mark.slow
def test_names_are_added_and_unknown_ones_leave_nothing_out(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(HOOKS)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "passed").write_text("test_gone.py::test_long_ago\n")
    run(tmp_path, "--passed-to=passed", "-k", "size or passes")
    run(tmp_path, "--passed-to=passed", "-k", "fails", HAS_SERVER="1")

    third = run(tmp_path, "--without=passed")

    assert third == []
    assert len((tmp_path / "passed").read_text().splitlines()) == 5
