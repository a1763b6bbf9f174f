"""A checkpoint has one fingerprint as long as every byte of it is the same, and is read once."""

import logging
import os
from pathlib import Path

import pytest

pytest.importorskip("blake3", reason="needs BLAKE3: pip install 'kvtier[vllm]'")

from kvtier.engines.checkpoint import DigestCache, Fingerprint, FingerprintJob
from kvtier.engines.checkpoint import fingerprint as module
from kvtier.errors import FingerprintError
from kvtier.quantities import size_in_words

PIECE_BYTES = 1 << 12
LONG = bytes(range(256)) * 45 + b"end"
"""Three pieces, the last one not full."""

LATER_NS = 60_000_000_000


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files of the tests have several pieces, read in several calls."""
    monkeypatch.setattr(module, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(module, "READ_BYTES", 1000)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a checkpoint of several files."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-1.safetensors").write_bytes(LONG)
    (folder / "model-2.safetensors").write_bytes(LONG[::-1])
    (folder / "modeling.py").write_bytes(b"")
    return folder


def read(place: Path, cache: Path | None = None, num_threads: int = 3) -> Fingerprint:
    """Return the fingerprint, read long after the last change of a file."""

    def now_ns() -> int:
        """Return a time long after every change."""
        return max(path.stat().st_ctime_ns for path in (place, *place.iterdir())) + LATER_NS

    return FingerprintJob(place, "m", DigestCache(cache, now_ns), num_threads).wait()


@pytest.mark.parametrize("num_threads", [1, 2, 8])
def test_every_byte_is_read_whatever_the_number_of_threads(model: Path, num_threads: int) -> None:
    found = read(model, num_threads=num_threads)

    assert found.num_bytes == found.num_read_bytes == 2 * len(LONG)
    assert found.text == read(model).text
    assert [file.name for file in found.files] == [
        "model-1.safetensors",
        "model-2.safetensors",
        "modeling.py",
    ]


@pytest.mark.parametrize("position", [0, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES + 7, len(LONG) - 1])
def test_each_byte_counts(model: Path, position: int) -> None:
    before = read(model).text
    changed = bytearray(LONG)
    changed[position] ^= 1
    (model / "model-1.safetensors").write_bytes(changed)

    assert read(model).text != before


@pytest.mark.parametrize("change", ["swapped names", "new file", "a byte moved", "longer by a piece"])
def test_names_and_lengths_count(model: Path, change: str) -> None:
    before = read(model).text
    one, two = model / "model-1.safetensors", model / "model-2.safetensors"
    if change == "swapped names":
        one.rename(model / "x")
        two.rename(one)
        (model / "x").rename(two)
    elif change == "new file":
        (model / "more.py").write_bytes(b"")
    elif change == "a byte moved":
        one.write_bytes(LONG[:-1])
        two.write_bytes(LONG[-1:] + LONG[::-1])
    else:
        one.write_bytes(LONG + bytes(PIECE_BYTES))

    assert read(model).text != before


def test_a_copy_has_the_same_fingerprint(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())

    assert read(copy).text == read(model).text


def test_a_folder_without_weights_has_no_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text("{}")

    assert read(tmp_path).text == ""


def test_the_second_start_reads_nothing(model: Path, tmp_path: Path) -> None:
    first, second = (read(model, tmp_path / "cache.json") for _ in range(2))

    assert (first.num_read_bytes, second.num_read_bytes) == (2 * len(LONG), 0)
    assert second.text == first.text


def test_only_the_changed_file_is_read_again(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache.json"
    before = read(model, cache)
    status = (model / "model-2.safetensors").stat()
    (model / "model-2.safetensors").write_bytes(LONG[::-1][:-1] + b"?")
    os.utime(model / "model-2.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))
    after = read(model, cache)

    assert after.num_read_bytes == len(LONG)
    assert after.text == read(model).text != before.text


def test_a_file_that_was_just_written_is_read_at_the_next_start_too(model: Path, tmp_path: Path) -> None:
    def now_ns() -> int:
        """Return the time of the last change."""
        return max(path.stat().st_ctime_ns for path in model.iterdir())

    jobs = [FingerprintJob(model, "m", DigestCache(tmp_path / "cache.json", now_ns)).wait() for _ in range(2)]

    assert [job.num_read_bytes for job in jobs] == [2 * len(LONG)] * 2


class ChangingCache(DigestCache):
    """Changes a file after the checkpoint was listed and before it is read."""

    def __init__(self, path: Path, change: str) -> None:
        super().__init__(None)
        self._file = path
        self._change = change

    def now_ns(self) -> int:
        """Change the file, then return the time."""
        if self._change == "gone":
            self._file.unlink()
        elif self._change == "shorter":
            self._file.write_bytes(LONG[:5000])
        elif self._change == "another file":
            self._file.rename(self._file.with_name("old.log"))
            self._file.write_bytes(LONG)
        else:
            self._file.write_bytes(LONG)
            os.utime(self._file, ns=(1, 1))
        return super().now_ns()


@pytest.mark.parametrize("change", ["gone", "shorter", "written again", "another file"])
def test_a_file_that_changes_meanwhile_is_an_error_that_names_it(model: Path, change: str) -> None:
    job = FingerprintJob(model, "m", ChangingCache(model / "model-1.safetensors", change))

    with pytest.raises(FingerprintError, match=r"model-1\.safetensors: .*make it readable"):
        job.wait()
    assert job.is_done


def test_a_start_that_waits_says_how_far_it_is_and_how_long_it_took(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    class SlowCache(DigestCache):
        """Waits until the log has a line of progress."""

        def now_ns(self) -> int:
            """Wait, then return the time."""
            while "kvtier reads the fingerprint of m: 0 B of " not in caplog.text:
                pass
            return super().now_ns()

    FingerprintJob(model, "m", SlowCache(None), progress_interval_s=0.001).wait()

    size = size_in_words(sum(path.stat().st_size for path in model.iterdir()))
    assert f"kvtier has read the fingerprint of m: 3 files of {size}, {size} of them in" in caplog.text
