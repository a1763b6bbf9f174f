"""The shared count of bytes in a directory, changed under a file lock by everyone who writes there.

It walks no directory and removes no block. Room is reserved before a block is written, so that all processes
together never go beyond the capacity. The lock is held for one read and one write of a page; a process that is
stopped in just that moment costs the others their stores and not their threads, since they wait a second at most.
"""

import fcntl
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier.tiering.fs.book import MAX_BOOK_BYTES, MAX_MEMBERS, Book, Change, MemberId, unpack_book
from kvtier.tiering.fs.owner import Owner
from kvtier.tiering.fs.system import open_shared_file

logger = logging.getLogger(__name__)

LOCK_ATTEMPTS = 110
FIRST_LOCK_PAUSE_S = 0.00005
MAX_LOCK_PAUSE_S = 0.01
"""A busy lock is tried again with growing pauses, for a second in all. It is held for microseconds, so a holder
that keeps it longer is stopped or its disk hangs; waiting longer would only hold slots of the primary."""


AHEAD_RESERVATIONS = 3
AHEAD_SHARE = 8
"""A reservation takes room for so many more of its size, for those that follow while it is open, as long as a tier has
no more of that than this part of what is free: others would lack it. More would save hardly anything, since the last to
settle gives back what is left."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a reservation got.

    Attributes:
        num_blocks: blocks that may be written.
        book: the count after it, None when it could not be had or did not change.
    """

    num_blocks: int
    book: Book | None


