"""A lock that another process keeps costs a second once, and one that is no file costs no wait."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiering.fs.packed import (
    CAPACITY_BYTES,
    NAMESPACE,
    Clock,
    create,
    make_directory,
    no_file_stays_open,
)

from kvtier.tiering.fs import directory_lock
from kvtier.tiering.fs.directory_lock import BACK_OFF_S
from kvtier.tiering.fs.system_calls import try_lock

NAME = "0123456789abcdef.pack"
WAIT_S = 1.0


@pytest.fixture(autouse=True)
def _wait_as_engines_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_lock, "LOCK_WAIT_S", WAIT_S)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Where a test's directory is; no file of it stays open."""
    with no_file_stays_open(tmp_path):
        yield tmp_path / "root"


def test_a_lock_that_another_process_keeps_is_waited_for_a_second_and_then_not_at_once(root: Path) -> None:
    clock = Clock()
    other, directory = make_directory(root), make_directory(root, clock=clock, pause=clock.pause)
    with other.locked() as is_held:
        assert is_held
        begin_s = clock.now_s
        assert directory.create(NAMESPACE, CAPACITY_BYTES, may_remove=True) is None
        assert WAIT_S <= clock.now_s - begin_s < WAIT_S + 0.1
        for _ in range(10):
            begin_s = clock.now_s
            assert directory.create(NAMESPACE, CAPACITY_BYTES, may_remove=True) is None
            assert directory.adopt(NAMESPACE, NAME) is None
            assert clock.now_s == begin_s
            clock.now_s += BACK_OFF_S / 20
    create(directory).close()
    with other.locked():
        clock.now_s += BACK_OFF_S
        num_pauses = clock.num_pauses
        assert directory.create(NAMESPACE, CAPACITY_BYTES, may_remove=True) is None
        assert clock.num_pauses > num_pauses + 100
        assert all(one.is_owned for one in directory.list_packs())


def test_a_lock_that_was_removed_meanwhile_is_not_taken_for_the_directorys(root: Path) -> None:
    clock = Clock()
    first, third = make_directory(root), make_directory(root, clock=clock, pause=clock.pause)
    holder = first.locked()
    assert holder.__enter__()

    def pause(seconds: float) -> None:
        (root / ".lock").unlink()
        holder.__exit__(None, None, None)

    second = make_directory(root, clock=clock, pause=pause)
    with second.locked() as is_second_held, third.locked() as is_third_held:
        assert is_second_held
        assert not is_third_held


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_lock_that_is_no_file_is_an_error_and_is_not_waited_for(root: Path, kind: str) -> None:
    directory = make_directory(root)
    if kind == "fifo":
        os.mkfifo(root / ".lock")
    else:
        (root / ".lock").symlink_to(root / "elsewhere")
    with pytest.raises(OSError, match=r"regular|symbolic"):
        directory.create(NAMESPACE, CAPACITY_BYTES, may_remove=True)
    assert directory.adopt(NAMESPACE, NAME) is None
    assert not (root / "elsewhere").exists()


def test_a_directory_that_was_removed_is_an_error_until_it_is_made_again(root: Path) -> None:
    directory = make_directory(root)
    root.rename(root.with_name("away"))
    with pytest.raises(FileNotFoundError):
        directory.create(NAMESPACE, CAPACITY_BYTES, may_remove=True)
    directory.make_ready()
    create(directory).close()


def test_a_lock_is_not_taken_twice(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as first, path.open("wb") as second:
        assert try_lock(first.fileno())
        assert not try_lock(second.fileno())
