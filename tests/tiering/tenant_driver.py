"""Drives a tier with blocks of several tenants, as the manager would."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvtier.base import JobId, OffloadKey, get_offload_block_hash, get_offload_tenant, make_offload_key
from kvtier.config import OffloadingConfig
from kvtier.tenants import tenant_number
from kvtier.testing.tier_suite import TierDriver, make_config
from kvtier.tiering.base import JobMetadata

NAMES = ("alice", "bob", "carol")
NAME_OF = {tenant_number(name): name for name in NAMES} | {0: ""}

COLLIDING_NAME = "mallory-11628364"
"""A name that was searched for, in half a minute: three bytes of its unkeyed digest are those of "alice"."""


def key_of_tenant(name: str, number: int) -> OffloadKey:
    """Return the key of a tenant's block; "" is no tenant."""
    return make_offload_key(number.to_bytes(32, "big"), 0, tenant_number(name) if name else 0)


def config_of_tenants(
    tier: str, quota_bytes: Mapping[str, int | None], config: OffloadingConfig | None = None
) -> OffloadingConfig:
    """Return the configuration of an engine whose tenants have these quotas in a tier; "*" is everybody else."""
    tenants = {
        name: {} if num_bytes is None else {"quota_bytes": {tier: num_bytes}}
        for name, num_bytes in quota_bytes.items()
    }
    extra_config = {"tenants": tenants, "secondary_tiers": [{"type": tier}]}
    return replace(config or make_config(), extra_config=extra_config)


class TenantDriver(TierDriver):
    """Stores and looks up blocks of tenants."""

    def store_of(self, name: str, numbers: Sequence[int]) -> set[OffloadKey]:
        """Store blocks of a tenant in one job; return those that succeeded."""
        return self.store_keys([key_of_tenant(name, number) for number in numbers])

    def store_keys(self, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
        """Store blocks in one job, in the first slots; return those that succeeded."""
        numbers = [int.from_bytes(get_offload_block_hash(key), "big") for key in keys]
        slots = list(range(len(keys)))
        self.place(numbers, slots)
        job_id = self._next_job_id
        self._next_job_id += 1
        job = JobMetadata(
            JobId(job_id),
            tuple(keys),
            np.array(slots, dtype=np.int64),
            is_promotion=False,
            req_context=self.request,
        )
        self.tier.submit_store(job)
        result = self.wait(job_id)
        return set(keys) if result.success else set(result.successful_keys or ())


def count_by_name(keys: Sequence[OffloadKey] | set[OffloadKey]) -> dict[str, int]:
    """Return how many blocks each tenant has, for those who have any. Pure."""
    counts: dict[str, int] = {}
    for key in keys:
        name = NAME_OF[get_offload_tenant(key)]
        counts[name] = counts.get(name, 0) + 1
    return counts
