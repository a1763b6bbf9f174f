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
            "nothing was compiled when kvtier was installed: a C compiler and Python's headers are missing"
        )
    return REAL_CALLS.whole_files


def test_a_path_of_any_characters_is_written_and_described(calls: WholeFileCalls, tmp_path: Path) -> None:
    path = f"{tmp_path}/br\u00fccke \udcff"
    assert calls.publish(
        str(tmp_path), path, os.O_CLOEXEC, 0o600, [memoryview(b"x" * 4096), memoryview(b"yz")]
    )
    assert not calls.publish(str(tmp_path), path, os.O_CLOEXEC, 0o600, [memoryview(b"other")])
    found = Path(path).stat()
    buffer = bytearray(4098)
    status = FileStatus(*calls.read(path, os.O_CLOEXEC, [memoryview(buffer)]))
    assert buffer == b"x" * 4096 + b"yz"
    assert status[:3] == (4098, found.st_dev, found.st_ino)
    assert status.modified_s == pytest.approx(found.st_mtime, abs=1e-6)


def test_an_empty_list_makes_an_empty_file(calls: WholeFileCalls, tmp_path: Path) -> None:
    assert calls.publish(str(tmp_path), f"{tmp_path}/a", os.O_CLOEXEC, 0o600, [])
    assert (tmp_path / "a").read_bytes() == b""
    assert calls.read(f"{tmp_path}/a", os.O_CLOEXEC, [])[0] == 0


def test_errors_carry_number_and_path(calls: WholeFileCalls, tmp_path: Path) -> None:
    missing = str(tmp_path / "no" / "a")
    with pytest.raises(FileNotFoundError) as caught:
        calls.read(missing, os.O_CLOEXEC, [memoryview(bytearray(1))])
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, missing)
    with pytest.raises(FileNotFoundError) as caught:
        calls.publish(str(tmp_path / "no"), missing, os.O_CLOEXEC, 0o600, [memoryview(b"x")])
    assert caught.value.filename == missing


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
            calls.read(path, os.O_CLOEXEC, bad)  # type: ignore[arg-type]  # what is refused is no list of buffers
    del bad
    first.append(0)  # a bytearray that somebody still views cannot grow
    assert sys.getrefcount(first) == held_before


def test_a_zero_in_a_path_is_refused(calls: WholeFileCalls, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="null"):
        calls.read(f"{tmp_path}/a\0b", os.O_CLOEXEC, [])
    with pytest.raises(ValueError, match="null"):
        calls.publish(f"{tmp_path}\0", f"{tmp_path}/a", os.O_CLOEXEC, 0o600, [])


def test_others_run_while_the_system_is_busy(calls: WholeFileCalls, tmp_path: Path) -> None:
    """Opening a pipe waits for its other end: with the interpreter's lock held nobody could open that."""
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    read = []
    reader = threading.Thread(
        target=lambda: read.append(calls.read(path, os.O_CLOEXEC, [memoryview(bytearray(1))]))
    )
    reader.start()
    os.close(os.open(path, os.O_WRONLY))
    reader.join(HANG_GUARD_S)
    assert read[0][0] == 0
    assert stat.S_ISFIFO(Path(path).stat().st_mode)
