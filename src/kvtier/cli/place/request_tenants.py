"""The tenant of requests that a block in a place belongs to; of an encrypted block with the key ring.

The name of a plain block tells its tenant's number. The name of an encrypted one is a keyed permutation of the same
bytes: with the ring's secret they come back. Another ring gives random bytes. So the number of the KV group, which
every key has and a namespace's document bounds, decides by the first block of a namespace whether the ring is its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from kvtier.base import get_offload_group_idx, get_offload_tenant
from kvtier.cli.place.options import encrypted_names, read_document
from kvtier.tenants import is_name, tenant_number
from kvtier.tiering.kit.place import Opener, Place, PlaceBlock, PlaceNamespace


class RequestTenants:
    """Tells the tenants of a place's blocks. Used by one thread.

    Args:
        namespaces: those of the place.
        opener: has the ring; None: the tenants of encrypted blocks are not told.
    """

    def __init__(self, namespaces: Sequence[PlaceNamespace], opener: Opener | None) -> None:
        self._opener = opener
        self._num_groups = {one.name: _count_groups(one) for one in namespaces}
        self._encrypted = encrypted_names(namespaces)
        self._is_of_ring: dict[str, bool] = {}

    def told(self, blocks: Iterable[PlaceBlock]) -> Iterator[PlaceBlock]:
        """Yield the blocks with their tenants, None where nothing tells one."""
        for block in blocks:
            if block.namespace not in self._encrypted:
                yield block
            else:
                yield replace(block, tenant=self._tenant_of_encrypted(block))

    def _tenant_of_encrypted(self, block: PlaceBlock) -> int | None:
        if self._opener is None or block.name is None:
            return None
        key = self._opener.key_of(bytes.fromhex(block.namespace), block.name)
        is_right = get_offload_group_idx(key) < self._num_groups.get(block.namespace, 0)
        if not self._is_of_ring.setdefault(block.namespace, is_right) or not is_right:
            return None
        return get_offload_tenant(key)


def find_tenant(place: Place, known: Sequence[PlaceNamespace], tenant: str) -> int | None:
    """Return the number of a tenant of requests that has blocks in a place; None where there is no such tenant.

    An engine's tag goes first: an engine's own tenant has whole namespaces.
    """
    documents = map(read_document, known)
    if any(document is not None and document.get("tenant") == tenant for document in documents):
        return None
    if not is_name(tenant):
        return None
    number = tenant_number(tenant)
    told = RequestTenants(known, place.opener).told(place.blocks())
    return number if any(block.tenant == number for block in told) else None


def _count_groups(namespace: PlaceNamespace) -> int:
    groups = (read_document(namespace) or {}).get("groups")
    return len(groups) if isinstance(groups, list) else 0
