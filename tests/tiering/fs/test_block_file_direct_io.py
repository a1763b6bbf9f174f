"""A file system is asked what it can do."""

import errno
import os
from pathlib import Path

import pytest
from tests.tiering.fs.peer import refuse_unnamed_files

from kvtier.tiering.fs.file_support import FileSupport, detect_file_support
from kvtier.tiering.fs.system import SystemCalls


def refuse_direct_io(path: str, flags: int, mode: int) -> int:
    """Open like a file system without ``O_DIRECT``."""
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "no direct I/O", path)
    return os.open(path, flags, mode)


def test_a_file_system_that_lacks_something_is_found_out(tmp_path: Path) -> None:
    here = detect_file_support(tmp_path, tmp_path / "scratch", 0o600, SystemCalls())
    without = detect_file_support(tmp_path, tmp_path / "scratch", 0o600, SystemCalls(open=refuse_direct_io))
    assert without == FileSupport(has_direct_io=False, has_unnamed_files=here.has_unnamed_files)
    unnamed = detect_file_support(
        tmp_path, tmp_path / "scratch", 0o600, SystemCalls(open=refuse_unnamed_files)
    )
    assert unnamed == FileSupport(here.has_direct_io, has_unnamed_files=False)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        detect_file_support(tmp_path / "missing", tmp_path / "missing" / "scratch", 0o600, SystemCalls())
