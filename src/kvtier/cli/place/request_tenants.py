"""The tenant of requests that a block in a place belongs to; of an encrypted block with the key ring.

The name of a plain block tells its tenant's number. The name of an encrypted one is a keyed permutation of the same
bytes: with the ring's secret they come back. Another ring gives random bytes. So the number of the KV group, which
every key has and a namespace's document bounds, decides by the first block of a namespace whether the ring is its own.

A number is made from the tenant's name and the ``tenant_salt`` of its engine, so a name has another number under each
salt that engines of a place have. Blocks of an older layout have shorter numbers, which tell no tenant here.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kvtier.base import get_offload_group_idx, get_offload_tenant
from kvtier.cli.place.options import counted, encrypted_names, read_document
from kvtier.config import Settings, parse_settings
from kvtier.namespace import LAYOUT_VERSION, tag_tenant
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
        self._older = frozenset(one.name for one in namespaces if _is_older(one))
        self._is_of_ring: dict[str, bool] = {}

    def told(self, blocks: Iterable[PlaceBlock]) -> Iterator[PlaceBlock]:
        """Yield the blocks with their tenants, None where nothing tells one."""
        for block in blocks:
            if block.namespace in self._older:
                yield replace(block, tenant=None)
            elif block.namespace not in self._encrypted:
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


def read_engine_settings(config: Path) -> Settings:
    """Return the settings of an engine in a file, as ``kvtier doctor`` reads it.

    Raises:
        KVTierError: the file cannot be read, or has a setting that cannot work.
    """
    from kvtier.cli.config_checks import EXTRA_CONFIG, find_own, read_config

    own = find_own(read_config(config)) or {}
    return parse_settings(own.get(EXTRA_CONFIG, own))


def find_tenant(place: Place, known: Sequence[PlaceNamespace], tenant: str, salt: str) -> int | None:
    """Return the number of a tenant of requests that has blocks in a place; None where there is no such tenant.

    An engine's tag goes first: an engine's own tenant has whole namespaces.

    Args:
        place: the place.
        known: its namespaces.
        tenant: the name.
        salt: ``tenant_salt`` of the engines whose tenant it is; empty for those without one.
    """
    documents = map(read_document, known)
    if any(document is not None and document.get("tenant") == tenant for document in documents):
        return None
    if not is_name(tenant):
        return None
    number = tenant_number(tenant, salt)
    told = RequestTenants(known, place.opener).told(place.blocks())
    return number if any(block.tenant == number for block in told) else None


def describe_left_out(known: Sequence[PlaceNamespace], names: Collection[str] | None, salt: str) -> list[str]:
    """Return in which namespaces a tenant is not looked for, by name and salt, and what to do. Pure.

    Args:
        known: those of the place.
        names: of those that were chosen; None: all.
        salt: as of ``find_tenant``.
    """
    chosen = [one for one in known if names is None or one.name in names]
    older = [one for one in chosen if _is_older(one)]
    encrypted = encrypted_names(chosen)
    others = [
        one
        for one in chosen
        if one not in older and one.name not in encrypted and _tag(one) != tag_tenant(salt)
    ]
    lines = []
    if others:
        of_others = f"{counted(len(others), 'namespace')} of engines with another tenant_salt, or without"
        lines.append(
            f"{of_others}: the name has another number there, give --config FILE with their settings"
        )
    if older:
        lines.append(
            f"{counted(len(older), 'namespace')} of an older layout, which no engine of this version reads: their "
            "blocks are not told by tenant, remove them with --namespace"
        )
    return lines


def _tag(namespace: PlaceNamespace) -> str:
    return str((read_document(namespace) or {}).get("tenant") or "")


def _is_older(namespace: PlaceNamespace) -> bool:
    version = (read_document(namespace) or {}).get("layout_version", LAYOUT_VERSION)
    return isinstance(version, int) and version < LAYOUT_VERSION


def _count_groups(namespace: PlaceNamespace) -> int:
    groups = (read_document(namespace) or {}).get("groups")
    return len(groups) if isinstance(groups, list) else 0
