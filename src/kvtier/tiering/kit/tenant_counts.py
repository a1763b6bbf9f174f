"""How many blocks of a tier belong to which tenant of requests, and which is beyond its quota, where there are tenants.

A tier that has its blocks in memory counts them here as they come and go; the tier's own lock guards the counts. Labels
are the listed names and two more, so a client cannot make new ones.
"""

from collections import Counter
from collections.abc import Iterable

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.config import OffloadingConfig
from kvtier.tenants import Tenants, make_tenants

BLOCKS_STAT = "tenant_blocks."
BYTES_STAT = "tenant_bytes."
"""What the names of the counts begin with; the tenant's label follows."""


class TenantCounts:
    """The counts of one tier, by number.

    Args:
        tenants: the engine's tenants.
        tier: type of the tier.
        block_bytes: what a block takes in it, header included.

    Attributes:
        num_blocks: blocks of each tenant; none of the counts is zero.
        has_quotas: whether any tenant has a quota in the tier.
    """

    def __init__(self, tenants: Tenants, tier: str, block_bytes: int) -> None:
        self._tenants = tenants
        self._tier = tier
        self._block_bytes = block_bytes
        self.num_blocks: Counter[int] = Counter()
        self.has_quotas = tenants.has_quota(tier)

    def add(self, keys: Iterable[OffloadKey]) -> None:
        """Count blocks that were not held."""
        self.num_blocks.update(map(get_offload_tenant, keys))

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        """Uncount blocks that were held."""
        for number in map(get_offload_tenant, keys):
            self.num_blocks[number] -= 1
            if not self.num_blocks[number]:
                del self.num_blocks[number]

    def clear(self) -> None:
        """Forget every block."""
        self.num_blocks.clear()

    def excess_blocks(self, number: int, num_new: int = 0) -> int:
        """Return by how many blocks a tenant is beyond its quota with so many new ones; 0 when it is not. Pure."""
        quota_bytes = self._tenants.quota_of(number, self._tier)
        if quota_bytes is None:
            return 0
        return max(0, self.num_blocks[number] + num_new - quota_bytes // self._block_bytes)

    def rank_beyond(self, added: Iterable[OffloadKey]) -> tuple[list[tuple[int, int]], int]:
        """Return which tenants beyond their quotas give first where a store needs room, and by how many blocks. Pure.

        Those of ``added`` stand first, then the tenant that is most beyond. The second value is how many of ``added``
        bring a tenant beyond its quota: these take the place of no other tenant's block.
        """
        num_added = Counter(map(get_offload_tenant, added))
        storing = [(number, self.excess_blocks(number, num)) for number, num in num_added.items()]
        others = [
            (number, self.excess_blocks(number)) for number in self.num_blocks if number not in num_added
        ]
        ranked = storing + sorted(others, key=lambda item: -item[1])
        num_beyond = sum(min(excess, num_added[number]) for number, excess in storing)
        return [(number, excess) for number, excess in ranked if excess], num_beyond

    def stats(self) -> dict[str, float]:
        """Return the blocks and bytes of each label, under the names that a tier's statistics have."""
        counts = dict.fromkeys(self._tenants.labels(), 0.0)
        for number, num in self.num_blocks.items():
            label = self._tenants.label_of(number)
            counts[label] = counts.get(label, 0.0) + num
        sizes = {f"{BYTES_STAT}{label}": count * self._block_bytes for label, count in counts.items()}
        return {f"{BLOCKS_STAT}{label}": count for label, count in counts.items()} | sizes


def make_tenant_counts(config: OffloadingConfig, tier: str, block_bytes: int) -> TenantCounts | None:
    """Return empty counts for an engine's tier; None where it has no tenants of requests.

    Args:
        config: what the engine said of itself.
        tier: type of the tier.
        block_bytes: what a block takes in it, header included.
    """
    tenants = make_tenants(config.settings)
    return None if tenants is None else TenantCounts(tenants, tier, block_bytes)
