"""The directory of packs: makes, opens, adopts, lists and removes them, and keeps them within a capacity.

What they take is what the disk says, and processes change it one at a time, under ``ROOT/.lock``. A pack has all of its
room, and that of its journal, before the lock is given back. A pack without an owner is removed where room is needed:
its bytes go before its name, because a reader that is stopped keeps the file open.
"""

import errno
import itertools
import logging
import os
import secrets
import shlex
import stat
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NamedTuple

from kvtier.tiering.fs.directory_lock import DirectoryLock
from kvtier.tiering.fs.file_systems import refusal, require_unshared, try_file_system
from kvtier.tiering.fs.notes import NOTES_SUFFIX
from kvtier.tiering.fs.pack import Pack, PackFiles, page_of, read_boot
from kvtier.tiering.fs.pack_files import (
    JOURNAL_SUFFIX,
    NAMESPACE_NAME,
    NEW_SUFFIX,
    PACK_NAME,
    PACK_SUFFIX,
    TEMPORARY_SUFFIX,
    FoundPack,
    list_all_packs,
    list_older_blocks,
    list_packs,
)
from kvtier.tiering.fs.pack_header import (
    OwnerMark,
    PackHeader,
    disk_bytes_of,
    plan_geometry,
)
from kvtier.tiering.fs.system_calls import (
    PRIVATE_MODE,
    REAL_CALLS,
    SystemCalls,
    open_regular,
    transfer,
)
from kvtier.tiering.kit.backend import allocate_page
from kvtier.tiering.kit.disk import ALIGNMENT_BYTES
from kvtier.tiering.kit.mount import MountPoint
from kvtier.tiering.kit.private_folders import find_refusal, judge, make_folder, make_folders
from kvtier.tiering.kit.siblings import amount_in_words

logger = logging.getLogger(__name__)

SETTLED_NS = 50_000_000
"""Nanoseconds after which a folder's time of change is taken for that of no later change: the file system's clock ticks
every 10 ms at most. Fewer overlook a pack; more list folders that did not change."""

_numbers = itertools.count(1)


class PackStatus(NamedTuple):
    """A pack in the directory.

    Attributes:
        namespace_name: of its namespace.
        name: of its file.
        num_bytes: what it takes of the disk, with its journal.
        used_s: when it was last written, or read by a process that does not own it; seconds since 1970.
        is_owned: whether a process owns it, or it cannot be said.
    """

    namespace_name: str
    name: str
    num_bytes: int
    used_s: float
    is_owned: bool


