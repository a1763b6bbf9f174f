"""Digests are remembered for files that have surely not changed since, and by nobody but this user."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("blake3", reason="needs BLAKE3: pip install 'kvtier[vllm]'")

from kvtier.engines.checkpoint import CheckpointFile, DigestCache, default_cache_path, find_files
from kvtier.engines.checkpoint import digest_cache as module
from kvtier.engines.checkpoint.digest_cache import MIN_AGE_NS

DIGEST = b"d" * 32


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return where the cache is, in a folder that is not there yet."""
    return tmp_path / "cache" / "digests.json"


@pytest.fixture
def file(tmp_path: Path) -> CheckpointFile:
    """Return a file of a checkpoint."""
    (tmp_path / "model.bin").write_bytes(b"weights")
    return find_files(tmp_path / "model.bin")[0]


def add_digest(path: Path, file: CheckpointFile, age_ns: int = MIN_AGE_NS) -> None:
    """Remember the digest of a file that was left alone for so long before it was read."""
    DigestCache(path).add([(file, DIGEST)], file.stamp.ctime_ns + age_ns)


def test_a_digest_is_remembered_privately(path: Path, file: CheckpointFile) -> None:
    assert DigestCache(path).find([file]) == {}
    add_digest(path, file)

    assert DigestCache(path).find([file]) == {file.name: DIGEST}
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_a_file_that_changed_shortly_before_it_was_read_is_not_remembered(
    path: Path, file: CheckpointFile
) -> None:
    add_digest(path, file, MIN_AGE_NS - 1)

    assert DigestCache(path).find([file]) == {}


def test_bytes_written_anew_are_found_although_size_and_mtime_are_set_back(
    path: Path, file: CheckpointFile
) -> None:
    add_digest(path, file)
    before = file.path.stat()
    file.path.write_bytes(b"WEIGHTS")
    os.utime(file.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    (after,) = find_files(file.path)

    assert (after.stamp.size_bytes, after.stamp.mtime_ns) == (file.stamp.size_bytes, file.stamp.mtime_ns)
    assert DigestCache(path).find([after]) == {}


def test_another_file_with_the_same_bytes_is_another_entry(path: Path, file: CheckpointFile) -> None:
    add_digest(path, file)
    file.path.with_name("copy.bin").write_bytes(b"weights")

    assert DigestCache(path).find(find_files(file.path.with_name("copy.bin"))) == {}


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda content: content[: len(content) // 2],
    "no JSON": lambda content: b"\x00" * len(content),
    "a list": lambda content: b"[]",
    "another digest": lambda content: content.replace(DIGEST.hex().encode(), b"e" * 64),
    "no text": lambda content: json.dumps({"checksum": 1, "digests": {}}).encode(),
    "too long": lambda content: content + b" " * (1 << 20),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_ignored_and_replaced(
    path: Path, file: CheckpointFile, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    add_digest(path, file)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))

    assert DigestCache(path).find([file]) == {}
    assert "is ignored" in caplog.text
    add_digest(path, file)
    assert DigestCache(path).find([file]) == {file.name: DIGEST}


@pytest.mark.parametrize("kind", ["others may write", "link", "folder"])
def test_a_cache_that_another_user_could_have_written_is_ignored(
    path: Path, file: CheckpointFile, kind: str
) -> None:
    add_digest(path, file)
    if kind == "others may write":
        path.chmod(0o620)
    else:
        path.rename(path.with_name("elsewhere"))
        if kind == "link":
            path.symlink_to(path.with_name("elsewhere"))
        else:
            path.mkdir()

    assert DigestCache(path).find([file]) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_cache_of_another_user_is_ignored(path: Path, file: CheckpointFile) -> None:
    add_digest(path, file)
    os.chown(path, 12345, 12345)

    assert DigestCache(path).find([file]) == {}


def test_what_was_added_last_is_kept_when_there_are_too_many(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 2)
    for name in ("a.bin", "b.bin", "c.bin"):
        (tmp_path / name).write_bytes(b"1")
    files = find_files(tmp_path)
    for file in files:
        add_digest(path, file)

    assert set(DigestCache(path).find(files)) == {"b.bin", "c.bin"}


def test_a_cache_that_cannot_be_written_is_a_warning(
    tmp_path: Path, file: CheckpointFile, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_bytes(b"a file where the folder would be")
    add_digest(tmp_path / "cache" / "digests.json", file)

    assert "cannot be written" in caplog.text


def test_without_a_path_nothing_is_remembered(file: CheckpointFile) -> None:
    cache = DigestCache(None)
    cache.add([(file, DIGEST)], file.stamp.ctime_ns + MIN_AGE_NS)

    assert cache.find([file]) == {}


def test_the_user_chooses_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(tmp_path))
    chosen = default_cache_path()
    monkeypatch.setenv("KVTIER_CACHE_DIR", "")
    none = default_cache_path()
    monkeypatch.delenv("KVTIER_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    usual = default_cache_path()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    fallback = default_cache_path()

    assert none is None
    assert [path and path.parent for path in (chosen, usual, fallback)] == [
        tmp_path,
        tmp_path / "xdg" / "kvtier",
        tmp_path / "home" / ".cache" / "kvtier",
    ]
