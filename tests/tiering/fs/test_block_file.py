"""A file appears whole or not at all, with the permissions asked for, and is read whole or judged too short.

Whether one compiled call does it, or each call of the system is made by itself.
"""

import errno
import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.tiering.fs.faulty_calls import Way, publish_one, read_one

from kvtier.testing.clock import ManualClock
from kvtier.tiering.fs.block_file import TOUCH_INTERVAL_S, BlockFiles, plan_batch_files
from kvtier.tiering.fs.file_support import FileSupport
from kvtier.tiering.fs.system import (
    REAL_CALLS,
    Buffers,
    FileStatus,
    SystemCalls,
    WholeFileCalls,
    current_owner,
    parse_owner,
    status_of,
)

MakeFiles = Callable[..., BlockFiles]
NOW_S = 1_700_000_000.0


EVERY_WAY = pytest.mark.parametrize("way", Way, ids=lambda way: way.value)
EVERY_WAY_OVER = pytest.mark.parametrize(
    "way", [way for way in Way if way.is_over], ids=lambda way: way.value
)
EVERY_READ = pytest.mark.parametrize("way", [Way.COMPILED, Way.STEPWISE], ids=lambda way: way.value)


def compiled() -> WholeFileCalls:
    """Return the compiled calls."""
    if REAL_CALLS.whole_files is None:
        pytest.skip(
            "nothing was compiled when kvtier was installed: apt-get install gcc python3-dev, make clean venv"
        )
    return REAL_CALLS.whole_files


@pytest.fixture
def make_files(tmp_path: Path) -> MakeFiles:
    """Build the files of the test's directory."""
    (tmp_path / "tmp").mkdir()

    def make(way: Way = Way.STEPWISE, *, mode: int = 0o600, calls: SystemCalls | None = None) -> BlockFiles:
        support = FileSupport(has_direct_io=False, has_unnamed_files=way is not Way.NAMED)
        calls = calls or SystemCalls(whole_files=compiled() if way.is_compiled else None)
        return BlockFiles(support, tmp_path / "tmp", current_owner(), mode, calls, ManualClock(NOW_S))

    return make


def publish(files: BlockFiles, way: Way, path: Path, buffers: list[memoryview], mode: int = 0o600) -> bool:
    """Publish a file, over one that was another block's where the way is to do so."""
    if not way.is_over:
        return publish_one(files, str(path), buffers)
    recycled_file = make_recycled(files, path.with_name("evicted"), sum(map(len, buffers)), mode)
    return publish_one(files, str(path), buffers, recycled_file)


def make_recycled(files: BlockFiles, evicted: Path, num_bytes: int, mode: int = 0o600) -> str:
    """Return a file of that length which was unpublished."""
    evicted.write_bytes(b"!" * num_bytes)
    evicted.chmod(mode)
    return files.unpublish(str(evicted))


def parts(*texts: bytes) -> list[memoryview]:
    """Return writable buffers with these bytes."""
    return [memoryview(bytearray(text)) for text in texts]


def left_over(folder: Path) -> list[Path]:
    """Return every file below ``folder``."""
    return [path for path in folder.rglob("*") if path.is_file()]


def num_left_over(root: Path) -> tuple[int, int]:
    """Return how many files are in a directory, and how many in its folder for temporary ones."""
    num_temporary = len(left_over(root / "tmp"))
    return len(left_over(root)) - num_temporary, num_temporary


def in_small_steps(call: Callable[[int, Buffers, int], int]) -> Callable[[int, Buffers, int], int]:
    """Return ``call``, which moves three bytes at a time."""
    return lambda fd, buffers, offset: call(fd, [buffers[0][:3]], offset)


@EVERY_WAY
def test_what_is_published_is_read_back(make_files: MakeFiles, tmp_path: Path, way: Way) -> None:
    files = make_files(way)
    assert publish(files, way, tmp_path / "a", parts(b"head", b"payload"))
    back = parts(b"....", b".......")
    assert read_one(files, f"{tmp_path}/a", back).num_bytes == 11
    assert [bytes(part) for part in back] == [b"head", b"payload"]
    assert left_over(tmp_path) == [tmp_path / "a"]


