"""A temporary directory goes with the demo, the user's own is kept, and a tier on disk gets its location."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path

import pytest

from kvtier.cli.demo.storage import TEMPORARY_PREFIX, free_ports, is_free, open_storage
from kvtier.errors import ConfigError

HOLD_A_FOLDER = """
import sys
from kvtier.cli.demo.storage import open_storage
with open_storage("fs", None) as settings:
    print(settings["root_dir"], flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the place of temporary directories, ours and that of processes started here."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def start_owner() -> subprocess.Popen[str]:
    """Start a process that holds a temporary folder, until its standard input is closed."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD_A_FOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def folder_of(owner: subprocess.Popen[str]) -> Path:
    """Wait until the process has its folder, and return it."""
    assert owner.stdout is not None
    return Path(owner.stdout.readline().strip())


def test_a_temporary_directory_is_removed_with_everything_in_it(parent: Path) -> None:
    with open_storage("fs", None) as settings:
        folder = Path(settings["root_dir"])
        (folder / "folder").mkdir()
        assert folder.parent == parent

    assert list(parent.iterdir()) == []


def test_a_temporary_directory_is_removed_when_the_block_raises(parent: Path) -> None:
    with pytest.raises(KeyboardInterrupt), open_storage("fs", None):
        raise KeyboardInterrupt

    assert list(parent.iterdir()) == []


def test_the_folder_of_a_killed_demo_is_removed_by_the_next_and_that_of_a_living_one_is_not(
    parent: Path,
) -> None:
    with start_owner() as living, start_owner() as killed:
        path_of_living, path_of_killed = folder_of(living), folder_of(killed)
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert path_of_killed.is_dir()

        with open_storage("fs", None) as settings:
            assert set(parent.iterdir()) == {path_of_living, Path(settings["root_dir"])}


def test_only_folders_of_demos_are_removed(parent: Path) -> None:
    (parent / "another").mkdir()
    (parent / f"{TEMPORARY_PREFIX}file").touch()
    (parent / f"{TEMPORARY_PREFIX}link").symlink_to(parent / "another")

    with open_storage("fs", None):
        assert len(list(parent.iterdir())) == 4


def test_the_users_directory_is_made_and_kept(tmp_path: Path) -> None:
    with open_storage("fs", tmp_path / "blocks") as settings:
        assert settings == {"root_dir": str(tmp_path / "blocks"), "capacity_bytes": "1GiB"}
        (tmp_path / "blocks" / "block").touch()

    assert (tmp_path / "blocks" / "block").is_file()
    assert (tmp_path / "blocks").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["file", "missing/blocks"])
def test_a_directory_that_cannot_be_written_is_one_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="--dir"), open_storage("fs", tmp_path / name):
        pass


def test_a_port_is_chosen_where_nothing_listens_on_it_nor_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = int(taken.getsockname()[1])
        offered = chain([port, port - 50], range(port - 1, 10_000, -1))
        monkeypatch.setattr(secrets, "randbelow", lambda _: next(offered) - 10_000)

        (chosen,) = free_ports(1, 50)

        assert not is_free(port)
        assert chosen not in {port, port - 50}
