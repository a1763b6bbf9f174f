"""Whether a block is whole, found out with little memory: what lies in a place may be of any length, or of holes."""

from collections.abc import Callable, Iterator

from kvtier.tiering.kit.envelope import Buffer, Envelope, digest_pieces, unpack
from kvtier.tiering.kit.place import BlockState, Opener, check_bytes

PIECE_BYTES = 4 * 2**20
"""Bytes read at a time. More gain nothing; fewer are more calls."""

MAX_HOLLOW_BYTES = 2**30
"""Longer files must have bytes on the disk, a part of their length: one of holes may be longer than any memory and take
days to read. Shorter ones are read, as a file system that compresses may need next to nothing for a row of zeros."""

MAX_HOLLOW_SHARE = 64

MAX_HOLLOW_ENCRYPTED_BYTES = 64 * 2**20
"""The same for an encrypted block, which must be in memory to be opened and which nothing compresses: half of its
length must be on the disk. Smaller, and a file system that counts its blocks late has fresh ones called damaged."""

MAX_ENCRYPTED_BYTES = 2**31 - 1
"""The cipher takes no more at a time, so no longer block was ever encrypted."""

DISK_BLOCK_BYTES = 512
"""Unit of ``st_blocks``, whatever the file system's own is."""

ReadPayload = Callable[[int, int], Buffer]
"""Reads a number of bytes from an offset of the payload on; fewer at its end."""


def is_hollow(num_bytes: int, num_disk_blocks: int, *, is_encrypted: bool = False) -> bool:
    """Return whether a file is of holes, next to nothing of its length being on the disk. Pure."""
    disk_bytes = num_disk_blocks * DISK_BLOCK_BYTES
    if is_encrypted and num_bytes > MAX_HOLLOW_ENCRYPTED_BYTES:
        return 2 * disk_bytes < num_bytes
    return num_bytes > MAX_HOLLOW_BYTES and disk_bytes * MAX_HOLLOW_SHARE < num_bytes


def check_in_pieces(
    header: Buffer,
    num_bytes: int,
    read: ReadPayload,
    namespace_name: str,
    name: bytes | None,
    opener: Opener | None,
    *,
    num_disk_blocks: int | None = None,
) -> BlockState:
    """Compare a block with its header, reading its payload only where the header fits it.

    Args:
        header: at least the bytes of the envelope.
        num_bytes: length of the payload, as the place says.
        read: reads it.
        namespace_name: of the namespace that it was found in.
        name: the block's, as the place calls it; None: whichever the header says.
        opener: opens encrypted blocks, which are read whole; without it only their headers are checked.
        num_disk_blocks: what the file takes on the disk; None: it is no file, or part of one.
    """
    envelope = unpack(header)
    # Whose block it is; a payload is not there yet, and only its absence is wrong with a good header.
    state = check_bytes(header, b"", namespace_name, name)
    if state is not BlockState.DAMAGED or not isinstance(envelope, Envelope):
        return state
    is_encrypted = envelope.is_encrypted
    if not 0 < envelope.stored_bytes == num_bytes:
        return state
    if num_disk_blocks is not None and is_hollow(num_bytes, num_disk_blocks, is_encrypted=is_encrypted):
        return state
    if not is_encrypted:
        digest = digest_pieces(_read_pieces(read, num_bytes))
        return BlockState.WHOLE if digest == envelope.checksum else BlockState.DAMAGED
    if num_bytes > MAX_ENCRYPTED_BYTES:
        return state
    if opener is None:
        return BlockState.ENCRYPTED
    payload = bytearray()
    for piece in _read_pieces(read, num_bytes):
        payload += piece
    return check_bytes(header, payload, namespace_name, name, opener)


def _read_pieces(read: ReadPayload, num_bytes: int) -> Iterator[Buffer]:
    """Yield the payload, no further than its length: a file may grow meanwhile."""
    offset = 0
    while offset < num_bytes and len(piece := memoryview(read(offset, min(PIECE_BYTES, num_bytes - offset)))):
        yield piece
        offset += len(piece)