@EVERY_WAY
def test_a_file_that_fails_costs_no_other_of_its_batch(
    make_files: MakeFiles, tmp_path: Path, way: Way
) -> None:
    files = make_files(way)
    (tmp_path / "taken").write_bytes(b"before")
    names = [*map(str, range(40)), "taken", "no/folder", *map(str, range(40, 50))]
    recycled = [make_recycled(files, tmp_path / "evicted", 4) if way.is_over else None for _ in names]
    texts = [f"{number:04}".encode() for number in range(len(names))]
    answers = files.publish(
        [
            (f"{tmp_path}/{name}", parts(text), recycled_file)
            for name, text, recycled_file in zip(names, texts, recycled, strict=True)
        ]
    )
    assert [answer for answer in answers if answer is not True] == [False, answers[41]]
    assert isinstance(answers[41], FileNotFoundError)
    assert answers[41].filename == f"{tmp_path}/no/folder"
    backs = [parts(b"....") for _ in names]
    found = files.read([(f"{tmp_path}/{name}", back) for name, back in zip(names, backs, strict=True)])
    assert isinstance(found.pop(41), FileNotFoundError)
    assert [status.num_bytes for status in found if isinstance(status, FileStatus)] == [4] * 40 + [6] + [
        4
    ] * 10
    texts[40:42] = b"befo", b"...."
    assert [bytes(*back) for back in backs] == texts
    assert num_left_over(tmp_path) == (51, 2 * way.is_over)


def test_nothing_is_done_for_no_file(make_files: MakeFiles) -> None:
    for way in (Way.COMPILED, Way.STEPWISE):
        assert make_files(way).publish([]) == []
        assert make_files(way).read([]) == []


@pytest.mark.parametrize(
    ("block_bytes", "num_files"),
    [(1, 32), (4096, 32), (2**15, 32), (2**16, 16), (600_000, 1), (2**20, 1), (2**26, 1)],
)
def test_a_call_moves_a_megabyte_or_a_block(block_bytes: int, num_files: int) -> None:
    assert plan_batch_files(block_bytes) == num_files


@EVERY_WAY
def test_a_name_that_is_taken_is_left_as_it_is(make_files: MakeFiles, tmp_path: Path, way: Way) -> None:
    files = make_files(way)
    publish(files, way, tmp_path / "a", parts(b"first"))
    assert not publish(files, way, tmp_path / "a", parts(b"second"))
    assert (tmp_path / "a").read_bytes() == b"first"
    assert num_left_over(tmp_path) == (1, way.is_over)


@EVERY_WAY
def test_a_missing_folder_is_said_and_nothing_is_left(
    make_files: MakeFiles, tmp_path: Path, way: Way
) -> None:
    with pytest.raises(FileNotFoundError):
        publish_one(make_files(way), f"{tmp_path}/no/a", parts(b"x"))
    assert left_over(tmp_path) == []


@EVERY_WAY_OVER
def test_a_missing_folder_costs_no_recycled_file(make_files: MakeFiles, tmp_path: Path, way: Way) -> None:
    files = make_files(way)
    recycled_file = make_recycled(files, tmp_path / "evicted", 1)
    with pytest.raises(FileNotFoundError):
        publish_one(files, f"{tmp_path}/no/a", parts(b"x"), recycled_file)
    assert left_over(tmp_path) == [Path(recycled_file)]
    (tmp_path / "no").mkdir()
    assert publish_one(files, f"{tmp_path}/no/a", parts(b"x"), recycled_file)
    assert left_over(tmp_path) == [tmp_path / "no" / "a"]


