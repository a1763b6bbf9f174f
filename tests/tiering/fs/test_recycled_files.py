"""Recycled files are blocks' files that were evicted: kept under temporary names, given to one taker each, removed."""

import os
import threading
from pathlib import Path

import pytest

from kvtier.testing.clock import ManualClock
from kvtier.tiering.fs.block_file import BlockFiles
from kvtier.tiering.fs.file_support import FileSupport
from kvtier.tiering.fs.recycled_files import RecycledFile, RecycledFiles
from kvtier.tiering.fs.shared_usage import SharedUsage, unpack_record
from kvtier.tiering.fs.system import SystemCalls, current_owner, parse_owner

NUM_BYTES = 5
FILE_MODE = 0o600
NAMESPACE, ANOTHER = "namespace-a", "namespace-b"


@pytest.fixture
def recycled(tmp_path: Path) -> RecycledFiles:
    """Recycled files of five bytes in a directory of the test."""
    (tmp_path / "tmp").mkdir()
    support = FileSupport(has_direct_io=False, has_unnamed_files=True)
    files = BlockFiles(support, tmp_path / "tmp", current_owner(), FILE_MODE, SystemCalls(), ManualClock(0.0))
    return RecycledFiles(files, FILE_MODE, NUM_BYTES)


def make_block(folder: Path, name: str, num_bytes: int = NUM_BYTES, mode: int = FILE_MODE) -> Path:
    """Write a file as a block's."""
    path = folder / name
    path.write_bytes(name[:1].encode() * num_bytes)
    path.chmod(mode)
    return path


