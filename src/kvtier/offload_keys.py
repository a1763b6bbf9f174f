"""Keys of blocks: a content hash, then the KV group, and between them the number of a tenant where the block has one.

    hash | 0 0 0 | group        a block without a tenant: the group as four bytes, big endian
    hash | number (7) | group   a block of a tenant, whose number never ends in three zeros

So a key tells by itself which it is, however long its hash. ``kvtier.base`` has these names too.
"""

from collections.abc import Iterable
from typing import NewType

OffloadKey = NewType("OffloadKey", bytes)
"""Content hash of a block and of its whole prefix, then its tenant's number if it has one, then the KV group index.
Bytes, not a tuple: millions of them must not burden the garbage collector."""

GROUP_INDEX_BYTES = 4
"""Bytes behind the hash of a block without a tenant: the group index, below 256, so that the first three are zero."""

TENANT_BYTES = 7
TENANT_SUFFIX_BYTES = TENANT_BYTES + 1
"""Bytes behind the hash of a tenant's block, its number and the group: a header has room for them and a SHA-256."""

MAX_TENANT_NUMBER = 2 ** (8 * TENANT_BYTES) - 1

TENANT_MARK = 2**24 - 1
"""Bits of a tenant's number that are never all zero: they stand where a key without a tenant has its three zeros, so
that a key tells by itself which it is, however long its hash is."""

# Slices that are written out are made again for each key, which takes as long as the rest.
_MARK, _TENANT = slice(-GROUP_INDEX_BYTES, -1), slice(-TENANT_SUFFIX_BYTES, -1)
_PLAIN_HASH, _TENANTS_HASH = slice(-GROUP_INDEX_BYTES), slice(-TENANT_SUFFIX_BYTES)
_NO_TENANT = bytes(GROUP_INDEX_BYTES - 1)
_read_number = int.from_bytes


def make_offload_key(block_hash: bytes, group_idx: int, tenant: int = 0) -> OffloadKey:
    """Return the key of a block. Pure.

    Args:
        block_hash: content hash of the block and of its whole prefix.
        group_idx: KV group, below 256.
        tenant: number of the request's tenant (``kvtier.tenants.tenant_number``); 0 for none.

    Raises:
        OverflowError: the group or the number is none of these.
    """
    return OffloadKey(block_hash + _make_suffix(group_idx, tenant))


def make_offload_keys(block_hashes: Iterable[bytes], group_idx: int, tenant: int = 0) -> list[OffloadKey]:
    """Return the key of each block of one group, in order; otherwise as ``make_offload_key``. Pure."""
    suffix = _make_suffix(group_idx, tenant)
    return [OffloadKey(block_hash + suffix) for block_hash in block_hashes]


def _make_suffix(group_idx: int, tenant: int) -> bytes:
    if not 0 <= group_idx < 256:
        raise OverflowError(f"group_idx={group_idx}: must be 0 to 255, a key has one byte for it")
    if tenant == 0:
        return group_idx.to_bytes(GROUP_INDEX_BYTES, "big")
    if not (0 < tenant <= MAX_TENANT_NUMBER and tenant & TENANT_MARK):
        raise OverflowError(f"tenant={tenant}: must be 0, or below 2^56 and no multiple of 2^24")
    return (tenant << 8 | group_idx).to_bytes(TENANT_SUFFIX_BYTES, "big")


def get_offload_block_hash(key: OffloadKey) -> bytes:
    """Return the content hash that ``key`` was made from. Pure."""
    return key[_PLAIN_HASH if key[_MARK] == _NO_TENANT else _TENANTS_HASH]


def get_offload_group_idx(key: OffloadKey) -> int:
    """Return the KV group index that ``key`` was made from. Pure."""
    return key[-1]


def get_offload_tenant(key: OffloadKey) -> int:
    """Return the number of the tenant that ``key`` was made for; 0 for none. Pure."""
    return 0 if key[_MARK] == _NO_TENANT else _read_number(key[_TENANT])


def get_tenant_part(tenant: int) -> tuple[slice, bytes]:
    """Return where a key shows whether it is of ``tenant``, by its number, and what stands there then. Pure."""
    return (_TENANT, tenant.to_bytes(TENANT_BYTES, "big")) if tenant else (_MARK, _NO_TENANT)