@EVERY_WAY_OVER
def test_a_recycled_file_that_is_gone_is_said(make_files: MakeFiles, tmp_path: Path, way: Way) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        publish_one(make_files(way), f"{tmp_path}/a", parts(b"x"), str(tmp_path / "tmp" / "gone"))
    assert caught.value.filename == f"{tmp_path}/a"
    assert left_over(tmp_path) == []


@EVERY_WAY_OVER
def test_what_is_written_over_is_the_same_file(make_files: MakeFiles, tmp_path: Path, way: Way) -> None:
    files = make_files(way)
    recycled_file = make_recycled(files, tmp_path / "evicted", 11)
    inode = Path(recycled_file).stat().st_ino
    assert publish_one(files, f"{tmp_path}/a", parts(b"head", b"payload"), recycled_file)
    assert (tmp_path / "a").stat().st_ino == inode
    assert (tmp_path / "a").stat().st_nlink == 1


@EVERY_WAY_OVER
def test_no_symbolic_link_is_written_over(make_files: MakeFiles, tmp_path: Path, way: Way) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "tmp" / "recycled").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic"):
        publish_one(make_files(way), f"{tmp_path}/a", parts(b"ours"), str(tmp_path / "tmp" / "recycled"))
    assert (tmp_path / "mine").read_bytes() == b"mine"
    assert not (tmp_path / "a").exists()


def test_a_file_that_was_unpublished_is_known_as_this_process_s(
    make_files: MakeFiles, tmp_path: Path
) -> None:
    files = make_files()
    first, second = (Path(make_recycled(files, tmp_path / name, 3)) for name in "ab")
    assert first != second
    assert {parse_owner(path.name) for path in (first, second)} == {current_owner()}
    assert {path.parent for path in (first, second)} == {tmp_path / "tmp"}
    assert set(left_over(tmp_path)) == {first, second}
    with pytest.raises(FileNotFoundError):
        files.unpublish(f"{tmp_path}/a")


@pytest.mark.parametrize("way", [Way.STEPWISE, Way.NAMED, Way.STEPWISE_OVER], ids=lambda way: way.value)
def test_a_write_that_fails_midway_leaves_nothing(make_files: MakeFiles, tmp_path: Path, way: Way) -> None:
    def full(fd: int, buffers: Buffers, offset: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, "full")
        return os.pwrite(fd, buffers[0][:3], 0)

    files = make_files(way, calls=SystemCalls(pwritev=full))
    with pytest.raises(OSError, match="full"):
        publish(files, way, tmp_path / "a", parts(b"head", b"payload"))
    assert num_left_over(tmp_path) == (0, way.is_over)


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Have the system refuse to let a file of this process grow beyond ``num_bytes``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@EVERY_WAY
def test_a_file_that_may_not_become_so_long_leaves_nothing(
    make_files: MakeFiles, tmp_path: Path, way: Way
) -> None:
    files = make_files(way)
    recycled_file = make_recycled(files, tmp_path / "evicted", 6) if way.is_over else None
    with files_of_at_most(6), pytest.raises(OSError, match="too large") as caught:
        publish_one(files, f"{tmp_path}/a", parts(b"head", b"payload"), recycled_file)
    assert caught.value.errno == errno.EFBIG
    assert num_left_over(tmp_path) == (0, way.is_over)


def test_a_write_that_ends_early_is_no_file(make_files: MakeFiles, tmp_path: Path) -> None:
    def stuck(fd: int, buffers: Buffers, offset: int) -> int:
        return 0 if offset else os.pwrite(fd, buffers[0], 0)

    with pytest.raises(OSError, match="only a part"):
        publish_one(make_files(calls=SystemCalls(pwritev=stuck)), f"{tmp_path}/a", parts(b"head", b"payload"))
    assert left_over(tmp_path) == []


def test_calls_that_move_a_few_bytes_at_a_time_are_continued(make_files: MakeFiles, tmp_path: Path) -> None:
    calls = SystemCalls(pwritev=in_small_steps(os.pwritev), preadv=in_small_steps(os.preadv))
    files = make_files(calls=calls)
    publish_one(files, f"{tmp_path}/a", parts(b"head", b"", b"payload"))
    back = parts(b"....", b"", b".......")
    read_one(files, f"{tmp_path}/a", back)
    assert b"".join(back) == b"headpayload"


