"""The slot table says which slot a block gets, and never gives away one that somebody reads or writes."""

from collections import deque

import pytest
from tests.cpu.policies.learner import NOTING_LEARNER, NotingLearner

from kvtier.base import OffloadKey
from kvtier.cpu.policies import CachePolicy, create_cache_policy
from kvtier.namespace import Namespace
from kvtier.testing.tier_suite import key_of
from kvtier.tiering.slab.slot_table import Contents, SlabNamespace, SlotTable


def keys(*numbers: int) -> list[OffloadKey]:
    """Return the keys of blocks."""
    return [key_of(number) for number in numbers]


def make_namespace_handle() -> SlabNamespace:
    """Return another namespace each time."""
    return SlabNamespace(Namespace("", bytes(32)))


class Fixture:
    """A slot table and its current namespace."""

    def __init__(self, num_slots: int, policy: str = "lru", *, is_empty: bool = True) -> None:
        def make_policy() -> CachePolicy:
            return create_cache_policy(policy, num_slots)

        self.slot_table = SlotTable(num_slots, make_policy, is_empty=is_empty)
        self.reset()

    def reset(self) -> None:
        """Open another namespace."""
        self.namespace = make_namespace_handle()
        self.slot_table.open_namespace(self.namespace)

    def store(self, *numbers: int) -> list[int]:
        """Store blocks in one call and return the slots that were written."""
        plan = self.slot_table.prepare_store(self.namespace, keys(*numbers))
        self.slot_table.complete_store(plan.pins, [pin.key for pin in plan.pins])
        return [pin.slot for pin in plan.pins]

    def held(self, *numbers: int) -> list[int]:
        """Return which of the blocks are there."""
        return [number for number in numbers if self.slot_table.is_held(self.namespace, key_of(number))]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_slots_are_given_in_their_order_then_those_of_the_oldest_blocks(policy: str) -> None:
    fixture = Fixture(4, policy)
    assert fixture.store(1, 2) == [0, 1]
    assert fixture.store(3, 4) == [2, 3]
    assert fixture.store(5) == [0]
    assert fixture.held(1, 2, 3, 4, 5) == [2, 3, 4, 5]
    assert fixture.slot_table.stats()["evicted_blocks"] == 1


def test_a_touched_block_stays_and_the_first_of_a_prefix_longest() -> None:
    fixture = Fixture(3)
    fixture.store(1, 2, 3)
    fixture.slot_table.touch(fixture.namespace, keys(1, 2))
    assert fixture.store(4) == [2]
    assert fixture.store(5) == [1]
    assert fixture.held(1, 2, 3) == [1]


def test_a_block_that_is_being_written_is_not_found_and_not_evicted() -> None:
    fixture = Fixture(2)
    plan = fixture.slot_table.prepare_store(fixture.namespace, keys(1, 2))
    assert fixture.held(1, 2) == []
    assert fixture.slot_table.prepare_load(fixture.namespace, keys(1)) == [None]
    assert fixture.store(3) == []
    fixture.slot_table.complete_store(plan.pins, keys(1, 2))
    assert fixture.held(1, 2) == [1, 2]


def test_a_block_that_is_being_read_stays_until_its_last_reader_has_ended() -> None:
    fixture = Fixture(1)
    fixture.store(1)
    readers = [fixture.slot_table.prepare_load(fixture.namespace, keys(1))[0] for _ in range(2)]
    for reader in readers:
        assert fixture.store(2) == []
        assert reader is not None
        fixture.slot_table.complete_load([reader], ())
    assert fixture.store(2) == [0]


def test_a_lost_block_is_gone_at_once_and_its_slot_free_after_its_last_reader() -> None:
    fixture = Fixture(2)
    fixture.store(1)
    first, second = (fixture.slot_table.prepare_load(fixture.namespace, keys(1))[0] for _ in range(2))
    assert first is not None
    assert second is not None
    fixture.slot_table.complete_load([first], keys(1))
    assert fixture.held(1) == []
    assert fixture.store(1, 2) == [1]
    fixture.slot_table.complete_load([second], keys(1))
    assert fixture.slot_table.stats()["free_slots"] == 1
    assert fixture.store(2) == [0]
    assert fixture.held(1, 2) == [1, 2]


def test_a_slot_that_could_not_be_written_is_used_again_only_when_there_is_nothing_else() -> None:
    fixture = Fixture(3)
    plan = fixture.slot_table.prepare_store(fixture.namespace, keys(1, 2))
    fixture.slot_table.complete_store(plan.pins, keys(2))
    assert fixture.held(1, 2) == [2]
    assert fixture.slot_table.stats()["failed_slots"] == 1
    assert fixture.store(3) == [2]
    assert fixture.store(4) == [1]
    assert fixture.store(5, 6, 7) == [2, 1, 0]
    assert fixture.slot_table.stats()["failed_slots"] == 0


def test_a_call_never_evicts_what_it_names_and_gets_what_room_there_is() -> None:
    fixture = Fixture(3)
    fixture.store(1, 2, 3)
    assert fixture.store(1, 4, 5, 6) == [1, 2]
    assert fixture.held(1, 2, 3, 4, 5, 6) == [1, 4, 5]


