"""What the place of every tier must do, as tests to inherit.

Subclass ``PlaceSuite``, implement its abstract methods and run pytest. Blocks come from the real tier, so the suite
shows that commands without an engine see what engines have written, and that engines go on after what those remove.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from kvtier.base import JobId, OffloadKey, make_offload_key
from kvtier.config import OffloadingConfig
from kvtier.errors import TierError, UnknownNameError
from kvtier.namespace import make_namespace, parse_document
from kvtier.testing.tier_driver import HANG_GUARD_S, ROW_BYTES, TierDriver, key_of, make_config, make_rows
from kvtier.tiering.base import JobMetadata, SecondaryTierManager
from kvtier.tiering.kit.place import BlockState, Place, PlaceBlock

MODELS = ("model-a", "model-b")


def name_of(model: str) -> str:
    """Return the name of the namespace of the suite's engine with that model."""
    return make_namespace(make_config(model), ROW_BYTES).name


class PlaceSuite(ABC):
    """The contract of Place.

    Attributes:
        tier_class: the tier.
        has_owner: whether a place belongs to one engine, which alone may remove from it.
        counts_exactly: whether what another command has removed is not counted.
    """

    tier_class: ClassVar[type[SecondaryTierManager]]
    has_owner: ClassVar[bool] = False
    counts_exactly: ClassVar[bool] = True

    @abstractmethod
    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        """Build a tier over ``rows``; all tiers of one test have the same place."""

    @abstractmethod
    def own_settings(self, directory: Path) -> Mapping[str, object]:
        """Return the tier's own settings for the place of ``make_tier``."""

    @abstractmethod
    def damage(self, directory: Path, key: OffloadKey) -> None:
        """Change a byte of what the place keeps of a block's row."""

    @contextmanager
    def drive(self, directory: Path, model: str = MODELS[0]) -> Iterator[TierDriver]:
        """Give a tier with something that drives it, and end it afterwards."""
        rows = make_rows()
        tier = self.make_tier(make_config(model), rows, directory)
        try:
            yield TierDriver(tier, rows)
        finally:
            assert tier.shutdown(HANG_GUARD_S), "the tier's threads did not end"

    def fill(self, directory: Path, model: str, numbers: list[int]) -> None:
        """Store blocks with an engine that ends."""
        with self.drive(directory, model) as driver:
            assert driver.store(numbers).success

    @contextmanager
    def opened(self, directory: Path) -> Iterator[Place]:
        """Give the place, and close it afterwards."""
        place = self.tier_class.open_place(self.own_settings(directory))
        try:
            yield place
        finally:
            place.close()

    def find(self, place: Place, model: str = MODELS[0]) -> list[PlaceBlock]:
        """Return what holds blocks of a model."""
        return [block for block in place.blocks() if block.namespace == name_of(model)]

    def remove_all(self, place: Place) -> int:
        """Remove everything; return how many blocks that was."""
        place.begin_removal()
        removed = place.remove(list(place.blocks()), unless_changed=False)
        place.end_removal([namespace.name for namespace in place.namespaces()])
        return removed.num

    def test_namespaces_have_their_identity_in_words(self, tmp_path: Path) -> None:
        for model in MODELS:
            self.fill(tmp_path, model, [1])
        with self.opened(tmp_path) as place:
            found = {one.name: parse_document(one.document)["model"]["name"] for one in place.namespaces()}
        assert found == {name_of(model): model for model in MODELS}

    def test_every_block_is_listed_once_with_its_length(self, tmp_path: Path) -> None:
        self.fill(tmp_path, MODELS[0], [1, 2, 3])
        self.fill(tmp_path, MODELS[1], [1])
        with self.opened(tmp_path) as place:
            assert sum(block.num_blocks for block in self.find(place)) == 3
            assert sum(block.num_blocks for block in self.find(place, MODELS[1])) == 1
            assert sum(block.num_bytes for block in self.find(place)) >= 3 * ROW_BYTES
            of_one = [block.address for block in place.blocks([name_of(MODELS[1])])]
            assert of_one == [block.address for block in self.find(place, MODELS[1])]

    def test_blocks_have_a_time_where_the_place_says_so(self, tmp_path: Path) -> None:
        self.fill(tmp_path, MODELS[0], [1])
        with self.opened(tmp_path) as place:
            assert all((block.used_s is not None) == place.has_times for block in place.blocks())

    def test_what_an_engine_has_stored_is_whole(self, tmp_path: Path) -> None:
        self.fill(tmp_path, MODELS[0], [1, 2, 3])
        with self.opened(tmp_path) as place:
            assert {place.check(block) for block in place.blocks()} == {BlockState.WHOLE}

    def test_one_changed_byte_is_found_and_only_there(self, tmp_path: Path) -> None:
        self.fill(tmp_path, MODELS[0], [1])
        self.fill(tmp_path, MODELS[0], [2])
        self.damage(tmp_path, key_of(1))
        with self.opened(tmp_path) as place:
            states = sorted(place.check(block).value for block in place.blocks() if block.num_blocks)
        assert states == ["damaged", "whole"]

    def test_a_block_that_is_gone_by_now_is_not_damaged(self, tmp_path: Path) -> None:
        self.fill(tmp_path, MODELS[0], [1])
        with self.opened(tmp_path) as place:
            listed = list(place.blocks())
            self.remove_all(place)
            assert {place.check(block) for block in listed} == {BlockState.GONE}

    def test_a_removed_block_is_a_miss_for_the_next_engine_and_can_be_stored_again(
        self, tmp_path: Path
    ) -> None:
        self.fill(tmp_path, MODELS[0], [1, 2])
        with self.opened(tmp_path) as place:
            assert self.remove_all(place) == 2
            assert list(place.blocks()) == []
            assert place.namespaces() == []
        with self.drive(tmp_path) as driver:
            assert driver.load_right([1, 2]) == set()
            assert driver.store([1, 2]).success
            assert driver.load_right([1, 2]) == {1, 2}

    def test_a_block_says_whose_it_is(self, tmp_path: Path) -> None:
        self.fill(tmp_path, MODELS[0], [1])
        with self.drive(tmp_path) as driver:
            key = make_offload_key((2).to_bytes(32, "big"), 0, 0xABCDEF)
            job = JobMetadata(
                JobId(1000), (key,), np.array([0]), is_promotion=False, req_context=driver.request
            )
            driver.tier.submit_store(job)
            assert driver.wait(1000).success
        with self.opened(tmp_path) as place:
            tenants = {block.tenant for block in place.blocks() if block.num_blocks}
        assert tenants == {0, 0xABCDEF}

    def test_of_another_namespace_nothing_is_removed(self, tmp_path: Path) -> None:
        for model in MODELS:
            self.fill(tmp_path, model, [1, 2])
        with self.opened(tmp_path) as place:
            place.begin_removal()
            place.remove(list(place.blocks([name_of(MODELS[0])])), unless_changed=False)
            place.end_removal([name_of(MODELS[0])])
            assert [one.name for one in place.namespaces()] == [name_of(MODELS[1])]
        with self.drive(tmp_path, MODELS[1]) as driver:
            assert driver.load_right([1, 2]) == {1, 2}

    def test_two_removals_of_the_same_blocks_are_one(self, tmp_path: Path) -> None:
        self.fill(tmp_path, MODELS[0], [1, 2])
        with self.opened(tmp_path) as one, self.opened(tmp_path) as other:
            listed = list(other.blocks())
            assert self.remove_all(one) == 2
            other.begin_removal()
            again = other.remove(listed, unless_changed=False)
            other.end_removal([name_of(MODELS[0])])
            assert again.num == (0 if self.counts_exactly else 2)
            assert list(other.blocks()) == []

    def test_a_living_engine_sees_misses_and_goes_on(self, tmp_path: Path) -> None:
        with self.drive(tmp_path) as driver:
            assert driver.store([1, 2, 3]).success
            with self.opened(tmp_path) as place:
                if self.has_owner:
                    with pytest.raises(TierError, match="belongs to"):
                        place.begin_removal()
                    assert driver.load_right([1, 2, 3]) == {1, 2, 3}
                    return
                assert self.remove_all(place) == 3
            assert driver.load_right([1, 2, 3]) == set()
            driver.poll_until(lambda: driver.store([1, 2, 3]).success and driver.load_right([1, 2]) == {1, 2})

    def test_blocks_that_a_living_engine_stores_meanwhile_are_never_damaged(self, tmp_path: Path) -> None:
        with self.drive(tmp_path) as driver, self.opened(tmp_path) as place:
            for begin in range(0, 64, 8):
                job = driver.submit(list(range(begin, begin + 8)), list(range(8)), is_promotion=False)
                states = {place.check(block) for block in place.blocks()}
                assert states <= {BlockState.WHOLE, BlockState.GONE, BlockState.BEING_WRITTEN}
                driver.wait(job)

    def test_a_setting_that_no_tier_has_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UnknownNameError, match="no_such"):
            self.tier_class.open_place({**self.own_settings(tmp_path), "no_such": 1})

    def test_a_place_that_an_engine_can_use_passes_the_probe(self, tmp_path: Path) -> None:
        findings = self.tier_class.probe(self.own_settings(tmp_path))
        assert findings
        assert all(finding.is_good for finding in findings), findings
