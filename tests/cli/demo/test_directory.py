"""A temporary directory goes with its owner, however that dies; the user's own is kept."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvtier.cli.demo.directory import TEMPORARY_PREFIX, open_directory, remove_abandoned
from kvtier.errors import ConfigError

HOLD_A_DIRECTORY = """
import sys
from kvtier.cli.demo.directory import open_directory
with open_directory(None) as directory:
    (directory.path / "block").write_text("bytes")
    print(directory.path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the place of temporary directories, ours and that of processes started here."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def start_owner() -> tuple[subprocess.Popen[str], Path]:
    """Start a process that holds a temporary directory; return both."""
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD_A_DIRECTORY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def test_a_temporary_directory_is_removed_with_everything_in_it(parent: Path) -> None:
    with open_directory(None) as directory:
        (directory.path / "folder").mkdir()
        assert directory.path.parent == parent

    assert list(parent.iterdir()) == []


def test_a_temporary_directory_is_removed_when_the_block_raises(parent: Path) -> None:
    with pytest.raises(KeyboardInterrupt), open_directory(None):
        raise KeyboardInterrupt

    assert list(parent.iterdir()) == []


def test_the_directory_of_a_killed_demo_is_removed_by_the_next(parent: Path) -> None:
    owner, path = start_owner()
    with owner:
        os.kill(owner.pid, signal.SIGKILL)
    assert path.is_dir()

    with open_directory(None) as directory:
        assert list(parent.iterdir()) == [directory.path]


def test_the_directory_of_a_living_demo_is_left_alone(parent: Path) -> None:
    owner, path = start_owner()
    with owner:
        remove_abandoned(parent)
        assert (path / "block").is_file()


def test_only_directories_of_the_demo_are_removed(parent: Path) -> None:
    (parent / "somebody-else").mkdir()
    (parent / f"{TEMPORARY_PREFIX}file").touch()
    (parent / f"{TEMPORARY_PREFIX}link").symlink_to(parent / "somebody-else")

    remove_abandoned(parent)

    assert len(list(parent.iterdir())) == 3


def test_the_users_directory_is_made_and_kept(tmp_path: Path) -> None:
    with open_directory(tmp_path / "blocks") as directory:
        (directory.path / "block").touch()

    assert (tmp_path / "blocks" / "block").is_file()
    assert (tmp_path / "blocks").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["file", "missing/blocks"])
def test_a_directory_that_cannot_be_written_is_one_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="--dir"), open_directory(tmp_path / name):
        pass
