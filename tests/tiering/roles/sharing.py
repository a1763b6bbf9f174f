"""Engines that share a backend and never talk. That one finds what another has stored is in ``ServerTierSuite``."""

import numpy as np
from tests.tiering.roles.bench import MODELS, RoleSuite, needs, purge

from kvtier.testing.tier_driver import NUM_ROWS, content_of, key_of

NUM_BLOCKS = NUM_ROWS


class Sharing(RoleSuite):
    """Two engines at once."""

    @needs("sharing", "one copy")
    def test_blocks_that_two_engines_store_at_once_are_there_once_and_right(self) -> None:
        first, second = self.start(), self.start()
        numbers = list(range(NUM_BLOCKS))
        jobs = []
        for driver in (first, second):
            driver.place(numbers, numbers)
        for number in numbers:
            jobs += [
                (driver, driver.submit([number], [number], is_promotion=False)) for driver in (first, second)
            ]
        assert all(driver.wait(job).success for driver, job in jobs)
        keys = self.held_keys()
        if "one copy" in self.lacks:
            keys = list(set(keys))
        assert sorted(keys) == list(map(key_of, numbers))
        if "existed" not in self.lacks:
            assert sum(driver.tier.stats()["stored_blocks"] for driver in (first, second)) == NUM_BLOCKS
        for driver in (second, first):
            assert driver.load_right(numbers) == set(numbers)

    @needs("sharing", "one copy")
    def test_a_block_that_another_engine_has_stored_is_not_written_again(self) -> None:
        first, second = self.start(), self.start()
        assert first.store([1, 2]).success
        before = self.get_backend().read(self.name_of(1))
        # Two engines compute the same values to the last bit only as long as their kernels do.
        second.rows[0] = content_of(100)
        assert second.wait(second.submit([1], [0], is_promotion=False)).success
        assert self.get_backend().read(self.name_of(1)) == before
        assert second.load_right([1]) == first.load_right([1]) == {1}

    @needs("sharing", "removals")
    def test_a_block_that_another_removes_after_the_lookup_fails_alone(self) -> None:
        first, second = self.start(), self.start()
        assert first.store([1, 2]).success
        assert second.lookup(1)
        assert second.lookup(2)
        self.remove_blocks(2)
        result = second.load([1, 2])
        assert (result.success, result.is_fault) == (False, False)
        assert result.successful_keys == frozenset({key_of(1)})
        assert second.tier.stats()["absent"] == 1
        assert not second.lookup(2)
        assert second.store([2]).success
        assert first.load_right([2, 1]) == {1, 2}

    @needs("sharing")
    def test_models_keep_their_own_bytes_under_one_key(self) -> None:
        drivers = {model: self.start(model) for model in MODELS}
        for offset, driver in enumerate(drivers.values()):
            assert not driver.lookup(1)
            driver.rows[0] = content_of(100 + offset)
            assert driver.wait(driver.submit([1], [0], is_promotion=False)).success
        blocks = self.list_blocks()
        assert sorted(block.namespace for block in blocks) == sorted(map(self.namespace_of, MODELS))
        assert len({block.address for block in blocks}) == len(MODELS)
        for offset, driver in enumerate(drivers.values()):
            assert driver.load([1]).success
            assert np.array_equal(driver.rows[0], content_of(100 + offset))

    @needs("sharing")
    def test_a_purge_by_an_engine_leaves_other_models_their_blocks(self) -> None:
        first, second = self.start(), self.start("model-b")
        assert first.store([1, 2]).success
        assert second.store([1, 2, 3]).success
        assert purge(first).num_blocks == 2
        assert {block.namespace for block in self.list_blocks()} == {self.namespace_of("model-b")}
        assert second.load_right([1, 2, 3]) == {1, 2, 3}
        assert first.load_right([1, 2]) == set()

    @needs("sharing")
    def test_a_purge_of_one_model_leaves_the_others(self) -> None:
        first, second = self.start(), self.start("model-b")
        assert first.store([1, 2]).success
        assert second.store([1, 2]).success
        assert self.remove_namespace(self.namespace_of()) == 2
        assert first.load_right([1, 2]) == set()
        assert second.load_right([1, 2]) == {1, 2}
        assert first.store([1]).success
        assert first.load_right([1]) == {1}