@pytest.mark.parametrize("way", [Way.NAMED, Way.STEPWISE_OVER], ids=lambda way: way.value)
def test_a_file_without_hard_links_is_renamed(
    make_files: MakeFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    files = make_files(way)
    assert publish(files, way, tmp_path / "a", parts(b"x"))
    assert left_over(tmp_path) == [tmp_path / "a"]
    assert not publish(files, way, tmp_path / "a", parts(b"y"))
    assert (tmp_path / "a").read_bytes() == b"x"


@EVERY_READ
def test_a_file_that_is_too_short_is_not_read(make_files: MakeFiles, tmp_path: Path, way: Way) -> None:
    (tmp_path / "a").write_bytes(b"short")
    back = parts(b"......")
    assert read_one(make_files(way), f"{tmp_path}/a", back).num_bytes == 5
    assert bytes(back[0]) == b"......"


@EVERY_READ
def test_a_file_that_ends_before_its_length_is_an_error(make_files: MakeFiles, way: Way) -> None:
    """The kernel gives every file of /sys the length of a page, and then a few bytes."""
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not path.exists() or path.stat().st_size <= len(path.read_bytes()):
        pytest.skip(f"{path} is missing, or as long as it says")
    with pytest.raises(OSError, match="ended before its length") as caught:
        read_one(make_files(way), str(path), parts(bytes(path.stat().st_size)))
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))


@EVERY_READ
def test_a_missing_file_and_a_symbolic_link_are_not_read(
    make_files: MakeFiles, tmp_path: Path, way: Way
) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(FileNotFoundError):
        read_one(make_files(way), f"{tmp_path}/missing", parts(b"."))
    with pytest.raises(OSError, match="symbolic"):
        read_one(make_files(way), f"{tmp_path}/link", parts(b"."))


@EVERY_WAY
@pytest.mark.parametrize("mode", [0o600, 0o660])
def test_permissions_are_those_asked_for_whatever_the_umask(
    make_files: MakeFiles, tmp_path: Path, way: Way, mode: int
) -> None:
    publish(make_files(way, mode=mode), way, tmp_path / "a", parts(b"x"), mode)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode


@EVERY_READ
def test_a_load_renews_the_time_once_a_minute_at_most(
    make_files: MakeFiles, tmp_path: Path, way: Way
) -> None:
    path, files = tmp_path / "a", make_files(way)
    path.write_bytes(b"x")
    os.utime(path, (NOW_S, NOW_S - TOUCH_INTERVAL_S))
    read_one(files, str(path), parts(b"."))
    assert path.stat().st_mtime == NOW_S - TOUCH_INTERVAL_S
    os.utime(path, (NOW_S, NOW_S - TOUCH_INTERVAL_S - 1))
    read_one(files, str(path), parts(b"."))
    assert path.stat().st_mtime > NOW_S


def test_renewing_says_whether_the_file_is_there(make_files: MakeFiles, tmp_path: Path) -> None:
    path, files = tmp_path / "a", make_files()
    assert not files.touch(str(path))
    path.write_bytes(b"x")
    os.utime(path, (0, 0))
    assert files.touch(str(path))
    assert path.stat().st_mtime > NOW_S


def test_only_the_file_that_was_meant_is_removed(make_files: MakeFiles, tmp_path: Path) -> None:
    path, files = tmp_path / "a", make_files()
    path.write_bytes(b"damaged")
    seen = status_of(path.stat())
    (tmp_path / "b").write_bytes(b"whole!")
    (tmp_path / "b").rename(path)
    assert files.remove(str(path), seen) == 0
    assert files.remove(str(path), status_of(path.stat())) == 6
    assert files.remove(str(path)) == 0
