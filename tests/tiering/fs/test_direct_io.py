"""A file system is asked what it can do, and memory whether direct I/O accepts it."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from tests.tiering.fs.peer import refuse_unnamed_files

from kvtier.testing.tier_suite import make_rows
from kvtier.tiering.fs.direct_io import FileSupport, allocate_page, is_aligned, probe
from kvtier.tiering.fs.system import SystemCalls


def refuse_direct_io(path: str, flags: int, mode: int) -> int:
    """Open like a file system without ``O_DIRECT``."""
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "no direct I/O", path)
    return os.open(path, flags, mode)


def test_a_page_is_aligned_and_zeroed() -> None:
    page = allocate_page()
    assert is_aligned(memoryview(page).cast("b", (1, 4096)))
    assert bytes(page) == bytes(4096)


def test_rows_are_aligned_in_address_and_length() -> None:
    assert is_aligned(make_rows(4, 8192))
    assert not is_aligned(make_rows(4, 8192 + 512))
    memory = np.zeros(3 * 4096, np.int8)
    start = -memory.ctypes.data % 4096 + 64
    assert not is_aligned(memory[start : start + 4096].reshape(1, 4096).data)


def test_a_file_system_that_lacks_something_is_found_out(tmp_path: Path) -> None:
    here = probe(tmp_path, tmp_path / "scratch", 0o600, SystemCalls())
    without = probe(tmp_path, tmp_path / "scratch", 0o600, SystemCalls(open=refuse_direct_io))
    assert without == FileSupport(has_direct_io=False, has_unnamed_files=here.has_unnamed_files)
    unnamed = probe(tmp_path, tmp_path / "scratch", 0o600, SystemCalls(open=refuse_unnamed_files))
    assert unnamed == FileSupport(here.has_direct_io, has_unnamed_files=False)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        probe(tmp_path / "missing", tmp_path / "missing" / "scratch", 0o600, SystemCalls())
