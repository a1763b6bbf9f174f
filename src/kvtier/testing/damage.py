"""Changes single bits of stored blocks, past the tier that keeps them: what suites of tiers prove checksums with."""

from pathlib import Path

from kvtier.base import OffloadKey, get_offload_block_hash
from kvtier.testing.tier_driver import content_of


def row_of(key: OffloadKey) -> bytes:
    """Return the bytes that the suite stores under ``key``, a key that ``key_of`` made. Pure."""
    return content_of(int.from_bytes(get_offload_block_hash(key), "big")).tobytes()


def flip_bit(value: bytes, key: OffloadKey) -> bytes | None:
    """Return ``value`` with one bit of the block's row changed, None when the row is not in it. Pure."""
    row = row_of(key)
    at = value.find(row)
    if at < 0:
        return None
    place = at + len(row) // 2
    return value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :]


def flip_bit_in_files(directory: Path, key: OffloadKey) -> bool:
    """Change one bit of the block's row in the first file below ``directory`` that has it.

    Returns:
        False when no file has the row as it was stored; a tier that encodes rows needs a search of its own.
    """
    row = row_of(key)
    for path in sorted(directory.rglob("*")):
        at = path.read_bytes().find(row) if path.is_file() else -1
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + len(row) // 2)
                file.write(bytes([row[len(row) // 2] ^ 1]))
            return True
    return False
