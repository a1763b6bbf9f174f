"""Packs are kept only where locks exclude, room can be reserved and no other host or user writes."""

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.tiering.fs.packed import (
    CAPACITY_BYTES,
    NAMESPACE,
    create,
    make_directory,
    no_file_stays_open,
    read_slot,
    slot_of,
    stored,
)

from kvtier.errors import PlaceError
from kvtier.tiering.fs.file_systems import SHARED_FILE_SYSTEMS
from kvtier.tiering.fs.system_calls import REAL_CALLS, SystemCalls, file_system_of


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Where a test's directory is; no file of it stays open."""
    with no_file_stays_open(tmp_path):
        yield tmp_path / "root"


@pytest.mark.parametrize("kind", sorted(SHARED_FILE_SYSTEMS))
def test_a_mount_that_hosts_share_is_refused_with_the_line_that_serves_it(root: Path, kind: str) -> None:
    with pytest.raises(PlaceError) as refused:
        make_directory(root, calls=SystemCalls(file_system=lambda path: kind))
    assert kind in str(refused.value)
    assert f'{{"type": "obj", "url": "file://{root}"}}' in str(refused.value)
    assert not root.exists()


@pytest.mark.parametrize(
    "kind", ["ext4", "xfs", "btrfs", "overlay", "tmpfs", "fuse", "fuseblk", "fuse.ntfs-3g", "zfs", ""]
)
def test_file_systems_of_one_host_are_taken(root: Path, kind: str) -> None:
    directory = make_directory(root, calls=SystemCalls(file_system=lambda path: kind))
    create(directory).close()


def test_the_kind_of_a_file_system_is_found() -> None:
    assert file_system_of("/proc/self") == "proc"
    assert file_system_of("/dev/pts/no such") == "devpts"
    assert file_system_of("/no such") == file_system_of("/"), (
        "not known where the root is none of the mounts shown"
    )


def failing(code: int) -> Callable[..., Any]:  # Any: whichever call it is
    """Return a call that the file system cannot do."""

    def call(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        (replace(REAL_CALLS, try_lock=failing(errno.ENOLCK)), "no locks"),
        (replace(REAL_CALLS, try_lock=failing(errno.EOPNOTSUPP)), "no locks"),
        (replace(REAL_CALLS, try_lock=lambda fd: True), "do not exclude"),
        (replace(REAL_CALLS, fallocate=failing(errno.EOPNOTSUPP)), "reserves no room"),
        (replace(REAL_CALLS, open=failing(errno.EROFS)), "Read-only"),
        (replace(REAL_CALLS, fallocate=failing(errno.EIO)), "output error"),
    ],
)
def test_a_file_system_that_cannot_keep_packs_is_refused_by_name(
    root: Path, calls: SystemCalls, reason: str
) -> None:
    with pytest.raises(PlaceError, match=reason) as refused:
        make_directory(root, calls=replace(calls, file_system=lambda path: "oddfs"))
    assert "oddfs" in str(refused.value) or "cannot be written" in str(refused.value)
    assert list(root.iterdir()) == []


def without_direct_io(path: str, flags: int, mode: int) -> int:
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return os.open(path, flags, mode)


@pytest.mark.parametrize(
    ("row_bytes", "asks", "calls", "has"),
    [
        (4096, False, REAL_CALLS, False),
        (5000, True, REAL_CALLS, False),
        (4096, True, SystemCalls(open=without_direct_io), False),
    ],
)
def test_slots_bypass_the_page_cache_only_where_that_works(
    root: Path, row_bytes: int, asks: bool, calls: SystemCalls, has: bool
) -> None:
    directory = make_directory(root, row_bytes=row_bytes, direct_io=asks, calls=calls)
    assert directory.has_direct_io is has
    create(directory).close()


def test_direct_io_is_used_where_the_file_system_has_it(root: Path) -> None:
    directory = make_directory(root, direct_io=True)
    pack = create(directory)
    assert bool(fcntl.fcntl(pack._fd, fcntl.F_GETFL) & os.O_DIRECT) == directory.has_direct_io
    pack.write(2, slot_of(b"direct"))
    assert read_slot(pack, 2) == bytes(slot_of(b"direct")[0])
    assert not pack.has_other_owner()
    pack.close()


# Permissions


def modes_below(root: Path) -> dict[bool, set[int]]:
    """Return the permissions of folders and of files below a directory, and its own."""
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for path in (root, *root.rglob("*")):
        found[path.is_dir()].add(stat.S_IMODE(path.lstat().st_mode))
    return found


@pytest.mark.parametrize(("file_mode", "folder_mode"), [(0o600, 0o700), (0o660, 0o770), (0o640, 0o750)])
def test_files_have_the_permissions_that_were_asked_for(root: Path, file_mode: int, folder_mode: int) -> None:
    before = os.umask(0o077)
    try:
        directory = make_directory(root, file_mode=file_mode)
        pack = create(directory)
        pack.journal.append([stored(1)])
        pack.journal.rewrite(lambda records: records, is_durable=False)
        pack.close()
    finally:
        os.umask(before)
    assert modes_below(root) == {True: {folder_mode}, False: {file_mode}}


@pytest.mark.parametrize("mode", [0o777, 0o702, 0o722])
def test_a_directory_that_others_may_write_to_is_refused(root: Path, mode: int) -> None:
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(PlaceError, match="may write to it"):
        make_directory(root)
    root.chmod(0o700)
    directory = make_directory(root)
    root.chmod(mode)
    assert directory.find_refusal() is not None


@pytest.mark.parametrize("kind", ["others may write", "link"])
def test_no_pack_is_taken_from_a_folder_that_others_may_change(root: Path, kind: str, tmp_path: Path) -> None:
    directory = make_directory(root)
    pack = create(directory)
    pack.close()
    folder = directory.folder_of(NAMESPACE)
    if kind == "link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.chmod(0o777)
    assert directory.open(NAMESPACE, pack.name) is None
    assert directory.adopt(NAMESPACE, pack.name) is None
    with pytest.raises(PermissionError):
        directory.create(NAMESPACE, CAPACITY_BYTES, may_remove=True)
