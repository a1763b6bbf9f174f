"""The shared count of bytes in a directory, as a value: what each change makes of it, and its form on disk.

It opens no file. ``used_bytes`` counts blocks on the disk and room that is reserved; each process that writes is a
member with what it has in flight, which is such room, and the capacity it was configured with. The smallest capacity
counts.

A recount walks the directory while others write. It takes what it found, adds what was finished since it began
and what is in flight now: that may count a block twice for a while, and never misses one.

Values are NamedTuples here: each part of a store changes the book while it holds every other writer's lock, and
frozen dataclasses took twice as long.
"""

import fcntl
import logging
import os
import secrets
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from kvtier.tiering.fs.owner import Owner
from kvtier.tiering.fs.system import open_shared_file

MAX_MEMBERS = 1024
"""Members kept; more would make each reservation read more than a few pages."""

BOOK_PAGE_BYTES = 4096
MAX_BOOK_BYTES = 64 * 1024

_MAGIC = b"KVTU"
_VERSION = 1
_HEAD = struct.Struct("<4sHHBxxxQQ")
_MEMBER = struct.Struct("<8sIQQQQd")
_SEAL = struct.Struct("<I")


class MemberId(NamedTuple):
    """One tier of one process.

    Attributes:
        owner: the process.
        tier_id: which of its tiers, a random number below 2**64.
    """

    owner: Owner
    tier_id: int


class UsageMember(NamedTuple):
    """What a member told the others.

    Attributes:
        in_flight_bytes: reserved and not known to be on the disk.
        capacity_bytes: the most that it allows in the directory.
        seen_s: its last sign of life, wall clock.
    """

    in_flight_bytes: int
    capacity_bytes: int
    seen_s: float


class Change(NamedTuple):
    """What a member did.

    Attributes:
        used_bytes: difference to the bytes on the disk and in flight.
        in_flight_bytes: difference to the member's bytes in flight.
        finished_bytes: bytes of blocks that are now on the disk.
    """

    used_bytes: int = 0
    in_flight_bytes: int = 0
    finished_bytes: int = 0


class UsageRecord(NamedTuple):
    """The count.

    Attributes:
        used_bytes: bytes on the disk and in flight, never too few once counted.
        finished_bytes: bytes ever finished; only differences between two readings mean something.
        members: who writes.
        is_counted: False until somebody has walked the directory.
    """

    used_bytes: int = 0
    finished_bytes: int = 0
    members: Mapping[MemberId, UsageMember] = MappingProxyType({})
    is_counted: bool = False

    @property
    def limit_bytes(self) -> int:
        """The smallest capacity of any member, 0 without members."""
        return min((member.capacity_bytes for member in self.members.values()), default=0)

    @property
    def in_flight_bytes(self) -> int:
        """What all members have in flight."""
        return sum(member.in_flight_bytes for member in self.members.values())

    @property
    def room_bytes(self) -> int:
        """What may still be reserved, 0 while nobody has counted."""
        return max(0, self.limit_bytes - self.used_bytes) if self.is_counted else 0

    def joined(self, member_id: MemberId, capacity_bytes: int, now_s: float) -> "UsageRecord":
        """Return the book with a sign of life of the member. Pure."""
        known = self.members.get(member_id)
        in_flight_bytes = known.in_flight_bytes if known else 0
        member = UsageMember(in_flight_bytes, capacity_bytes, now_s)
        return self._replace(members={**self.members, member_id: member})

    def left(self, member_id: MemberId) -> "UsageRecord":
        """Return the book without the member. Pure."""
        rest = {name: member for name, member in self.members.items() if name != member_id}
        return self._replace(members=rest)

    def changed(self, member_id: MemberId, change: Change) -> "UsageRecord":
        """Return the book after ``change`` by a member. Pure."""
        member = self.members[member_id]
        in_flight_bytes = max(0, member.in_flight_bytes + change.in_flight_bytes)
        moved = member._replace(in_flight_bytes=in_flight_bytes)
        return self._replace(
            used_bytes=max(0, self.used_bytes + change.used_bytes),
            finished_bytes=self.finished_bytes + change.finished_bytes,
            members={**self.members, member_id: moved},
        )

    def without_dead(self, here: Owner, now_s: float) -> "UsageRecord":
        """Return the book without members whose process has ended.

        What they had in flight stays in ``used_bytes`` until the recount that this call begins.
        """
        alive = {
            name: member
            for name, member in self.members.items()
            if not name.owner.is_dead(here, now_s - member.seen_s)
        }
        return self._replace(members=alive)

    def recounted(self, found_bytes: int, finished_before_bytes: int) -> "UsageRecord":
        """Return the book after a walk over the directory. Pure.

        Args:
            found_bytes: what the walk found.
            finished_before_bytes: ``finished_bytes`` when it began.
        """
        finished_since_bytes = max(0, self.finished_bytes - finished_before_bytes)
        used_bytes = found_bytes + finished_since_bytes + self.in_flight_bytes
        return self._replace(used_bytes=used_bytes, is_counted=True)

    def pack(self) -> bytes:
        """Return the book's form on disk, whole pages. Pure."""
        parts = [
            _HEAD.pack(
                _MAGIC, _VERSION, len(self.members), self.is_counted, self.used_bytes, self.finished_bytes
            )
        ]
        for name, member in self.members.items():
            owner = name.owner
            host = bytes.fromhex(owner.host)
            numbers = (member.in_flight_bytes, member.capacity_bytes, member.seen_s)
            parts.append(_MEMBER.pack(host, owner.pid, owner.start_ticks, name.tier_id, *numbers))
        body = b"".join(parts)
        sealed = body + _SEAL.pack(zlib.crc32(body))
        return sealed + bytes(-len(sealed) % BOOK_PAGE_BYTES)


