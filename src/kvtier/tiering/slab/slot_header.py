"""The page in front of a block in its slot: the envelope, and what was not finished when it was written.

It reads and writes no file. Behind the envelope stands, in 8 bytes, the oldest generation whose write had not ended
when this one began. The newest header of a slab therefore says which slots a crash can have left half written:
those of that generation and later ones. It has no checksum of its own: when it is wrong, too many slots are looked
at, or a torn one is found by the check of each load instead.
"""

import struct

from kvtier.base import OffloadKey
from kvtier.tiering.codecs.raw import RAW_NUMBER
from kvtier.tiering.envelope import ENVELOPE_BYTES, Buffer, pack, seal

_OLDEST = struct.Struct("<Q")


def write_header(
    page: memoryview,
    key: OffloadKey,
    namespace_digest: bytes,
    row: Buffer,
    generation: int,
    oldest_generation: int,
) -> None:
    """Fill ``page`` for a block.

    Args:
        page: a header page, format 'B'; what is behind the header stays as it is.
        key: the block.
        namespace_digest: its namespace's.
        row: its bytes.
        generation: of this write.
        oldest_generation: of the writes that have not ended, this one included.
    """
    page[:ENVELOPE_BYTES] = pack(seal(key, namespace_digest, row, codec=RAW_NUMBER, generation=generation))
    _OLDEST.pack_into(page, ENVELOPE_BYTES, oldest_generation)


def oldest_unfinished(page: Buffer) -> int:
    """Return the oldest generation that was being written when the header in ``page`` was. Pure."""
    oldest: int = _OLDEST.unpack_from(page, ENVELOPE_BYTES)[0]
    return oldest
