"""The shared count of bytes in a directory, as a value: what each change makes of it, and its form on disk.

It opens no file. ``used_bytes`` counts blocks on the disk and room that is reserved; each process that writes is a
member with what it has in flight, which is such room, and the capacity it was configured with. The smallest capacity
counts.

A recount walks the directory while others write. It takes what it found, adds what was finished since it began
and what is in flight now: that may count a block twice for a while, and never misses one.

Values are NamedTuples here: each part of a store changes the book while it holds every other writer's lock, and
frozen dataclasses took twice as long.
"""

import struct
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from kvtier.tiering.fs.owner import Owner

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


class Member(NamedTuple):
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


class Book(NamedTuple):
    """The count.

    Attributes:
        used_bytes: bytes on the disk and in flight, never too few once counted.
        finished_bytes: bytes ever finished; only differences between two readings mean something.
        members: who writes.
        is_counted: False until somebody has walked the directory.
    """

    used_bytes: int = 0
    finished_bytes: int = 0
    members: Mapping[MemberId, Member] = MappingProxyType({})
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

    def joined(self, member_id: MemberId, capacity_bytes: int, now_s: float) -> "Book":
        """Return the book with a sign of life of the member. Pure."""
        known = self.members.get(member_id)
        in_flight_bytes = known.in_flight_bytes if known else 0
        member = Member(in_flight_bytes, capacity_bytes, now_s)
        return self._replace(members={**self.members, member_id: member})

    def left(self, member_id: MemberId) -> "Book":
        """Return the book without the member. Pure."""
        rest = {name: member for name, member in self.members.items() if name != member_id}
        return self._replace(members=rest)

    def changed(self, member_id: MemberId, change: Change) -> "Book":
        """Return the book after ``change`` by a member. Pure."""
        member = self.members[member_id]
        in_flight_bytes = max(0, member.in_flight_bytes + change.in_flight_bytes)
        moved = member._replace(in_flight_bytes=in_flight_bytes)
        return self._replace(
            used_bytes=max(0, self.used_bytes + change.used_bytes),
            finished_bytes=self.finished_bytes + change.finished_bytes,
            members={**self.members, member_id: moved},
        )

    def without_dead(self, here: Owner, now_s: float) -> "Book":
        """Return the book without members whose process has ended.

        What they had in flight stays in ``used_bytes`` until the recount that this call begins.
        """
        alive = {
            name: member
            for name, member in self.members.items()
            if not name.owner.is_dead(here, now_s - member.seen_s)
        }
        return self._replace(members=alive)

    def recounted(self, found_bytes: int, finished_before_bytes: int) -> "Book":
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


def unpack_book(text: bytes) -> Book:
    """Return the book in ``text``, or an uncounted empty one when it is none or damaged. Pure."""
    if len(text) < _HEAD.size:
        return Book()
    magic, version, num_members, is_counted, used_bytes, finished_bytes = _HEAD.unpack_from(text)
    body_bytes = _HEAD.size + num_members * _MEMBER.size
    if magic != _MAGIC or version != _VERSION or len(text) < body_bytes + _SEAL.size:
        return Book()
    if _SEAL.unpack_from(text, body_bytes)[0] != zlib.crc32(text[:body_bytes]):
        return Book()
    members = {}
    for offset in range(_HEAD.size, body_bytes, _MEMBER.size):
        host, pid, start_ticks, tier_id, *numbers = _MEMBER.unpack_from(text, offset)
        members[MemberId(Owner(host.hex(), pid, start_ticks), tier_id)] = Member(*numbers)
    return Book(used_bytes, finished_bytes, members, bool(is_counted))