class Ledger:
    """One tier's access to the book of its directory.

    Mutable are the deque of changes that are not in the book yet, where appending and taking are atomic, and the
    bytes of open reservations and of room that was taken ahead, which ``_lock`` guards. The book itself is guarded by
    the file's ``flock``, and with it what it was last told to be in flight. Room is taken ahead only while there is an
    open reservation, and counts as one in the book.

    Args:
        path: the book.
        owner: this process.
        capacity_bytes: the most that this tier allows in the directory.
        file_mode: permissions of the book when it is made.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self, path: Path, owner: Owner, capacity_bytes: int, file_mode: int, wall_clock: Callable[[], float]
    ) -> None:
        self._path = path
        self._id = MemberId(owner, secrets.randbits(64))
        self._capacity_bytes = capacity_bytes
        self._file_mode = file_mode
        self._wall_clock = wall_clock
        self._unwritten: deque[Change] = deque()
        self._lock = threading.Lock()
        self._open_bytes = 0
        self._ahead_bytes = 0
        self._told_bytes = 0

    def reserve(self, num_blocks: int, block_bytes: int) -> Grant:
        """Take room for as many of ``num_blocks`` as the capacity allows; settle them afterwards.

        Thread: any; blocks, unless enough was taken ahead.
        """
        num_ahead = self._take_ahead(num_blocks, block_bytes)
        if num_ahead == num_blocks:
            return Grant(num_blocks, None)
        granted = further = 0

        def take(book: Book) -> Book:
            nonlocal num_ahead, granted, further
            # Another thread may have taken some while this one waited for the book.
            num_ahead += self._take_ahead(num_blocks - num_ahead, block_bytes)
            num_free = book.room_bytes // block_bytes
            granted = min(num_blocks - num_ahead, num_free)
            further = min(AHEAD_RESERVATIONS * granted, (num_free - granted) // AHEAD_SHARE)
            size = (granted + further) * block_bytes
            self._add_taken(granted * block_bytes, further * block_bytes)
            return book.changed(self._id, Change(used_bytes=size, in_flight_bytes=size))

        after = self._update(take)
        if after is None:
            self._add_taken(-granted * block_bytes, -further * block_bytes)
            return Grant(num_ahead, None)
        return Grant(num_ahead + granted, after)

    def settle(self, reserved_bytes: int, written_bytes: int) -> None:
        """End a reservation: ``written_bytes`` of it are on the disk, the rest is given back.

        When all of it was written and other threads are still writing, the book hears of it with the next change
        or from the last of them. Until then the bytes count as in flight, so nothing is missed. The last also gives
        back what was taken ahead.
        """
        if not reserved_bytes:
            return
        unused_bytes = reserved_bytes - written_bytes
        with self._lock:
            self._open_bytes -= reserved_bytes
            is_last = not self._open_bytes
            if is_last:
                unused_bytes += self._ahead_bytes
                reserved_bytes += self._ahead_bytes
                self._ahead_bytes = 0
            change = Change(-unused_bytes, -reserved_bytes, written_bytes)
            can_wait = not is_last and unused_bytes == 0
            if can_wait:
                self._unwritten.append(change)
        if not can_wait:
            self._change(change)

    def remove(self, num_bytes: int) -> None:
        """Count ``num_bytes`` as gone from the disk."""
        if num_bytes:
            self._change(Change(used_bytes=-num_bytes))

    def begin_removal(self, num_bytes: int) -> None:
        """Say that files are about to be removed while others may count; the directory's evictor need not."""
        if num_bytes:
            self._change(Change(in_flight_bytes=num_bytes))

    def end_removal(self, num_bytes: int, removed_bytes: int) -> None:
        """Count out what was removed of ``num_bytes`` that were announced."""
        if num_bytes:
            self._change(Change(used_bytes=-removed_bytes, in_flight_bytes=-num_bytes))

    def begin_recount(self) -> Book | None:
        """Forget members that died and return the book, None when it cannot be had."""
        here = self._id.owner
        return self._update(lambda book: book.without_dead(here, self._wall_clock()))

    def end_recount(self, found_bytes: int, begun: Book) -> Book | None:
        """Correct the count after a walk that began with the book ``begun``, and return it."""
        return self._update(lambda book: book.recounted(found_bytes, begun.finished_bytes))

    def refresh(self) -> Book | None:
        """Give a sign of life and return the book, None when it cannot be had."""
        return self._update(lambda book: book)

    def leave(self) -> None:
        """Let the others go by their own capacities; the next change joins again."""
        self._update(lambda book: book.left(self._id))

    def _take_ahead(self, num_blocks: int, block_bytes: int) -> int:
        """Return for how many of ``num_blocks`` there was room that had been taken ahead; it is reserved now."""
        with self._lock:
            taken = min(num_blocks, self._ahead_bytes // block_bytes)
            self._ahead_bytes -= taken * block_bytes
            self._open_bytes += taken * block_bytes
        return taken

    def _add_taken(self, open_bytes: int, ahead_bytes: int) -> None:
        """Note what was reserved, and what was taken ahead with it; negative when the book could not be told of it."""
        with self._lock:
            self._open_bytes += open_bytes
            self._ahead_bytes = max(0, self._ahead_bytes + ahead_bytes)

    def _change(self, change: Change) -> None:
        self._update(lambda book: book.changed(self._id, change), if_busy=change)

    def _update(self, edit: Callable[[Book], Book], if_busy: Change | None = None) -> Book | None:
        """Apply ``edit`` and what was left over; None, and ``if_busy`` kept for later, when there is no lock."""
        leftover = [self._unwritten.popleft() for _ in range(len(self._unwritten))]

        def edit_all(book: Book) -> Book:
            is_known = self._id in book.members
            book = book.joined(self._id, self._capacity_bytes, self._wall_clock())
            if not is_known:
                # The book was lost, or this process taken for dead: who has counted since knew nothing of these bytes.
                book = book.changed(self._id, Change(self._told_bytes, self._told_bytes))
            for change in leftover:
                book = book.changed(self._id, change)
            book = edit(book)
            self._told_bytes = book.members[self._id].in_flight_bytes if self._id in book.members else 0
            return book

        try:
            after = self._rewrite(edit_all)
        except OSError as error:
            logger.warning("tier fs: the count in %s cannot be changed: %s", self._path, error)
            after = None
        if after is None:
            self._unwritten.extend(leftover if if_busy is None else [*leftover, if_busy])
        return after

    def _rewrite(self, edit: Callable[[Book], Book]) -> Book | None:
        fd = open_shared_file(self._path, self._file_mode)
        try:
            if not _lock(fd):
                return None
            before = unpack_book(os.pread(fd, MAX_BOOK_BYTES, 0))
            after = edit(before)
            if len(after.members) > MAX_MEMBERS:
                after = after.without_dead(self._id.owner, self._wall_clock())
            os.pwrite(fd, after.pack(), 0)
            return after
        finally:
            # Closing alone would not do: a child that was forked meanwhile has the same lock.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def _lock(fd: int) -> bool:
    pause_s = FIRST_LOCK_PAUSE_S
    for _ in range(LOCK_ATTEMPTS):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_LOCK_PAUSE_S)
        else:
            return True
    return False
