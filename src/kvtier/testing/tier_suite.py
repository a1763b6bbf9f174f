"""What every secondary tier must do, as tests to inherit.

Subclass ``TierSuite``, implement ``make_tier`` and ``damage`` and run pytest; twenty lines test a new tier against
the contract of ``kvtier.tiering.base``. A tier whose blocks are on a server inherits
``kvtier.testing.server_tier_suite.ServerTierSuite``, which is this suite and what a server's end may cost.
"""

import logging
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from kvtier import namespace
from kvtier.base import OffloadKey, overrides
from kvtier.config import OffloadingConfig
from kvtier.errors import TierError
from kvtier.misses import MissCause
from kvtier.namespace import parse_document
from kvtier.observe.family import unread
from kvtier.observe.tier_metrics import TIER_FAMILIES
from kvtier.testing.tier_driver import (
    HANG_GUARD_S,
    NUM_ROWS,
    ROW_BYTES,
    TierDriver,
    content_of,
    key_of,
    make_config,
    make_rows,
)
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.factory import TIERS
from kvtier.tiering.places import open_place

__all__ = [
    "HANG_GUARD_S",
    "NUM_ROWS",
    "ROW_BYTES",
    "TierDriver",
    "TierSuite",
    "content_of",
    "key_of",
    "make_config",
    "make_rows",
]


AWKWARD_BYTES = (b"\0", b"\xff", b"\r\n", b"$-1\r\n", b"0", b"\xc3\x28", bytes(range(256)))
"""What clients are known to end, strip, decode or take for a length when a row is full of it."""

