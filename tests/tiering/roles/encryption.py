"""An engine that encrypts, as far as it is not ``EncryptedSuite``: names, and what else a tier keeps while it does."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.tiering.roles.bench import needs, only_without
from tests.tiering.roles.expiry import TTL_S, Expiry
from tests.tiering.roles.tenants import Tenants

from kvtier.errors import ConfigError
from kvtier.testing.tier_driver import key_of, make_config, make_rows
from kvtier.tiering.factory import create_secondary_tier
from kvtier.tiering.kit.key_ring import add_entry, make_ring, write_ring


class Encryption(Tenants, Expiry):
    """Engines with one ring of keys."""

    @pytest.fixture
    def encrypting(self, tmp_path: Path) -> dict[str, object]:
        """Return the settings of an engine that encrypts."""
        pytest.importorskip("cryptography")
        ring = tmp_path / "ring.json"
        write_ring(ring, add_entry(make_ring(), None, 1.0))
        return {"encryption": {"key_file": str(ring)}}

    @needs("encryption")
    def test_no_name_and_no_value_shows_a_key(self, encrypting: dict[str, object]) -> None:
        driver = self.start(extra=encrypting)
        assert driver.store([1, 2]).success
        assert not driver.lookup(3)
        backend = self.get_backend()
        assert len(backend.names()) >= 3, "two blocks and a description"
        kept = backend.dump()
        for key in map(key_of, (1, 2, 3)):
            assert not [one for one in (key[:32].hex().encode(), key[:32]) if one in kept]

    @needs("encryption")
    def test_engines_with_one_ring_share_blocks_and_a_plain_one_has_its_own(
        self, encrypting: dict[str, object]
    ) -> None:
        first, second, plain = self.start(extra=encrypting), self.start(extra=encrypting), self.start()
        assert first.store([1, 2]).success
        assert second.lookup(1)
        assert second.load_right([2, 1]) == {1, 2}
        assert plain.load_right([1, 2]) == set()
        assert plain.store([2]).success
        assert plain.load_right([2]) == second.load_right([2]) == {2}
        assert len(self.list_blocks()) == 3

    @needs("encryption", "quotas", "quotas at once")
    def test_encrypted_blocks_count_for_their_tenants(self, encrypting: dict[str, object]) -> None:
        driver = self.start_tenants({"alice": 4, "bob": None}, more=encrypting)
        assert len(driver.store_of("bob", range(4))) == 4
        assert len(driver.store_of("alice", range(8))) == 8
        driver.poll_until(lambda: len(self.list_blocks()) == 8)
        self.wait_counted(driver, "alice", {"alice": 4, "bob": 4})

    @needs("encryption", "expiry", "ages")
    def test_an_encrypted_block_is_a_miss_when_its_time_is_over(self, encrypting: dict[str, object]) -> None:
        driver = self.start(extra=encrypting, ttl_s=TTL_S, clock=self.clock)
        assert driver.store([1]).success
        self.pass_time(TTL_S / 2)
        assert driver.load_right([1]) == {1}
        self.pass_time(2 * TTL_S)
        assert driver.load_right([1]) == set()
        assert driver.store([1]).success
        assert driver.load_right([1]) == {1}

    @only_without("encryption")
    def test_an_engine_that_encrypts_is_refused(self, encrypting: dict[str, object]) -> None:
        config = replace(make_config(), extra_config=encrypting)
        tier = {"type": self.tier_class.get_tier_type(), **self.own_settings()}
        with pytest.raises(ConfigError, match="cannot encrypt"):
            create_secondary_tier(tier, make_rows(), config)
