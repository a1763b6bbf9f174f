"""The header in front of a block that leaves the machine's memory, with checksums of both.

It is 128 bytes, little endian: magic 4, version 2, codec 2, namespace 16, key length 2, key 40, stored length 8, raw
length 8, XXH3-128 of the stored bytes 16, key id 4, nonce 12, generation 6, XXH3-64 of the 120 bytes before it 8.
A reader checks it before it uses the payload. Nothing here raises on bad bytes: a ``HeaderCheck`` says what is wrong.

Version 3 is the header of an encrypted block (``kit/encryption.py``), of the same length: magic 4, version 2, codec 1,
key length 1, namespace 16, keyed name of the block 40, stored length 5, raw length 5, tag 16, key id 4, salt 16,
counter 4, generation 6, XXH3-64 as above. Lengths shrink because AES-GCM takes no more than 64 GiB at a time; the room
goes to the salt, which is drawn anew by each run of a process, so that no nonce can come twice under a key.

Source: XXH3 is described at https://github.com/Cyan4973/xxHash; it finds accidents, not forgeries.
"""

import struct
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple, TypeAlias

from kvtier.base import OffloadKey
from kvtier.errors import MissingExtraError
from kvtier.tiering.base import TierFailure

try:
    import xxhash
except ImportError as error:
    raise MissingExtraError("xxhash", "fs") from error

MAGIC = b"KVTB"
VERSION = 1
ENCRYPTED_VERSION = 3
"""2 was never written: it is left out so that a version says at once whether blocks are encrypted."""

ENVELOPE_BYTES = 128
HEADER_PAGE_BYTES = 4096
"""Where a file keeps envelopes, one page in front of each payload: with direct I/O both stay aligned."""

RAW_CODEC = 0
"""The payload is the row as it is: the only encoding there is. Earlier versions of the obj tier wrote pointers into
objects of several blocks with the largest number that the field has."""

MAX_KEY_BYTES = 40
NAMESPACE_BYTES = 16
NONCE_BYTES = 12
GENERATION_BYTES = 6

NO_ENCRYPTION = 0
NO_NONCE = bytes(NONCE_BYTES)
"""What stands in the header of a block that is not encrypted."""

SALT_BYTES = 16
TAG_BYTES = 16
LENGTH_BYTES = 5
MAX_COUNTER = 2**32 - 1
"""Blocks that one run of a process can encrypt under one salt."""

_FIELDS = struct.Struct("<4sHH16sH40sQQ16sI12s6s")
_BEFORE_TAG = struct.Struct("<4sHBB16s40s5s5s")
_BEHIND_TAG = struct.Struct("<I16sI6s")
_ENCRYPTED_FIELDS = struct.Struct(f"{_BEFORE_TAG.format}16s{_BEHIND_TAG.format[1:]}")
assert _ENCRYPTED_FIELDS.size == _FIELDS.size, "both headers are 128 bytes with their checksum"
_OWN_CHECKSUM = struct.Struct("<Q")
_ENVELOPE = struct.Struct(_FIELDS.format + "Q")

_Fields: TypeAlias = tuple[bytes, int, int, bytes, int, bytes, int, int, bytes, int, bytes, bytes, int]
"""What stands in an envelope, in its order, and the checksum behind it."""

Buffer: TypeAlias = bytes | bytearray | memoryview


class HeaderCheck(Enum):
    """What is wrong with a block, or OK."""

    OK = "ok"
    DAMAGED = "damaged"
    OTHER_VERSION = "other_version"
    OTHER_CODEC = "other_codec"
    OTHER_NAMESPACE = "other_namespace"
    OTHER_KEY = "other_key"
    ENCRYPTED = "encrypted"
    NOT_ENCRYPTED = "not_encrypted"
    UNKNOWN_KEY_ID = "unknown_key_id"
    DROPPED_KEY_ID = "dropped_key_id"


FAILURE_OF_CHECK = {
    HeaderCheck.DAMAGED: TierFailure.DAMAGED,
    HeaderCheck.OTHER_KEY: TierFailure.DAMAGED,
    HeaderCheck.OTHER_VERSION: TierFailure.FOREIGN,
    HeaderCheck.OTHER_CODEC: TierFailure.FOREIGN,
    HeaderCheck.OTHER_NAMESPACE: TierFailure.FOREIGN,
    HeaderCheck.ENCRYPTED: TierFailure.FOREIGN,
    HeaderCheck.NOT_ENCRYPTED: TierFailure.DAMAGED,
    HeaderCheck.UNKNOWN_KEY_ID: TierFailure.FOREIGN,
    HeaderCheck.DROPPED_KEY_ID: TierFailure.DAMAGED,
}
"""Damaged blocks are removed, foreign ones left alone. A block of this namespace whose header has another key than its
name can only have been moved. A plain block under an encrypted name can only have been planted; a key id that this
engine does not know yet may be of a ring that another engine has read already; one that was dropped opens nothing."""

