"""How long blocks live: as long as ``ttl_s`` says, and no longer, whoever has stored them."""

from typing import ClassVar

import pytest
from tests.tiering.roles.bench import RoleSuite, needs, only_without

from kvtier.errors import KVTierError
from kvtier.misses import MissCause
from kvtier.testing.tier_driver import key_of, make_config, make_rows
from kvtier.tiering.factory import create_secondary_tier

TTL_S = 1000.0
YEAR_S = 365 * 86_400.0


class Expiry(RoleSuite):
    """Time passes as a backend sees it.

    Attributes:
        renews: whether a use begins a block's time again.
        no_ttl: what ``ttl_s`` is for blocks without an end.
    """

    renews: ClassVar[bool] = False
    no_ttl: ClassVar[object] = None

    def pass_time(self, seconds: float) -> None:
        """Let all that is stored be that much older, and the clocks of engines go on."""
        backend = self.get_backend()
        for name in backend.names():
            backend.add_age(name, seconds)
        self.clock.advance(seconds)

    @needs("expiry", "ages")
    def test_a_block_is_a_miss_when_its_time_is_over(self) -> None:
        driver = self.start(ttl_s=TTL_S, clock=self.clock)
        assert driver.store([1, 2]).success
        self.pass_time(TTL_S / 2)
        assert driver.lookup(1)
        assert driver.load_right([1, 2]) == {1, 2}
        self.pass_time(2 * TTL_S)
        assert driver.load_right([1, 2]) == set()
        for number in (1, 2):
            assert not driver.lookup(number)
            miss = driver.tier.explain(key_of(number), driver.request)
            assert miss is not None
            assert (miss.cause, miss.tier) == (MissCause.EXPIRED, driver.tier.get_tier_type())
        assert driver.tier.stats()["damaged"] == 0

    @needs("expiry", "ages")
    def test_what_is_over_costs_no_younger_block_of_its_job(self) -> None:
        driver = self.start(ttl_s=TTL_S, clock=self.clock)
        assert driver.store([1, 3]).success
        self.pass_time(TTL_S + 1)
        assert driver.store([2]).success
        result = driver.load([1, 2, 3])
        assert (result.success, result.is_fault) == (False, False)
        assert driver.load_right([1, 2, 3]) == {2}
        assert driver.tier.stats()["absent"] == 4

    @needs("expiry", "ages")
    def test_another_engine_finds_nothing_of_what_is_over(self) -> None:
        assert self.start(ttl_s=TTL_S, clock=self.clock).store([1, 2]).success
        self.pass_time(2 * TTL_S)
        driver = self.start(ttl_s=TTL_S, clock=self.clock)
        assert not driver.lookup(1)
        assert driver.load_right([2, 1]) == set()

    @needs("expiry", "ages", "remains")
    def test_a_block_of_an_engine_without_a_time_to_live_is_over_for_one_that_has_one(self) -> None:
        assert self.start(clock=self.clock).store([1, 2]).success
        self.pass_time(TTL_S / 2)
        driver = self.start(ttl_s=TTL_S, clock=self.clock)
        assert driver.lookup(1)
        assert driver.load_right([1]) == {1}
        self.pass_time(2 * TTL_S)
        assert driver.load_right([1]) == set()
        other = self.start(ttl_s=TTL_S, clock=self.clock)
        assert not other.lookup(2)
        miss = other.tier.explain(key_of(2), other.request)
        assert miss is not None
        assert miss.cause is MissCause.EXPIRED

    @needs("expiry", "ages")
    def test_what_is_over_is_stored_again_and_lives_again(self) -> None:
        writer, driver = (self.start(ttl_s=TTL_S, clock=self.clock) for _ in range(2))
        assert writer.store([1, 2]).success
        self.pass_time(2 * TTL_S)
        assert driver.store([1]).success
        assert driver.load_right([1, 2]) == {1}
        self.pass_time(TTL_S / 2)
        assert writer.load_right([1, 2]) == {1}

    @needs("expiry", "ages")
    def test_a_use_renews_the_time_of_a_block_only_where_the_tier_says_so(self) -> None:
        driver = self.start(ttl_s=TTL_S, clock=self.clock)
        assert driver.store([1, 2]).success
        self.pass_time(0.6 * TTL_S)
        assert driver.load_right([1]) == {1}
        assert driver.store([1]).success
        self.pass_time(0.6 * TTL_S)
        assert driver.load_right([1, 2]) == ({1} if self.renews else set())

    @needs("expiry", "ages")
    def test_without_a_time_to_live_a_block_does_not_expire(self) -> None:
        driver = self.start(ttl_s=self.no_ttl, clock=self.clock)
        assert driver.store([1]).success
        self.pass_time(20 * YEAR_S)
        assert driver.lookup(1)
        assert driver.load_right([1]) == {1}

    @only_without("expiry")
    def test_a_time_to_live_is_refused(self) -> None:
        tier = {"type": self.tier_class.get_tier_type(), "ttl_s": TTL_S, **self.own_settings()}
        with pytest.raises(KVTierError, match="ttl_s"):
            create_secondary_tier(tier, make_rows(), make_config())
