"""How many blocks of a tier belong to which tenant of requests, where the engine has tenants.

A tier that has its blocks in memory counts them here as they come and go; the tier's own lock guards the counts. Labels
are the listed names and two more, so a client cannot make new ones.
"""

from collections import Counter
from collections.abc import Iterable

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.config import OffloadingConfig
from kvtier.tenants import Tenants, make_tenants

STAT = "tenant_blocks."
"""What the names of the counts begin with; the tenant's label follows."""


class TenantCounts:
    """The counts of one tier, by number.

    Args:
        tenants: the engine's tenants.

    Attributes:
        num_blocks: blocks of each tenant; none of the counts is zero.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self.num_blocks: Counter[int] = Counter()

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

    def stats(self) -> dict[str, float]:
        """Return the blocks of each label, under the names that a tier's statistics have."""
        counts = dict.fromkeys(self._tenants.labels(), 0.0)
        for number, num in self.num_blocks.items():
            label = self._tenants.label_of(number)
            counts[label] = counts.get(label, 0.0) + num
        return {f"{STAT}{label}": count for label, count in counts.items()}


def make_tenant_counts(config: OffloadingConfig) -> TenantCounts | None:
    """Return empty counts for an engine's tier; None where it has no tenants of requests."""
    tenants = make_tenants(config.settings)
    return None if tenants is None else TenantCounts(tenants)
