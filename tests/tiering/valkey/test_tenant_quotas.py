"""Quotas over several nodes, without the right to list, and through an outage. The others are in ``test_roles.py``."""

from collections.abc import Callable, Iterator

import pytest
from tests.tiering.tenant_driver import TenantDriver, config_of_tenants, count_by_name, key_of_tenant
from tests.tiering.valkey.conftest import StartServer
from tests.tiering.valkey.live import HANG_GUARD_S, LiveServer
from tests.tiering.valkey.live_cluster import LiveCluster

from kvtier.base import OffloadKey
from kvtier.errors import TierError
from kvtier.testing.tier_suite import make_config, make_rows
from kvtier.tiering.valkey import ValkeyTier
from kvtier.tiering.valkey.blobs import ValkeyNames

StartTenants = Callable[..., TenantDriver]


def open_tier(url: str, sizes: dict[str, int | None], **own: object) -> TenantDriver:
    """Return a tier with quotas in bytes, and what drives it."""
    config = config_of_tenants("valkey", sizes, make_config("model-a"))
    rows = make_rows()
    tier = ValkeyTier(config, rows, url=url, **own)  # type: ignore[arg-type]  # a test's own
    return TenantDriver(tier, rows)


def block_bytes_in(url: str, **own: object) -> int:
    """Return what a block counts on a server: before 7.2 what it takes in memory, more than its length."""
    driver = open_tier(url, {"carol": None}, **own)
    key = key_of_tenant("carol", 999)
    driver.store_keys([key])
    assert driver.tier.shutdown(HANG_GUARD_S)
    place = ValkeyTier.open_place({"url": url} | own)
    try:
        (block,) = [block for block in place.blocks() if block.key == key]
        place.remove([block], unless_changed=False)
    finally:
        place.close()
    return block.num_bytes


@pytest.fixture
def start() -> Iterator[StartTenants]:
    """Build tiers with quotas in blocks."""
    drivers: list[TenantDriver] = []

    def make(url: str, quotas: dict[str, int | None], **own: object) -> TenantDriver:
        block_bytes = block_bytes_in(url, **own) if any(quotas.values()) else 0
        # A little more: where memory counts, a value that was restored takes less than one that was stored.
        sizes = {
            name: None if num is None else num * block_bytes + block_bytes // 4
            for name, num in quotas.items()
        }
        drivers.append(open_tier(url, sizes, **own))
        return drivers[-1]

    yield make
    for driver in drivers:
        assert driver.tier.shutdown(HANG_GUARD_S)


def held_in(server: LiveServer) -> set[OffloadKey]:
    """Return which blocks the server has."""
    with server.client() as client:
        names = [ValkeyNames().parse(name.decode()) for name in client.scan_iter("kvtier:*", count=10_000)]
    return {OffloadKey(found.block) for found in names if found is not None and found.block}


def counts_of(driver: TenantDriver, *names: str) -> dict[str, float]:
    """Return what a pass finds at rest; before, what was written while another was read may count twice."""
    driver.tier._block_store._evictor._run_pass()  # type: ignore[attr-defined]  # a valkey tier's
    stats = driver.tier.stats()
    return {name: stats[f"tenant_blocks.{name}"] for name in names}


def test_all_nodes_of_a_cluster_count_together(cluster: LiveCluster, start: StartTenants) -> None:
    driver = start(cluster.url, {"alice": 4, "bob": None}, cluster=True)
    driver.store_of("bob", range(8))
    driver.store_of("alice", range(8))
    place = ValkeyTier.open_place({"url": cluster.url, "cluster": True})
    try:
        driver.poll_until(
            lambda: (
                count_by_name([block.key for block in place.blocks() if block.key]) == {"alice": 4, "bob": 8}
            )
        )
    finally:
        place.close()


def test_a_user_that_may_not_list_is_refused_at_the_start(
    start_server: StartServer, start: StartTenants
) -> None:
    server = start_server("valkey")
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "engine", "on", ">secret", "~kvtier:*", "+@all", "-scan")
    url = f"redis://engine:secret@127.0.0.1:{server.port}"
    start(url, {"alice": None, "bob": None}).tier.check_reachable()
    driver = open_tier(url, {"alice": 2**20})
    with pytest.raises(TierError, match=r"quota_bytes cannot be kept .*\+scan") as caught:
        driver.tier.check_reachable()
    assert "secret" not in str(caught.value)
    assert driver.tier.shutdown(HANG_GUARD_S)


def test_the_tier_goes_on_without_a_server_and_keeps_the_quota_when_it_is_back(
    server: LiveServer, start: StartTenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiering.kit.blobs.evictor.RETRY_S", 0.01)
    driver = start(server.url, {"alice": 4})
    driver.store_of("alice", range(4))
    driver.poll_until(lambda: counts_of(driver, "alice") == {"alice": 4})
    server.kill()
    driver.store_of("alice", range(4, 8))
    server.start()
    driver.poll_until(lambda: len(driver.store_of("alice", range(8, 16))) == 8)
    driver.poll_until(lambda: count_by_name(held_in(server)) == {"alice": 4})
