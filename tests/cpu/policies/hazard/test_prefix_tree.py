"""The tree of hazard's shadow: who is forgotten first, and that what it remembers of it stays bounded."""

import random
from collections import OrderedDict

import pytest

from kvtier.base import OffloadKey
from kvtier.cpu.policies.hazard.prefix_tree import MIN_STALE, PrefixNode, PrefixTree
from kvtier.errors import InvariantError
from kvtier.testing.policy_suite import key_of


def named(tree: PrefixTree, *numbers: int) -> list[PrefixNode]:
    chain, _ = tree.find_or_add([key_of(number) for number in numbers])
    return chain


def test_ghosts_are_forgotten_in_the_order_of_their_last_burial() -> None:
    tree = PrefixTree(max_ghosts=3)
    draw = random.Random(5)
    reference: OrderedDict[OffloadKey, None] = OrderedDict()
    for _ in range(3_000):
        (node,) = named(tree, draw.randrange(12))
        if node.is_held:
            tree.release(node)
        elif draw.random() < 0.3:
            tree.hold(node)
            reference.pop(node.key, None)
            continue
        else:
            tree.add_ghosts([node])
        reference[node.key] = None
        reference.move_to_end(node.key)
        tree.forget_oldest_ghosts()
        while len(reference) > 3:
            reference.popitem(last=False)

        assert {key for key, one in tree.nodes.items() if not one.is_held} == set(reference)
        assert [one.key for one in tree._live_ghosts()] == list(reference)


def test_a_tail_is_forgotten_before_the_blocks_that_it_follows() -> None:
    tree = PrefixTree(max_ghosts=2)
    tree.add_ghosts(named(tree, 1, 2, 3))

    assert len(tree.forget_oldest_ghosts()) == 1
    assert set(tree.nodes) == {key_of(1), key_of(2)}


def test_ghosts_that_are_named_again_and_again_leave_nothing_behind() -> None:
    tree = PrefixTree(max_ghosts=100)
    for _ in range(1_000):
        tree.add_ghosts(named(tree, 1, 2, 3))
        tree.forget_oldest_ghosts()
        assert len(tree._ghost_queue) <= 2 * tree.num_ghosts + MIN_STALE + 3
    assert tree.num_ghosts == 3
    tree.check()


def test_a_ghost_that_nobody_would_forget_is_found_out() -> None:
    tree = PrefixTree(max_ghosts=3)
    tree.add_ghosts(named(tree, 1, 2))
    tree.nodes[key_of(2)].ghost_number += 1

    with pytest.raises(InvariantError, match="0 blocks held, 1 ghosts of 2"):
        tree.check()
