"""A server or bucket that is emptied under a living engine costs the blocks, and one line; routers are told."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("redis", reason="the valkey tier needs redis-py: pip install 'kvtier[valkey]'")
pytest.importorskip("obstore", reason="the obj tier needs obstore: pip install 'kvtier[obj]'")

import shutil

from tests.tiering.valkey.scripted import ScriptedServer, bulk, number

from kvtier.base import ReqContext
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import TierDriver, key_of, make_config, make_rows
from kvtier.tiering.base import SecondaryTierManager, TierSettings
from kvtier.tiering.guard import GuardedTier
from kvtier.tiering.kit.threaded_tier import CHECK_S
from kvtier.tiering.obj import ObjTier
from kvtier.tiering.valkey import ValkeyTier

TELLING = TierSettings(emit_events=True)
HANG_GUARD_S = 60.0


class Values:
    """What a small Valkey keeps: enough of it for a tier."""

    def __init__(self) -> None:
        self.by_name: dict[bytes, bytes] = {}

    def answer(self, words: list[bytes]) -> Iterable[bytes]:
        """Return the reply to a command."""
        verb, *rest = words
        name = rest[0] if rest else b""
        value = self.by_name.get(name)
        if verb == b"SET":
            if b"NX" in rest[2:] and value is not None:
                return [bulk(None)]
            self.by_name[name] = rest[1]
            return [b"+OK\r\n"]
        if verb == b"CLIENT":
            return [b"+OK\r\n"]
        if verb == b"GET":
            return [bulk(value)]
        if verb == b"UNLINK":
            return [number(self.by_name.pop(name, None) is not None)]
        return [number(len(value or b"") if verb == b"STRLEN" else value is not None)]


class Place:
    """A tier and its backend, which can be emptied."""

    def __init__(self, kind: str, directory: Path, clock: ManualClock) -> None:
        rows = make_rows()
        self.kind, self.clock, self.directory = kind, clock, directory / "root"
        self.values = Values()
        self.server = ScriptedServer(self.values.answer)
        tier: SecondaryTierManager
        if kind == "valkey":
            tier = ValkeyTier(make_config(), rows, TELLING, url=self.server.url, clock=clock)
        else:
            tier = ObjTier(make_config(), rows, TELLING, url=f"file://{self.directory}", clock=clock)
        self.driver = TierDriver(tier, rows)
        self.guarded = GuardedTier(tier, rows.nbytes, rows.shape[1], clock)  # type: ignore[index]  # a matrix

    def empty(self) -> None:
        """Lose everything."""
        self.values.by_name.clear()
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(exist_ok=True)

    def tell(self, numbers: list[int], *, is_load: bool, arrived: Iterable[int]) -> None:
        """Let routers know what a job has shown, as the manager does."""
        assert self.guarded.announcements is not None
        keys = [key_of(one) for one in numbers]
        self.guarded.announcements.begin_job(keys)
        self.guarded.announcements.end_job(keys, {key_of(one) for one in arrived}, is_load=is_load)

    def announced(self) -> set[int]:
        """Return which blocks routers know of now."""
        self.guarded.take_events()
        assert self.guarded.announcements is not None
        return {one for one in range(8) if key_of(one) in self.guarded.announcements}


@pytest.fixture(params=["valkey", "obj"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Each kind of place, with eight blocks that routers know of."""
    place = Place(request.param, tmp_path, ManualClock())
    assert place.driver.store(list(range(8))).success
    place.tell(list(range(8)), is_load=False, arrived=range(8))
    assert place.announced() == set(range(8))
    place.clock.advance(10 * CHECK_S)
    yield place
    assert place.driver.tier.shutdown(HANG_GUARD_S)
    place.server.close()


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines that say so."""
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.parametrize("is_load", [True, False])
def test_it_costs_the_blocks_one_line_and_what_routers_know(
    place: Place, is_load: bool, caplog: pytest.LogCaptureFixture
) -> None:
    place.empty()
    if is_load:
        result = place.driver.load([1])
        assert (result.success, result.is_fault) == (False, False)
        place.tell([1], is_load=True, arrived=())
    else:
        place.clock.advance(3600.0)
        assert not place.driver.lookup(1)
    assert place.announced() == set()
    assert len(lines_of(caplog)) == 1
    assert "emptied" in lines_of(caplog)[0]

    place.clock.advance(3600.0)
    assert not place.driver.lookup(2)
    assert place.driver.store([1, 2]).success
    place.tell([1, 2], is_load=False, arrived=[1, 2])
    place.clock.advance(3600.0)
    assert place.driver.lookup(2)
    assert place.driver.load([1, 2]).success
    assert place.announced() == {1, 2}
    assert len(lines_of(caplog)) == 1


def test_a_block_that_is_missing_alone_withdraws_itself_and_is_no_line(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    if place.kind == "valkey":
        del place.values.by_name[
            next(name for name in place.values.by_name if len(place.values.by_name[name]) > 1000)
        ]
    else:
        next(iter(place.directory.rglob("*.kv"))).unlink()
    place.clock.advance(3600.0)
    result = place.driver.load(list(range(8)))
    arrived = [one for one in range(8) if key_of(one) in (result.successful_keys or ())]
    assert len(arrived) == 7
    place.tell(list(range(8)), is_load=True, arrived=arrived)
    assert place.announced() == set(arrived)
    assert not lines_of(caplog)


def test_what_is_missing_is_looked_after_every_few_seconds_only(place: Place) -> None:
    place.empty()
    place.driver.load([1])
    place.announced()
    place.tell([3], is_load=False, arrived=[3])
    place.empty()
    place.driver.load([1])
    assert place.announced() == {3}
    place.clock.advance(CHECK_S)
    place.driver.load([1])
    assert place.announced() == set()


def test_a_place_that_was_never_written_to_was_not_emptied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place("valkey", tmp_path, ManualClock())
    assert not place.driver.lookup(1)
    assert place.guarded.lookup(key_of(1), ReqContext("a")) is not True
    assert not lines_of(caplog)
    assert place.driver.tier.shutdown(HANG_GUARD_S)
    place.server.close()