class PackDirectory:
    """The packs below a directory, as one tier of one process sees them. Thread: any.

    Args:
        root: the directory.
        row_bytes: length of a block.
        capacity_bytes: what all packs of all namespaces may take.
        file_mode: permissions of files.
        direct_io: whether slots shall bypass the page cache.
        pack_bytes: about the length of a pack; None: a part of the capacity.
        process: name of this tier in owners' marks.
        calls: the system.
        clock: seconds, monotonic.
        pause: waits so many seconds.

    Attributes:
        geometry: of new packs.
        has_direct_io: whether slots bypass the page cache, known when the directory is ready.
    """

    def __init__(
        self,
        root: Path,
        row_bytes: int,
        capacity_bytes: int,
        *,
        process: str,
        file_mode: int = PRIVATE_MODE,
        direct_io: bool = False,
        pack_bytes: int | None = None,
        calls: SystemCalls = REAL_CALLS,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.root = root
        self.capacity_bytes = capacity_bytes
        self.file_mode = file_mode
        self.geometry = plan_geometry(row_bytes, capacity_bytes, pack_bytes)
        self.has_direct_io = direct_io and row_bytes % ALIGNMENT_BYTES == 0
        self._files = PackFiles(calls, file_mode, process, clock)
        self._calls = calls
        self._mount = MountPoint(root)
        self._lock = DirectoryLock(root, calls, file_mode, clock, pause)
        self._seen_ns: dict[str, int | None] = {}
        self._older = (0, 0)

    def make_ready(self) -> None:
        """Make the directory, find out what its file system can do, and count blocks of older versions.

        Raises:
            PlaceError: it cannot be written, others may write to it, or packs cannot be kept in its file system.
        """
        require_unshared(self.root, self._calls)
        try:
            make_folders(self.root, self.file_mode)
            reason = find_refusal(self.root, self.file_mode)
            if reason is None:
                # Others remove it where this process is killed, as a dead one's notes.
                probe = self.root / f"{self._files.process}0{NOTES_SUFFIX}"
                can_bypass_cache = try_file_system(probe, self.file_mode, self._calls)
                self.has_direct_io = self.has_direct_io and can_bypass_cache
        except OSError as error:
            reason = f"cannot be written ({error}): give a directory that this user may write"
            raise refusal(self.root, reason) from error
        if reason is not None:
            raise refusal(self.root, reason)
        num_older, older_bytes = self.older_formats()
        if num_older:
            logger.warning(
                "tier fs: %s has %d blocks of an older version, a file each, which take %s and are not read; to remove "
                "them: kvtier purge %s --older-formats",
                self.root,
                num_older,
                amount_in_words(older_bytes),
                shlex.quote(str(self.root)),
            )

    def find_refusal(self) -> str | None:
        """Return why the directory must not be used now; None where it may, or is missing and may be made."""
        if self._mount.is_away():
            return f"nothing is mounted at {self._mount.path} any more"
        return find_refusal(self.root, self.file_mode)

    def locked(self) -> AbstractContextManager[bool]:
        """Hold ``ROOT/.lock``, not twice in one thread; gives False when another process has kept it for a second.

        Raises:
            OSError: the directory is gone or cannot be written, or nothing is mounted there any more.
        """
        self._require_mounted()
        return self._lock.held()

    def folder_of(self, namespace_name: str) -> Path:
        """Return the folder of a namespace. Pure."""
        return self.root / namespace_name

    def make_folder(self, namespace_name: str) -> Path:
        """Make the folder of a namespace unless it is there, and return it.

        Raises:
            OSError: the system refused.
        """
        assert NAMESPACE_NAME.fullmatch(namespace_name), "a namespace has a name of 32 hex digits"
        self._require_mounted()
        folder = self.folder_of(namespace_name)
        make_folder(folder, self.file_mode)
        return folder

    def names(self, namespace_name: str) -> set[str]:
        """Return the names of the packs of a namespace."""
        return {found.path().name for found in list_packs(self.folder_of(namespace_name)) if found.is_whole}

    def changed(self, namespace_name: str) -> bool:
        """Return whether packs of a namespace may have come or gone since the last call; one call of ``stat``."""
        try:
            changed_ns = self.folder_of(namespace_name).stat().st_mtime_ns
        except OSError:
            changed_ns = 0
        if self._seen_ns.get(namespace_name, -1) == changed_ns:
            return False
        # Two changes within one tick of the file system's clock have one time.
        is_settled = time.time_ns() - changed_ns > SETTLED_NS
        self._seen_ns[namespace_name] = changed_ns if is_settled else None
        return True

    def open(self, namespace_name: str, name: str, *, has_own_rows: bool = True) -> Pack | None:
        """Open a pack for reading; None where it is gone, damaged or not of this kind.

        Args:
            namespace_name: whose it is.
            name: of its file.
            has_own_rows: whether its blocks must be as long as this tier's.
        """
        path = self.folder_of(namespace_name) / name
        with suppress(OSError):
            fd = self._open(path, os.O_RDONLY)
            return self._as_pack(path, fd, is_own=False, has_own_rows=has_own_rows)
        return None

    def adopt(self, namespace_name: str, name: str, *, has_own_rows: bool = True) -> Pack | None:
        """Become the owner of a pack, as ``open``; None also where it has one."""
        path = self.folder_of(namespace_name) / name
        with suppress(OSError), self.locked() as is_held:
            if is_held and (fd := self._lock_pack(path)) is not None:
                return self._as_pack(path, fd, is_own=True, has_own_rows=has_own_rows)
        return None

    def create(self, namespace_name: str, limit_bytes: int, *, may_remove: bool) -> Pack | None:
        """Make a pack and own it; None where there is no room, or another process keeps the directory's lock.

        Args:
            namespace_name: whose pack it is; its folder is made if it is missing.
            limit_bytes: what all packs of all namespaces may take.
            may_remove: whether packs without an owner may be removed, those unused for longest first. None is where
                that would not make enough room.

        Raises:
            OSError: the system refused, or the disk is full.
        """
        with self.locked() as is_held:
            if not is_held or not self._make_room(
                limit_bytes - disk_bytes_of(self.geometry), may_remove=may_remove
            ):
                return None
            folder = self.make_folder(namespace_name)
            path = folder / f"{secrets.token_hex(8)}{PACK_SUFFIX}"
            pack = self._make(path)
        # It has its room, which is what the lock is for; the device may take long.
        try:
            pack.sync()
            self._calls.rename(str(path.with_suffix(NEW_SUFFIX)), str(path))
            self._calls.sync_folder(str(folder))
            self._calls.sync_folder(str(self.root))
        except OSError:
            pack.close()
            with suppress(OSError):
                self._unlink(path, PACK_SUFFIX, NEW_SUFFIX, JOURNAL_SUFFIX)
            raise
        return pack

    def remove(self, pack: Pack) -> None:
        """Remove an own pack, or by force another's, and close it. A reader that is stopped keeps none of its bytes.

        Raises:
            OSError: the system refused.
        """
        try:
            if not pack.is_lost():
                self._remove(pack.path)
        finally:
            pack.close()

    def remove_folder(self, namespace_name: str, names_beside: Collection[str]) -> bool:
        """Remove the folder of a namespace and what dead processes have left in it; False while there is more.

        Args:
            namespace_name: the namespace.
            names_beside: of files that go with it.

        Raises:
            OSError: the system refused.
        """
        folder = self.folder_of(namespace_name)
        with self.locked() as is_held:
            if not is_held or not stat.S_ISDIR(folder.lstat().st_mode):
                return False  # what is behind a link is not the tier's
            if [found for found in list_packs(folder) if not self._is_abandoned(found)]:
                return False
            if not {path.name for path in folder.iterdir()} <= set(names_beside):
                return False
            for name in names_beside:
                with suppress(FileNotFoundError):
                    self._calls.unlink(str(folder / name))
            folder.rmdir()
            return True

    def list_packs(self) -> list[PackStatus]:
        """Return the packs of all namespaces. While another process keeps the lock all count as owned.

        Raises:
            OSError: the directory is gone or cannot be written.
        """
        with self.locked() as is_held:
            return [
                PackStatus(
                    found.folder.name,
                    found.path().name,
                    found.num_bytes,
                    found.used_s,
                    not is_held or self._is_owned(found.path()),
                )
                for found in list_all_packs(self.root)
                if found.is_whole
            ]

    def used_bytes(self) -> int:
        """Return what all packs take of the disk, and blocks of older versions as last counted."""
        return sum(found.num_bytes for found in list_all_packs(self.root)) + self._older[1]

    def older_formats(self) -> tuple[int, int]:
        """Count the blocks of a version that kept a file a block; return how many, and the bytes they take."""
        sizes = list(list_older_blocks(self.root))
        self._older = len(sizes), sum(sizes)
        return self._older

    def close_in_child(self) -> None:
        """Close what a forked child has of the directory; its packs are closed one by one."""
        self._lock.close_in_child()

    def _require_mounted(self) -> None:
        """Return if the file system is there: below its mount point a folder of another one may lie."""
        if self._mount.is_away():
            raise FileNotFoundError(errno.ENOENT, "nothing is mounted any more", str(self._mount.path))

    # Packs

    def _open(self, path: Path, flags: int) -> int:
        """Open a pack, or make it, in a folder that no other user may change."""
        found = path.parent.lstat()
        if not stat.S_ISDIR(found.st_mode) or judge(found, self.file_mode, os.geteuid(), os.getegid()):
            raise PermissionError(errno.EPERM, "is no folder of this user alone", str(path.parent))
        if path.suffix not in {PACK_SUFFIX, NEW_SUFFIX} or not PACK_NAME.fullmatch(
            f"{path.stem}{PACK_SUFFIX}"
        ):
            raise FileNotFoundError(errno.ENOENT, "no pack has such a name", str(path))
        direct = os.O_DIRECT if self.has_direct_io else 0
        return open_regular(self._calls, path, flags | direct, self.file_mode)

    def _as_pack(self, path: Path, fd: int, *, is_own: bool, has_own_rows: bool = True) -> Pack | None:
        """Return the pack in an open file, None where it is damaged or not of this kind; then the file is closed."""
        with suppress(OSError):
            page = allocate_page()
            header = PackHeader.unpack(bytes(page[: self._calls.preadv(fd, [page], 0)]))
            # A header may be forged: a pack has no more slots than its file has room for.
            if (
                header is not None
                and header.namespace.hex() == path.parent.name
                and (not has_own_rows or header.geometry.row_bytes == self.geometry.row_bytes)
                and header.geometry.file_bytes <= os.fstat(fd).st_size
            ):
                return Pack(path, fd, header, next(_numbers), is_own=is_own, files=self._files)
        os.close(fd)
        return None

    def _make(self, path: Path) -> Pack:
        """Make a pack under a temporary name, with all the room that it will take. ``.lock`` is held."""
        namespace = bytes.fromhex(path.parent.name)
        header = PackHeader(self.geometry, secrets.token_bytes(16), namespace)
        mark = OwnerMark(read_boot(), self._files.process, bytes(16), is_closed=True)
        pages = [page_of(header.pack()), page_of(mark.pack())]
        fd = self._open(path.with_suffix(NEW_SUFFIX), os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            self._calls.try_lock(fd)
            self._calls.fallocate(fd, 0, 0, self.geometry.file_bytes)
            transfer(self._calls.pwritev, fd, pages, 0)
            return Pack(path, fd, header, next(_numbers), is_own=True, files=self._files)
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                self._unlink(path, NEW_SUFFIX, JOURNAL_SUFFIX)
            raise

    def _lock_pack(self, path: Path) -> int | None:
        """Return an open pack whose lock this process now holds, None where another has it. ``.lock`` is held."""
        fd = self._open(path, os.O_RDWR)
        try:
            if self._calls.try_lock(fd) and os.path.samestat(os.fstat(fd), path.lstat()):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def _is_owned(self, path: Path) -> bool:
        """Return whether a process owns a pack, or that cannot be found out. ``.lock`` is held."""
        try:
            fd = self._lock_pack(path)
        except OSError:
            return True
        if fd is not None:
            os.close(fd)
        return fd is None

    # Room

    def _make_room(self, room_bytes: int, *, may_remove: bool) -> bool:
        """Remove what dead processes left, then packs without an owner, until the rest takes ``room_bytes``.

        Returns whether it does; no pack is removed where that would not be enough. ``.lock`` is held.
        """
        found = [one for one in list_all_packs(self.root) if not self._is_abandoned(one)]
        excess_bytes = sum(one.num_bytes for one in found) + self._older[1] - room_bytes
        victims: list[tuple[Path, int]] = []
        try:
            packs = [one for one in found if one.is_whole]
            for one in sorted(packs, key=lambda one: one.used_s) if may_remove else ():
                if excess_bytes <= 0:
                    break
                with suppress(OSError):
                    if (fd := self._lock_pack(one.path())) is not None:
                        victims.append((one.path(), fd))
                        excess_bytes -= one.num_bytes
            if excess_bytes > 0:
                return False
            for path, _ in victims:
                self._remove(path)
            return True
        finally:
            for _, fd in victims:
                os.close(fd)

    def _is_abandoned(self, found: FoundPack) -> bool:
        """Return whether the files are what a dead process has left of a pack; then they are removed."""
        path = found.path()
        if found.is_whole and found.files[PACK_SUFFIX].st_size:
            return False
        with suppress(OSError):
            if found.is_whole or NEW_SUFFIX in found.files:
                is_abandoned = not self._is_owned(path if found.is_whole else found.path(NEW_SUFFIX))
            else:
                # In this order: the pack may have got its name since the folder was listed.
                is_abandoned = not found.path(NEW_SUFFIX).exists() and not path.exists()
            if is_abandoned:
                self._unlink(path, *found.files)
            return is_abandoned
        return False

    def _remove(self, path: Path) -> None:
        """Remove a pack that this process has locked."""
        fd = self._open(path, os.O_RDWR)
        try:
            self._calls.truncate(fd, 0)
        finally:
            os.close(fd)
        self._unlink(path, PACK_SUFFIX, JOURNAL_SUFFIX, TEMPORARY_SUFFIX)

    def _unlink(self, path: Path, *suffixes: str) -> None:
        """Remove files of a pack, as many of them as can be.

        Raises:
            OSError: one is still there.
        """
        failure: OSError | None = None
        for suffix in suffixes:
            try:
                self._calls.unlink(str(path.with_suffix(suffix)))
            except FileNotFoundError:
                continue
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure
