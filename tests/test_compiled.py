"""A compiled module that cannot be loaded is told once, with file, reason and remedy; one that is not there is not."""

import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import kvtier
from kvtier.cpu.row_copy import REMEDY

HANG_GUARD_S = 120.0

USE_TWICE = """
import importlib, sys
for _ in range(2):
    user = importlib.import_module(sys.argv[1])
print(user.__file__, user.COMPILED_CALLS is None)
"""

EVERY_MODULE = pytest.mark.parametrize(
    ("place", "user"),
    [
        ("cpu/_page_copy", "kvtier.cpu.row_copy"),
    ],
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Copy the package, without what was compiled of it."""
    copy = tmp_path / "kvtier"
    shutil.copytree(Path(kvtier.__file__).parent, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return copy


def use(package: Path, user: str) -> str:
    """Import a module of the copy twice, see that it does without a compiled one, and return what it logged."""
    command = [sys.executable, "-c", USE_TWICE, user]
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=HANG_GUARD_S, check=True
    )
    path, does_without = done.stdout.split()
    assert Path(path).is_relative_to(package)
    assert does_without == "True"
    return done.stderr


@EVERY_MODULE
def test_a_damaged_module_is_told_once_with_file_reason_and_remedy(
    package: Path, place: str, user: str
) -> None:
    module = package / f"{place}{EXTENSION_SUFFIXES[-1]}"
    module.write_bytes(b"no library at all" * 100)
    (line,) = use(package, user).splitlines()
    assert line.startswith(f"{module} cannot be loaded (")
    assert "ELF" in line
    assert line.endswith(REMEDY)


@EVERY_MODULE
def test_a_library_without_the_module_is_told(package: Path, place: str, user: str) -> None:
    """As if the file of another module had taken its place."""
    other = importlib.util.find_spec("xxhash._xxhash")
    assert other is not None
    assert other.origin is not None
    shutil.copy(other.origin, package / f"{place}{EXTENSION_SUFFIXES[-1]}")
    (line,) = use(package, user).splitlines()
    assert "does not define" in line


@EVERY_MODULE
def test_a_module_that_was_never_compiled_is_not_told(package: Path, place: str, user: str) -> None:
    assert not list(package.glob(f"{place}*.so"))
    assert use(package, user) == ""
