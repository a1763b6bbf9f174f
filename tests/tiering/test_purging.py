"""A purge of a living engine reaches its tiers: nothing comes back, and nothing is lost that a transfer uses."""

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
from tests.tiering.encrypted_suite import encrypted
from tests.tiering.purged import BLOCKS, HANG_GUARD_S, check_purge, end, make_driver

from kvtier.base import OffloadKey, ReqContext
from kvtier.errors import ControlError, TierError, UnknownNameError
from kvtier.misses import MissCause
from kvtier.testing.tier_suite import key_of, make_config
from kvtier.testing.tiering_driver import ROW_BYTES, TieringDriver
from kvtier.tiering.base import PurgeOutcome, SecondaryTierManager, TierSettings
from kvtier.tiering.example import ExampleSecondaryTier
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.system_calls import REAL_CALLS, SystemCalls
from kvtier.tiering.kit.key_ring import add_entry, make_ring, write_ring
from kvtier.tiering.kit.purging import BackgroundPurge, Batches, Removed
from kvtier.tiering.obj import ObjTier

CAPACITY = "1MiB"

EVENTS = TierSettings(emit_events=True)

Make = Callable[[Path, memoryview], SecondaryTierManager]


def make_fs(
    folder: Path, view: memoryview, model: str = "model-a", calls: SystemCalls = REAL_CALLS
) -> SecondaryTierManager:
    config, root = make_config(model, ROW_BYTES), str(folder / "fs")
    return FSTier(config, view, EVENTS, calls=calls, root_dir=root, capacity_bytes=CAPACITY)


def make_obj(folder: Path, view: memoryview) -> SecondaryTierManager:
    return ObjTier(make_config("model-a", ROW_BYTES), view, url=f"file://{folder / 'obj'}")


@pytest.mark.parametrize("make", [make_fs, make_obj])
def test_a_purge_leaves_nothing_to_find(make: Make, tmp_path: Path) -> None:
    check_purge(lambda view: make(tmp_path, view))


def test_a_purge_leaves_the_blocks_of_other_namespaces(tmp_path: Path) -> None:
    other = make_driver(lambda view: make_fs(tmp_path, view, "model-b"))
    other.evict_everything()
    assert other.manager.drain(HANG_GUARD_S)
    driver = make_driver(lambda view: make_fs(tmp_path, view))
    assert end(driver, driver.manager.purge(["fs"])).num_purged == {"fs": len(BLOCKS)}
    assert other.search_until_known([0, 1], ReqContext("other"), 10**6) == 2
    for each in (driver, other):
        each.manager.shutdown()


def test_routers_hear_of_each_block_that_a_purge_removes(tmp_path: Path) -> None:
    driver = make_driver(lambda view: make_fs(tmp_path, view))
    driver.step()
    announced = keys_of_events(driver, removed=False)
    end(driver, driver.manager.purge(["fs"]))
    driver.step()
    assert announced == keys_of_events(driver, removed=True) == {key_of(number) for number in BLOCKS}
    driver.manager.shutdown()


