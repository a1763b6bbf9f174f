"""From a path to a locked, formatted slab: refuses what is not ours, reserves the room, chooses the kind of I/O.

A file is formatted in an order that a crash may interrupt anywhere: emptied, superblock, room, copy of the superblock.
The next opening formats an empty file, gives one that is too short the rest of its room, and writes what is missing of
the two superblocks. A file of ours of which neither can be used is refused: what is in its slots may be saved.
"""

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum

from kvtier.errors import ConfigError, PlaceError, TierError
from kvtier.tiering.kit.backend import allocate_page
from kvtier.tiering.kit.disk import ALIGNMENT_BYTES, Durability, is_aligned, sync_folder
from kvtier.tiering.slab.settings import SlabSettings, explain_shrinking
from kvtier.tiering.slab.slab_file import SlabFile, SystemCalls
from kvtier.tiering.slab.superblock import (
    Origin,
    SlabGeometry,
    Superblock,
    Superblocks,
    fit_geometry_without_copy,
    pack_superblock,
    read_superblocks,
)

logger = logging.getLogger(__name__)

FILE_MODE = 0o600
STAT_BLOCK_BYTES = 512
"""Unit of ``st_blocks``. Source: stat(3type)."""


class Opening(Enum):
    """What is done with a file."""

    KEEP = "keep"
    FORMAT = "format"
    FORMAT_ANEW = "format anew"
    REFUSE = "refuse"
    REFUSE_DAMAGED = "refuse damaged"


def open_slab(
    settings: SlabSettings, geometry: SlabGeometry, rows: memoryview, calls: SystemCalls
) -> SlabFile:
    """Open the slab of ``settings`` for rows such as these, made when it is missing.

    Args:
        settings: where it is.
        geometry: how it is divided if it is made; one of an older version may have a slot more.
        rows: the primary's, shape (num_blocks, row_stride).
        calls: the system.

    Raises:
        ConfigError: the file is not ours, damaged in both superblocks or cannot be made, the disk has no room, or
            direct I/O is insisted on and impossible.
        TierError: another process, or another tier of this one, owns the file.
    """
    with _translated(settings):
        fd, is_created = _open(settings)
    is_owner = False
    try:
        with _translated(settings):
            _lock(fd, settings)
            is_owner = True
            is_new, geometry = _make_usable(fd, settings, geometry, calls)
            if settings.durability is Durability.FDATASYNC:
                os.fdatasync(fd)  # blocks that an engine without it has written are reported as held
                sync_folder(str(settings.path.parent))
            has_direct_io = _choose_io(fd, settings, calls, are_rows_aligned=is_aligned(rows))
    except BaseException:
        if is_created and is_owner:
            with suppress(OSError):
                settings.path.unlink()
        os.close(fd)
        raise
    return SlabFile(settings.path, fd, geometry, is_new=is_new, has_direct_io=has_direct_io, calls=calls)


def plan_opening(found: Superblock, *wanted: SlabGeometry) -> Opening:
    """Decide what to do with a file, given what its superblocks say and which geometries will do. Pure."""
    if found is Origin.EMPTY:
        return Opening.FORMAT
    if found is Origin.FOREIGN:
        return Opening.REFUSE
    if found is Origin.DAMAGED:
        return Opening.REFUSE_DAMAGED
    return Opening.KEEP if found in wanted else Opening.FORMAT_ANEW


