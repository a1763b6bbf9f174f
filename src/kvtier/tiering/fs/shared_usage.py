"""The shared count of bytes in a directory: the record, its form on disk, and one tier's access to it.

``used_bytes`` counts blocks on the disk and room that is reserved; each process that writes is a member with what it
has in flight, which is such room, and the capacity it was configured with. The smallest capacity counts.

A recount walks the directory while others write. It takes what it found, adds what was finished since it began
and what is in flight now: that may count a block twice for a while, and never misses one.

Values are NamedTuples here: each task of a store changes the record under the lock that every other writer needs, and
frozen dataclasses took twice as long.
"""

import errno
import fcntl
import os
import secrets
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from kvtier.tiering.fs.system import PRIVATE_MODE, Owner, set_file_mode
from kvtier.tiering.kit.health import OutageLog

MAX_MEMBERS = 1024
"""Members kept; more would make each reservation read more than a few pages."""

RECORD_PAGE_BYTES = 4096
MAX_RECORD_BYTES = 64 * 1024

_MAGIC = b"KVTU"
_VERSION = 1
_HEAD = struct.Struct("<4sHHBxxxQQ")
_MEMBER = struct.Struct("<8sIQQQQd")
_CHECKSUM = struct.Struct("<I")


class MemberId(NamedTuple):
    """One tier of one process.

    Attributes:
        owner: the process.
        tier_id: which of its tiers, a random number below 2**64.
    """

    owner: Owner
    tier_id: int


