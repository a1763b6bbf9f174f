"""The journal of a pack: the file of its records, appended by the pack's owner, read by every process.

An append is one call, and all of it or nothing counts. Readers poll the file's length. An owner whose journal has
become long writes it again, of what the slots hold now, under a temporary name that it then gives the journal's: the
old file has no name any more, which readers notice. What lies under the name and is no file of this user is left
alone by readers; an owner removes it and begins an empty journal.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvtier.tiering.fs.pack_files import TEMPORARY_SUFFIX
from kvtier.tiering.fs.pack_header import PackHeader
from kvtier.tiering.fs.records import (
    NO_RECORDS,
    RECORD_BYTES,
    Change,
    Records,
    long_records,
    pack_changes,
    reserved_bytes,
    seal_records,
    whole_records,
)
from kvtier.tiering.fs.system_calls import KEEP_SIZE, PRIVATE_MODE, SystemCalls, named_when_done, open_regular

_NO_JOURNAL = frozenset({errno.ENOENT, errno.ELOOP, errno.EPERM, errno.ENXIO})
"""What opening says where nothing lies under the name, a link, or no file of this user."""


class Tailed(NamedTuple):
    """What was read of a journal.

    Attributes:
        is_new: whether the journal was replaced, so that ``records`` are all there are.
        records: what was appended since the last reading.
    """

    is_new: bool
    records: Records


class Journal:
    """A pack's journal, open for reading, and for appending by the owner. Thread: any.

    Mutable are the open file and how far it was read and written. ``_lock`` guards them, during I/O as well: a reader
    and an appender must not find the file replaced in between, and the file is on a local disk.

    Args:
        path: the file.
        header: of the pack.
        is_own: whether this process owns the pack; then a missing file is made, and a torn record at the end cut off.
        calls: the system.
        file_mode: permissions of files that are made.

    Attributes:
        num_records: how many it has, as far as an owner knows.
        is_lost: whether there was no such file when it was opened.

    Raises:
        OSError: an own journal cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        header: PackHeader,
        *,
        is_own: bool,
        calls: SystemCalls,
        file_mode: int = PRIVATE_MODE,
    ) -> None:
        self._path = path
        self._pack_id = header.pack_id
        self._num_slots = header.geometry.num_slots
        self._is_own = is_own
        self._calls = calls
        self._file_mode = file_mode
        self._lock = threading.Lock()
        self._fd = -1
        self._num_read = self._seen_bytes = self.num_records = 0
        self._is_settled = self._is_torn = self._is_renamed = False
        self.is_lost = False
        try:
            self._open()
        except OSError as error:
            self.is_lost = True
            if is_own and error.errno not in _NO_JOURNAL:
                self._close()
                raise
            if is_own:
                self._make()

    @property
    def is_long(self) -> bool:
        """Whether the owner should compact it."""
        return self.num_records > long_records(self._num_slots)

    def append(self, changes: Iterable[Change]) -> None:
        """Append records with one call; all of them or none.

        Raises:
            OSError: the system refused, or the disk is full.
        """
        data = pack_changes(changes, self._pack_id)
        with self._lock:
            self._cut_torn()
            # A reader takes no more, and an owner that cannot compact must not fill the disk.
            if self.num_records + len(data) // RECORD_BYTES > self._max_records:
                raise OSError(errno.EFBIG, "the journal is too long", str(self._path))
            try:
                self._write(self._fd, data)
            except OSError:
                self._is_torn = True
                with suppress(OSError):
                    self._cut_torn()
                raise
            self.num_records += len(data) // RECORD_BYTES

    def tail(self) -> Tailed:
        """Read what was appended since the last call. An own journal has its owner's own records, too.

        Raises:
            OSError: it is gone or cannot be read.
        """
        with self._lock:
            status = None if self._fd < 0 else os.fstat(self._fd)
            is_new = status is None or status.st_nlink == 0 or status.st_size < self._num_read * RECORD_BYTES
            if status is None or (is_new and not self._is_own):
                self._close()
                self._open()
                status = os.fstat(self._fd)
            end_bytes = min(status.st_size, self._max_records * RECORD_BYTES)
            start_bytes = self._num_read * RECORD_BYTES
            # Bad records at the end may be on their way. They are read twice at one length, then when it is another.
            if end_bytes - start_bytes < RECORD_BYTES or (end_bytes == self._seen_bytes and self._is_settled):
                return Tailed(is_new, NO_RECORDS)
            data = self._calls.pread(self._fd, end_bytes - start_bytes, start_bytes)
            records, num_read = whole_records(data, self._pack_id, self._num_slots)
            self._is_settled = end_bytes == self._seen_bytes
            self._seen_bytes = end_bytes
            self._num_read += num_read
            return Tailed(is_new, records)

    def rewrite(self, select: Callable[[Records], Records], *, is_durable: bool) -> None:
        """Replace the journal by some of its records, those used longest ago first; nothing is appended meanwhile.

        With durability the new name is on the device before anything more is reported: a loss of power that brought
        the old file back would lose what was appended to the new one.

        Args:
            select: returns what stands in the new one, given a copy of all records of the old one. Pure.
            is_durable: see above.

        Raises:
            OSError: the system refused; the journal is as it was, unless only its name is not on the device yet, which
                the next ``sync`` tries again.
        """
        with self._lock:
            data = self._calls.pread(self._fd, self.num_records * RECORD_BYTES, 0)
            records, _ = whole_records(data, self._pack_id, self._num_slots)
            self._replace(seal_records(select(records.copy()), self._pack_id), is_durable=is_durable)

    def sync(self) -> None:
        """Have the records outlive a loss of power.

        Raises:
            OSError: the system refused.
        """
        with self._lock:
            if self._is_renamed:
                self._sync_name()
            self._calls.sync(self._fd)

    def close(self) -> None:
        """Close the file; idempotent."""
        with self._lock:
            self._close()

    def close_in_child(self) -> None:
        """Close a forked child's copy: a thread of the parent that held the lock does not release it here."""
        self._close()

    @property
    def _max_records(self) -> int:
        """More than an owner writes: it compacts at half of that."""
        return 2 * long_records(self._num_slots)

    def _replace(self, data: bytes, *, is_durable: bool) -> None:
        """Put another file under the journal's name."""
        temporary = self._path.with_suffix(TEMPORARY_SUFFIX)
        flags = os.O_RDWR | os.O_APPEND
        with named_when_done(self._calls, temporary, self._path, flags, self._file_mode) as fd:
            self._write(fd, data)
            if is_durable:
                self._calls.sync(fd)
        self._close()
        self._take(fd, len(data) // RECORD_BYTES)
        self._num_read = self.num_records
        self._is_renamed = True
        if is_durable:
            self._sync_name()

    def _open(self) -> None:
        fd = self._open_file(self._path, 0)
        try:
            num_bytes = os.fstat(fd).st_size
        except OSError:
            os.close(fd)
            raise
        self._take(fd, min(num_bytes // RECORD_BYTES, self._max_records))
        if self._is_own and num_bytes != self.num_records * RECORD_BYTES:
            self._is_torn = True
            self._cut_torn()

    def _make(self) -> None:
        self._close()
        with suppress(FileNotFoundError):
            self._calls.unlink(str(self._path))
        self._take(self._open_file(self._path, os.O_CREAT | os.O_EXCL), 0)
        self._is_renamed = True

    def _write(self, fd: int, data: bytes) -> None:
        if self._calls.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, "the file system took only a part of the records", str(self._path))

    def _open_file(self, path: Path, flags: int) -> int:
        access = os.O_RDWR | os.O_APPEND if self._is_own else os.O_RDONLY
        return open_regular(self._calls, path, access | flags, self._file_mode)

    def _take(self, fd: int, num_records: int) -> None:
        """Go on with another file."""
        self._fd = fd
        self.num_records = num_records
        self._num_read = self._seen_bytes = 0
        self._is_settled = self._is_torn = False
        self._reserve()

    def _reserve(self) -> None:
        if self._is_own:
            with suppress(OSError):  # not every file system can; then an append may find the disk full
                self._calls.fallocate(self._fd, KEEP_SIZE, 0, reserved_bytes(self._num_slots))

    def _cut_torn(self) -> None:
        """Cut off what a failed append has left. While this fails nothing is appended, for it would be no record."""
        if self._is_torn:
            self._calls.truncate(self._fd, self.num_records * RECORD_BYTES)
            self._is_torn = False
            self._reserve()

    def _sync_name(self) -> None:
        self._calls.sync_folder(str(self._path.parent))
        self._is_renamed = False

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with suppress(OSError):  # Linux closes it whatever it says
                os.close(fd)