def unpack_book(text: bytes) -> UsageRecord:
    """Return the book in ``text``, or an uncounted empty one when it is none or damaged. Pure."""
    if len(text) < _HEAD.size:
        return UsageRecord()
    magic, version, num_members, is_counted, used_bytes, finished_bytes = _HEAD.unpack_from(text)
    body_bytes = _HEAD.size + num_members * _MEMBER.size
    if magic != _MAGIC or version != _VERSION or len(text) < body_bytes + _SEAL.size:
        return UsageRecord()
    if _SEAL.unpack_from(text, body_bytes)[0] != zlib.crc32(text[:body_bytes]):
        return UsageRecord()
    members = {}
    for offset in range(_HEAD.size, body_bytes, _MEMBER.size):
        host, pid, start_ticks, tier_id, *numbers = _MEMBER.unpack_from(text, offset)
        members[MemberId(Owner(host.hex(), pid, start_ticks), tier_id)] = UsageMember(*numbers)
    return UsageRecord(used_bytes, finished_bytes, members, bool(is_counted))


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
    book: UsageRecord | None


class SharedUsage:
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

        def take(book: UsageRecord) -> UsageRecord:
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

    def begin_recount(self) -> UsageRecord | None:
        """Forget members that died and return the book, None when it cannot be had."""
        here = self._id.owner
        return self._update(lambda book: book.without_dead(here, self._wall_clock()))

    def end_recount(self, found_bytes: int, begun: UsageRecord) -> UsageRecord | None:
        """Correct the count after a walk that began with the book ``begun``, and return it."""
        return self._update(lambda book: book.recounted(found_bytes, begun.finished_bytes))

    def refresh(self) -> UsageRecord | None:
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

    def _update(
        self, edit: Callable[[UsageRecord], UsageRecord], if_busy: Change | None = None
    ) -> UsageRecord | None:
        """Apply ``edit`` and what was left over; None, and ``if_busy`` kept for later, when there is no lock."""
        leftover = [self._unwritten.popleft() for _ in range(len(self._unwritten))]

        def edit_all(book: UsageRecord) -> UsageRecord:
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
        except (FileNotFoundError, NotADirectoryError):
            after = None  # somebody has removed the directory: the evictor says so, once, and makes it again
        except OSError as error:
            logger.warning("tier fs: the count in %s cannot be changed: %s", self._path, error)
            after = None
        if after is None:
            self._unwritten.extend(leftover if if_busy is None else [*leftover, if_busy])
        return after

    def _rewrite(self, edit: Callable[[UsageRecord], UsageRecord]) -> UsageRecord | None:
        fd = open_shared_file(self._path, self._file_mode)
        try:
            if not _lock(fd):
                return None
            if os.fstat(fd).st_nlink == 0:
                # Removed while we waited for the lock: what is written there, nobody else would ever read.
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
