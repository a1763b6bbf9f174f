"""Slot numbers: fresh ones ascending, then freed ones, last freed first."""

from collections.abc import Sequence

from kvtier.base import OffloadKey
from kvtier.cpu.block_table import SlotAllocator
from kvtier.cpu.policies.base import IN_FLIGHT, BlockStatus
from kvtier.testing.manager_suite import keys_of


def take(slots: SlotAllocator, keys: Sequence[OffloadKey]) -> list[int]:
    return [block.block_id for block in slots.take(keys)[1]]


def test_fresh_slots_come_before_freed_ones() -> None:
    slots = SlotAllocator(4)
    assert take(slots, keys_of(1, 2)) == [0, 1]
    slots.give_back([0])
    slots.give_back([1])
    assert slots.num_free == 4
    assert take(slots, keys_of(3, 4, 5)) == [2, 3, 1]
    assert take(slots, keys_of(6)) == [0]
    assert slots.num_free == 0


def test_a_batch_takes_the_last_freed_first() -> None:
    slots = SlotAllocator(3)
    slots.take(keys_of(1, 2, 3))
    slots.give_back([2, 0, 1])
    assert take(slots, keys_of(4, 5)) == [1, 0]
    assert slots.freed == [2]


def test_taking_nothing_takes_nothing() -> None:
    slots = SlotAllocator(1)
    assert slots.take([]) == ([], [])
    slots.take(keys_of(1))
    slots.give_back([0])
    assert slots.take([]) == ([], [])
    assert slots.num_free == 1


def test_held_blocks_are_those_that_still_name_their_slot() -> None:
    slots = SlotAllocator(4)
    gone, moved, held = keys_of(1, 2, 3)
    slots.take([gone, moved, held])
    blocks = {moved: BlockStatus(3), held: BlockStatus(2)}
    assert slots.held_blocks(blocks.get) == {held: blocks[held]}


def test_a_slot_that_is_taken_again_is_in_flight_again() -> None:
    slots = SlotAllocator(1)
    _, (block,) = slots.take(keys_of(1))
    block.ref_cnt = 3
    slots.give_back([0])
    assert [taken.ref_cnt for taken in slots.take(keys_of(2))[1]] == [IN_FLIGHT]
