"""What a purge of a living engine must do, whatever tier it is: used by the tests of each."""

from collections.abc import Callable

from kvtier.base import ReqContext
from kvtier.misses import MissCause
from kvtier.operating import Purge, PurgedBlocks
from kvtier.testing.tier_suite import key_of
from kvtier.testing.tiering_driver import TieringDriver
from kvtier.tiering.base import SecondaryTierManager

HANG_GUARD_S = 60.0

MAX_STEPS = 10**6
"""Guard against a hang: steps of nothing are short."""

BLOCKS = range(12)

MakeTier = Callable[[memoryview], SecondaryTierManager]


def make_driver(make_tier: MakeTier) -> TieringDriver:
    """Return a manager with one tier, which has BLOCKS; host memory has them too."""
    driver = TieringDriver(16, lambda view: [make_tier(view)])
    driver.store(list(BLOCKS))
    assert driver.manager.drain(HANG_GUARD_S)
    return driver


def end(driver: TieringDriver, purge: Purge) -> PurgedBlocks:
    """Step until a purge has ended and return what it has done."""
    while purge.result is None:
        driver.step()
    return purge.result


def check_purge(make_tier: MakeTier, *, is_named: bool = True) -> None:
    """A purge leaves nothing to find, here and after a restart; what is stored afterwards is found, and only that.

    Args:
        make_tier: makes the tier over the rows, each time on the same place.
        is_named: whether the tier knows which blocks it has removed.
    """
    driver = make_driver(make_tier)
    name = driver.tiers[0].get_tier_type()
    purged = end(driver, driver.manager.purge(None))
    assert purged == PurgedBlocks({"host": 12, name: 12}, {"host": 0}, {}), purged

    asked = ReqContext("asked")
    assert driver.search_until_known(list(BLOCKS), asked, MAX_STEPS) == 0
    miss = driver.manager.explain(key_of(0), asked)
    assert miss is not None
    assert (miss.cause, miss.tier) == (MissCause.PURGED, name if is_named else "host")
    driver.manager.request_finished(asked)
    assert end(driver, driver.manager.purge([name])).num_purged == {name: 0}

    driver.store([3, 4])
    assert driver.manager.drain(HANG_GUARD_S)
    driver.evict_everything()
    driver.manager.shutdown()

    again = TieringDriver(16, lambda view: [make_tier(view)])
    asked = ReqContext("asked again")
    assert again.search_until_known([3, 4], asked, MAX_STEPS) == 2
    again.load([3, 4], asked)
    for number in BLOCKS:
        if number not in (3, 4):
            assert again.search_until_known([number], ReqContext(f"{number}"), MAX_STEPS) == 0
    again.manager.shutdown()
