"""The file of a slab without an engine: what is in it, whether it is whole, and the emptying of its slots.

The owner of the file writes its slots at any time, header and row with one call, and reads may see the one without the
other. The newest header says from which generation on writes had not ended when it was written. While the file has an
owner, a slot of that generation or a later one that is not whole is being written; an older one is damaged.

Slots are emptied by their owner alone, because it keeps in memory what they hold: while an engine has the file this
refuses. Two that empty slots wait for each other with a lock of their own, which engines do not take.
"""

import errno
import fcntl
import os
import shutil
import stat
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.errors import ConfigError, TierError
from kvtier.settings import parse_settings
from kvtier.tiering.kit.block_pieces import check_in_pieces
from kvtier.tiering.kit.envelope import (
    ENVELOPE_BYTES,
    HEADER_PAGE_BYTES,
    HeaderCheck,
    unpack,
)
from kvtier.tiering.kit.place import (
    DAMAGE,
    Amount,
    BlockState,
    Place,
    PlaceBlock,
    PlaceNamespace,
    PlaceSummary,
    TierFinding,
)
from kvtier.tiering.slab.documents import SlabPages, document_path, drop_documents, read_documents
from kvtier.tiering.slab.scan import oldest_unfinished
from kvtier.tiering.slab.settings import SlabSettings, explain_shrinking
from kvtier.tiering.slab.superblock import (
    SUPERBLOCK_BYTES,
    Origin,
    SlabGeometry,
    Superblock,
    read_superblocks,
)

TIER_TYPE = "slab"

NO_LIMIT_BYTES = 2**63 - 1
LOCK_TABLE = Path("/proc/locks")

F_OFD_SETLKW = 38
"""Source: <asm-generic/fcntl.h>; Python 3.11 has no name for it."""

_OFD_LOCK = struct.Struct("hhqqi")
"""``struct flock`` of 64-bit Linux. Source: fcntl(2)."""