def _open(settings: SlabSettings) -> tuple[int, bool]:
    """Open the file, or make it; returns whether it was made. Never waits, whatever kind of file it is."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    if settings.durability is Durability.FDATASYNC:
        flags |= os.O_DSYNC  # each write ends as if with fdatasync
    try:
        return os.open(settings.path, flags | os.O_CREAT | os.O_EXCL, FILE_MODE), True
    except FileExistsError:
        return os.open(settings.path, flags), False


@contextmanager
def _translated(settings: SlabSettings) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = f"cannot be used ({error}): give a file that this user may make, in a folder that exists"
        raise PlaceError("path", str(settings.path), remedy) from error


def _lock(fd: int, settings: SlabSettings) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise PlaceError("path", str(settings.path), "is not a regular file: give the path of one")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        message = f"{settings.path} belongs to an engine that is running: give each engine a file of its own"
        raise TierError("slab", message) from error
    # The process that made the file may have failed and removed it, between our opening and our locking it.
    if not os.path.samestat(status, settings.path.lstat()):
        raise TierError("slab", f"{settings.path} was replaced while it was opened: start again")


def _make_usable(
    fd: int, settings: SlabSettings, geometry: SlabGeometry, calls: SystemCalls
) -> tuple[bool, SlabGeometry]:
    """Bring the file into its form; returns whether it holds nothing, and how it is divided.

    Raises:
        ConfigError: it is not ours, or there is no room.
    """
    found = read_superblocks(fd)
    older = fit_geometry_without_copy(settings.capacity_bytes, geometry.row_bytes)
    opening = plan_opening(found.geometry, geometry, older)
    if opening is Opening.REFUSE_DAMAGED:
        remedy = (
            "is a slab whose first page and its copy at the end are both damaged, and was left as it is: restore "
            "one of them, or remove the file to begin with an empty one"
        )
        raise PlaceError("path", str(settings.path), remedy)
    if opening is Opening.REFUSE:
        remedy = "holds something else and was left as it is: give a path that is free, or an empty file"
        raise PlaceError("path", str(settings.path), remedy)
    if stat.S_IMODE(os.fstat(fd).st_mode) != FILE_MODE:
        with suppress(OSError):  # another user's file, or a file system without modes
            os.fchmod(fd, FILE_MODE)
    if opening is Opening.FORMAT_ANEW:
        if isinstance(found.geometry, SlabGeometry):
            _require_no_shrinking(settings, found.geometry)
        logger.warning(
            "tier slab: %s was made for other rows or another capacity; it is emptied", settings.path
        )
    if opening is Opening.KEEP:
        assert isinstance(found.geometry, SlabGeometry)
        geometry = found.geometry
    else:
        _require_room(fd, settings, geometry.file_bytes)
        _format(fd, geometry)
        found = Superblocks(geometry, Origin.EMPTY)
    is_copied = os.fstat(fd).st_size == geometry.file_bytes
    _allocate(fd, settings, geometry.file_bytes, calls)
    _repair(fd, settings, geometry, found, is_copied=is_copied)
    return opening is not Opening.KEEP, geometry


def _require_no_shrinking(settings: SlabSettings, found: SlabGeometry) -> None:
    reason = explain_shrinking(settings, found)
    if reason is not None:
        raise PlaceError("capacity_bytes", settings.capacity_bytes, reason)


def _repair(
    fd: int, settings: SlabSettings, geometry: SlabGeometry, found: Superblocks, *, is_copied: bool
) -> None:
    """Write the superblock that is missing or damaged; ``is_copied`` says that there ought to be two."""
    if found == (geometry, geometry):
        return
    page = allocate_page()
    superblock = pack_superblock(geometry)
    page[: len(superblock)] = superblock
    is_first = found.first != geometry
    os.pwrite(fd, page, 0 if is_first else geometry.copy_offset)
    os.fsync(fd)
    if is_first or is_copied:
        which = ("first page", "copy at the end") if is_first else ("copy of its first page", "first page")
        logger.warning(
            "tier slab: the %s of %s was damaged, and is repaired from its %s",
            which[0],
            settings.path,
            which[1],
        )


def _require_room(fd: int, settings: SlabSettings, file_bytes: int) -> None:
    """Refuse before anything is lost what a full disk would refuse afterwards."""
    disk = os.fstatvfs(fd)
    room_bytes = disk.f_bavail * disk.f_frsize + os.fstat(fd).st_blocks * STAT_BLOCK_BYTES
    if room_bytes < file_bytes:
        raise _no_room(settings, file_bytes, f"{room_bytes} are free")


def _format(fd: int, geometry: SlabGeometry) -> None:
    os.ftruncate(fd, 0)
    page = allocate_page()
    superblock = pack_superblock(geometry)
    page[: len(superblock)] = superblock
    os.pwrite(fd, page, 0)
    # A loss of power may otherwise leave a file of zeros, which cannot be told from a foreign one.
    os.fsync(fd)


def _allocate(fd: int, settings: SlabSettings, file_bytes: int, calls: SystemCalls) -> None:
    status = os.fstat(fd)
    if status.st_size == file_bytes and status.st_blocks * STAT_BLOCK_BYTES >= file_bytes:
        return
    try:
        calls.allocate(fd, 0, file_bytes)
        os.ftruncate(fd, file_bytes)
    except OSError as error:
        os.ftruncate(fd, min(status.st_size, file_bytes))
        raise _no_room(settings, file_bytes, str(error)) from error


def _no_room(settings: SlabSettings, file_bytes: int, reason: str) -> PlaceError:
    remedy = f"{settings.path} needs {file_bytes} bytes on its disk ({reason}): free some or give less"
    return PlaceError("capacity_bytes", file_bytes, remedy)


def _choose_io(fd: int, settings: SlabSettings, calls: SystemCalls, *, are_rows_aligned: bool) -> bool:
    """Bypass the page cache where it was not ruled out and works, and return whether; says once why not.

    Raises:
        ConfigError: it is insisted on and impossible.
    """
    if settings.direct_io is False:
        return False
    if not are_rows_aligned:
        reason = (
            f"rows of the primary tier are not multiples of {ALIGNMENT_BYTES} bytes in address and length"
        )
    elif _take_direct(fd, calls):
        return True
    else:
        reason = f"the file system of {settings.path} refuses it"
    if settings.direct_io:
        raise ConfigError("direct_io", value=True, remedy=f'{reason}: say "auto" to go without')
    logger.info("tier slab: no direct I/O, %s; blocks go through the page cache", reason)
    return False


def _take_direct(fd: int, calls: SystemCalls) -> bool:
    """Set direct I/O and try it on the first page, which is written as it was read."""
    page = allocate_page()
    try:
        calls.set_flags(fd, os.O_DIRECT)
        is_read = calls.preadv(fd, [page], 0) == len(page)
        if is_read and calls.pwritev(fd, [page], 0) == len(page):
            return True
    except OSError:
        pass
    with suppress(OSError):
        calls.set_flags(fd, 0)
    return False