class UsageMember(NamedTuple):
    """What the record says of a member.

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
        is_counted: False before the first recount.
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
        """What may still be reserved, 0 before the first recount."""
        return max(0, self.limit_bytes - self.used_bytes) if self.is_counted else 0

    def joined(
        self, member_id: MemberId, capacity_bytes: int, now_s: float, in_flight_bytes: int = 0
    ) -> "UsageRecord":
        """Return the record with a sign of life of the member. Pure.

        Args:
            member_id: the member.
            capacity_bytes: the most that it allows in the directory.
            now_s: wall clock.
            in_flight_bytes: what it has in flight, should the record not know the member: the record was lost, or the
                member taken for dead, and a recount since then did not see these bytes.
        """
        known = self.members.get(member_id)
        member = UsageMember(known.in_flight_bytes if known else in_flight_bytes, capacity_bytes, now_s)
        used_bytes = self.used_bytes if known else self.used_bytes + in_flight_bytes
        return self._replace(used_bytes=used_bytes, members={**self.members, member_id: member})

    def left(self, member_id: MemberId) -> "UsageRecord":
        """Return the record without the member. Pure."""
        rest = {name: member for name, member in self.members.items() if name != member_id}
        return self._replace(members=rest)

    def changed(self, member_id: MemberId, change: Change) -> "UsageRecord":
        """Return the record after ``change`` by a member. Pure."""
        member = self.members[member_id]
        in_flight_bytes = max(0, member.in_flight_bytes + change.in_flight_bytes)
        moved = member._replace(in_flight_bytes=in_flight_bytes)
        return self._replace(
            used_bytes=max(0, self.used_bytes + change.used_bytes),
            finished_bytes=self.finished_bytes + change.finished_bytes,
            members={**self.members, member_id: moved},
        )

    def without_dead(self, here: Owner, now_s: float) -> "UsageRecord":
        """Return the record without members whose process has ended.

        What they had in flight stays in ``used_bytes`` until the recount that this call begins.
        """
        alive = {
            name: member
            for name, member in self.members.items()
            if not name.owner.is_dead(here, now_s - member.seen_s)
        }
        return self._replace(members=alive)

    def recounted(self, found_bytes: int, finished_before_bytes: int) -> "UsageRecord":
        """Return the record after a walk over the directory. Pure.

        Args:
            found_bytes: what the walk found.
            finished_before_bytes: ``finished_bytes`` when it began.
        """
        finished_since_bytes = max(0, self.finished_bytes - finished_before_bytes)
        used_bytes = found_bytes + finished_since_bytes + self.in_flight_bytes
        return self._replace(used_bytes=used_bytes, is_counted=True)

    def pack(self) -> bytes:
        """Return its form on disk, whole pages. Pure."""
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
        whole = body + _CHECKSUM.pack(zlib.crc32(body))
        return whole + bytes(-len(whole) % RECORD_PAGE_BYTES)


def unpack_record(text: bytes) -> UsageRecord:
    """Return the record in ``text``, or an uncounted empty one when it is none or damaged. Pure."""
    if len(text) < _HEAD.size:
        return UsageRecord()
    magic, version, num_members, is_counted, used_bytes, finished_bytes = _HEAD.unpack_from(text)
    body_bytes = _HEAD.size + num_members * _MEMBER.size
    if magic != _MAGIC or version != _VERSION or len(text) < body_bytes + _CHECKSUM.size:
        return UsageRecord()
    if _CHECKSUM.unpack_from(text, body_bytes)[0] != zlib.crc32(text[:body_bytes]):
        return UsageRecord()
    members = {}
    for offset in range(_HEAD.size, body_bytes, _MEMBER.size):
        host, pid, start_ticks, tier_id, *numbers = _MEMBER.unpack_from(text, offset)
        members[MemberId(Owner(host.hex(), pid, start_ticks), tier_id)] = UsageMember(*numbers)
    return UsageRecord(used_bytes, finished_bytes, members, bool(is_counted))


LOCK_ATTEMPTS = 110
FIRST_LOCK_PAUSE_S = 0.00005
MAX_LOCK_PAUSE_S = 0.01
"""A busy lock is tried again with growing pauses, for a second in all. It is held for microseconds, so a holder
that keeps it longer is stopped or its disk hangs; waiting longer would only keep slots of the primary pinned."""


SURPLUS_RESERVATIONS = 3
SURPLUS_SHARE = 8
"""A reservation takes a surplus of room, so many times its own size, for those that follow while it is open, as long as
a tier has no more of that than one part in so many of what is free: others would lack it. More would save hardly
anything, since the last to end gives back what is left."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a reservation got.

    Attributes:
        num_blocks: blocks that may be written.
        record: the count after it, None when it could not be had or did not change.
        is_fault: whether the system refused to read or to write the record, so that waiting gives no room.
    """

    num_blocks: int
    record: UsageRecord | None
    is_fault: bool = False


def read_record(path: Path) -> UsageRecord:
    """Return the record in a file without taking part; an empty one where it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return UsageRecord()
    try:
        return unpack_record(os.pread(fd, MAX_RECORD_BYTES, 0))
    except OSError:
        return UsageRecord()
    finally:
        os.close(fd)