def test_a_folder_is_no_recycled_file(recycled: RecycledFiles, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert not recycled.can_keep((tmp_path / "folder").lstat())


def names_in(folder: Path) -> list[str]:
    """Return the names of the files there."""
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def test_an_evicted_file_has_a_temporary_name_of_this_process_and_counts(
    recycled: RecycledFiles, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        assert recycled.keep(str(make_block(tmp_path, name)), NAMESPACE)
    assert names_in(tmp_path) == []
    kept = names_in(tmp_path / "tmp")
    assert {parse_owner(name) for name in kept} == {current_owner()}
    assert sorted((tmp_path / "tmp" / name).read_bytes() for name in kept) == [b"aaaaa", b"bbbbb"]
    assert len(recycled.waiting) == 2


def test_what_is_gone_is_not_kept(recycled: RecycledFiles, tmp_path: Path) -> None:
    assert not recycled.keep(f"{tmp_path}/gone", NAMESPACE)
    assert len(recycled.waiting) == 0


def test_without_the_folder_for_temporary_names_the_file_stays(
    recycled: RecycledFiles, tmp_path: Path
) -> None:
    (tmp_path / "tmp").rmdir()
    path = make_block(tmp_path, "a")
    assert not recycled.keep(str(path), NAMESPACE)
    assert path.read_bytes() == b"aaaaa"


@pytest.mark.parametrize(
    ("num_bytes", "mode", "num_links", "expected"),
    [
        (NUM_BYTES, FILE_MODE, 1, True),
        (NUM_BYTES - 1, FILE_MODE, 1, False),
        (NUM_BYTES + 1, FILE_MODE, 1, False),
        (NUM_BYTES, 0o660, 1, False),
        (NUM_BYTES, FILE_MODE, 2, False),
    ],
)
def test_a_file_that_others_may_want_as_it_is_is_not_written_over(
    recycled: RecycledFiles, tmp_path: Path, num_bytes: int, mode: int, num_links: int, expected: bool
) -> None:
    path = make_block(tmp_path, "a", num_bytes, mode)
    for number in range(1, num_links):
        os.link(path, tmp_path / f"backup{number}")
    assert recycled.can_keep(path.lstat()) is expected


def test_a_file_of_another_user_is_not_written_over(
    recycled: RecycledFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = make_block(tmp_path, "a").lstat()
    monkeypatch.setattr(os, "geteuid", lambda: status.st_uid + 1)
    assert not recycled.can_keep(status)


def test_takers_get_what_there_is_and_may_give_it_back(recycled: RecycledFiles, tmp_path: Path) -> None:
    for name in "abc":
        recycled.keep(str(make_block(tmp_path, name)), NAMESPACE)
    assert recycled.take(0, NAMESPACE) == []
    taken = recycled.take(2, NAMESPACE)
    assert (len(taken), len(recycled.waiting)) == (2, 1)
    assert len(recycled.take(5, NAMESPACE)) == 1
    assert recycled.take(1, NAMESPACE) == []
    recycled.give_back(taken)
    assert sorted(recycled.take(9, NAMESPACE)) == sorted(taken)


def test_each_file_has_one_taker(recycled: RecycledFiles, tmp_path: Path) -> None:
    for number in range(64):
        recycled.keep(str(make_block(tmp_path, f"a{number}")), NAMESPACE)
    start = threading.Barrier(8)
    taken: list[RecycledFile] = []

    def take() -> None:
        start.wait()
        taken.extend(recycled_file for _ in range(64) for recycled_file in recycled.take(1, NAMESPACE))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(set(taken)), len(recycled.waiting)) == (64, 64, 0)


def test_those_beyond_a_number_are_removed_and_what_that_gives_is_said(
    recycled: RecycledFiles, tmp_path: Path
) -> None:
    for name in "abc":
        recycled.keep(str(make_block(tmp_path, name)), NAMESPACE)
    assert recycled.trim(5) == 0
    assert recycled.trim(1) == 2 * NUM_BYTES
    assert (len(names_in(tmp_path / "tmp")), len(recycled.waiting)) == (1, 1)
    assert recycled.trim(0) == NUM_BYTES
    assert names_in(tmp_path / "tmp") == []


def test_a_file_that_cannot_be_removed_gives_nothing(
    recycled: RecycledFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recycled.keep(str(make_block(tmp_path, "a")), NAMESPACE)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", refuse)
    assert recycled.trim(0) == 0


def test_those_that_somebody_else_removed_give_nothing(recycled: RecycledFiles, tmp_path: Path) -> None:
    for name in "ab":
        recycled.keep(str(make_block(tmp_path, name)), NAMESPACE)
    next((tmp_path / "tmp").iterdir()).unlink()
    assert recycled.trim(0) == NUM_BYTES
    assert len(recycled.waiting) == 0


def test_the_oldest_is_used_and_removed_first(recycled: RecycledFiles, tmp_path: Path) -> None:
    for name in "abcd":
        recycled.keep(str(make_block(tmp_path, name)), NAMESPACE)
    recycled.trim(3)
    (taken,) = recycled.take(1, NAMESPACE)
    assert Path(taken.path).read_bytes() == b"bbbbb"


def test_blocks_of_another_namespace_get_none_and_it_is_removed(
    recycled: RecycledFiles, tmp_path: Path
) -> None:
    for name, namespace_name in (("a", ANOTHER), ("b", NAMESPACE), ("c", ANOTHER)):
        recycled.keep(str(make_block(tmp_path, name)), namespace_name)
    (taken,) = recycled.take(3, NAMESPACE)
    assert Path(taken.path).read_bytes() == b"bbbbb"
    assert names_in(tmp_path / "tmp") == [Path(taken.path).name]
    assert len(recycled.waiting) == 0


def test_what_is_of_no_use_is_removed_if_it_is_there(recycled: RecycledFiles, tmp_path: Path) -> None:
    recycled.keep(str(make_block(tmp_path, "a")), NAMESPACE)
    (taken,) = recycled.take(1, NAMESPACE)
    recycled.discard(taken)
    recycled.discard(taken)
    assert names_in(tmp_path / "tmp") == []


def test_at_the_end_every_file_is_removed_and_counted_out(recycled: RecycledFiles, tmp_path: Path) -> None:
    usage = SharedUsage(tmp_path / ".usage", current_owner(), 100 * NUM_BYTES, FILE_MODE, ManualClock(0.0))
    begun = usage.begin_recount()
    assert begun is not None
    usage.end_recount(7 * NUM_BYTES, begun)
    for name in "abc":
        recycled.keep(str(make_block(tmp_path, name)), NAMESPACE)

    recycled.remove_all(usage)

    record = unpack_record((tmp_path / ".usage").read_bytes())
    assert (record.used_bytes, record.in_flight_bytes) == (4 * NUM_BYTES, 0)
    assert (names_in(tmp_path / "tmp"), len(recycled.waiting)) == ([], 0)
