"""Orphaned slots: reports by key in order of submission, reports by slot in any order, never a slot too early."""

import pytest

from kvtier.cpu.orphaned_slots import OrphanedSlots
from kvtier.errors import InvariantError
from kvtier.testing.manager_suite import keys_of
from kvtier.testing.policy_suite import key_of

KEY = key_of(1)


def make_orphans() -> tuple[OrphanedSlots, list[int]]:
    freed: list[int] = []
    return OrphanedSlots(freed.extend), freed


def test_an_empty_table_is_empty_and_keeps_every_key() -> None:
    orphans, freed = make_orphans()
    assert not orphans.by_slot
    assert orphans.settle_keys(keys_of(1, 2), is_write=True) == keys_of(1, 2)
    orphans.settle_slots([1], is_write=True)
    assert freed == []


def test_reports_by_key_go_to_the_oldest_orphan() -> None:
    orphans, freed = make_orphans()
    for slot in (5, 3):
        orphans.adopt(slot, KEY, is_write=True, num_reports=1)
    assert orphans.settle_keys([KEY], is_write=True) == []
    assert (freed, list(orphans.by_slot)) == ([5], [3])
    orphans.check()


def test_reads_and_writes_of_a_key_are_told_apart() -> None:
    orphans, freed = make_orphans()
    orphans.adopt(5, KEY, is_write=True, num_reports=1)
    assert orphans.settle_keys([KEY], is_write=False) == [KEY]
    orphans.settle_slots([5], is_write=False)
    assert freed == []


def test_a_repeated_key_in_one_report_settles_once() -> None:
    orphans, freed = make_orphans()
    orphans.adopt(5, KEY, is_write=False, num_reports=2)
    orphans.settle_keys([KEY, KEY], is_write=False)
    assert freed == []
    orphans.settle_keys([KEY], is_write=False)
    assert freed == [5]


def test_a_slot_report_takes_the_slots_place_in_the_keys_queue() -> None:
    orphans, freed = make_orphans()
    for slot in (5, 3):
        orphans.adopt(slot, KEY, is_write=False, num_reports=1)
    orphans.settle_slots([3], is_write=False)
    assert freed == [3]
    orphans.settle_keys([KEY], is_write=False)
    assert orphans.settle_keys([KEY], is_write=False) == [KEY]
    assert freed == [3, 5]


def test_a_claimed_report_is_not_settled_by_key() -> None:
    orphans, freed = make_orphans()
    orphans.adopt(5, KEY, is_write=False, num_reports=2)
    orphans.claim([5, 9], is_write=False)
    orphans.check()
    orphans.settle_keys([KEY], is_write=False)
    assert orphans.settle_keys([KEY], is_write=False) == [KEY]
    assert freed == []
    orphans.settle_slots([5], is_write=False)
    assert freed == [5]


def test_a_slot_can_be_claimed_once_for_each_report() -> None:
    orphans, freed = make_orphans()
    orphans.adopt(5, KEY, is_write=False, num_reports=2)
    for _ in range(3):
        orphans.claim([5], is_write=False)
    for _ in range(3):
        orphans.settle_slots([5], is_write=False)
    assert freed == [5]
    assert not orphans.by_slot


def test_check_finds_an_orphan_that_waits_for_nothing() -> None:
    orphans, _ = make_orphans()
    orphans.adopt(5, KEY, is_write=True, num_reports=1)
    orphans.by_slot[5].num_by_key = 0
    with pytest.raises(InvariantError, match="orphans expect"):
        orphans.check()
    orphans._by_key.clear()
    with pytest.raises(InvariantError, match="wait for no report"):
        orphans.check()
