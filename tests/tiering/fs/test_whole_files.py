"""The compiled calls refuse what is no list of buffers, let others compute meanwhile, and keep nothing."""

import errno
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from kvtier.tiering.fs.system import REAL_CALLS, FileStatus, WholeFileCalls

HANG_GUARD_S = 60.0
NUM_BYTES = 2**24


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


def test_others_run_while_the_system_is_busy(
    calls: WholeFileCalls, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """No thread is made to give the interpreter's lock away, so another one runs only while a call has let go of it."""
    path, has_ended, num_turns = f"{tmp_path}/a", threading.Event(), 0
    Path(path).write_bytes(bytes(NUM_BYTES))

    def take_turns() -> None:
        nonlocal num_turns
        while not has_ended.is_set():
            os.stat("/")  # noqa: PTH116 - it lets go of the lock
            num_turns += 1

    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    other = threading.Thread(target=take_turns)
    other.start()
    buffer = memoryview(bytearray(NUM_BYTES))
    end_s = time.monotonic() + HANG_GUARD_S
    sys.setswitchinterval(HANG_GUARD_S)
    before = num_turns
    while num_turns == before and time.monotonic() < end_s:
        before = num_turns
        calls.read([(path, [buffer])], os.O_CLOEXEC, 0.0)
    has_run = num_turns > before
    has_ended.set()
    other.join(HANG_GUARD_S)
    assert has_run


def test_what_is_no_regular_file_is_refused_and_keeps_no_thread(
    calls: WholeFileCalls, tmp_path: Path
) -> None:
    path = f"{tmp_path}/pipe"
    os.mkfifo(path)
    buffer = memoryview(bytearray(1))
    assert calls.read([(path, [buffer])], os.O_CLOEXEC, 0.0) == [errno.EINVAL]
    assert calls.read([("/dev/zero", [buffer])], os.O_CLOEXEC, 0.0) == [errno.EINVAL]
    assert calls.read([(str(tmp_path), [buffer])], os.O_CLOEXEC, 0.0) == [errno.EINVAL]
    written = calls.publish([(f"{tmp_path}/a", [memoryview(b"x")], path)], os.O_CLOEXEC, 0o600)
    assert written == [errno.EINVAL]
    assert [entry.name for entry in tmp_path.iterdir()] == ["pipe"]
