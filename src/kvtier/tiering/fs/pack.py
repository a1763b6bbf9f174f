"""An open pack: its slots, the lock and the mark of its owner, and its journal.

The owner is the process that holds the pack's ``flock``, and it alone writes. As the lock is taken the owner writes a
random number into its page: another number found there later means that the lock does not exclude, as in a file system
of which each guest has lock tables of its own.
"""

import errno
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvtier.tiering.fs.journal import Journal
from kvtier.tiering.fs.pack_files import JOURNAL_SUFFIX
from kvtier.tiering.fs.pack_header import OWNER_OFFSET, OwnerMark, PackHeader
from kvtier.tiering.fs.system_calls import (
    KEEP_SIZE,
    NOT_SUPPORTED,
    PRIVATE_MODE,
    PUNCH_HOLE,
    REAL_CALLS,
    Buffers,
    SystemCalls,
    transfer,
)
from kvtier.tiering.kit.backend import allocate_page

logger = logging.getLogger(__name__)

TOUCH_S = 60.0
"""Seconds between two notes of a pack's use. Shorter writes more inodes; longer tells less exactly which packs without
an owner are in use."""

NO_BOOT = bytes(16)
BOOT_PATH = Path("/proc/sys/kernel/random/boot_id")


def read_boot() -> bytes:
    """Return the id of this boot of the kernel, zeros where it is not known."""
    try:
        return bytes.fromhex(BOOT_PATH.read_text(encoding="ascii").strip().replace("-", ""))
    except (OSError, ValueError):
        return NO_BOOT


class PackFiles(NamedTuple):
    """What all packs of a directory have in common.

    Attributes:
        calls: the system.
        file_mode: permissions of files.
        process: name of this tier in owners' marks.
        clock: seconds, monotonic.
    """

    calls: SystemCalls = REAL_CALLS
    file_mode: int = PRIVATE_MODE
    process: str = "0"
    clock: Callable[[], float] = time.monotonic


