"""The compiled calls refuse what is no list of buffers, let others compute meanwhile, and keep nothing."""

import errno
import os
import stat
import sys
import threading
from pathlib import Path

import pytest

from kvtier.tiering.fs.system import REAL_CALLS, FileStatus, WholeFileCalls

HANG_GUARD_S = 60.0


@pytest.fixture
def calls() -> WholeFileCalls:
    """Return the compiled calls."""
    if REAL_CALLS.whole_files is None:
        pytest.skip(
            "nothing was compiled when kvtier was installed: apt-get install gcc python3-dev, make clean venv"
        )
    return REAL_CALLS.whole_files


def test_a_path_of_any_characters_is_written_and_described(calls: WholeFileCalls, tmp_path: Path) -> None:
    path = f"{tmp_path}/br\u00fccke \udcff"
    parts = [memoryview(b"x" * 4096), memoryview(b"yz")]
    assert calls.publish([(path, parts, None)], os.O_CLOEXEC, 0o600) == [0]
    assert calls.publish([(path, [memoryview(b"other")], None)], os.O_CLOEXEC, 0o600) == [errno.EEXIST]
    found = Path(path).stat()
    buffer = bytearray(4098)
    (fields,) = calls.read([(path, [memoryview(buffer)])], os.O_CLOEXEC, 0.0)
    assert isinstance(fields, tuple)
    status = FileStatus(*fields)
    assert buffer == b"x" * 4096 + b"yz"
    assert status[:3] == (4098, found.st_dev, found.st_ino)
    assert status.modified_s == pytest.approx(found.st_mtime, abs=1e-6)


def test_a_name_without_a_folder_is_in_the_current_one(
    calls: WholeFileCalls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert calls.publish([("a", [memoryview(b"x")], None)], os.O_CLOEXEC, 0o600) == [0]
    assert (tmp_path / "a").read_bytes() == b"x"


def test_an_empty_list_makes_an_empty_file(calls: WholeFileCalls, tmp_path: Path) -> None:
    assert calls.publish([(f"{tmp_path}/a", [], None)], os.O_CLOEXEC, 0o600) == [0]
    assert (tmp_path / "a").read_bytes() == b""
    (status,) = calls.read([(f"{tmp_path}/a", [])], os.O_CLOEXEC, 0.0)
    assert isinstance(status, tuple)
    assert status[0] == 0


def test_errors_are_numbers(calls: WholeFileCalls, tmp_path: Path) -> None:
    missing = str(tmp_path / "no" / "a")
    assert calls.read([(missing, [memoryview(bytearray(1))])], os.O_CLOEXEC, 0.0) == [errno.ENOENT]
    assert calls.publish([(missing, [memoryview(b"x")], None)], os.O_CLOEXEC, 0o600) == [errno.ENOENT]


def test_what_is_no_list_of_buffers_is_refused_and_held_no_longer(
    calls: WholeFileCalls, tmp_path: Path
) -> None:
    path = f"{tmp_path}/a"
    Path(path).write_bytes(b"x")
    first = bytearray(1)
    held_before = sys.getrefcount(first)
    for bad, error in (
        ([memoryview(first), memoryview(b"x")], BufferError),  # cannot be written to
        ([memoryview(first), memoryview(bytearray(4))[::2]], BufferError),
        ([memoryview(first), 1], TypeError),
        ([memoryview(first)] * 9, ValueError),
        (3, TypeError),
    ):
        with pytest.raises(error):
            # What is refused is no list of buffers, and what was taken of the file before it is let go.
            calls.read([(path, [memoryview(first)]), (path, bad)], os.O_CLOEXEC, 0.0)  # type: ignore[list-item]
    del bad
    first.append(0)  # a bytearray that somebody still views cannot grow
    assert sys.getrefcount(first) == held_before


@pytest.mark.parametrize("bad", [3, [3], [()], [("a",)], [(b"a", [])], [("a", [], 1)]])
def test_what_is_no_list_of_files_is_refused(calls: WholeFileCalls, bad: object) -> None:
    with pytest.raises(TypeError):
        calls.read(bad, os.O_CLOEXEC, 0.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        calls.publish(bad, os.O_CLOEXEC, 0o600)  # type: ignore[arg-type]


def test_a_zero_in_a_path_is_refused(calls: WholeFileCalls, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="null"):
        calls.read([(f"{tmp_path}/a\0b", [])], os.O_CLOEXEC, 0.0)
    with pytest.raises(ValueError, match="null"):
        calls.publish([(f"{tmp_path}/a", [], "b\0c")], os.O_CLOEXEC, 0o600)


def test_others_run_while_the_system_is_busy(calls: WholeFileCalls, tmp_path: Path) -> None:
    """Opening a pipe waits for its other end: with the interpreter's lock held nobody could open that."""
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    read: list[tuple[int, int, int, float] | int] = []
    reader = threading.Thread(
        target=lambda: read.extend(calls.read([(path, [memoryview(bytearray(1))])], os.O_CLOEXEC, 0.0))
    )
    reader.start()
    os.close(os.open(path, os.O_WRONLY))
    reader.join(HANG_GUARD_S)
    assert isinstance(read[0], tuple)
    assert read[0][0] == 0
    assert stat.S_ISFIFO(Path(path).stat().st_mode)
