"""Folders are private, a walk sees our blocks only, and what dead processes left is given back."""

import os
import stat
import threading
from pathlib import Path

import pytest
from tests.tiering.fs.conftest import HANG_GUARD_S, StartTier

from kvtier.namespace import Namespace
from kvtier.testing.tier_suite import key_of
from kvtier.tiering.fs import block_writer, folders
from kvtier.tiering.fs.external_deletions import forget_missing
from kvtier.tiering.fs.folders import (
    EMPTY_FOLDER_TTL_S,
    FSNamespace,
    make_block_folder,
    refresh_document,
    remove_empty_folders,
    sweep_temporaries,
    walk_blocks,
)
from kvtier.tiering.fs.index import KeyIndex
from kvtier.tiering.fs.system import FOREIGN_OWNER_TIMEOUT_S, Owner, current_owner
from kvtier.tiering.kit.private_folders import make_folder

NAMESPACE = Namespace('{"model": "m"}', bytes(range(32)))
NOW_S = 1_700_000_000.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with a folder for temporary files."""
    (tmp_path / "tmp").mkdir()
    return tmp_path


def handle_of(root: Path, identity: Namespace) -> FSNamespace:
    """Return the handle of a namespace in the directory."""
    path = folders.namespace_path(root, identity.name)
    return FSNamespace(identity, identity.name, path, KeyIndex(10, is_complete=True))


def put_block(root: Path, number: int, namespace: Namespace = NAMESPACE) -> Path:
    """Write a block's file and return it."""
    handle = handle_of(root, namespace)
    path = folders.block_path(handle.path, key_of(number))
    make_block_folder(root, handle, path, 0o600, str(current_owner()))
    Path(path).write_bytes(b"x" * number)
    return Path(path)


@pytest.mark.parametrize(("file_mode", "expected"), [(0o600, 0o700), (0o660, 0o770)])
def test_folders_have_the_permissions_of_their_files(root: Path, file_mode: int, expected: int) -> None:
    make_folder(root / "a", file_mode)
    make_folder(root / "a", 0o600)
    assert stat.S_IMODE((root / "a").stat().st_mode) == expected


def test_a_namespace_is_described_beside_its_blocks(root: Path) -> None:
    put_block(root, 1)
    document = root / NAMESPACE.name / "namespace.json"
    assert document.read_text(encoding="utf-8") == NAMESPACE.document
    assert stat.S_IMODE(document.stat().st_mode) == 0o600
    assert list((root / "tmp").iterdir()) == []


def test_a_description_of_an_older_version_is_replaced_and_a_missing_one_is_not_made(root: Path) -> None:
    refresh_document(root, handle_of(root, NAMESPACE), 0o600, str(current_owner()))
    assert not (root / NAMESPACE.name).exists()
    put_block(root, 1)
    document = root / NAMESPACE.name / "namespace.json"
    document.write_text('{"tenant_salt": "a digest"}')
    refresh_document(root, handle_of(root, NAMESPACE), 0o600, str(current_owner()))
    assert document.read_text(encoding="utf-8") == NAMESPACE.document
    assert list((root / "tmp").iterdir()) == []


def test_a_walk_sees_the_blocks_of_every_namespace_and_nothing_else(root: Path) -> None:
    other = Namespace("{}", bytes(32))
    paths = {put_block(root, 1), put_block(root, 2), put_block(root, 3, other)}
    (root / NAMESPACE.name / "0" / "0" / "notes.txt").write_text("mine")
    (root / "somebody's").mkdir()
    (root / "somebody's" / f"{key_of(9).hex()}.kv").write_bytes(b"mine")
    (root / NAMESPACE.name / "0" / "0" / f"{key_of(8).hex()}.kv").symlink_to("/etc/passwd")
    found = list(walk_blocks(root))
    assert {Path(block.path) for block in found} == paths
    assert {(block.name, block.num_bytes) for block in found} == {(key_of(n), n) for n in (1, 2, 3)}


def test_a_walk_over_nothing_finds_nothing(tmp_path: Path) -> None:
    assert list(walk_blocks(tmp_path / "missing")) == []


