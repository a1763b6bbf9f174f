"""Names blocks by content: SHA-256 chained over the parent's digest, the salt and the token ids.

It keeps nothing. A block's digest stands for its tokens and for every token before them, so that equal
digests mean equal keys and values; only full blocks have one.
"""

import hashlib
from array import array
from collections.abc import Sequence

HASH_ALGORITHM = "sha256"
"""What the engine reports to kvtier as the name of its hash."""

ID_TYPE_CODE = "q"
"""Token ids enter the hash as 64-bit integers, wider than any vocabulary, so that no two ids collide."""


def make_root_digest(salt: str) -> bytes:
    """Return the parent of every first block: engines with different salts share no block. Pure."""
    return hashlib.sha256(b"kvtier.block_hash.1\0" + salt.encode()).digest()


def make_range_root(root: bytes, length_range: str) -> bytes:
    """Return the parent of the first blocks of sequences in one range of lengths; ``root`` where none has a name. Pure.

    Args:
        root: of the engine.
        length_range: names the range; keys of different ranges differ, so they share no block.
    """
    if not length_range:
        return root
    return hashlib.sha256(b"kvtier.length_range.1\0" + root + length_range.encode()).digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the digest of one full block after ``parent``, 32 bytes. Pure."""
    return hashlib.sha256(parent + array(ID_TYPE_CODE, token_ids).tobytes()).digest()


def extend_block_hashes(
    digests: list[bytes], token_ids: Sequence[int], block_size_tokens: int, root: bytes
) -> None:
    """Append to ``digests`` one digest for each full block of ``token_ids`` that has none yet.

    Effects: changes ``digests`` only; the last, partial block gets no digest.
    """
    for index in range(len(digests), len(token_ids) // block_size_tokens):
        first = index * block_size_tokens
        parent = digests[-1] if digests else root
        digests.append(hash_block(parent, token_ids[first : first + block_size_tokens]))
