"""What routers learn of a tier: each block that it gains, and each that it is known to have lost, once."""

from typing import ClassVar

from tests.tiering.roles.bench import RoleSuite, needs, only_without

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.testing.tier_driver import HANG_GUARD_S, TierDriver, key_of, make_config
from kvtier.testing.tiering_driver import ROW_BYTES, TieringDriver, number_of
from kvtier.tiering.base import TierSettings

TELLING = TierSettings(emit_events=True, max_in_flight_store_bytes=2**20)
LOOK_AGAIN_S = 3600.0
MAX_STEPS = 10**6
"""Guard against a hang: steps of nothing are short."""


class Mirror:
    """What a router believes that one medium holds.

    Args:
        engine: whose events it reads.
        medium: the tier's type.
    """

    def __init__(self, engine: TieringDriver, medium: str) -> None:
        self._engine = engine
        self._medium = medium
        self.held: set[int] = set()

    def read(self) -> set[int]:
        """Take the events since the last call; what is gained twice or lost twice fails the test."""
        for event in self._engine.manager.take_events():
            if event.medium != self._medium:
                continue
            numbers = set(map(number_of, event.keys))
            assert len(numbers) == len(list(event.keys))
            if event.removed:
                assert numbers <= self.held, "lost without being gained"
                self.held -= numbers
            else:
                assert not numbers & self.held, "gained twice"
                self.held |= numbers
        return self.held


class Events(RoleSuite):
    """A tier alone, and behind a manager.

    Attributes:
        small: the tier's own settings with which it holds ``num_small`` blocks and evicts the oldest.
        num_small: that many.
    """

    small: ClassVar[dict[str, object]] = {}
    num_small: ClassVar[int] = 4

    def start_engine(self, **own: object) -> tuple[TieringDriver, Mirror]:
        """Return a manager over the tier, and a router."""
        config: OffloadingConfig = make_config(row_bytes=ROW_BYTES)
        engine = TieringDriver(32, lambda view: [self.build(config, view, TELLING, clock=self.clock, **own)])
        self.drivers.append(TierDriver(engine.tiers[0], engine.region.rows))  # type: ignore[arg-type]
        return engine, Mirror(engine, self.tier_class.get_tier_type())

    def test_each_block_is_announced_once_when_it_is_stored(self) -> None:
        engine, mirror = self.start_engine()
        for numbers in ([1, 2, 3], [3, 4], [1, 2, 3, 4]):
            engine.store(numbers)
            engine.settle(HANG_GUARD_S)
            engine.evict_everything()
        engine.settle(HANG_GUARD_S)
        assert {1, 2, 3, 4} <= mirror.read()

    @needs("raw", "removals")
    def test_a_block_that_a_request_finds_missing_is_withdrawn(self) -> None:
        engine, mirror = self.start_engine()
        engine.store([1, 2])
        engine.settle(HANG_GUARD_S)
        assert mirror.read() == {1, 2}
        engine.evict_everything()
        engine.settle(HANG_GUARD_S)
        self.remove_block_of_engine(1)
        self.clock.advance(LOOK_AGAIN_S)
        request = ReqContext("asks")
        assert engine.search_until_known([1], request, MAX_STEPS) == 0
        engine.manager.request_finished(request)
        engine.step()
        held = mirror.read()
        assert 1 not in held
        assert 2 in held

    def remove_block_of_engine(self, number: int) -> None:
        """Remove a block of ``start_engine``'s engine past its tier."""
        backend = self.get_backend()
        (name,) = [name for name in backend.names() if key_of(number).hex() in name]
        backend.remove(name)

    @needs("evictions")
    def test_what_routers_believe_is_what_a_small_tier_holds(self) -> None:
        engine, mirror = self.start_engine(**self.small)
        for number in range(4 * self.num_small):
            engine.store([number])
            engine.settle(HANG_GUARD_S)
            held = mirror.read()
            assert number in held
            assert held == {
                one for one in range(number + 1) if engine.tiers[0].lookup(key_of(one), ReqContext("r"))
            }
            assert len(held) == min(number + 1, self.num_small)

    def start_small(self) -> TierDriver:
        """Return a small tier that collects what it evicts, full of the first blocks."""
        driver = self.start(settings=TELLING, **self.small)  # type: ignore[arg-type]  # the tier's own
        for number in range(self.num_small):
            assert driver.store([number]).success
        assert take(driver) == set()
        return driver

    @needs("evictions")
    def test_an_evicted_block_is_told_once(self) -> None:
        driver = self.start_small()
        assert driver.store([100]).success
        assert take(driver) == {0}
        assert take(driver) == set()

    @needs("evictions")
    def test_a_block_that_is_back_is_not_told_as_gone(self) -> None:
        driver = self.start_small()
        assert driver.store([100]).success
        assert driver.store([0]).success
        assert take(driver) == {1}

    @needs("evictions", "small jobs")
    def test_an_eviction_is_not_told_before_its_store_is_reported(self) -> None:
        driver = self.start_small()
        for number in range(100, 100 + 2 * self.num_small):
            driver.submit([number], [0], is_promotion=False)
        assert driver.tier.drain(HANG_GUARD_S)
        told = take(driver)
        driver.poll_until(lambda: len(driver.results) == 3 * self.num_small)
        told |= take(driver)
        assert told == {*range(self.num_small), *range(100, 100 + self.num_small)}

    @needs("evictions")
    def test_nothing_is_kept_to_be_told_without_events(self) -> None:
        driver = self.start(**self.small)  # type: ignore[arg-type]  # the tier's own
        for number in range(2 * self.num_small):
            assert driver.store([number]).success
        assert not driver.lookup(0)
        assert take(driver) == set()

    @only_without("evictions")
    def test_a_tier_that_does_not_know_what_leaves_tells_none(self) -> None:
        driver = self.start(settings=TELLING)
        assert driver.store([1, 2]).success
        driver.tier.drop([key_of(1)])
        driver.poll_until(lambda: not driver.lookup(1))
        assert take(driver) == set()

    @needs("emptied")
    def test_a_backend_that_is_emptied_is_said_once(self) -> None:
        driver = self.start(settings=TELLING, clock=self.clock)
        assert driver.store(list(range(8))).success
        self.clock.advance(LOOK_AGAIN_S)
        assert not driver.tier.drain_emptied()
        self.get_backend().clear()
        assert driver.load_right([1]) == set()
        driver.poll_until(driver.tier.drain_emptied)
        assert driver.store([1, 2]).success
        self.clock.advance(LOOK_AGAIN_S)
        assert driver.load_right([1, 2, 3]) == {1, 2}
        assert not driver.tier.drain_emptied()

    @needs("emptied", "removals")
    def test_a_block_that_is_missing_alone_empties_no_backend(self) -> None:
        driver = self.start(settings=TELLING, clock=self.clock)
        assert driver.store(list(range(8))).success
        self.clock.advance(LOOK_AGAIN_S)
        self.remove_blocks(1)
        assert driver.load_right(list(range(8))) == {0, 2, 3, 4, 5, 6, 7}
        assert not driver.tier.drain_emptied()


def take(driver: TierDriver) -> set[int]:
    """Return which blocks a tier says that it has evicted; one that is named twice fails the test."""
    keys: list[OffloadKey] = list(driver.tier.drain_evicted() or ())
    assert len(keys) == len(set(keys))
    return set(map(number_of, keys))
