"""A directory is made ready, or refused in one line that says what to do."""

import stat
from pathlib import Path

import pytest
from tests.tiering.fs.peer import refuse_unnamed_files

from kvtier.errors import ConfigError
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import make_rows
from kvtier.tiering.fs.directory import choose_support, open_directory
from kvtier.tiering.fs.file_support import FileSupport
from kvtier.tiering.fs.settings import FSSettings
from kvtier.tiering.fs.system import SystemCalls


def settings_of(root: Path, *, direct_io: bool | None = None, file_mode: int = 0o600) -> FSSettings:
    """Return settings for a directory."""
    return FSSettings(
        root_dir=root,
        capacity_bytes=2**20,
        shared=True,
        negative_ttl_s=1.0,
        file_mode=file_mode,
        direct_io=direct_io,
        num_threads=1,
    )


def open_it(settings: FSSettings, calls: SystemCalls | None = None) -> None:
    """Make a directory ready."""
    open_directory(settings, make_rows(), calls or SystemCalls(), ManualClock(), ManualClock())


def test_a_missing_directory_is_made_with_its_parents_and_is_private(tmp_path: Path) -> None:
    open_it(settings_of(tmp_path / "a" / "b"))
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b")] == [0o700, 0o700]
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["tmp"]


@pytest.mark.parametrize("name", ["file", "file/below", "/proc/kvtier"])
def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        open_it(settings_of(tmp_path / name))
    assert caught.value.setting == "root_dir"


def test_direct_io_is_taken_where_file_system_and_rows_allow_it(tmp_path: Path) -> None:
    both = FileSupport(has_direct_io=True, has_unnamed_files=True)
    neither = FileSupport(has_direct_io=False, has_unnamed_files=True)
    auto, off = settings_of(tmp_path), settings_of(tmp_path, direct_io=False)
    assert choose_support(auto, both, are_rows_aligned=True).has_direct_io
    assert not choose_support(auto, both, are_rows_aligned=False).has_direct_io
    assert not choose_support(auto, neither, are_rows_aligned=True).has_direct_io
    assert not choose_support(off, both, are_rows_aligned=True).has_direct_io


@pytest.mark.parametrize(
    ("has_direct_io", "are_rows_aligned", "reason"),
    [(False, True, "refuses it"), (True, False, "multiples of 4096")],
)
def test_insisting_on_direct_io_that_cannot_be_had_is_refused(
    tmp_path: Path, has_direct_io: bool, are_rows_aligned: bool, reason: str
) -> None:
    found = FileSupport(has_direct_io, has_unnamed_files=True)
    with pytest.raises(ConfigError, match=reason):
        choose_support(settings_of(tmp_path, direct_io=True), found, are_rows_aligned=are_rows_aligned)


def test_what_is_missed_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    open_it(settings_of(tmp_path), SystemCalls(open=refuse_unnamed_files))
    assert caplog.text.count("no unnamed files") == 1
