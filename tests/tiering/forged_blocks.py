"""Blocks that somebody has planted: of holes, with headers that say their length, or of another encoding."""

from pathlib import Path

import xxhash

from kvtier.base import OffloadKey
from kvtier.tiering.kit.envelope import (
    ENVELOPE_BYTES,
    Buffer,
    EncryptedFields,
    Envelope,
    HeaderCheck,
    join_encrypted_header,
    make_header,
    unpack,
)


def forge_header(path: str, header_bytes: int, num_bytes: int, *, is_encrypted: bool) -> None:
    """Make a block's file as long as a header says that is right but for the payload's checksum.

    Args:
        path: a whole block's file.
        header_bytes: bytes in front of its payload.
        num_bytes: length that the payload gets, of holes.
        is_encrypted: whether the header says so.
    """
    with Path(path).open("r+b") as file:
        found = unpack(file.read(ENVELOPE_BYTES))
        assert isinstance(found, Envelope)
        fields = EncryptedFields(found.namespace, found.key, num_bytes, num_bytes, 7, bytes(16), 1, 0)
        before, behind = fields.pack()
        forged = join_encrypted_header(before, bytes(16), behind)
        if not is_encrypted:
            plain = bytearray(make_header(found.key, found.namespace, b""))
            plain[66:82] = 2 * num_bytes.to_bytes(8, "little")
            plain[-8:] = xxhash.xxh3_64_intdigest(plain[:-8]).to_bytes(8, "little")
            forged = bytes(plain)
        parsed = unpack(forged)
        assert isinstance(parsed, Envelope)
        assert parsed.stored_bytes == num_bytes
        file.seek(0)
        file.write(forged)
        file.truncate(header_bytes + num_bytes)


def with_codec(block: bytes, codec: int) -> bytes:
    """Return a plain block whose header says another encoding, with the checksum of such a header."""
    fields = block[:6] + codec.to_bytes(2, "little") + block[8 : ENVELOPE_BYTES - 8]
    return fields + xxhash.xxh3_64_intdigest(fields).to_bytes(8, "little") + block[ENVELOPE_BYTES:]


class AnyOpener:
    """Opens whatever it is given."""

    def open(self, header: Buffer, payload: Buffer) -> HeaderCheck:
        """Take it for right."""
        del header, payload
        return HeaderCheck.OK

    def is_of_ring(self, namespace: bytes, name: bytes) -> bool:
        """Take it for the ring's."""
        del namespace, name
        return True

    def key_of(self, namespace: bytes, name: bytes) -> OffloadKey:
        """Return the name."""
        del namespace
        return OffloadKey(name)