class Pack:
    """An open pack; one that is own is locked. Threads may read and write slots at once, until it is closed.

    Args:
        path: the file.
        fd: open, and locked if the pack is own; closed with the pack.
        header: what its first page says, checked.
        number: unique in the process, so that an address can name the pack.
        is_own: whether this process owns it; then it marks the pack as its own.
        files: what it has in common with others.

    Attributes:
        name: of the file.
        geometry: how it is divided.
        journal: of its slots.
        was_closed: whether the owner before has ended as it should; of an own pack.
        same_boot: whether that owner ran under this boot of the kernel.

    Raises:
        OSError: the journal of an own pack cannot be opened, or the mark not be written; ``fd`` stays open.
    """

    def __init__(
        self, path: Path, fd: int, header: PackHeader, number: int, *, is_own: bool, files: PackFiles
    ) -> None:
        self.path = path
        self.name = path.name
        self.header = header
        self.geometry = header.geometry
        self.number = number
        self.is_own = is_own
        self.was_closed = self.same_boot = True
        self._fd = fd
        self._calls = files.calls
        self._clock = files.clock
        self._touched_s: float | None = None
        self._mark = OwnerMark(read_boot(), files.process, secrets.token_bytes(16), is_closed=False)
        if is_own:
            self._become_owner()
        self.journal = Journal(
            path.with_suffix(JOURNAL_SUFFIX),
            header,
            is_own=is_own,
            calls=files.calls,
            file_mode=files.file_mode,
        )

    def write(self, slot: int, buffers: Buffers) -> None:
        """Write ``buffers`` over the slots from ``slot`` on.

        Raises:
            OSError: the system refused; the slots are then of no use.
        """
        if transfer(self._calls.pwritev, self._fd, buffers, self.geometry.offset_of(slot)) < sum(
            map(len, buffers)
        ):
            raise OSError(errno.ENOSPC, "the file system took only a part of the block", str(self.path))

    def read(self, slot: int, buffers: Buffers, skipped_bytes: int = 0) -> int:
        """Fill ``buffers`` from ``slot`` on; return how many bytes arrived, fewer from a pack that was cut.

        Args:
            slot: the first.
            buffers: where the bytes go.
            skipped_bytes: of the slot, in front of those.

        Raises:
            OSError: the system could not read.
        """
        offset = self.geometry.offset_of(slot) + skipped_bytes
        return transfer(self._calls.preadv, self._fd, buffers, offset)

    def punch(self, slots: Iterable[int]) -> None:
        """Remove the bytes of slots, so that nothing of them can be read; give their room to the file system if it can.

        Raises:
            OSError: the system refused.
        """
        for first, num in _runs_of(slots):
            offset, num_bytes = self.geometry.offset_of(first), num * self.geometry.slot_bytes
            try:
                self._calls.fallocate(self._fd, PUNCH_HOLE | KEEP_SIZE, offset, num_bytes)
            except OSError as error:
                if error.errno not in NOT_SUPPORTED:
                    raise
                for slot in range(first, first + num):
                    self.write(slot, [allocate_page()])

    def sync(self) -> None:
        """Have the slots outlive a loss of power; the journal has a call of its own.

        Raises:
            OSError: the system refused.
        """
        self._calls.sync(self._fd)

    def is_lost(self) -> bool:
        """Return whether the pack was removed, replaced, moved or cut."""
        try:
            found = os.fstat(self._fd)
            return found.st_size < self.geometry.file_bytes or not os.path.samestat(found, self.path.lstat())
        except OSError:
            return True

    def has_other_owner(self) -> bool:
        """Return whether another process has marked this own pack, so that locks do not exclude here.

        A damaged mark tells nothing, nor does one that came with another pack's header: see ``is_overwritten``.
        """
        return self._has_other_mark() and not self._has_other_header()

    def is_overwritten(self) -> bool:
        """Return whether another pack was copied over this own one."""
        return self._has_other_mark() and self._has_other_header()

    def read_owner(self) -> str | None:
        """Return the name of the process that owns the pack, or did last; None where its mark is damaged."""
        found = self._read_mark()
        return None if found is None else found.process

    def forget_cached(self, slot: int) -> None:
        """Have the page cache forget a slot that nothing is expected to read soon."""
        with suppress(OSError):
            offset = self.geometry.offset_of(slot)
            os.posix_fadvise(self._fd, offset, self.geometry.slot_bytes, os.POSIX_FADV_DONTNEED)

    def touch(self) -> None:
        """Note that the pack is in use, once a minute: of packs without an owner the one unused for longest goes."""
        now_s = self._clock()
        if self._touched_s is None or now_s - self._touched_s >= TOUCH_S:
            self._touched_s = now_s
            with suppress(OSError):
                os.utime(self._fd)

    def close(self, *, unlock: bool = True, is_first_to_go: bool = False) -> None:
        """Close the files, and let another process own the pack; idempotent. No other call may be under way.

        Args:
            unlock: False in a forked child: lock and mark are its parent's, too.
            is_first_to_go: whether it counts as unused since 1970, so that it is removed first where room is needed.
        """
        (self.journal.close if unlock else self.journal.close_in_child)()
        if self._fd < 0:
            return
        if self.is_own and unlock:
            try:
                # What was written before may not be on the device yet: an adopter of another boot looks at it anyway.
                if not self.has_other_owner():
                    self._write_mark(self._mark._replace(is_closed=True))
            except OSError as error:
                logger.warning("tier fs: %s could not be marked as closed: %s", self.path, error)
            if is_first_to_go:
                with suppress(OSError):
                    os.utime(self._fd, (0, 0))  # after the mark, whose write is a use
            with suppress(OSError):  # closing alone would leave the lock to a child that was forked meanwhile
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        fd, self._fd = self._fd, -1
        with suppress(OSError):  # Linux closes it whatever it says
            os.close(fd)

    def _become_owner(self) -> None:
        before = self._read_mark()
        self.was_closed = before is not None and before.is_closed
        self.same_boot = before is not None and before.boot == self._mark.boot != NO_BOOT
        self._write_mark(self._mark)

    def _has_other_mark(self) -> bool:
        found = self._read_mark()
        return found is not None and found.token != self._mark.token

    def _has_other_header(self) -> bool:
        found = PackHeader.unpack(self._read_page(0))
        return found is not None and found.pack_id != self.header.pack_id

    def _read_mark(self) -> OwnerMark | None:
        return OwnerMark.unpack(self._read_page(OWNER_OFFSET))

    def _read_page(self, offset: int) -> bytes:
        """Return a page, or what there is of it."""
        page = allocate_page()  # direct I/O
        try:
            num_bytes = self._calls.preadv(self._fd, [page], offset)
        except OSError:
            return b""
        return bytes(page[:num_bytes])

    def _write_mark(self, mark: OwnerMark) -> None:
        page = page_of(mark.pack())
        if transfer(self._calls.pwritev, self._fd, [page], OWNER_OFFSET) != len(page):
            raise OSError(
                errno.ENOSPC, "the file system took only a part of the owner's mark", str(self.path)
            )


def page_of(data: bytes) -> memoryview:
    """Return an aligned page that begins with ``data``."""
    page = allocate_page()
    page[: len(data)] = data
    return page


def _runs_of(slots: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first of neighbouring slots, and how many they are."""
    first = num = 0
    for slot in sorted(slots):
        if num and slot == first + num:
            num += 1
        else:
            if num:
                yield first, num
            first, num = slot, 1
    if num:
        yield first, num
