"""The first page of a slab: what says that the file is ours, and how it is divided.

A page has a magic of 16 bytes, version 4, padding 4, row length 8, number of slots 8, and
BLAKE2b of those, 16 bytes; all little endian. Behind it stand the slots, each a page with the envelope and then
the row.
"""

import hashlib
import struct
from dataclasses import dataclass
from enum import Enum

from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES

MAGIC = b"kvtier-slab\r\n\x1a\n\xf3"
VERSION = 1
SUPERBLOCK_BYTES = HEADER_PAGE_BYTES

_FIELDS = struct.Struct("<16sI4xQQ")
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class SlabGeometry:
    """How a slab is divided.

    Attributes:
        row_bytes: length of a block without its header.
        num_slots: blocks that the file has room for.
    """

    row_bytes: int
    num_slots: int

    @property
    def slot_bytes(self) -> int:
        """Length of a slot: a header page and a row."""
        return HEADER_PAGE_BYTES + self.row_bytes

    @property
    def file_bytes(self) -> int:
        """Length of the file."""
        return self.offset_of(self.num_slots)

    def offset_of(self, slot: int) -> int:
        """Return where ``slot`` begins."""
        return SUPERBLOCK_BYTES + slot * self.slot_bytes


class Origin(Enum):
    """Whose a file is that has no usable superblock of this version."""

    EMPTY = "empty"
    FOREIGN = "foreign"
    UNREADABLE = "unreadable"


def fit_geometry(capacity_bytes: int, row_bytes: int) -> SlabGeometry:
    """Return the largest slab of such rows within ``capacity_bytes``; it may have no slot. Pure."""
    slot_bytes = SlabGeometry(row_bytes, 0).slot_bytes
    return SlabGeometry(row_bytes, max(0, capacity_bytes - SUPERBLOCK_BYTES) // slot_bytes)


def pack_superblock(geometry: SlabGeometry) -> bytes:
    """Return the used bytes of the first page; the rest of it is zero. Pure."""
    fields = _FIELDS.pack(MAGIC, VERSION, geometry.row_bytes, geometry.num_slots)
    return fields + _digest(fields)


def unpack_superblock(page: bytes) -> SlabGeometry | Origin:
    """Say how the file is divided whose first bytes are ``page``, or whose it is. Pure.

    A page with our magic is ours whatever else is wrong with it: damaged, or of another version.
    """
    if not page:
        return Origin.EMPTY
    if page[: len(MAGIC)] != MAGIC:
        return Origin.FOREIGN
    fields = page[: _FIELDS.size]
    if page[_FIELDS.size : _FIELDS.size + _DIGEST_BYTES] != _digest(fields):
        return Origin.UNREADABLE
    _, version, row_bytes, num_slots = _FIELDS.unpack(fields)
    return SlabGeometry(row_bytes, num_slots) if version == VERSION else Origin.UNREADABLE


def _digest(fields: bytes) -> bytes:
    return hashlib.blake2b(fields, digest_size=_DIGEST_BYTES, usedforsecurity=False).digest()