FAULTS = frozenset({TierFailure.IO_ERROR, TierFailure.TIMEOUT, TierFailure.DAMAGED})
"""Failures that count against a tier; a block that was evicted, or belongs to another instance, does not."""


class Envelope(NamedTuple):
    """What the header of a block says.

    Attributes:
        namespace: first 16 bytes of the namespace digest.
        key: the block.
        codec: number of the encoding of the stored bytes.
        stored_bytes: length of the payload as stored.
        raw_bytes: length of the row that it decodes to.
        checksum: XXH3-128 of the stored bytes, 16 bytes; the tag of an encrypted block.
        key_id: number of the encryption key, 0 without one.
        nonce: of the encryption: 12 zero bytes without one, else the salt and the counter, 20 bytes.
        generation: of the write, where slots are written again and again; below 2**48.
    """

    namespace: bytes
    key: OffloadKey
    codec: int
    stored_bytes: int
    raw_bytes: int
    checksum: bytes
    key_id: int
    nonce: bytes
    generation: int

    @property
    def is_encrypted(self) -> bool:
        """Whether the payload is encrypted."""
        return self.key_id != NO_ENCRYPTION


def make_header(
    key: OffloadKey,
    namespace_digest: bytes,
    payload: Buffer,
    *,
    raw_bytes: int | None = None,
    generation: int = 0,
) -> bytes:
    """Return the 128 bytes that stand in front of ``payload``, its checksum in them. Pure.

    Args:
        key: at most 40 bytes.
        namespace_digest: the namespace's; its first 16 bytes are used.
        payload: what will be stored, contiguous.
        raw_bytes: length of the row; None when it is that of the payload.
        generation: of the write, where slots are written again and again; below 2**48.
    """
    assert len(key) <= MAX_KEY_BYTES, "keys are checked when a tier is built and when a job comes"
    num_bytes = len(payload)
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        RAW_CODEC,
        namespace_digest[:NAMESPACE_BYTES],
        len(key),
        key,
        num_bytes,
        num_bytes if raw_bytes is None else raw_bytes,
        xxhash.xxh3_128_digest(payload),
        NO_ENCRYPTION,
        NO_NONCE,
        generation.to_bytes(GENERATION_BYTES, "little"),
    )
    return fields + _OWN_CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


def unpack(header: Buffer) -> Envelope | HeaderCheck:
    """Return the envelope in the first 128 bytes of ``header``, or what is wrong with them. Pure.

    A header of another version cannot be checked: its own checksum may stand elsewhere.
    """
    if _is_encrypted(header):
        return _unpack_encrypted(header)
    fields = _read_fields(header)
    if isinstance(fields, HeaderCheck):
        return fields
    _, _, codec, namespace, key_bytes, key, stored, raw, checksum, key_id, nonce, generation, _ = fields
    return Envelope(
        namespace=namespace,
        key=OffloadKey(key[:key_bytes]),
        codec=codec,
        stored_bytes=stored,
        raw_bytes=raw,
        checksum=checksum,
        key_id=key_id,
        nonce=nonce,
        generation=int.from_bytes(generation, "little"),
    )


class EncryptedFields(NamedTuple):
    """What goes into the header of an encrypted block beside its tag.

    Attributes:
        namespace: first 16 bytes of the namespace digest.
        name: the keyed name of the block, at most 40 bytes.
        stored_bytes: length of the payload.
        raw_bytes: length of the row that it decodes to.
        key_id: number of the ring's entry, not 0.
        salt: of the data key, 16 bytes.
        counter: of the data key's uses.
        generation: of the write, below 2**48.
    """

    namespace: bytes
    name: bytes
    stored_bytes: int
    raw_bytes: int
    key_id: int
    salt: bytes
    counter: int
    generation: int

    def pack(self) -> tuple[bytes, bytes]:
        """Return what stands before and behind the tag: together they are the block's additional data. Pure."""
        before = _BEFORE_TAG.pack(
            MAGIC,
            ENCRYPTED_VERSION,
            RAW_CODEC,
            len(self.name),
            self.namespace,
            self.name,
            self.stored_bytes.to_bytes(LENGTH_BYTES, "little"),
            self.raw_bytes.to_bytes(LENGTH_BYTES, "little"),
        )
        generation = self.generation.to_bytes(GENERATION_BYTES, "little")
        return before, _BEHIND_TAG.pack(self.key_id, self.salt, self.counter, generation)


