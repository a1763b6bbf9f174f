"""Every tier with threads: what cannot be carried out is refused, a place that is away is a miss and heard of."""

import hashlib
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtier.base import JobId, OffloadKey, ReqContext
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.errors import ConfigError, TierError
from kvtier.namespace import Namespace
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import (
    HANG_GUARD_S,
    ROW_BYTES,
    TierDriver,
    TierSuite,
    key_of,
    make_rows,
)
from kvtier.testing.tier_suite import make_config as make_engine_config
from kvtier.tiering.base import FAILURES_TO_OPEN, JobMetadata, SecondaryTierManager
from kvtier.tiering.breaker import BreakerState
from kvtier.tiering.guard import GuardedTier
from kvtier.tiering.kit.backend import BlockStore, Rows, rows_of
from kvtier.tiering.kit.io_pool import TransferOutcome
from kvtier.tiering.kit.threaded_tier import ThreadedTier, ThreadOptions, require_lasting_keys

Place = dict[tuple[str, OffloadKey], bytes]


class DictStore(BlockStore[str]):
    """Keeps blocks in a dictionary that may be away.

    Args:
        rows: the primary's.
        place: the dictionary, shared by those who share blocks.
    """

    def __init__(self, rows: Rows, place: Place) -> None:
        self._rows = rows
        self.place = place
        self.is_away = False
        self.num_closings = 0

    def open_namespace(self, identity: Namespace, *, is_new: bool) -> str:
        return identity.name

    def contains_batch(self, namespace: str, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        self.check_reachable()
        return [key for key in keys if (namespace, key) in self.place]

    def store(self, namespace: str, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        self.check_reachable()
        self.place.update(
            {(namespace, key): bytes(self._rows.row(slot)) for key, slot in zip(keys, slots, strict=True)}
        )
        return TransferOutcome(keys)

    def load(self, namespace: str, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        self.check_reachable()
        held = [(key, slot) for key, slot in zip(keys, slots, strict=True) if (namespace, key) in self.place]
        for key, slot in held:
            self._rows.row(slot)[:] = self.place[namespace, key]
        return TransferOutcome([key for key, _ in held])

    def drop(self, namespace: str, keys: Sequence[OffloadKey]) -> None:
        self.check_reachable()
        for key in keys:
            self.place.pop((namespace, key), None)

    def check_reachable(self) -> None:
        if self.is_away:
            raise TierError("dict", "the place is away")

    def close(self) -> None:
        self.num_closings += 1


class DictTier(ThreadedTier[str]):
    """A tier over a dictionary."""

    def __init__(
        self, config: OffloadingConfig, rows: memoryview, place: Place, positive_ttl_s: float = 5.0
    ) -> None:
        self.clock = ManualClock()
        self.dict_store = DictStore(rows_of(rows), place)
        options = ThreadOptions(num_threads=2, max_task_blocks=4, positive_ttl_s=positive_ttl_s)
        super().__init__(config, rows, block_store=self.dict_store, options=options, clock=self.clock)

    @staticmethod
    def get_tier_type() -> str:
        return "dict"


class TestDictTier(TierSuite):
    """A tier is its place: the rest keeps the contract."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return DictTier(config, rows, {})

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> bool:
        return False  # a dictionary of this process


class TestForgettingDictTier(TierSuite):
    """The same without verdicts that are believed for a while."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return DictTier(config, rows, {}, positive_ttl_s=0.0)

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> bool:
        return False  # a dictionary of this process


@pytest.fixture
def tier() -> Iterator[DictTier]:
    """A tier over an empty dictionary."""
    tier = DictTier(make_engine_config(), make_rows(), {})
    yield tier
    assert tier.shutdown(HANG_GUARD_S)


@pytest.fixture
def driver(tier: DictTier) -> TierDriver:
    """Something that drives it."""
    return TierDriver(tier, tier.primary_kv_view)


def test_a_place_that_is_away_is_a_miss_and_a_fault_and_one_line_of_log(
    tier: DictTier, driver: TierDriver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.store([1])
    tier.dict_store.is_away = True
    tier.clock.advance(60.0)
    with caplog.at_level(logging.WARNING):
        assert not driver.lookup(1)
        for result in (driver.load([1]), driver.store([2])):
            assert not result.success
            assert result.is_fault
    assert tier.drain_unanswered() == 1
    assert tier.drain_unanswered() == 0
    assert [record.getMessage().count("the place is away") for record in caplog.records] == [1]


def test_a_place_that_is_back_is_told_once_and_used(
    tier: DictTier, driver: TierDriver, caplog: pytest.LogCaptureFixture
) -> None:
    tier.dict_store.is_away = True
    driver.store([1])
    tier.dict_store.is_away = False
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert driver.store([1]).success
        assert driver.load([1]).success
    assert [record.getMessage() for record in caplog.records] == ["tier dict can be reached again"]


def test_a_place_that_is_not_there_at_the_start_is_left_out_at_once(tier: DictTier) -> None:
    guard = GuardedTier(tier, 2**20, ROW_BYTES, tier.clock)
    tier.dict_store.is_away = True
    with pytest.raises(TierError, match="the place is away"):
        tier.check_reachable()
    assert guard.get_finished() == []
    assert guard.breaker.state is BreakerState.OPEN


def test_unanswered_questions_open_the_breaker(tier: DictTier, driver: TierDriver) -> None:
    guard = GuardedTier(tier, 2**20, ROW_BYTES, tier.clock)
    tier.dict_store.is_away = True
    for number in range(FAILURES_TO_OPEN):
        assert guard.breaker.state is BreakerState.CLOSED
        assert not driver.lookup(number)
        assert guard.get_finished() == []
    assert guard.breaker.state is BreakerState.OPEN


def test_what_was_stored_is_known_without_asking(tier: DictTier, driver: TierDriver) -> None:
    driver.store([1])
    tier.dict_store.is_away = True
    assert driver.lookup(1)


def test_what_could_not_be_loaded_is_known_to_be_gone(tier: DictTier, driver: TierDriver) -> None:
    driver.store([1])
    tier.dict_store.place.clear()
    driver.load([1])
    driver.poll()
    assert not driver.lookup(1)


def test_what_transfers_find_out_does_not_pile_up_while_nothing_is_looked_up(
    tier: DictTier, driver: TierDriver
) -> None:
    driver.submit([1, 2], [0, 1], is_promotion=False)
    assert tier.drain(HANG_GUARD_S)
    assert tier._lookup.answers
    tier.end_step()
    assert not tier._lookup.answers
    tier.dict_store.is_away = True
    assert driver.lookup(1)


def test_a_backend_that_does_not_order_its_blocks_gets_no_touch(tier: DictTier) -> None:
    assert not GuardedTier(tier, 2**20, ROW_BYTES, tier.clock).uses_touch


def test_what_ends_after_a_reset_says_nothing_about_the_new_epoch(tier: DictTier, driver: TierDriver) -> None:
    job_id = driver.submit([1], [0], is_promotion=False)
    tier.reset(bytes(range(16)))
    driver.wait(job_id)
    assert not driver.lookup(1)


class Interrupting(list[OffloadKey]):
    """Keys with a reset right before they are read for the first time."""

    def __init__(self, keys: Sequence[OffloadKey], tier: DictTier) -> None:
        super().__init__(keys)
        self._tier = tier
        self._is_read = False

    def __iter__(self) -> Iterator[OffloadKey]:
        if not self._is_read:
            self._is_read = True
            self._tier.reset(bytes(range(16)))
        return super().__iter__()


@pytest.mark.parametrize("is_promotion", [True, False], ids=["load", "store"])
def test_a_reset_while_a_job_tells_what_it_met_is_a_reset_after_it(
    tier: DictTier, driver: TierDriver, monkeypatch: pytest.MonkeyPatch, *, is_promotion: bool
) -> None:
    def move(_namespace: str, keys: Sequence[OffloadKey], _slots: Sequence[int]) -> TransferOutcome:
        return TransferOutcome(Interrupting([] if is_promotion else keys, tier))

    monkeypatch.setattr(tier.dict_store, "load" if is_promotion else "store", move)
    driver.wait(driver.submit([1], [0], is_promotion=is_promotion))
    assert tier.lookup(key_of(1), ReqContext("after")) is None


def test_the_place_is_closed_once_and_last(tier: DictTier, driver: TierDriver) -> None:
    driver.store([1])
    assert tier.dict_store.num_closings == 0
    assert tier.shutdown(HANG_GUARD_S)
    assert tier.shutdown(HANG_GUARD_S)
    assert tier.dict_store.num_closings == 1


@pytest.mark.parametrize(
    ("keys", "slots", "remedy"),
    [
        ((key_of(1),), [0, 1], "one slot for each key"),
        ((OffloadKey(bytes(41)),), [0], "1 to 40 bytes"),
        ((OffloadKey(b""),), [0], "1 to 40 bytes"),
        ((key_of(1),), [16], "the primary has 16"),
        ((key_of(1),), [-1], "the primary has 16"),
    ],
)
def test_a_job_that_no_thread_could_carry_out_is_refused(
    tier: DictTier, keys: tuple[OffloadKey, ...], slots: list[int], remedy: str
) -> None:
    job = JobMetadata(JobId(1), keys, np.array(slots, np.int64), False, ReqContext("a"))
    for submit in (tier.submit_store, tier.submit_load):
        with pytest.raises(TierError, match=remedy):
            submit(job)
    assert tier.get_finished() == []


def make_config(algorithm: str) -> OffloadingConfig:
    """Return a configuration with that hash."""
    group = KVGroup(16, ("layer.0",), ROW_BYTES)
    return OffloadingConfig("engine", ModelIdentity("model"), (group,), 16, hash_algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["sha256", "blake2s", "an-engine's-own"])
def test_a_hash_whose_keys_fit_is_accepted(algorithm: str) -> None:
    require_lasting_keys(make_config(algorithm), "fs")


def test_a_hash_whose_keys_fit_without_a_tenant_alone_is_refused_with_tenants() -> None:
    if "md5-sha1" not in hashlib.algorithms_available:
        pytest.skip("this build of hashlib has no digest of 33 to 36 bytes")
    config = make_config("md5-sha1")
    require_lasting_keys(config, "fs")
    with pytest.raises(ConfigError, match="44 bytes, at most 40"):
        require_lasting_keys(replace(config, extra_config={"tenants": {"*": {}}}), "fs")


def test_a_hash_whose_keys_do_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="68 bytes, at most 40"):
        require_lasting_keys(make_config("sha512"), "fs")
