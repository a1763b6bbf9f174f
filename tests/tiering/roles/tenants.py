"""Tenants beyond their quotas lose their own blocks, those used longest ago first, and no others."""

from collections.abc import Mapping

import pytest
from tests.tiering.roles.bench import RoleSuite, needs, only_without
from tests.tiering.tenant_driver import TenantDriver, config_of_tenants, count_by_name, key_of_tenant

from kvtier.errors import ConfigError
from kvtier.testing.tier_driver import HANG_GUARD_S, make_rows
from kvtier.tiering.factory import create_secondary_tier

Quotas = Mapping[str, int | None]


def count_evicted(driver: TenantDriver) -> float:
    """Return how many blocks a tier has evicted; some count objects."""
    stats = driver.tier.stats()
    return stats["evicted"] if "evicted" in stats else stats["evicted_blocks"]


class Tenants(RoleSuite):
    """Quotas in blocks."""

    def settings_of(self, quotas: Quotas, more: Mapping[str, object]) -> dict[str, object]:
        """Return the engine's settings for quotas in blocks."""
        block_bytes = self.measure_block(more) if any(quotas.values()) else 0
        # A little more: where memory counts, a value that was restored takes less than one that was stored.
        sizes = {
            name: None if num is None else num * block_bytes + block_bytes // 4
            for name, num in quotas.items()
        }
        return {**config_of_tenants(self.tier_class.get_tier_type(), sizes).extra_config, **more}

    def measure_block(self, more: Mapping[str, object]) -> int:
        """Return what a block counts: in some servers what it takes in memory, more than its length."""
        driver = self.start("measured", more)
        assert driver.store([10**6]).success  # a place may be none before an engine has used it
        before = {block.address for block in self.list_blocks()}
        assert driver.store([10**6 + 1]).success
        (block,) = [block for block in self.list_blocks() if block.address not in before]
        assert driver.tier.shutdown(HANG_GUARD_S)
        assert self.remove_namespace(block.namespace) == 2
        return block.num_bytes

    def start_tenants(
        self, quotas: Quotas, model: str = "model-a", more: Mapping[str, object] | None = None
    ) -> TenantDriver:
        """Return a tier of an engine whose tenants have quotas in blocks; "*" is every other one."""
        return self.start(model, self.settings_of(quotas, more or {}))

    def counts(self) -> dict[str, int]:
        """Return how many blocks each tenant has in the backend, of whatever model."""
        return count_by_name(self.held_keys())

    def wait_counted(self, driver: TenantDriver, bound: str, counts: Mapping[str, int]) -> None:
        """Store blocks of a tenant that is at its quota, until the tier knows what all have.

        What is written while a pass reads may count twice until the next one, which a store begins.
        """
        number = 1000

        def store_and_ask() -> bool:
            nonlocal number
            number += 1
            driver.store_of(bound, [number])
            stats = driver.tier.stats()
            return {name: stats[f"tenant_blocks.{name}"] for name in counts} == counts

        driver.poll_until(store_and_ask)

    @needs("quotas", "quotas at once")
    def test_beyond_its_quota_a_tenant_loses_its_own_blocks_and_nobody_else_one(self) -> None:
        driver = self.start_tenants({"alice": 4, "bob": 20, "carol": None})
        assert len(driver.store_of("bob", range(8))) == 8
        assert len(driver.store_of("carol", range(12))) == 12
        assert len(driver.store_of("", range(8))) == 8
        assert len(driver.store_of("alice", range(8))) == 8
        others = {"bob": 8, "carol": 12, "": 8}
        driver.poll_until(lambda: self.counts() == {"alice": 4, **others})
        self.wait_counted(driver, "alice", {"alice": 4, "bob": 8, "carol": 12})
        driver.poll_until(lambda: self.counts() == {"alice": 4, **others})
        num_gone = driver.tier.stats()["stored_blocks"] - sum(self.counts().values())
        driver.poll_until(lambda: count_evicted(driver) == num_gone)

    @needs("quotas", "quotas at once")
    def test_within_their_quotas_tenants_lose_nothing(self) -> None:
        driver = self.start_tenants({"alice": 16, "*": 8})
        held = driver.store_of("alice", range(8)) | driver.store_of("bob", range(8))
        # The pass that this begins has seen the others.
        assert len(driver.store_of("carol", range(9))) == 9
        driver.poll_until(lambda: self.counts()["carol"] == 8)
        assert held <= set(self.held_keys())
        assert count_evicted(driver) == 1

    @needs("quotas", "quotas at once", "ages", "single ages")
    def test_the_blocks_used_longest_ago_leave_first(self) -> None:
        # Without quotas first: an engine with some would remove them by the times that the backend gave them.
        self.start_tenants({"alice": None}).store_of("alice", range(8))
        backend, namespace = self.get_backend(), self.namespace_of()
        for number in (1, 3, 5, 7):
            backend.add_age(backend.name_of(namespace, key_of_tenant("alice", number)), 1000.0 + number)
        driver = self.start_tenants({"alice": 4, "bob": None})
        driver.store_of("bob", range(8))
        driver.poll_until(lambda: self.counts() == {"alice": 4, "bob": 8})
        assert {key_of_tenant("alice", number) for number in (0, 2, 4, 6)} <= set(self.held_keys())
        driver.poll_until(lambda: count_evicted(driver) == 4)

    @needs("quotas", "quotas at once", "quotas of all models")
    def test_engines_of_several_models_keep_one_quota_together(self) -> None:
        quotas = {"alice": 5, "*": 3}
        drivers = [self.start_tenants(quotas, model) for model in ("model-a", "model-a", "model-b")]
        for index, driver in enumerate(drivers):
            assert len(driver.store_of("alice", range(4 * index, 4 * index + 4))) == 4
            assert len(driver.store_of("bob", [index])) == 1
        drivers[-1].poll_until(lambda: self.counts() == {"alice": 5, "bob": 3})

    @needs("quotas", "quotas at once")
    def test_a_tenant_that_goes_on_storing_is_refused_nothing_and_kept_to_its_quota(self) -> None:
        driver = self.start_tenants({"alice": 4, "bob": None})
        driver.store_of("bob", range(6))
        for first in range(0, 40, 4):
            assert len(driver.store_of("alice", range(first, first + 4))) == 4
        driver.poll_until(lambda: self.counts() == {"alice": 4, "bob": 6})

    @needs("quotas", "quotas at once", "emptied")
    def test_a_backend_that_is_emptied_is_counted_again(self) -> None:
        driver = self.start_tenants({"alice": 4, "bob": 8})
        driver.store_of("alice", range(4))
        driver.poll_until(lambda: self.counts() == {"alice": 4})
        self.get_backend().clear()
        driver.store_of("bob", range(12))
        self.wait_counted(driver, "bob", {"alice": 0, "bob": 8})

    @only_without("quotas")
    @pytest.mark.parametrize("name", ["alice", "*"])
    def test_a_quota_is_refused(self, name: str) -> None:
        tier = self.tier_class.get_tier_type()
        config = config_of_tenants(tier, {name: 2**20})
        with pytest.raises(ConfigError, match="quota_bytes"):
            create_secondary_tier({"type": tier, **self.own_settings()}, make_rows(), config)
