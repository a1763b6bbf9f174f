"""A trace's file is private and new, never larger than allowed, and whole up to wherever it was cut."""

import gzip
import random
import stat
import zlib
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.recording.trace_file import MAX_NUMBER, TraceFile, create_trace_file, numbered

LINES = [f'{{"line": {number}}}\n'.encode() for number in range(50)]


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace", 1000)
    file.close()

    assert stat.S_IMODE((tmp_path / "trace").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_each_line_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path, name: str) -> None:
    file = TraceFile(tmp_path / name, 10_000)
    for number, line in enumerate(LINES):
        file.write(line)

        content = (tmp_path / name).read_bytes()
        assert file.num_bytes == len(content)
        assert readable(content, is_zipped=name.endswith(".gz")) == b"".join(LINES[: number + 1])
    file.close()
    file.close()


def readable(content: bytes, *, is_zipped: bool) -> bytes:
    return zlib.decompressobj(wbits=31).decompress(content) if is_zipped else content


def test_a_compressed_file_is_one_that_gzip_reads(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.gz", 10_000)
    for line in LINES:
        file.write(line)
    file.close()

    with gzip.open(tmp_path / "trace.gz") as unzipped:
        assert unzipped.read() == b"".join(LINES)


@pytest.mark.parametrize("name", ["trace", "trace.gz"])
@pytest.mark.parametrize("is_random", [True, False])
def test_a_file_whose_writer_asks_for_room_never_exceeds_its_limit(
    tmp_path: Path, name: str, is_random: bool
) -> None:
    chance = random.Random(0)
    max_bytes = 20_000
    file = TraceFile(tmp_path / name, max_bytes)
    while True:
        num_bytes = chance.randint(1, 3000)
        line = chance.randbytes(num_bytes) if is_random else b"a" * num_bytes
        if not file.has_room(len(line)):
            break
        file.write(line)
    file.close()

    assert (tmp_path / name).stat().st_size <= max_bytes
    assert is_random is False or file.num_bytes > 0.8 * max_bytes


@pytest.mark.parametrize("name", ["trace", "trace.gz"])
def test_what_cannot_be_compressed_stays_within_any_limit(tmp_path: Path, name: str) -> None:
    chance = random.Random(0)
    for max_bytes in range(2000, 2300, 3):
        folder = tmp_path / str(max_bytes)
        folder.mkdir()
        file = TraceFile(folder / name, max_bytes)
        while file.has_room(100):
            file.write(chance.randbytes(100))
        file.close()

        assert file.num_bytes == (folder / name).stat().st_size <= max_bytes


@pytest.mark.parametrize(
    ("name", "third"),
    [("trace", "trace.3"), ("trace.jsonl", "trace.3.jsonl"), ("a.b.jsonl.gz", "a.3.b.jsonl.gz")],
)
def test_a_number_stands_before_the_endings_of_a_name(name: str, third: str) -> None:
    assert numbered(Path("/t") / name, 1) == Path("/t") / name
    assert numbered(Path("/t") / name, 3) == Path("/t") / third


def test_what_exists_is_not_touched_and_the_next_number_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("precious")
    (tmp_path / "trace.2.jsonl").symlink_to(tmp_path / "elsewhere")

    file = create_trace_file(path, 1000, "record_trace")
    file.close()

    assert file.path == tmp_path / "trace.3.jsonl"
    assert path.read_text() == "precious"
    assert not (tmp_path / "elsewhere").exists()


def test_an_engine_that_crashes_on_and_on_does_not_fill_the_folder(tmp_path: Path) -> None:
    for _ in range(MAX_NUMBER):
        create_trace_file(tmp_path / "trace", 1000, "record_trace").close()

    with pytest.raises(ConfigError, match="100 files of this name exist: move them away"):
        create_trace_file(tmp_path / "trace", 1000, "record_trace")
    assert len(list(tmp_path.iterdir())) == MAX_NUMBER


def test_a_path_where_no_file_can_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record_trace='trace.jsonl': must be an absolute path"):
        create_trace_file(Path("trace.jsonl"), 1000, "record_trace")
    with pytest.raises(ConfigError, match=r"cannot be made .No such file or directory"):
        create_trace_file(tmp_path / "missing" / "trace", 1000, "record_trace")


class CuttingFile(TraceFile):
    """A file on a disk that is full behind so many bytes, and has room again after the complaint."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        super().__init__(path, 10**6)
        self._left: int | None = num_bytes

    def _write_some(self, content: memoryview) -> int:
        if self._left is None:
            return super()._write_some(content)
        if self._left == 0:
            self._left = None
            raise OSError(28, "No space left on device")
        num_bytes = super()._write_some(content[: self._left])
        self._left -= num_bytes
        return num_bytes


def write_all(file: TraceFile, lines: list[bytes]) -> None:
    for line in lines:
        file.write(line)


def test_a_compressed_file_that_is_cut_anywhere_ends_there_and_is_not_damaged(tmp_path: Path) -> None:
    chance = random.Random(0)
    lines = [chance.randbytes(40).hex().encode() + b"\n" for _ in range(4)]
    for num_bytes in range(11, 150):
        file = CuttingFile(tmp_path / f"{num_bytes}.gz", num_bytes)
        with pytest.raises(OSError, match="No space left"):
            write_all(file, lines)
        file.close()

        assert file.path.stat().st_size == num_bytes
        with gzip.open(file.path) as unzipped, pytest.raises(EOFError):
            unzipped.read()
