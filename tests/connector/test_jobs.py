"""Fences on device blocks of unfinished stores."""

from kvtier.base import TransferJobId
from kvtier.connector.jobs import BlockFences

ONE, TWO = TransferJobId(1), TransferJobId(2)


def test_whoever_takes_a_block_gets_the_stores_that_read_it_once() -> None:
    fences = BlockFences()
    fences.add(ONE, [5, 6])
    fences.add(TWO, [6, 7])

    assert fences.take([6]) == {ONE, TWO}
    assert fences.take([5, 6, 7]) == set()
    assert len(fences) == 0


def test_other_blocks_wait_for_nobody() -> None:
    fences = BlockFences()
    fences.add(ONE, [5])

    assert fences.take([4]) == set()
    assert fences.take([5]) == {ONE}


def test_a_store_that_ended_fences_nothing_and_ending_twice_is_ignored() -> None:
    fences = BlockFences()
    fences.add(ONE, [5, 6])
    fences.add(TWO, [6])

    fences.remove(ONE)
    fences.remove(ONE)

    assert fences.take([5, 6]) == {TWO}
