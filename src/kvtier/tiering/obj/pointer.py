"""Where a block is that shares an object with others: a small object under the block's own name.

An engine that knows one key only must find the block, and no two engines cut their blocks into the same groups; so
each block of a group has a pointer under the name that the block alone would have. It is sealed as a block is, with
a codec number of its own.
"""

import struct
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.tiering.envelope import ENVELOPE_BYTES, Verdict, check, pack, seal
from kvtier.tiering.obj.layout import GROUP_ID_BYTES

POINTER_CODEC = 0xFFFF
"""Far from the numbers of codecs, which count up from zero."""

_PAYLOAD = struct.Struct(f"<{GROUP_ID_BYTES}sI")
POINTER_BYTES = ENVELOPE_BYTES + _PAYLOAD.size


class Location(NamedTuple):
    """Where in which group a block is.

    Attributes:
        group_id: number of the group's object.
        position: how many blocks stand before it.
    """

    group_id: bytes
    position: int


def pack_pointer(location: Location, key: OffloadKey, namespace_digest: bytes) -> bytes:
    """Return the bytes of the pointer to the block of ``key``. Pure."""
    payload = _PAYLOAD.pack(*location)
    return pack(seal(key, namespace_digest, payload, codec=POINTER_CODEC)) + payload


def unpack_pointer(body: memoryview, key: OffloadKey, namespace_digest: bytes) -> Location | Verdict:
    """Return where the block of ``key`` is, or what is wrong with its pointer. Pure."""
    payload = body[ENVELOPE_BYTES:]
    verdict = check(body, payload, key, namespace_digest, codec=POINTER_CODEC)
    if verdict is not Verdict.OK:
        return verdict
    if len(payload) != _PAYLOAD.size:
        return Verdict.DAMAGED
    return Location(*_PAYLOAD.unpack(payload))
