"""Records of a pack's journal: which slot holds which block, 64 bytes a change.

A record is little endian: name 40, slot 4, stored 4, used 4 (seconds since 1970), kind 1, length of the name 1, 2 free,
checksum 8 over the others and the pack's id. It has no generation: equal names mean equal bytes, so that a slot whose
envelope has the name and whose checksum is right is a hit, whenever it was written.

A bad record ends nothing, because all have one length. What it said is lost: a slot may seem to hold a block that was
dropped, and its envelope tells when it is read.
"""

import hashlib
import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier.tiering.kit.block_format import BlockName
from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES, MAX_KEY_BYTES

RECORD_BYTES = 64
RECORD = np.dtype(
    [("name", "V40"), ("slot", "<u4"), ("stored_s", "<u4"), ("used_s", "<u4"), ("kind", "u1"), ("length", "u1"),
     ("free", "V2"), ("check", "<u8")]
)  # fmt: skip

MAX_SECONDS = 2**32 - 1
"""The last second that a record can name, in the year 2106. Clocks that are set wrong are cut to it."""

SPARE_RECORDS = 62
"""Records that a journal may have beyond two a slot. With fewer, packs of a few slots are compacted all the time; with
more, their journals take more than a page of the disk."""

Records: TypeAlias = npt.NDArray[np.void]
"""An array of ``RECORD``."""

NO_RECORDS: Records = np.zeros(0, RECORD)

_FIELDS = struct.Struct("<40sIIIBB10x")
_FACTORS = np.frombuffer(hashlib.blake2b(b"kvtier pack journal", digest_size=56).digest(), "<u8") | np.uint64(
    1
)
_HALF = np.uint64(32)


class Kind(IntEnum):
    """What a record says of its slot."""

    STORED = 1
    DROPPED = 2


class Change(NamedTuple):
    """What happened to a slot.

    Attributes:
        kind: whether it holds a block since.
        slot: its number.
        name: of the block, at most 40 bytes; may be empty where it was dropped.
        stored_s: when it was stored, seconds since 1970.
        used_s: when it was last used.
    """

    kind: Kind
    slot: int
    name: BlockName
    stored_s: int = 0
    used_s: int = 0


def long_records(num_slots: int) -> int:
    """Return how many records a journal may have before its owner compacts it. Pure."""
    return 2 * num_slots + SPARE_RECORDS


def reserved_bytes(num_slots: int) -> int:
    """Return the room on the disk that a journal has from the beginning, in whole pages. Pure."""
    return -(-long_records(num_slots) * RECORD_BYTES // HEADER_PAGE_BYTES) * HEADER_PAGE_BYTES


def pack_changes(changes: Iterable[Change], pack_id: bytes) -> bytes:
    """Return the records of some changes. Pure.

    Args:
        changes: in the order in which they happened.
        pack_id: 16 bytes.
    """
    packed = bytearray()
    for kind, slot, name, stored_s, used_s in changes:
        # INVARIANT: a name that is cut would be another block's.
        assert len(name) <= MAX_KEY_BYTES, "a name is too long for its record"
        packed += _FIELDS.pack(name, slot, _clamp(stored_s), _clamp(used_s), kind, len(name))
    return seal_records(np.frombuffer(packed, RECORD), pack_id)


def seal_records(records: Records, pack_id: bytes) -> bytes:
    """Return records as they stand in a journal, with their checksums made right. Pure."""
    sealed = np.array(records, order="C")
    sealed["check"] = _checksums(sealed, pack_id)
    return sealed.tobytes()


def whole_records(data: bytes, pack_id: bytes, num_slots: int) -> tuple[Records, int]:
    """Return the records that are whole and possible, and the number of records up to the last of them. Pure.

    Bad ones behind it are to be read again: they may be on their way.

    Args:
        data: of a journal, from the beginning of a record; a part of a record at its end is left out.
        pack_id: 16 bytes.
        num_slots: of the pack.
    """
    records = np.frombuffer(data, RECORD, count=len(data) // RECORD_BYTES)
    is_good = _checksums(records, pack_id) == records["check"]
    is_good &= (records["slot"] < num_slots) & (records["length"] <= MAX_KEY_BYTES)
    is_good &= (records["kind"] == Kind.DROPPED) | (records["kind"] == Kind.STORED) & (records["length"] > 0)
    if is_good.all():
        return records, len(records)
    (good,) = np.nonzero(is_good)
    return records[good], int(good[-1]) + 1 if len(good) else 0


def names_of(records: Records) -> list[BlockName]:
    """Return the block that each record names. Pure."""
    data, lengths = records.tobytes(), records["length"].tolist()
    starts = range(0, len(data), RECORD_BYTES)
    return [data[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def last_of_each(records: Records) -> Records:
    """Return the last record of each slot, in the order of the journal. Pure."""
    _, from_end = np.unique(records["slot"][::-1], return_index=True)
    last: Records = records[np.sort(len(records) - 1 - from_end)]
    return last


def _checksums(records: Records, pack_id: bytes) -> npt.NDArray[np.uint64]:
    """Return the checksum of each record: its mixed words times odd numbers, summed modulo 2^64.

    One changed word always changes it. A million take numpy some tens of milliseconds, a loop ten times that. The
    pack's id is in it, so that the journal of another pack is not taken for this one's.
    """
    words = records.view("<u8").reshape(-1, RECORD_BYTES // 8)[:, :-1] * _FACTORS
    # A product keeps its top bits to itself: without the second one, top bits of two words may cancel.
    words ^= words >> _HALF
    words *= _FACTORS
    sums: npt.NDArray[np.uint64] = words.sum(axis=1, dtype=np.uint64) + np.frombuffer(pack_id[:8], "<u8")
    return sums


def _clamp(seconds: int) -> int:
    return min(max(0, seconds), MAX_SECONDS)
