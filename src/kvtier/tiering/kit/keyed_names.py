"""Keyed names: what a tier calls a block where it is encrypted.

Names are a permutation of keys: four rounds of a Feistel network whose rounds are keyed BLAKE2b. Without the ring's
secret they say nothing and no guessed prompt can be confirmed; with it a walk of the place gives the keys back, which
the tiers index by.

Source: four rounds make a permutation that cannot be told from a random one, Luby and Rackoff, SIAM Journal on
Computing 17 (1988); BLAKE2 with a key, RFC 7693; HKDF, RFC 5869.
"""

import hashlib
from functools import lru_cache

from kvtier.base import OffloadKey
from kvtier.errors import MissingExtraError
from kvtier.tiering.kit.block_format import BlockName

try:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:
    raise MissingExtraError("cryptography", "encryption") from error

KEY_BYTES = 32

NAMES_PURPOSE = b"kvtier names 3"

MAX_NAMES = 4096
"""Names of blocks remembered, 300 bytes each: a batch computes the name of a block several times, 5 us each."""

NUM_ROUNDS = 4


def derive_key(secret: bytes, salt: bytes | None, purpose: bytes) -> bytes:
    """Return 32 bytes derived with HKDF-SHA256. Pure."""
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=purpose).derive(secret)


class BlockNames:
    """Names of the blocks of one namespace, and back; immutable but for a cache that guards itself.

    Args:
        names_secret: the ring's.
        namespace: first 16 bytes of the digest of the encrypted namespace.
    """

    def __init__(self, names_secret: bytes, namespace: bytes) -> None:
        self._key = derive_key(names_secret, None, NAMES_PURPOSE + namespace)
        self.name = lru_cache(MAX_NAMES)(self._name)

    def key(self, name: BlockName) -> OffloadKey:
        """Return the block that is called ``name``."""
        half = len(name) // 2
        left, right = name[:half], name[half:]
        for number in reversed(range(0, NUM_ROUNDS, 2)):
            left = self._mix(number + 1, right, left)
            right = self._mix(number, left, right)
        return OffloadKey(left + right)

    def _name(self, key: OffloadKey) -> BlockName:
        half = len(key) // 2
        left, right = key[:half], key[half:]
        for number in range(0, NUM_ROUNDS, 2):
            right = self._mix(number, left, right)
            left = self._mix(number + 1, right, left)
        return left + right

    def _mix(self, number: int, source: bytes, target: bytes) -> bytes:
        """Return ``target`` changed by a keyed hash of ``source``; the same again changes it back."""
        num_bytes = len(target)
        if not num_bytes:
            return target
        person = b"kvtier name %d" % number
        mask = hashlib.blake2b(source, digest_size=num_bytes, key=self._key, person=person).digest()
        return (int.from_bytes(target) ^ int.from_bytes(mask)).to_bytes(num_bytes)