class SharedUsage:
    """One tier's access to the usage record of its directory.

    Mutable are the deque of changes that are not in the record yet, where appending and taking are atomic, and the
    bytes of open reservations and of their surplus, which ``_lock`` guards. The record itself is guarded by its file's
    ``flock``, and what this tier has recorded as in flight by ``_turn``: of a directory that is moved, two threads may
    have two files. There is a surplus only while there is an open reservation, and it counts as one in the record.

    Args:
        path: the record.
        owner: this process.
        capacity_bytes: the most that this tier allows in the directory.
        file_mode: permissions of the record when it is made.
        wall_clock: seconds since 1970.
        outage: says once that the record cannot be changed; None: one of its own.
    """

    def __init__(
        self,
        path: Path,
        owner: Owner,
        capacity_bytes: int,
        file_mode: int,
        wall_clock: Callable[[], float],
        outage: OutageLog | None = None,
    ) -> None:
        self._outage = outage or OutageLog(f"tier fs at {path.parent}")
        self._path = path
        self._id = MemberId(owner, secrets.randbits(64))
        self._capacity_bytes = capacity_bytes
        self._file_mode = file_mode
        self._wall_clock = wall_clock
        self._unwritten: deque[Change] = deque()
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._open_bytes = self._surplus_bytes = self._recorded_in_flight_bytes = 0

    def reserve(self, num_blocks: int, block_bytes: int) -> Grant:
        """Take room for as many of ``num_blocks`` as the capacity allows; end the reservation afterwards.

        Thread: any; blocks, unless the surplus of others is enough.
        """
        num_taken = self._take_surplus(num_blocks, block_bytes)
        if num_taken == num_blocks:
            return Grant(num_blocks, None)
        granted = surplus = 0
        with self._updating() as update:
            if update.record is not None:
                # Another thread may have taken a surplus while this one waited for the record.
                num_taken += self._take_surplus(num_blocks - num_taken, block_bytes)
                num_free = update.record.room_bytes // block_bytes
                granted = min(num_blocks - num_taken, num_free)
                surplus = min(SURPLUS_RESERVATIONS * granted, (num_free - granted) // SURPLUS_SHARE)
                num_bytes = (granted + surplus) * block_bytes
                with self._lock:
                    self._open_bytes += granted * block_bytes
                    self._surplus_bytes += surplus * block_bytes
                change = Change(used_bytes=num_bytes, in_flight_bytes=num_bytes)
                update.record = update.record.changed(self._id, change)
        if not update.is_written:
            with self._lock:
                self._open_bytes -= granted * block_bytes
                self._surplus_bytes = max(0, self._surplus_bytes - surplus * block_bytes)
            return Grant(num_taken, None, is_fault=update.is_fault)
        return Grant(num_taken + granted, update.record)

    def end_reservation(self, reserved_bytes: int, written_bytes: int) -> UsageRecord | None:
        """End a reservation: ``written_bytes`` of it are on the disk, the rest is given back.

        When all of it was written and other threads are still writing, the record gets it with the next change or from
        the last of them. Until then the bytes count as in flight, so nothing is missed. The last also gives back the
        surplus. Return the record where it has changed.
        """
        if not reserved_bytes:
            return None
        unused_bytes = reserved_bytes - written_bytes
        with self._lock:
            self._open_bytes -= reserved_bytes
            is_last = not self._open_bytes
            if is_last:
                unused_bytes += self._surplus_bytes
                reserved_bytes += self._surplus_bytes
                self._surplus_bytes = 0
            # Under the lock: the last to end must find what those before it have left to it.
            change = Change(-unused_bytes, -reserved_bytes, written_bytes)
            self._unwritten.append(change)
        if not (is_last or unused_bytes):
            return None
        with self._updating() as update:
            pass  # it writes what is unwritten
        return update.record if update.is_written else None

    def remove(self, num_bytes: int) -> None:
        """Count ``num_bytes`` as gone from the disk."""
        if num_bytes:
            self._change(Change(used_bytes=-num_bytes))

    def begin_removal(self, num_bytes: int) -> None:
        """Record that files are about to be removed while a recount may run; the directory's evictor need not."""
        if num_bytes:
            self._change(Change(in_flight_bytes=num_bytes))

    def end_removal(self, num_bytes: int, removed_bytes: int) -> None:
        """Count out what was removed of ``num_bytes`` that were announced."""
        if num_bytes:
            self._change(Change(used_bytes=-removed_bytes, in_flight_bytes=-num_bytes))

    def begin_recount(self) -> UsageRecord | None:
        """Drop members that died and return the record, None when it cannot be had."""
        with self._updating() as update:
            if update.record is not None:
                update.record = update.record.without_dead(self._id.owner, self._wall_clock())
        return update.record if update.is_written else None

    def end_recount(self, found_bytes: int, begun: UsageRecord) -> UsageRecord | None:
        """Correct the count after a walk that began with the record ``begun``, and return it.

        Returns:
            None when it cannot be had, or was lost during the walk and with it what was finished since: walk again.
        """
        is_lost = False
        with self._updating() as update:
            if update.record is not None:
                is_lost = begun.is_counted and not update.record.is_counted
                if not is_lost:
                    update.record = update.record.recounted(found_bytes, begun.finished_bytes)
        return update.record if update.is_written and not is_lost else None

    def refresh(self) -> UsageRecord | None:
        """Give a sign of life and return the record, None when it cannot be had."""
        with self._updating() as update:
            pass
        return update.record if update.is_written else None

    def leave(self) -> None:
        """Let the others go by their own capacities; the next change joins again."""
        with self._updating() as update:
            if update.record is not None:
                update.record = update.record.left(self._id)

    def _take_surplus(self, num_blocks: int, block_bytes: int) -> int:
        """Return for how many of ``num_blocks`` there was a surplus of room; it is reserved now."""
        with self._lock:
            taken = min(num_blocks, self._surplus_bytes // block_bytes)
            self._surplus_bytes -= taken * block_bytes
            self._open_bytes += taken * block_bytes
        return taken

    def _change(self, change: Change) -> None:
        self._unwritten.append(change)
        with self._updating():
            pass  # it writes what is unwritten

    @contextmanager
    def _updating(self) -> Iterator["_Update"]:
        """Give the record with this member and its unwritten changes in it, and write what it has become afterwards.

        Without the lock, or when the system refuses, the record is None or is not written, the unwritten changes stay
        for the next update, and the log says why, unless the directory was removed.
        """
        update = _Update()
        if not self._turn.acquire(timeout=LOCK_ATTEMPTS * MAX_LOCK_PAUSE_S):
            yield update
            return
        try:
            leftover = [self._unwritten.popleft() for _ in range(len(self._unwritten))]
            fd = -1
            try:
                fd = open_shared_file(self._path, self._file_mode)
                # A record that was removed while this waited for its lock is not written: no other process reads it.
                if lock_file(fd) and os.fstat(fd).st_nlink:
                    record = unpack_record(os.pread(fd, MAX_RECORD_BYTES, 0)).joined(
                        self._id, self._capacity_bytes, self._wall_clock(), self._recorded_in_flight_bytes
                    )
                    for change in leftover:
                        record = record.changed(self._id, change)
                    update.record = record
            except (FileNotFoundError, NotADirectoryError):
                pass  # the directory was removed: the evictor makes it again, and the log has one line about it
            except OSError as error:
                self._on_fault(update, error)
            try:
                yield update
                if update.record is not None:
                    member = update.record.members.get(self._id, UsageMember(0, 0, 0.0))
                    self._recorded_in_flight_bytes = member.in_flight_bytes
                    if len(update.record.members) > MAX_MEMBERS:
                        update.record = update.record.without_dead(self._id.owner, self._wall_clock())
                    os.pwrite(fd, update.record.pack(), 0)
                    update.is_written = True
                    if self._outage.is_out:
                        self._outage.on_success("count")
            except OSError as error:
                self._on_fault(update, error)
            finally:
                if not update.is_written:
                    self._unwritten.extend(leftover)
                # An error that went on from here would end a reservation before it is recorded as one: its room would
                # be taken for as long as this process lives. The record was written all the same, or it was not.
                with suppress(OSError, ValueError):  # the latter where it could not be opened
                    try:
                        # Closing alone would not do: a child that was forked meanwhile has the same lock.
                        fcntl.flock(fd, fcntl.LOCK_UN)
                    finally:
                        os.close(fd)
        finally:
            self._turn.release()

    def _on_fault(self, update: "_Update", error: OSError) -> None:
        # A full disk is no fault: an eviction may make room, and until then the tier declines.
        update.is_fault = error.errno not in (errno.ENOSPC, errno.EDQUOT)
        self._outage.on_failure("count", f"the count of bytes cannot be changed: {error}")


@dataclass(slots=True)
class _Update:
    """One change of the record, from its reading to its writing.

    Attributes:
        record: what is to be written; None when it could not be read.
        is_written: whether it is on the disk.
        is_fault: whether the system refused to read or to write it.
    """

    record: UsageRecord | None = None
    is_written: bool = False
    is_fault: bool = False


def open_shared_file(path: Path, file_mode: int) -> int:
    """Open a file that all processes of a directory read and write, made when it is missing.

    Raises:
        OSError: the system refused.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, file_mode)
    if file_mode != PRIVATE_MODE:
        set_file_mode(fd, file_mode)
    return fd


def lock_file(fd: int) -> bool:
    """Lock a file that all processes of a directory change; False when another has kept it for a second."""
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