def test_temporaries_of_dead_processes_go_and_others_stay_and_count(root: Path) -> None:
    here = current_owner()
    dead = Owner(here.host, here.pid, here.start_ticks + 1)
    elsewhere = Owner("0" * 16, here.pid, here.start_ticks)
    for name, age_s in ((f"{here}-aa", 9e6), (f"{dead}-bb", 0.0), (f"{elsewhere}-cc", 9.0), ("notes", 9e6)):
        (root / "tmp" / name).write_bytes(b"1234")
        os.utime(root / "tmp" / name, (NOW_S, NOW_S - age_s))
    assert sweep_temporaries(root / "tmp", here, NOW_S) == 8
    assert {path.name for path in (root / "tmp").iterdir()} == {f"{here}-aa", f"{elsewhere}-cc", "notes"}
    assert sweep_temporaries(root / "tmp", here, NOW_S + FOREIGN_OWNER_TIMEOUT_S) == 4


def test_a_description_that_was_half_written_at_a_crash_is_swept(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = current_owner()
    dead = Owner(here.host, here.pid, here.start_ticks + 1)
    handle = handle_of(root, NAMESPACE)
    path = folders.block_path(handle.path, key_of(1))

    def crash(*_: object) -> int:
        os._exit(9)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(os, "write", crash)
        make_block_folder(root, handle, path, 0o600, str(dead))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(list((root / "tmp").iterdir())) == 1
    sweep_temporaries(root / "tmp", here, NOW_S)
    assert list((root / "tmp").iterdir()) == []


def test_folders_that_have_long_been_empty_are_given_back(root: Path) -> None:
    kept, gone = put_block(root, 1), put_block(root, 2, Namespace("{}", bytes(32)))
    gone.unlink()
    now_s = kept.parent.stat().st_mtime
    remove_empty_folders(root, now_s + EMPTY_FOLDER_TTL_S - 60.0)
    assert gone.parent.is_dir()
    # Removing a folder renews the one above it, so each level waits for its own hour.
    for level in (2, 3, 4):
        for folder in [path for path in root.rglob("*") if path.is_dir()]:
            os.utime(folder, (now_s, now_s))
        remove_empty_folders(root, now_s + level * EMPTY_FOLDER_TTL_S)
    assert kept.exists()
    assert not gone.parents[2].exists()


@pytest.mark.parametrize(
    ("file_mode", "mode"), [(0o600, 0o700), (0o640, 0o750), (0o660, 0o770), (0o666, 0o777)], ids=oct
)
def test_folders_can_be_searched_by_those_who_read_files(tmp_path: Path, file_mode: int, mode: int) -> None:
    make_folder(tmp_path / "folder", file_mode)
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == mode


def test_a_folder_is_not_made_on_the_way_to_another(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        make_folder(tmp_path / "removed meanwhile" / "folder", 0o600)

    assert list(tmp_path.iterdir()) == []


def test_a_block_that_another_thread_stores_in_a_folder_just_made_is_no_deletion(
    start_tier: StartTier, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_made, may_go_on = threading.Event(), threading.Event()

    def make_and_wait(root: Path, namespace: FSNamespace, path: str, mode: int, owner_name: str) -> bool:
        answer = make_block_folder(root, namespace, path, mode, owner_name)
        is_made.set()
        assert may_go_on.wait(HANG_GUARD_S)
        return answer

    driver = start_tier(num_threads=2)
    first, second = 1, 2  # in one folder, which is called as the first byte of their keys
    with monkeypatch.context() as patch:
        patch.setattr(block_writer, "make_block_folder", make_and_wait)
        job = driver.submit([first], [0], is_promotion=False)
        assert is_made.wait(HANG_GUARD_S)
        assert driver.store([second], [1]).success
        may_go_on.set()
        assert driver.wait(job).success

    assert driver.lookup(first)
    assert driver.lookup(second)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []
    assert driver.tier.stats()["evicted_blocks"] == 0


@pytest.mark.parametrize("level", ["*", "*/0", "*/0/0"])
def test_a_block_behind_a_link_is_forgotten_with_those_that_are_gone(root: Path, level: str) -> None:
    behind, gone, there = (key_of(number) for number in (1, 2, 0x33 << 248))
    namespace = handle_of(root, NAMESPACE)
    for key in (behind, there):
        path = namespace.block_path(key)
        make_block_folder(root, namespace, path, 0o600, str(current_owner()))
        Path(path).touch()
    namespace.index.add([behind, gone, there])
    (folder,) = (path for path in root.glob(level) if path.name != "tmp")
    folder.rename(root / "elsewhere")
    folder.symlink_to(root / "elsewhere")

    forget_missing(namespace)

    kept = [there] if level != "*" else []
    assert [key for key in (behind, gone, there) if key in namespace.index] == kept
