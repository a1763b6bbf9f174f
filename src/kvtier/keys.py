"""What names a block and what asks for it: keys, and the context of a request."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NewType

from kvtier.hints.values import RequestHints, parse_hints

OffloadKey = NewType("OffloadKey", bytes)
"""Content hash of a block and of its whole prefix, its tenant's number if it has one, the KV group index. Bytes, not a
tuple: millions of them must not burden the garbage collector."""

GROUP_INDEX_BYTES = 4
"""Bytes behind the hash of a block without a tenant: the group index, below 256, so that the first three are zero."""

TENANT_BYTES = 7
TENANT_SUFFIX_BYTES = TENANT_BYTES + 1
"""Bytes behind the hash of a tenant's block, its number and the group: a header has room for them and a SHA-256."""

MAX_TENANT_NUMBER = 2 ** (8 * TENANT_BYTES) - 1
TENANT_MARK = 2**24 - 1
"""Bits of a tenant's number that are never all zero, where a key without one has zeros: so a key tells which it is."""

# Slices that are written out are made again for each key, which takes as long as the rest.
_MARK, _TENANT = slice(-GROUP_INDEX_BYTES, -1), slice(-TENANT_SUFFIX_BYTES, -1)
_PLAIN_HASH, _TENANTS_HASH = slice(-GROUP_INDEX_BYTES), slice(-TENANT_SUFFIX_BYTES)
_NO_TENANT, _read_number = bytes(GROUP_INDEX_BYTES - 1), int.from_bytes


def make_offload_key(block_hash: bytes, group_idx: int, tenant: int = 0) -> OffloadKey:
    """Return the key of a block with that content hash; otherwise as ``make_offload_keys``. Pure."""
    return make_offload_keys((block_hash,), group_idx, tenant)[0]


def make_offload_keys(block_hashes: Iterable[bytes], group_idx: int, tenant: int = 0) -> list[OffloadKey]:
    """Return the key of each block of one group, in order. Pure.

    Args:
        block_hashes: content hashes, each of a block and of its whole prefix.
        group_idx: KV group, below 256.
        tenant: number of the request's tenant (``kvtier.tenants.tenant_number``); 0 for none.

    Raises:
        OverflowError: the group or the number is none of these.
    """
    if not 0 <= group_idx < 256:
        raise OverflowError(f"group_idx={group_idx}: must be 0 to 255, a key has one byte for it")
    if tenant and not (tenant & TENANT_MARK and 0 < tenant <= MAX_TENANT_NUMBER):
        raise OverflowError(f"tenant={tenant}: must be 0, or below 2^56 and no multiple of 2^24")
    suffix = (tenant << 8 | group_idx).to_bytes(TENANT_SUFFIX_BYTES if tenant else GROUP_INDEX_BYTES, "big")
    return [OffloadKey(block_hash + suffix) for block_hash in block_hashes]


def get_offload_block_hash(key: OffloadKey) -> bytes:
    """Return the content hash that ``key`` was made from. Pure."""
    return key[_PLAIN_HASH if key[_MARK] == _NO_TENANT else _TENANTS_HASH]


def get_offload_group_idx(key: OffloadKey) -> int:
    """Return the KV group index that ``key`` was made from. Pure."""
    return key[-1]


def get_offload_tenant(key: OffloadKey) -> int:
    """Return the number of the tenant that ``key`` was made for; 0 for none. Pure."""
    return 0 if key[_MARK] == _NO_TENANT else _read_number(key[_TENANT])


@dataclass(eq=False, slots=True)
class ReqContext:
    """One request for managers and tiers; compared by identity.

    The same object reaches every manager and tier call made for the request.

    Attributes:
        req_id: the engine's id of the request.
        kv_transfer_params: the client's hints, unchanged by the engine.
    """

    req_id: str
    kv_transfer_params: dict[str, Any] | None = None  # Any: a client's JSON, read where it is used
    _hints: RequestHints | None = field(default=None, init=False, repr=False)

    @property
    def hints(self) -> RequestHints:
        """The hints among ``kv_transfer_params``; they are read when they are first asked for, and then never again."""
        if self._hints is None:
            self._hints = parse_hints(self.kv_transfer_params)
        return self._hints
