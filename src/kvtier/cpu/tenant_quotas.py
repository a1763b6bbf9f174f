"""Which blocks leave host memory first where tenants have quotas; the policy decides only among those.

A quota is a limit where room is short, and no reservation: while slots are free every tenant may take them. When a
store needs room, three kinds of blocks are taken, in this order:

    1. as far as the store brings its own tenant beyond the quota: blocks of that tenant
    2. of other tenants that are beyond theirs: as many as they are beyond it
    3. for a store within its tenant's quota: any

A store that would need blocks of the third kind to bring its tenant beyond its quota is refused: it has nothing idle
left itself, and those within their quotas do not pay for it.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.cpu.block_table import BlockListener, BlockTable
from kvtier.cpu.policies.base import BlockStatus
from kvtier.errors import InvariantError
from kvtier.tenants import HOST, OtherKeys, Tenants

NO_KEYS: Collection[OffloadKey] = ()


class Part(NamedTuple):
    """A part of an eviction.

    Attributes:
        num: blocks to evict.
        tenant: whose; None: anybody's.
    """

    num: int
    tenant: int | None


class TenantBlocks(BlockListener):
    """The blocks of each tenant in host memory, and what to evict for whom.

    Args:
        table: the blocks.
        tenants: the engine's tenants.
        block_bytes: bytes of a slot.

    Attributes:
        held: the held blocks of each tenant by number, in flight or ready; none of the groups is empty.
        has_quotas: whether any tenant has a quota here; without one only the blocks are counted.
    """

    def __init__(self, table: BlockTable, tenants: Tenants, block_bytes: int) -> None:
        self._table = table
        self._tenants = tenants
        self._block_bytes = block_bytes
        self.held: dict[int, dict[OffloadKey, None]] = {}
        self.has_quotas = tenants.has_quota(HOST)

    def on_held(self, keys: Collection[OffloadKey]) -> None:
        for key in keys:
            self.held.setdefault(get_offload_tenant(key), {})[key] = None

    def on_gone(self, keys: Collection[OffloadKey]) -> None:
        for key in keys:
            number = get_offload_tenant(key)
            group = self.held[number]
            del group[key]
            if not group:
                del self.held[number]

    def on_cleared(self) -> None:
        self.held.clear()

    def evict(
        self,
        num: int,
        num_new: int,
        storer: int,
        named: Collection[OffloadKey],
        protected: Collection[OffloadKey],
    ) -> list[OffloadKey] | None:
        """Evict ``num`` blocks for a store; None, with nothing changed, when it has to be refused.

        Args:
            num: blocks to evict.
            num_new: blocks that the store adds.
            storer: number of its tenant.
            named: blocks that must stay.
            protected: further ones; ``in`` of neither should search.
        """
        kept = (named, protected)
        parts = self.plan(num, num_new, storer, kept)
        if parts is None:
            return None
        return self._table.evict_each((part.num, OtherKeys(part.tenant, kept)) for part in parts)

    def plan(
        self,
        num: int,
        num_new: int,
        storer: int,
        kept: tuple[Collection[OffloadKey], Collection[OffloadKey]] = (NO_KEYS, NO_KEYS),
    ) -> list[Part] | None:
        """Return whose blocks ``evict`` takes, None when it refuses; arguments as of ``evict``. Pure."""
        num_beyond = min(num, self._excess(storer, num_new))
        parts = [Part(self._count_idle(storer, num_beyond, kept), storer)]
        num_left = num - parts[0].num
        num_within = num - num_beyond
        beyond = {other: self._excess(other) for other in self.held if other != storer}
        for other, excess in sorted(beyond.items(), key=lambda item: -item[1]):
            if num_left == 0 or excess == 0:
                break
            parts.append(Part(self._count_idle(other, min(num_left, excess), kept), other))
            num_left -= parts[-1].num
        if num_left > num_within:
            return None
        if num_left:
            num_taken = sum(part.num for part in parts)
            if self._count_all_idle(num_taken + num_left, kept) < num_taken + num_left:
                return None
            parts.append(Part(num_left, None))
        return [part for part in parts if part.num]

    def quota_blocks(self, number: int) -> int | None:
        """Return how many slots a tenant's quota has, by its number; None: as many as there is room. Pure."""
        quota_bytes = self._tenants.quota_of(number, HOST)
        return None if quota_bytes is None else quota_bytes // self._block_bytes

    def stats(self) -> dict[str, float]:
        # By the label of each tenant.
        counts: dict[str, int] = dict.fromkeys(self._tenants.labels(), 0)
        for number, group in tuple(self.held.items()):
            label = self._tenants.label_of(number)
            counts[label] = counts.get(label, 0) + len(group)
        stats = {f"primary.tenant_blocks.{label}": float(count) for label, count in counts.items()}
        sizes = {
            f"primary.tenant_bytes.{label}": float(count * self._block_bytes)
            for label, count in counts.items()
        }
        return stats | sizes

    def check(self, held: Mapping[OffloadKey, BlockStatus]) -> None:
        found = [key for group in self.held.values() for key in group]
        if len(found) != len(held) or set(found) != set(held) or not all(self.held.values()):
            raise InvariantError(f"tenants have {len(found)} blocks, {len(held)} are held")

    def _excess(self, number: int, num_new: int = 0) -> int:
        """Return by how many blocks a tenant is beyond its quota with so many new ones; 0 when it is not. Pure."""
        quota_blocks = self.quota_blocks(number)
        if quota_blocks is None:
            return 0
        return max(0, len(self.held.get(number, ())) + num_new - quota_blocks)

    def _count_idle(
        self, number: int, limit: int, kept: tuple[Collection[OffloadKey], Collection[OffloadKey]]
    ) -> int:
        """Return how many blocks of a tenant could be evicted, counted up to ``limit``. Pure."""
        return self._count(self.held.get(number, ()), limit, kept)

    def _count_all_idle(self, limit: int, kept: tuple[Collection[OffloadKey], Collection[OffloadKey]]) -> int:
        num_found = 0
        for group in self.held.values():
            num_found += self._count(group, limit - num_found, kept)
        return num_found

    def _count(
        self,
        keys: Collection[OffloadKey],
        limit: int,
        kept: tuple[Collection[OffloadKey], Collection[OffloadKey]],
    ) -> int:
        named, protected = kept
        get, num_found = self._table.get_block, 0
        for key in keys:
            if num_found >= limit:
                break
            block = get(key)
            is_idle = block is not None and block.ref_cnt == 0
            num_found += is_idle and key not in named and key not in protected
        return num_found