FOREIGN = {
    "another model": make_config("model-b"),
    "another length of rows": make_config(row_bytes=ROW_BYTES // 2),
}
"""Engines that must find nothing of the first one's blocks."""

SPOILT = 77
"""A value for the bytes of slots that no job may write."""


class TierSuite(ABC):
    """The contract of SecondaryTierManager; inherit it and implement make_tier and damage.

    Attributes:
        hang_guard_s: seconds of wall clock after which an answer that has not come fails a test. Far more than a
            tier needs: a machine under load is slow, and only a hang lasts so long.
        names_siblings: whether the tier says of a missing block that another namespace of its place holds it.
    """

    hang_guard_s: ClassVar[float] = HANG_GUARD_S
    names_siblings: ClassVar[bool] = False

    @abstractmethod
    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        """Build a tier over ``rows`` that holds at least 64 blocks.

        Args:
            config: the engine; another model is another namespace, and so is another length of rows.
            rows: shape (16, 8192), format 'b', page-aligned; some tests have more rows, or shorter ones.
            directory: an empty folder of the test; two tiers of one test get the same one.
        """

    @abstractmethod
    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> bool:
        """Change a byte of what the tier keeps for a block, past the tier: what a bad disk, server or person does.

        ``flip_bit_in_files`` and ``flip_bit`` of ``kvtier.testing.damage`` do it for tiers that keep rows as they are.

        Args:
            tier: the tier, of ``make_config()``; it has stored the block and reported it.
            key: the block, one byte of whose row is to change.

        Returns:
            True when a byte has changed. False says that this tier keeps its bytes in memory of its own process, which
            nothing outside can damage; the test is skipped then. A tier whose blocks are on a disk, on a server or in
            memory of another process must not say so: bytes change there, and it needs a checksum.
        """

    @contextmanager
    def drive(
        self, directory: Path, config: OffloadingConfig | None = None, num_rows: int = NUM_ROWS
    ) -> Iterator[TierDriver]:
        """Give a tier with something that drives it, and end it afterwards.

        Args:
            directory: the folder of the test.
            config: the engine; None is the first one, of rows of 8192 bytes.
            num_rows: slots of the primary.
        """
        config = config or make_config()
        rows = make_rows(num_rows, config.groups[0].page_size_bytes)
        with self.driving(self.make_tier(config, rows, directory), rows) as driver:
            yield driver

    @contextmanager
    def driving(self, tier: SecondaryTierManager, rows: memoryview) -> Iterator[TierDriver]:
        """Give something that drives ``tier``, and end the tier afterwards."""
        try:
            yield TierDriver(tier, rows, self.hang_guard_s)
        finally:
            has_ended = tier.shutdown(self.hang_guard_s)
        assert has_ended, "the tier's threads did not end"

    @pytest.fixture
    def driver(self, tmp_path: Path) -> Iterator[TierDriver]:
        """A tier with something that drives it."""
        with self.drive(tmp_path) as driver:
            yield driver

    def test_what_is_loaded_is_what_was_stored(self, driver: TierDriver) -> None:
        assert driver.store([1, 2, 3]).success
        assert driver.load([3, 1, 2], [7, 8, 9]).success
        for number, slot in ((3, 7), (1, 8), (2, 9)):
            assert np.array_equal(driver.rows[slot], content_of(number))

    def test_other_slots_are_left_alone_by_a_load(self, driver: TierDriver) -> None:
        driver.store([1])
        driver.rows[:] = SPOILT
        driver.wait(driver.submit([1], [4], is_promotion=True))
        assert np.all(driver.rows[[0, 1, 2, 3, *range(5, NUM_ROWS)]] == SPOILT)

    def test_a_row_of_any_bytes_survives_the_round_trip_through_its_memoryview(
        self, driver: TierDriver
    ) -> None:
        numbers = list(range(len(AWKWARD_BYTES)))
        rows = [np.resize(np.frombuffer(pattern, np.int8), ROW_BYTES) for pattern in AWKWARD_BYTES]
        slots = [NUM_ROWS - 1 - number for number in numbers]
        driver.rows[slots] = rows
        assert driver.wait(driver.submit(numbers, slots, is_promotion=False)).success
        driver.rows[:] = SPOILT
        assert driver.wait(driver.submit(numbers, slots, is_promotion=True)).success
        assert np.array_equal(driver.rows[slots], rows)
        assert np.all(driver.rows[: NUM_ROWS - len(numbers)] == SPOILT)

    def test_a_slot_written_over_after_its_store_does_not_change_the_block(self, driver: TierDriver) -> None:
        assert driver.store([1, 2], [3, 4]).success
        driver.rows[:] = SPOILT
        assert driver.load_right([2, 1]) == {1, 2}

    def test_lookup_finds_what_was_stored_and_nothing_else(self, driver: TierDriver) -> None:
        driver.store([1, 2])
        assert driver.lookup(1)
        assert driver.lookup(2)
        assert not driver.lookup(3)

    def test_a_second_store_of_a_held_block_is_reported_too(self, driver: TierDriver) -> None:
        driver.store([1, 2])
        assert driver.store([1, 2]).success
        assert driver.load([1, 2]).success

    def test_a_load_of_an_absent_block_fails_that_block_only(self, driver: TierDriver) -> None:
        driver.store([1, 3])
        result = driver.load([1, 2, 3])
        assert not result.success
        assert result.successful_keys == frozenset({key_of(1), key_of(3)})
        assert np.array_equal(driver.rows[2], content_of(3))

    def test_every_one_of_many_jobs_is_reported_once(self, driver: TierDriver) -> None:
        for number in range(NUM_ROWS):
            driver.rows[number] = content_of(number)
        jobs = [driver.submit([number], [number], is_promotion=False) for number in range(NUM_ROWS)]
        jobs += [driver.submit([number], [number], is_promotion=False) for number in range(NUM_ROWS)]
        driver.poll_until(lambda: len(driver.results) == len(jobs))
        driver.poll()
        assert sorted(driver.results) == jobs
        assert all(result.success for result in driver.results.values())

    def test_an_empty_job_is_reported(self, driver: TierDriver) -> None:
        assert driver.wait(driver.submit([], [], is_promotion=False)).success
        assert driver.wait(driver.submit([], [], is_promotion=True)).success

    def test_jobs_open_at_shutdown_are_reported_once(self, driver: TierDriver) -> None:
        jobs = [driver.submit([number], [number], is_promotion=False) for number in range(NUM_ROWS)]
        assert driver.tier.shutdown(self.hang_guard_s)
        driver.poll()
        assert sorted(driver.results) == jobs
        driver.poll()

    def test_a_submit_after_shutdown_is_a_raise_or_a_failed_job(self, driver: TierDriver) -> None:
        assert driver.tier.shutdown(self.hang_guard_s)
        try:
            job_id = driver.submit([1], [0], is_promotion=True)
        except TierError as error:
            assert str(error)
        else:
            driver.poll()
            assert not driver.results[job_id].success

    def test_shutdown_is_idempotent(self, driver: TierDriver) -> None:
        assert driver.tier.shutdown(self.hang_guard_s)
        assert driver.tier.shutdown(self.hang_guard_s)

    def test_after_a_reset_nothing_old_is_found(self, driver: TierDriver) -> None:
        driver.store([1, 2])
        driver.tier.reset(bytes(range(16)))
        assert not driver.lookup(1)
        result = driver.load([1])
        assert not result.success
        assert not result.successful_keys

    def test_after_a_reset_the_tier_goes_on(self, driver: TierDriver) -> None:
        driver.store([1])
        driver.tier.reset(bytes(range(16)))
        assert driver.store([2, 1]).success
        assert driver.lookup(1)
        assert driver.load([1, 2]).success
        assert np.array_equal(driver.rows[0], content_of(1))

    def test_jobs_under_way_at_a_reset_are_reported_once_and_leave_nothing_behind(
        self, driver: TierDriver
    ) -> None:
        driver.store([1])
        jobs = [driver.submit([2], [3], is_promotion=False), driver.submit([1], [4], is_promotion=True)]
        driver.tier.reset(bytes(range(16)))
        for job_id in jobs:
            driver.wait(job_id)
        driver.poll()
        assert sorted(driver.results)[-2:] == jobs
        assert not driver.lookup(2)
        assert not driver.load([2]).success

    def test_loads_and_stores_of_the_same_blocks_at_once_bring_only_right_bytes(
        self, driver: TierDriver
    ) -> None:
        numbers = list(range(NUM_ROWS // 2))
        driver.store(numbers)
        loads = {}
        for number in numbers:
            slot = NUM_ROWS // 2 + number
            driver.submit([number], [number], is_promotion=False)
            loads[driver.submit([number], [slot], is_promotion=True)] = (number, slot)
        for job_id, (number, slot) in loads.items():
            assert driver.wait(job_id).success
            assert np.array_equal(driver.rows[slot], content_of(number))

    def test_a_finished_request_cancels_no_job(self, driver: TierDriver) -> None:
        driver.store([1])
        job_id = driver.submit([1], [5], is_promotion=True)
        driver.tier.request_finished(driver.request)
        assert driver.wait(job_id).success
        assert np.array_equal(driver.rows[5], content_of(1))

    @pytest.mark.parametrize("foreign", FOREIGN.values(), ids=FOREIGN)
    def test_another_namespace_sees_nothing(
        self, driver: TierDriver, tmp_path: Path, foreign: OffloadingConfig
    ) -> None:
        driver.store([1])
        with self.drive(tmp_path, foreign) as other:
            assert not other.lookup(1)
            assert other.load_right([1]) == set()
        assert driver.load_right([1]) == {1}

    def test_a_block_that_another_namespace_holds_is_said_to_be_there(
        self, driver: TierDriver, tmp_path: Path
    ) -> None:
        if not self.names_siblings:
            pytest.skip("this tier knows nothing of other namespaces, says its suite")
        foreign = FOREIGN["another model"]
        with self.drive(tmp_path, foreign) as other:
            assert other.store([1, 2]).success
        assert not driver.lookup(1)
        miss = driver.tier.explain(key_of(1), driver.request)
        assert miss is not None, "another namespace of this place holds the block"
        assert (miss.cause, miss.tier) == (MissCause.OTHER_NAMESPACE, driver.tier.get_tier_type())
        assert miss.detail["model.name"] == "model-b (here model-a)"
        assert driver.store([1]).success
        assert driver.lookup(1)
        found = driver.tier.explain(key_of(1), driver.request)
        assert found is None or found.cause is not MissCause.OTHER_NAMESPACE, "the block is here by now"

    def test_after_an_upgrade_the_older_layout_is_named_and_purged_and_nothing_of_it_is_found(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        if not self.names_siblings:
            pytest.skip("this tier knows nothing of other namespaces, says its suite")
        with monkeypatch.context() as before:
            before.setattr(namespace, "LAYOUT_VERSION", namespace.LAYOUT_VERSION - 1)
            with self.drive(tmp_path) as older:
                assert older.store([1, 2]).success
        caplog.set_level(logging.INFO)
        with self.drive(tmp_path) as upgraded:
            assert not upgraded.lookup(1)
            assert upgraded.load_right([2]) == set()
            miss = upgraded.tier.explain(key_of(1), upgraded.request)
            assert miss is not None
            assert set(miss.detail) == {"namespace", "layout_version"}, (
                "fields of another version were compared"
            )
            assert "older and not readable" in str(miss.detail["layout_version"])
            assert upgraded.store([1]).success
            assert upgraded.load_right([1]) == {1}
            (line,) = [text for text in caplog.messages if "older layout" in text]
            assert not [text for text in caplog.messages if "holds nothing here" in text]
        _, _, command = line.partition("kvtier purge ")
        place, option = shlex.split(command)
        assert option == "--older-layouts"
        self.check_older_layouts_purge(tmp_path, place)

    def check_older_layouts_purge(self, tmp_path: Path, place: str) -> None:
        """Check that the command which an engine names removes the older layout's blocks and leaves the others.

        Args:
            tmp_path: as for ``drive``.
            place: what the log says that the command takes.
        """
        found = open_place(place)
        try:
            known = found.namespaces()
            assert len(known) == 2
            names = [one.name for one in known if namespace.is_older_layout(parse_document(one.document))]
            assert len(names) == 1
            found.begin_removal()
            assert found.remove(list(found.blocks(names)), unless_changed=False).num == 2
            found.end_removal(names)
            assert [one.name for one in found.namespaces()] == [
                one.name for one in known if one.name not in names
            ]
        finally:
            found.close()
        with self.drive(tmp_path) as again:
            assert again.load_right([1, 2]) == {1}

    def test_a_damaged_block_is_a_miss_and_makes_way(self, driver: TierDriver) -> None:
        assert driver.store([1, 2]).success
        if not self.damage(driver.tier, key_of(1)):
            pytest.skip("nothing outside the process can damage this tier's blocks, says its suite")
        driver.rows[:] = SPOILT
        assert 1 not in driver.load_right([1, 2])
        assert driver.load_right([1]) == set(), "a block that was damaged came back by itself"
        if overrides(driver.tier.explain, SecondaryTierManager.explain):
            miss = driver.tier.explain(key_of(1), driver.request)
            assert miss is not None, "a tier that explains misses knows what it has found damaged"
            assert (miss.cause, miss.tier) == (MissCause.DAMAGED, driver.tier.get_tier_type())
        driver.poll_until(lambda: driver.store([1, 2]).success and driver.load_right([1, 2]) == {1, 2})

    def test_small_jobs_of_many_requests_at_once_have_the_outcomes_that_each_has_alone(
        self, tmp_path: Path
    ) -> None:
        numbers, damaged, absent = list(range(48)), 5, 1000
        with self.drive(tmp_path, num_rows=64) as driver:
            driver.place(numbers, numbers)
            stores = [driver.submit([number], [number], is_promotion=False) for number in numbers]
            assert all(driver.wait(job_id).success for job_id in stores)
            is_damaged = self.damage(driver.tier, key_of(damaged))
            alone = driver.load([absent], [63])
            driver.rows[:] = SPOILT
            wanted = [*numbers[:20], absent, *numbers[20:]]
            loads = {
                number: driver.submit([number], [slot], is_promotion=True)
                for slot, number in enumerate(wanted)
            }
            for slot, number in enumerate(wanted):
                result = driver.wait(loads[number])
                assert result.success == (number != absent and not (number == damaged and is_damaged)), number
                if result.success:
                    driver.require_right([(number, slot)])
                if number == absent:
                    assert result.is_fault == alone.is_fault, "another job's fault is taken for this one's"
            assert np.all(driver.rows[len(wanted) :] == SPOILT)

    def test_a_dropped_block_is_gone_and_the_others_stay(self, driver: TierDriver) -> None:
        if not overrides(driver.tier.drop, SecondaryTierManager.drop):
            pytest.skip("the tier cannot delete single blocks")
        driver.store([0, 1, 2])
        driver.tier.drop([key_of(1), key_of(9)])
        driver.poll_until(lambda: not driver.lookup(1))
        assert driver.load_right([0, 2]) == {0, 2}
        assert driver.load_right([1]) == set()

    def test_touch_of_known_and_unknown_keys_is_harmless(self, driver: TierDriver) -> None:
        driver.store([1])
        driver.tier.touch([key_of(1), key_of(2)], driver.request)
        assert driver.lookup(1)
        assert not driver.lookup(2)

    def test_a_drained_tier_has_reported_everything_at_the_next_poll(self, driver: TierDriver) -> None:
        jobs = [driver.submit([number], [number], is_promotion=False) for number in range(8)]
        assert driver.tier.drain(self.hang_guard_s)
        driver.poll()
        assert sorted(driver.results) == jobs

    def test_stats_are_numbers(self, driver: TierDriver) -> None:
        driver.store([1])
        assert all(isinstance(value, int | float) for value in driver.tier.stats().values())

    def test_operators_see_each_of_its_numbers(self, driver: TierDriver) -> None:
        name = driver.tier.get_tier_type()
        if name not in TIERS.names():
            pytest.skip("kvtier declares metric families for its own tiers")
        driver.store([1])
        numbers = [*driver.tier.stats(), *driver.tier.histograms()]
        assert unread(TIER_FAMILIES, [f"tier.0.{name}.{number}" for number in numbers]) == []