def test_a_block_that_another_job_writes_is_waited_for() -> None:
    fixture = Fixture(2)
    plan = fixture.slot_table.prepare_store(fixture.namespace, keys(1))
    other = fixture.slot_table.prepare_store(fixture.namespace, keys(1, 2))
    assert other.awaited == keys(1)
    assert [pin.key for pin in other.pins] == keys(2)
    assert fixture.slot_table.wait_written(fixture.namespace, keys(1), 0.0) == []
    fixture.slot_table.complete_store(plan.pins, keys(1))
    assert fixture.slot_table.wait_written(fixture.namespace, keys(1), 60.0) == keys(1)


def test_generations_grow_and_the_oldest_unfinished_one_is_known() -> None:
    fixture = Fixture(8)
    first = fixture.slot_table.prepare_store(fixture.namespace, keys(1, 2))
    second = fixture.slot_table.prepare_store(fixture.namespace, keys(3))
    assert [pin.generation for pin in (*first.pins, *second.pins)] == [1, 2, 3]
    assert second.oldest_generation == 1
    fixture.slot_table.complete_store(first.pins, keys(1, 2))
    assert fixture.slot_table.prepare_store(fixture.namespace, keys(4)).oldest_generation == 3


def test_after_a_reset_the_old_blocks_are_not_found_and_the_first_to_leave() -> None:
    fixture = Fixture(4)
    fixture.store(1, 2)
    fixture.reset()
    assert fixture.held(1, 2) == []
    assert fixture.slot_table.stats()["foreign_slots"] == 2
    assert fixture.store(3, 4) == [2, 3]
    assert fixture.store(1) == [0]
    assert fixture.store(5) == [1]
    assert fixture.held(1, 2, 3, 4, 5) == [1, 3, 4, 5]
    assert fixture.slot_table.stats()["evicted_blocks"] == 0
    assert fixture.slot_table.stats()["evicted_foreign_blocks"] == 2


def test_what_is_moved_during_a_reset_keeps_its_slot_until_it_has_ended() -> None:
    fixture = Fixture(3)
    fixture.store(1)
    (reader,) = fixture.slot_table.prepare_load(fixture.namespace, keys(1))
    plan = fixture.slot_table.prepare_store(fixture.namespace, keys(2, 3))
    assert reader is not None
    fixture.reset()
    assert fixture.store(4) == []
    fixture.slot_table.complete_load([reader], ())
    assert fixture.store(4) == [0]
    fixture.slot_table.complete_store(plan.pins, keys(2, 3))
    assert sorted(fixture.store(5, 6)) == [1, 2]
    assert fixture.held(1, 2, 3, 4, 5, 6) == [4, 5, 6]


def test_a_job_of_an_older_epoch_stores_and_finds_nothing() -> None:
    fixture = Fixture(3)
    fixture.store(1)
    old = fixture.namespace
    fixture.reset()
    plan = fixture.slot_table.prepare_store(old, keys(1, 2))
    assert [*plan.held, *plan.awaited, *plan.pins] == []
    assert fixture.slot_table.prepare_load(old, keys(1)) == [None]
    fixture.slot_table.touch(old, keys(1))
    assert not fixture.slot_table.is_held(old, key_of(1))


def test_many_resets_leave_nothing_behind() -> None:
    fixture = Fixture(3)
    for number in range(50):
        fixture.reset()
        fixture.store(number)
    stats = fixture.slot_table.stats()
    assert stats["indexed_blocks"] == 1
    assert stats["free_slots"] + stats["foreign_slots"] == 2


def adopted(num_slots: int) -> Fixture:
    """Return a slot table that took over blocks 1, 2, 3, oldest first, and a slot of each other kind."""
    fixture = Fixture(num_slots, is_empty=False)
    assert fixture.store(9) == []
    slot_of = dict(zip(keys(1, 2, 3), (4, 0, 2), strict=True))
    contents = Contents(slot_of, foreign=deque([3]), free=deque([1]), next_generation=70)
    fixture.slot_table.adopt(fixture.namespace, contents)
    return fixture


def test_there_is_no_room_before_what_is_there_is_known_and_then_the_cheapest_goes_first() -> None:
    fixture = adopted(5)
    assert fixture.held(1, 2, 3) == [1, 2, 3]
    fixture.slot_table.touch(fixture.namespace, keys(1))
    assert [fixture.store(number) for number in (11, 12, 13, 14, 15, 16)] == [[1], [3], [0], [2], [4], [1]]
    assert fixture.held(1, 2, 3, 11, 12) == [12]


def test_generations_go_on_beyond_what_was_found() -> None:
    fixture = adopted(5)
    assert fixture.slot_table.prepare_store(fixture.namespace, keys(11)).pins[0].generation == 70


def test_what_was_found_before_a_reset_is_foreign_after_it() -> None:
    fixture = adopted(5)
    fixture.reset()
    assert fixture.held(1, 2, 3) == []
    assert [fixture.store(number) for number in (11, 12, 13, 14, 15)] == [[1], [3], [4], [0], [2]]


def test_a_scan_that_ends_after_a_reset_finds_nothing_of_ours() -> None:
    fixture = Fixture(2, is_empty=False)
    before = fixture.namespace
    fixture.reset()
    fixture.slot_table.adopt(before, Contents({key_of(1): 1}, free=deque([0])))
    assert fixture.held(1) == []
    assert fixture.store(2, 3) == [0, 1]


def test_a_policy_that_learns_is_told_of_requests_of_the_current_space_alone() -> None:
    fixture = Fixture(4, NOTING_LEARNER)
    before = fixture.namespace
    fixture.reset()
    for namespace in (before, fixture.namespace):
        fixture.slot_table.report(namespace, lambda policy: policy.on_finished("r"))
    assert NotingLearner.made[-1].finished == ["r"]