@pytest.mark.parametrize("kind", ["fs", "obj"])
def test_routers_hear_of_each_block_that_a_purge_removes_where_names_are_keyed(
    kind: str, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography", reason="needs kvtier[encryption]")
    ring = tmp_path / "ring"
    write_ring(ring, add_entry(make_ring(), None, 1.0))
    config = encrypted(make_config("model-a", ROW_BYTES), ring)

    def make(view: memoryview) -> SecondaryTierManager:
        if kind == "obj":
            return ObjTier(config, view, EVENTS, url=f"file://{tmp_path / 'obj'}")
        return FSTier(config, view, EVENTS, root_dir=str(tmp_path / "fs"), capacity_bytes=CAPACITY)

    driver = make_driver(make)
    driver.step()
    announced = keys_of_events(driver, removed=False, medium=kind)
    purged = end(driver, driver.manager.purge([kind]))
    driver.step()

    assert purged.num_purged == {kind: len(BLOCKS)}
    removed = keys_of_events(driver, removed=True, medium=kind)
    assert announced == removed == {key_of(number) for number in BLOCKS}
    driver.manager.shutdown()


def keys_of_events(driver: TieringDriver, *, removed: bool, medium: str = "fs") -> set[OffloadKey]:
    events = [event for event in driver.manager.take_events() if event.medium == medium]
    return {key for event in events if event.removed is removed for key in event.keys}


def test_a_slot_that_cannot_be_emptied_is_named_and_not_found(tmp_path: Path) -> None:
    def refuse(fd: int, data: bytes) -> int:
        if is_broken.is_set():
            raise OSError(errno.EIO, "no")
        return REAL_CALLS.write(fd, data)

    is_broken = Event()
    calls = replace(REAL_CALLS, write=refuse)
    driver = make_driver(lambda view: make_fs(tmp_path, view, calls=calls))
    is_broken.set()
    purged = end(driver, driver.manager.purge(["fs"]))
    assert "12 slots below" in purged.unable["fs"]
    driver.evict_everything()
    assert driver.search_until_known(list(BLOCKS), ReqContext("asked")) == 0
    is_broken.clear()
    driver.manager.shutdown()


class ScriptedTier(ExampleSecondaryTier):
    """The example tier, whose purge ends when a test says so."""

    outcome: PurgeOutcome | int = 0
    num_begun = 0
    num_looked_up = 0

    @staticmethod
    def get_tier_type() -> str:
        return "scripted"

    def purge(self, tenant: int | None = None) -> None:  # type: ignore[override]  # it never ends at once
        self.num_begun += 1

    def poll_purge(self) -> PurgeOutcome | int:
        return self.outcome

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        self.num_looked_up += 1
        return super().lookup(key, req_context)


@pytest.fixture
def driver() -> TieringDriver:
    """A manager with a tier whose jobs end a step late."""
    return TieringDriver(
        16, lambda view: [ScriptedTier(make_config("model-a", ROW_BYTES), view, simulate_async=True)]
    )


def tier_of(driver: TieringDriver) -> ScriptedTier:
    (tier,) = driver.tiers
    assert isinstance(tier, ScriptedTier)
    return tier


def test_a_backend_removes_only_when_no_job_is_open_and_gets_none_meanwhile(driver: TieringDriver) -> None:
    tier = tier_of(driver)
    driver.store([1, 2])
    assert driver.manager.stats()["tier.0.scripted.in_flight_store_bytes"] > 0
    purge = driver.manager.purge(["scripted"])
    assert tier.num_begun == 0
    driver.search([1, 2, 7], ReqContext("during"))
    driver.store([3])
    for _ in range(4):
        driver.step()
    assert (tier.num_begun, tier.num_looked_up, purge.result) == (1, 0, None)
    assert driver.manager.stats()["tier.0.scripted.in_flight_store_bytes"] == 0

    tier.outcome = PurgeOutcome(2, [key_of(1), key_of(2)])
    assert end(driver, purge).num_purged == {"scripted": 2}
    driver.step()
    assert driver.manager.stats()["tier.0.scripted.in_flight_store_bytes"] > 0


def test_two_purges_at_once_are_one(driver: TieringDriver) -> None:
    first = driver.manager.purge(["scripted"])
    second = driver.manager.purge(None)
    assert first is second
    assert tier_of(driver).num_begun == 1
    tier_of(driver).outcome = 5
    driver.step()
    assert first.num_removed == 5
    tier_of(driver).outcome = PurgeOutcome(7)
    assert end(driver, first).num_purged == {"host": 0, "scripted": 7}
    assert driver.manager.purge(["scripted"]) is not first


def test_what_a_tier_delivers_while_host_memory_is_purged_goes_too(driver: TieringDriver) -> None:
    driver.store([1])
    assert driver.manager.drain(HANG_GUARD_S)
    driver.evict_everything()
    request = ReqContext("waits")
    assert driver.search([1], request) is None
    driver.step()
    tier_of(driver).outcome = PurgeOutcome(1, [key_of(1)])
    purge = driver.manager.purge(None)
    driver.manager.request_finished(request)
    end(driver, purge)
    assert driver.primary.table.num_held == 0


def test_a_tier_that_fails_or_cannot_is_named_with_the_reason(driver: TieringDriver) -> None:
    tier = tier_of(driver)
    tier.outcome = PurgeOutcome(3, error="the disk is gone")
    purged = end(driver, driver.manager.purge(None))
    assert (purged.num_purged, purged.unable) == (
        {"host": 0, "scripted": 3},
        {"scripted": "the disk is gone"},
    )

    def refuse(tenant: int | None = None) -> None:
        raise TierError("scripted", "not today")

    tier.purge = refuse  # type: ignore[method-assign]
    assert "not today" in end(driver, driver.manager.purge(["scripted"])).unable["scripted"]
    with pytest.raises(UnknownNameError, match="scripted"):
        driver.manager.purge(["script"])


@pytest.mark.parametrize("answer", [[key_of(1)], "done", object(), 3.5])
@pytest.mark.parametrize("call", ["purge", "poll_purge"])
def test_an_answer_that_is_no_outcome_ends_the_purge_and_not_the_engine(
    driver: TieringDriver, call: str, answer: object
) -> None:
    setattr(tier_of(driver), call, lambda *_: answer)

    purged = end(driver, driver.manager.purge(["scripted"]))

    assert list(purged.unable) == ["scripted"]
    assert driver.manager.stats()["tier.0.scripted.errors"] == 1


def test_a_miss_while_a_purge_is_under_way_says_so(driver: TieringDriver) -> None:
    driver.manager.purge(["scripted"])
    asked = ReqContext("asked")
    assert driver.search([1], asked) == 0
    miss = driver.manager.explain(key_of(1), asked)
    assert miss is not None
    assert (miss.cause, miss.detail["reason"]) == (MissCause.PURGED, "a purge is under way")


def test_a_purge_ends_with_its_engine() -> None:
    removing = Event()

    def remove(namespace: str, tenant: int | None) -> Batches:
        while True:
            removing.set()
            yield Removed(1, [])

    purge = BackgroundPurge("some", remove)
    purge.begin("a")
    assert removing.wait(HANG_GUARD_S)
    assert purge.stop(HANG_GUARD_S)
    outcome = purge.poll()
    assert isinstance(outcome, PurgeOutcome)
    assert outcome.num_blocks > 0
    assert "ended before" in outcome.error


def test_a_crash_of_a_removal_is_its_outcome(caplog: pytest.LogCaptureFixture) -> None:
    def remove(namespace: str, tenant: int | None) -> Batches:
        yield Removed(2, [key_of(1)])
        raise RuntimeError("a bug")

    purge = BackgroundPurge("some", remove)
    purge.begin("a")
    while isinstance(outcome := purge.poll(), int):
        pass
    assert outcome == PurgeOutcome(2, [key_of(1)], "RuntimeError: a bug")
    assert "a purge has failed" in caplog.text


def test_a_purge_of_one_tenant_is_no_part_of_another_purge(driver: TieringDriver) -> None:
    driver.manager.purge(["scripted"])
    with pytest.raises(ControlError, match="a purge of other blocks is under way"):
        driver.manager.purge(["scripted"], 7)
    tier_of(driver).outcome = PurgeOutcome(0)
    driver.step()
    assert driver.manager.purge(None, 7).result is not None
