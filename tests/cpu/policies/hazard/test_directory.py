"""The directory of hazard's shadow: who is forgotten first, and that what it remembers of it stays bounded."""

import random
from collections import OrderedDict

import pytest

from kvtier.base import OffloadKey
from kvtier.cpu.policies.hazard.directory import MIN_STALE, Directory, Node
from kvtier.errors import InvariantError
from kvtier.testing.policy_suite import key_of


def named(directory: Directory, *numbers: int) -> list[Node]:
    chain, _ = directory.chain_of([key_of(number) for number in numbers])
    return chain


def test_ghosts_are_forgotten_in_the_order_of_their_last_burial() -> None:
    directory = Directory(max_ghosts=3)
    draw = random.Random(5)
    reference: OrderedDict[OffloadKey, None] = OrderedDict()
    for _ in range(3_000):
        (node,) = named(directory, draw.randrange(12))
        if node.is_held:
            directory.release(node)
        elif draw.random() < 0.3:
            directory.hold(node)
            reference.pop(node.key, None)
            continue
        else:
            directory.bury([node])
        reference[node.key] = None
        reference.move_to_end(node.key)
        directory.forget_oldest()
        while len(reference) > 3:
            reference.popitem(last=False)

        assert {key for key, one in directory.nodes.items() if not one.is_held} == set(reference)
        assert [one.key for one in directory._live_burials()] == list(reference)


def test_a_tail_is_forgotten_before_the_blocks_that_it_follows() -> None:
    directory = Directory(max_ghosts=2)
    directory.bury(named(directory, 1, 2, 3))

    assert len(directory.forget_oldest()) == 1
    assert set(directory.nodes) == {key_of(1), key_of(2)}


def test_ghosts_that_are_named_again_and_again_leave_nothing_behind() -> None:
    directory = Directory(max_ghosts=100)
    for _ in range(1_000):
        directory.bury(named(directory, 1, 2, 3))
        directory.forget_oldest()
        assert len(directory._burials) <= 2 * directory.num_ghosts + MIN_STALE + 3
    assert directory.num_ghosts == 3
    directory.check()


def test_a_ghost_that_nobody_would_forget_is_found_out() -> None:
    directory = Directory(max_ghosts=3)
    directory.bury(named(directory, 1, 2))
    directory.nodes[key_of(2)].burial += 1

    with pytest.raises(InvariantError, match="0 blocks held, 1 ghosts of 2"):
        directory.check()
