"""The first page of a slab: what says that the file is ours, and how it is divided; and its copy in the last page.

A page has a magic of 16 bytes, version 4, padding 4, row length 8, number of slots 8, and
BLAKE2b of those, 16 bytes; all little endian. Between the two stand the slots, each a page with the envelope and then
the row. Either page is enough, and repairs the other. Files that an older version has made end with their last slot;
they get the copy when they are opened.
"""

import hashlib
import os
import struct
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

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
    def copy_offset(self) -> int:
        """Where the copy of the superblock begins, behind the last slot."""
        return self.offset_of(self.num_slots)

    @property
    def file_bytes(self) -> int:
        """Length of the file."""
        return self.copy_offset + SUPERBLOCK_BYTES

    def offset_of(self, slot: int) -> int:
        """Return where ``slot`` begins."""
        return SUPERBLOCK_BYTES + slot * self.slot_bytes


class Origin(Enum):
    """Whose a file is that has no usable superblock of this version."""

    EMPTY = "empty"
    FOREIGN = "foreign"
    DAMAGED = "damaged"
    OTHER_VERSION = "other version"


Superblock = SlabGeometry | Origin


class Superblocks(NamedTuple):
    """What the two pages of a file say.

    Attributes:
        first: the first page.
        last: the last page, ``EMPTY`` where it is none of a superblock: in a file without one, or one that was cut.
    """

    first: Superblock
    last: Superblock

    @property
    def geometry(self) -> Superblock:
        """What counts: the first page, the last where the first is of no use, or whose the file is without one."""
        for found in self:
            if isinstance(found, SlabGeometry):
                return found
        return Origin.DAMAGED if Origin.DAMAGED in self else self.first


def fit_geometry(capacity_bytes: int, row_bytes: int) -> SlabGeometry:
    """Return the largest slab of such rows within ``capacity_bytes``; it may have no slot. Pure."""
    room_bytes = capacity_bytes - SlabGeometry(row_bytes, 0).file_bytes
    return SlabGeometry(row_bytes, max(0, room_bytes) // SlabGeometry(row_bytes, 0).slot_bytes)


def fit_geometry_without_copy(capacity_bytes: int, row_bytes: int) -> SlabGeometry:
    """Return the slab that older versions made, whose files had no copy: one slot more where it just fits. Pure."""
    return fit_geometry(capacity_bytes + SUPERBLOCK_BYTES, row_bytes)


def pack_superblock(geometry: SlabGeometry) -> bytes:
    """Return the used bytes of the page; the rest of it is zero. Pure."""
    fields = _FIELDS.pack(MAGIC, VERSION, geometry.row_bytes, geometry.num_slots)
    return fields + _digest(fields)


def unpack_superblock(page: bytes) -> Superblock:
    """Say how the file is divided that a page is of, or whose it is. Pure.

    A page with our magic is ours whatever else is wrong with it: damaged, or of another version.
    """
    if not page:
        return Origin.EMPTY
    if page[: len(MAGIC)] != MAGIC:
        return Origin.FOREIGN
    fields = page[: _FIELDS.size]
    if page[_FIELDS.size : _FIELDS.size + _DIGEST_BYTES] != _digest(fields):
        return Origin.DAMAGED
    _, version, row_bytes, num_slots = _FIELDS.unpack(fields)
    return SlabGeometry(row_bytes, num_slots) if version == VERSION else Origin.OTHER_VERSION


def read_superblocks(fd: int) -> Superblocks:
    """Return what the first and the last page of a file say.

    Raises:
        OSError: it cannot be read.
    """
    first = unpack_superblock(os.pread(fd, SUPERBLOCK_BYTES, 0))
    copy_offset = os.fstat(fd).st_size - SUPERBLOCK_BYTES
    last: Superblock = Origin.EMPTY
    if copy_offset >= SUPERBLOCK_BYTES:
        last = unpack_superblock(os.pread(fd, SUPERBLOCK_BYTES, copy_offset))
    # A row may hold the bytes of a superblock; one that stands where it says is no row of another geometry.
    if isinstance(last, SlabGeometry) and last.copy_offset != copy_offset:
        last = Origin.EMPTY
    if first is Origin.DAMAGED and copy_offset <= 0:
        first = (
            Origin.EMPTY
        )  # not even a page: a crash has interrupted the making of the file, and no slot is there
    return Superblocks(first, last)


def _digest(fields: bytes) -> bytes:
    return hashlib.blake2b(fields, digest_size=_DIGEST_BYTES, usedforsecurity=False).digest()