class SlabPlace(Place):
    """The file of one engine.

    Args:
        path: the file.
        fd: it, open for reading.
        geometry: how it is divided.

    Attributes:
        geometry: likewise.
    """

    tier: ClassVar[str] = TIER_TYPE
    has_times: ClassVar[bool] = False

    def __init__(self, path: Path, fd: int, geometry: SlabGeometry) -> None:
        super().__init__(str(path))
        self._path = path
        self._fd = fd
        self.geometry = geometry
        self._other_format = Amount()
        self._locked_fd: int | None = None
        self._oldest_unfinished = 0

    def namespaces(self) -> list[PlaceNamespace]:
        documents = read_documents(document_path(self._path))
        names = {block.namespace for block in self.blocks()} | documents.keys()
        return [PlaceNamespace(name, documents.get(name, "")) for name in sorted(names)]

    def blocks(self, namespaces: Collection[str] | None = None) -> Iterator[PlaceBlock]:
        self._other_format = Amount()
        for slot in range(self.geometry.num_slots):
            header = self._read_header(slot)
            found = HeaderCheck.DAMAGED if header is None else unpack(header)
            if found is HeaderCheck.OTHER_VERSION:
                self._other_format = self._other_format.plus(1, self.geometry.slot_bytes)
            if isinstance(found, HeaderCheck):
                continue  # an empty slot, or one that its engine will take for empty
            if namespaces is None or found.namespace.hex() in namespaces:
                yield PlaceBlock(
                    namespace=found.namespace.hex(),
                    address=f"slot {slot}",
                    num_bytes=self.geometry.slot_bytes,
                    used_s=None,
                    stamp=(slot, found.generation),
                    tenant=None if found.is_encrypted else get_offload_tenant(OffloadKey(found.key)),
                    name=found.key,
                )

    def summary(self) -> PlaceSummary:
        return PlaceSummary(
            capacity_bytes=self.geometry.file_bytes,
            other_format=self._other_format,
            users=() if self._locked_fd is not None else find_owners(self._fd),
        )

    def check(self, block: PlaceBlock) -> BlockState:
        state = self._check_once(block)
        if state in DAMAGE:
            state = self._check_once(block)
        if state not in DAMAGE or self._locked_fd is not None or not find_owners(self._fd):
            return state
        generation = block.stamp[1]
        if generation >= self._oldest_unfinished:
            self._oldest_unfinished = self._find_oldest_unfinished()  # it only grows
        return BlockState.BEING_WRITTEN if generation >= self._oldest_unfinished else state

    def begin_removal(self) -> None:
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise TierError(TIER_TYPE, f"{self._path} cannot be written: {error.strerror}") from error
        try:
            _wait_for_others(fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owners = ", ".join(find_owners(fd)) or "an engine"
            os.close(fd)
            message = (
                f"{self._path} belongs to {owners}, which is running and alone may empty its slots: "
                "end it first"
            )
            raise TierError(TIER_TYPE, message) from error
        except OSError as error:
            os.close(fd)
            raise TierError(TIER_TYPE, f"{self._path} cannot be locked: {error.strerror}") from error
        self._locked_fd = fd

    def remove(self, blocks: Sequence[PlaceBlock], *, unless_changed: bool) -> Amount:
        fd = self._locked_fd
        assert fd is not None, "begin_removal comes first"
        removed = Amount()
        for block in blocks:
            # Two that empty slots read them before they have the lock: what the other has emptied is not counted.
            slot, generation = block.stamp
            header = self._read_header(slot)
            found = HeaderCheck.DAMAGED if header is None else unpack(header)
            if isinstance(found, HeaderCheck) or found.generation != generation:
                continue
            try:
                os.pwrite(fd, bytes(HEADER_PAGE_BYTES), self.geometry.offset_of(slot))
            except OSError as error:
                message = f"slot {slot} of {self._path} cannot be emptied: {error.strerror}"
                raise TierError(TIER_TYPE, message) from error
            removed = removed.plus(1, block.num_bytes)
        return removed

    def end_removal(self, namespaces: Collection[str]) -> None:
        if self._locked_fd is None:
            return
        try:
            drop_documents(document_path(self._path), namespaces)
            SlabPages(self._path).remove(namespaces)
            os.fsync(self._locked_fd)
        except OSError as error:
            raise TierError(TIER_TYPE, f"{self._path} was not written: {error.strerror}") from error
        finally:
            self._give_back_lock()

    def close(self) -> None:
        self._give_back_lock()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _give_back_lock(self) -> None:
        if self._locked_fd is not None:
            fcntl.flock(self._locked_fd, fcntl.LOCK_UN)
            os.close(self._locked_fd)
            self._locked_fd = None

    def _read_header(self, slot: int) -> bytes | None:
        """Return the header of a slot, None where the disk does not give it."""
        try:
            return os.pread(self._fd, HEADER_PAGE_BYTES, self.geometry.offset_of(slot))
        except OSError as error:
            if error.errno in {errno.EIO, errno.EBADMSG}:
                return None
            raise TierError(TIER_TYPE, f"{self._path} cannot be read: {error.strerror}") from error

    def _check_once(self, block: PlaceBlock) -> BlockState:
        slot, generation = block.stamp
        offset, slot_bytes = self.geometry.offset_of(slot), self.geometry.slot_bytes

        def read(start: int, num_bytes: int) -> bytes:
            return os.pread(self._fd, num_bytes, offset + HEADER_PAGE_BYTES + start)

        try:
            header = os.pread(self._fd, HEADER_PAGE_BYTES, offset)
            found = unpack(header)
            if isinstance(found, HeaderCheck) or found.generation != generation:
                return BlockState.GONE  # the slot was emptied, or holds another block by now
            # The first page says how long a slot is, and may be forged.
            state = check_in_pieces(
                header, slot_bytes - HEADER_PAGE_BYTES, read, block.namespace, None, self.opener
            )
            os.posix_fadvise(self._fd, offset, slot_bytes, os.POSIX_FADV_DONTNEED)
        except OSError:
            return BlockState.UNREADABLE
        return state

    def _find_oldest_unfinished(self) -> int:
        """Return the generation from which on writes had not ended, as the newest header says."""
        newest = oldest = 0
        for slot in range(self.geometry.num_slots):
            header = self._read_header(slot)
            if header is None or len(header) <= ENVELOPE_BYTES:
                continue
            found = unpack(header)
            if not isinstance(found, HeaderCheck) and found.generation >= newest:
                newest, oldest = found.generation, oldest_unfinished(header)
        return oldest


REASONS = {
    Origin.EMPTY: "is empty: no slab tier has used it yet",
    Origin.FOREIGN: "is no slab: give the path of a slab tier",
    Origin.OTHER_VERSION: "is a slab of another version",
    Origin.DAMAGED: "is a slab whose first page and its copy at the end are damaged: remove it, or restore one of them",
}
"""Why a file is no place."""


def open_slab_place(own: Mapping[str, object]) -> SlabPlace:
    """Return the place of a tier's own settings; the capacity need not be among them.

    Raises:
        ConfigError: there is no such file, it cannot be read, or it is no slab.
    """
    settings = parse_settings(SlabSettings, {"capacity_bytes": NO_LIMIT_BYTES, **own}, f"tier {TIER_TYPE!r}")
    try:
        found = _open(settings.path)
    except OSError as error:
        remedy = f"cannot be read ({error.strerror}): give the file of a slab tier"
        raise ConfigError("PLACE", str(settings.path), remedy) from error
    if isinstance(found, Origin):
        raise ConfigError("PLACE", str(settings.path), REASONS[found])
    return found


def _open(path: Path) -> SlabPlace | Origin:
    """Return the place in a file, or what the file is instead.

    Raises:
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    found: Superblock = Origin.FOREIGN
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            found = read_superblocks(fd).geometry
    except OSError:
        os.close(fd)
        raise
    if isinstance(found, SlabGeometry):
        return SlabPlace(path, fd, _cut(found, os.fstat(fd).st_size))
    os.close(fd)
    return found


def _cut(geometry: SlabGeometry, num_bytes: int) -> SlabGeometry:
    """Return the slots that are whole in a file of that length: it may be cut, or its first page forged. Pure."""
    num_there = max(0, num_bytes - SUPERBLOCK_BYTES) // geometry.slot_bytes
    return SlabGeometry(geometry.row_bytes, min(geometry.num_slots, num_there))


def probe_slab_place(own: Mapping[str, object]) -> list[TierFinding]:
    """Return whether a tier could use its file, which it would make.

    Raises:
        ConfigError: a setting that cannot work.
    """
    settings = parse_settings(SlabSettings, own, f"tier {TIER_TYPE!r}")
    path = settings.path
    if path.exists():
        return [_probe_file(settings)]
    folder = path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        text = f"{folder} is no directory that this user may write: make it first"
        return [TierFinding(is_good=False, text=text)]
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < settings.capacity_bytes:
        text = f"capacity_bytes is {settings.capacity_bytes}, and {folder} has {free_bytes} free: give less"
        return [TierFinding(is_good=False, text=text)]
    return [TierFinding(is_good=True, text=f"{path} will be made, {free_bytes} bytes are free")]


def _probe_file(settings: SlabSettings) -> TierFinding:
    path = settings.path
    try:
        found = _open(path)
    except OSError as error:
        return TierFinding(is_good=False, text=f"{path} cannot be read: {error.strerror}")
    if isinstance(found, Origin):
        # A tier formats an empty file, and one of another version; what is foreign or damaged it refuses.
        is_good = found not in {Origin.FOREIGN, Origin.DAMAGED}
        return TierFinding(is_good, f"{path} {REASONS[found]}", is_note=is_good)
    owners, shrinking = found.summary().users, explain_shrinking(settings, found.geometry)
    found.close()
    if owners:
        text = f"{path} belongs to {', '.join(owners)}: give each engine a file of its own"
        return TierFinding(is_good=False, text=text)
    if shrinking is not None:
        return TierFinding(is_good=False, text=f"capacity_bytes {settings.capacity_bytes} {shrinking}")
    return TierFinding(is_good=True, text=f"{path} is a slab without an owner")


def find_owners(fd: int, lock_table: Path = LOCK_TABLE) -> tuple[str, ...]:
    """Return the processes that hold the lock of an engine on an open file, in words.

    The kernel's table is read: to try the lock could make a starting engine believe that another has the file.
    """
    status = os.fstat(fd)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = lock_table.read_text(encoding="ascii").splitlines()
    except OSError:
        return (f"an unknown process ({lock_table} cannot be read)",)
    # "1: FLOCK  ADVISORY  WRITE 4711 08:01:1234 0 EOF"; one that waits for a lock has an arrow in front of FLOCK.
    held = [words for line in lines if (words := line.split())[1:4:2] == ["FLOCK", "WRITE"]]
    return tuple(_describe(pid) for pid in sorted({words[4] for words in held if words[5] == place}))


def _describe(pid: str) -> str:
    with suppress(OSError):
        # The name alone: arguments may hold what no message should.
        return f"process {pid} ({Path(f'/proc/{pid}/comm').read_text(encoding='utf-8', errors='replace').strip()})"
    return f"process {pid}" if pid.isdigit() and pid != "0" else "a process of another container"


def _wait_for_others(fd: int) -> None:
    """Wait until no other process is emptying slots of the file."""
    lock = _OFD_LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    fcntl.fcntl(fd, F_OFD_SETLKW, lock)