def join_encrypted_header(before: bytes, tag: bytes, behind: bytes) -> bytes:
    """Return the 128 bytes in front of an encrypted block, given ``EncryptedFields.pack`` and the tag. Pure."""
    fields = before + tag + behind
    return fields + _OWN_CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


def additional_data(header: Buffer) -> bytes:
    """Return what the tag in the header of an encrypted block vouches for beside the payload: all but itself. Pure."""
    begin = _BEFORE_TAG.size
    return bytes(header[:begin]) + bytes(header[begin + TAG_BYTES : _ENCRYPTED_FIELDS.size])


def _is_encrypted(header: Buffer) -> bool:
    return len(header) >= ENVELOPE_BYTES and header[:6] == _ENCRYPTED_START


_ENCRYPTED_START = MAGIC + ENCRYPTED_VERSION.to_bytes(2, "little")


def _unpack_encrypted(header: Buffer) -> Envelope | HeaderCheck:
    found = _ENCRYPTED_FIELDS.unpack_from(header)
    _, _, codec, name_bytes, namespace, name, stored, raw, tag, key_id, salt, counter, generation = found
    (own_checksum,) = _OWN_CHECKSUM.unpack_from(header, _ENCRYPTED_FIELDS.size)
    if own_checksum != xxhash.xxh3_64_intdigest(header[: _ENCRYPTED_FIELDS.size]):
        return HeaderCheck.DAMAGED
    if name_bytes > MAX_KEY_BYTES or key_id == NO_ENCRYPTION:
        return HeaderCheck.DAMAGED
    return Envelope(
        namespace=namespace,
        key=OffloadKey(name[:name_bytes]),
        codec=codec,
        stored_bytes=int.from_bytes(stored, "little"),
        raw_bytes=int.from_bytes(raw, "little"),
        checksum=tag,
        key_id=key_id,
        nonce=salt + counter.to_bytes(4, "little"),
        generation=int.from_bytes(generation, "little"),
    )


def check_block(header: Buffer, payload: Buffer, key: OffloadKey, namespace_digest: bytes) -> HeaderCheck:
    """Check whether ``payload`` is what was stored under ``key`` in this namespace. Pure.

    Args:
        header: what stood in front of the payload.
        payload: the stored bytes, no more and no fewer, contiguous.
        key: the block that was to be read.
        namespace_digest: the reader's namespace.
    """
    fields = _read_fields(header)
    if isinstance(fields, HeaderCheck):
        return fields
    _, _, codec, namespace, key_bytes, found_key, num_stored, _, checksum, key_id, *_ = fields
    if namespace != namespace_digest[:NAMESPACE_BYTES]:
        return HeaderCheck.OTHER_NAMESPACE
    if found_key[:key_bytes] != key:
        return HeaderCheck.OTHER_KEY
    if codec != RAW_CODEC:
        return HeaderCheck.OTHER_CODEC
    if key_id != NO_ENCRYPTION:
        return HeaderCheck.ENCRYPTED
    if num_stored != len(payload) or checksum != xxhash.xxh3_128_digest(payload):
        return HeaderCheck.DAMAGED
    return HeaderCheck.OK


def digest_pieces(pieces: Iterable[Buffer]) -> bytes:
    """Return the checksum of a plain payload that comes in pieces."""
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _read_fields(header: Buffer) -> _Fields | HeaderCheck:
    if len(header) < ENVELOPE_BYTES:
        return HeaderCheck.DAMAGED
    fields: _Fields = _ENVELOPE.unpack_from(header)
    magic, version, _, _, key_bytes, *_, own_checksum = fields
    if magic != MAGIC:
        return HeaderCheck.DAMAGED
    if version != VERSION:
        return HeaderCheck.OTHER_VERSION
    is_intact = own_checksum == xxhash.xxh3_64_intdigest(header[: _FIELDS.size])
    return fields if is_intact and key_bytes <= MAX_KEY_BYTES else HeaderCheck.DAMAGED
