"""The device cache shares prefixes, keeps what nobody uses as long as it can, and gives tails away first."""

import pytest

from kvtier.errors import ConfigError, InvariantError
from kvtier.sim.device import DevicePool

A, B, C, D = b"a", b"b", b"c", b"d"


def filled(num_blocks: int, *hashes: bytes) -> DevicePool:
    """Return a pool that one ended request has left ``hashes`` in."""
    pool = DevicePool(num_blocks)
    block_ids = pool.take([], len(hashes))
    pool.name(block_ids, hashes)
    pool.give_back(block_ids)
    return pool


def test_only_the_leading_run_is_found() -> None:
    pool = filled(4, A, B)

    assert [len(pool.find_prefix(hashes)) for hashes in ([A, B, C], [C, A], [B])] == [2, 0, 1]


def test_the_tail_of_a_prefix_is_given_away_first() -> None:
    pool = filled(3, A, B, C)

    pool.take([], 1)

    assert len(pool.find_prefix([A, B, C])) == 2


def test_blocks_that_nobody_can_ask_for_are_used_again_before_those_that_hold_a_prefix() -> None:
    pool = filled(4, A, B)
    partial = pool.take([], 1)
    pool.give_back(partial)

    assert pool.take([], 1) == partial
    assert len(pool.find_prefix([A, B])) == 2


def test_a_prefix_in_use_is_not_given_away() -> None:
    pool = filled(3, A, B)
    pool.take(pool.find_prefix([A, B]), 1)

    assert (pool.num_free, pool.has_room([], 1)) == (0, False)
    with pytest.raises(InvariantError, match="1 device blocks are asked for"):
        pool.take([], 1)


def test_a_shared_block_is_free_when_its_last_user_is_done() -> None:
    pool = filled(2, A)
    first, second = pool.take(pool.find_prefix([A]), 0), pool.take(pool.find_prefix([A]), 0)

    pool.give_back(first)
    assert pool.num_free == 1
    pool.give_back(second)
    assert pool.num_free == 2


def test_the_prefix_itself_takes_room_from_what_is_free() -> None:
    pool = filled(3, A, B)

    assert pool.has_room(pool.find_prefix([A, B]), 1)
    assert not pool.has_room(pool.find_prefix([A, B]), 2)


def test_a_block_that_two_requests_have_computed_is_found_once() -> None:
    pool = DevicePool(2)
    first, second = pool.take([], 1), pool.take([], 1)
    pool.name(first, [A])
    pool.name(second, [A])
    pool.give_back(second)
    pool.take([], 1)

    assert pool.find_prefix([A]) == first


def test_held_is_what_somebody_uses_or_what_can_be_found() -> None:
    pool = DevicePool(5)
    assert pool.num_held == 0

    taken = pool.take([], 3)
    assert pool.num_held == 3
    pool.name(taken[:2], [A, B])
    pool.give_back(taken)
    assert pool.num_held == 2
    assert pool.num_free == 5

    prefix = pool.take(pool.find_prefix([A, B]), 3)
    assert pool.num_held == 5
    pool.give_back(prefix)
    assert pool.num_held == 2


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one block"):
        DevicePool(0)
