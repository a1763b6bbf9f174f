"""The first two pages of a pack: what it is, which never changes, and who owns it.

Page 0 has the pack's geometry, its id and its namespace. Page 1 has the owner's mark: a random number, by which an
owner notices that a lock does not exclude another one, and what an adopter must know of the owner before. They are
apart, so that no write of the second can damage the first. A digest follows each. Slots begin at byte 8192.
"""

import hashlib
import re
import struct
from typing import NamedTuple

from kvtier.tiering.fs.records import reserved_bytes
from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES

MAGIC = b"kvtier-pack\r\n\x1a\n\xf5"
VERSION = 1

OWNER_OFFSET = HEADER_PAGE_BYTES
SLOTS_OFFSET = 2 * HEADER_PAGE_BYTES

MAX_PACK_BYTES = 64 * 2**30
"""The longest pack. A longer one holds more slots than a reader wants in one table; one that says so is forged."""

NUM_PACKS = 64
"""Packs in the capacity. More are shared more evenly between processes; fewer are opened and polled sooner."""

MIN_PACK_BYTES = 128 * 2**10
"""Length of a pack in a small capacity, unless that is more than a quarter of it. Header and journal take 12 KiB at
least: in shorter packs much of the capacity would be theirs."""

MAX_SLOTS = 2**32
"""A record names a slot with 4 bytes."""

PROCESS_NAME = re.compile(r"[0-9a-z]{1,32}")
"""What a tier of a process is called, in the owner's mark and by its notes."""

_DIGEST_BYTES = 16
_HEADER = struct.Struct("<16sI4xQQ16s16s")
_MARK = struct.Struct("<16sI4x16s32s16s?7x")
_MARK_MAGIC = b"kvtier-owner\r\n\x1a\n"


class PackGeometry(NamedTuple):
    """How a pack is divided: ``num_slots`` slots, each a page for the envelope and a row of ``row_bytes``."""

    row_bytes: int
    num_slots: int

    @property
    def slot_bytes(self) -> int:
        """Length of a slot."""
        return HEADER_PAGE_BYTES + self.row_bytes

    @property
    def file_bytes(self) -> int:
        """Length of the pack."""
        return self.offset_of(self.num_slots)

    def offset_of(self, slot: int) -> int:
        """Return where a slot begins."""
        return SLOTS_OFFSET + slot * self.slot_bytes

    def is_possible(self) -> bool:
        """Return whether there can be such a pack."""
        has_slots = self.row_bytes > 0 and 0 < self.num_slots <= MAX_SLOTS
        return has_slots and (self.num_slots == 1 or self.file_bytes <= MAX_PACK_BYTES)


def plan_geometry(row_bytes: int, capacity_bytes: int, pack_bytes: int | None = None) -> PackGeometry:
    """Return how new packs are divided. Pure.

    Args:
        row_bytes: length of a block.
        capacity_bytes: of the directory.
        pack_bytes: about the length of a pack; None: a 64th of the capacity.
    """
    if pack_bytes is None:
        pack_bytes = max(capacity_bytes // NUM_PACKS, min(MIN_PACK_BYTES, capacity_bytes // 4))
    room_bytes = min(pack_bytes, MAX_PACK_BYTES) - SLOTS_OFFSET - reserved_bytes(1)
    num_slots = max(1, room_bytes // PackGeometry(row_bytes, 0).slot_bytes)
    # The journal's room grows with the slots; one that rounds up to another page costs a slot at most.
    while num_slots > 1 and disk_bytes_of(PackGeometry(row_bytes, num_slots)) > pack_bytes:
        num_slots -= max(1, num_slots // 64)
    return PackGeometry(row_bytes, num_slots)


def disk_bytes_of(geometry: PackGeometry) -> int:
    """Return what a pack and its journal take of the disk, in whole pages. Pure."""
    num_pages = -(-geometry.file_bytes // HEADER_PAGE_BYTES)
    return num_pages * HEADER_PAGE_BYTES + reserved_bytes(geometry.num_slots)


class PackHeader(NamedTuple):
    """What page 0 says.

    Attributes:
        geometry: how the pack is divided.
        pack_id: 16 random bytes, which the checksums of its journal contain.
        namespace: the first 16 bytes of the namespace's digest.
    """

    geometry: PackGeometry
    pack_id: bytes
    namespace: bytes

    def pack(self) -> bytes:
        """Return its bytes; the rest of the page is zero."""
        return _with_digest(
            _HEADER.pack(MAGIC, VERSION, *self.geometry, self.pack_id, self.namespace),
        )

    @classmethod
    def unpack(cls, page: bytes) -> "PackHeader | None":
        """Return what a page says, None where it is damaged, foreign, of another version or says what cannot be."""
        fields = _checked_fields(_HEADER, page)
        if fields is None:
            return None
        magic, version, row_bytes, num_slots, pack_id, namespace = _HEADER.unpack(fields)
        geometry = PackGeometry(row_bytes, num_slots)
        is_ours = magic == MAGIC and version == VERSION and geometry.is_possible()
        return cls(geometry, pack_id, namespace) if is_ours else None


class OwnerMark(NamedTuple):
    """What page 1 says.

    Attributes:
        boot: id of the boot of the kernel under which the owner runs, 16 bytes.
        process: which tier of which process it is.
        token: 16 random bytes, drawn anew by each owner.
        is_closed: whether the owner has ended as it should.
    """

    boot: bytes
    process: str
    token: bytes
    is_closed: bool

    def pack(self) -> bytes:
        """Return its bytes; the rest of the page is zero."""
        process = self.process.encode("ascii")
        return _with_digest(_MARK.pack(_MARK_MAGIC, VERSION, self.boot, process, self.token, self.is_closed))

    @classmethod
    def unpack(cls, page: bytes) -> "OwnerMark | None":
        """Return what a page says, None where it is damaged, empty or of another version."""
        fields = _checked_fields(_MARK, page)
        if fields is None:
            return None
        magic, version, boot, process, token, is_closed = _MARK.unpack(fields)
        name = process.rstrip(b"\0").decode("ascii", "replace")
        is_ours = magic == _MARK_MAGIC and version == VERSION and PROCESS_NAME.fullmatch(name) is not None
        return cls(boot, name, token, is_closed) if is_ours else None


def _with_digest(fields: bytes) -> bytes:
    return fields + hashlib.blake2b(fields, digest_size=_DIGEST_BYTES, usedforsecurity=False).digest()


def _checked_fields(layout: struct.Struct, page: bytes) -> bytes | None:
    """Return the fields at the beginning of a page, None where their digest is not right."""
    fields = bytes(page[: layout.size])
    is_whole = len(fields) == layout.size and page[: layout.size + _DIGEST_BYTES] == _with_digest(fields)
    return fields if is_whole else None
