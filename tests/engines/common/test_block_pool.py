"""Device blocks are never lost, never given twice, shared by prefix, and reused least recently used first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.engines.common.block_pool import DeviceBlockPool
from kvtier.errors import ConfigError, DevicePoolError

A, B, C, D = (bytes([n]) * 32 for n in range(4))


def fill(pool: DeviceBlockPool, *hashes: bytes) -> list[int]:
    """Use one block for each hash, publish it, and free them all."""
    block_ids = pool.allocate([], len(hashes))
    pool.publish(block_ids, hashes)
    pool.free(block_ids)
    pool.check()
    return block_ids


def take_prefix(pool: DeviceBlockPool, *hashes: bytes) -> list[int]:
    """Use what the pool holds of a prefix."""
    return pool.allocate(pool.find_prefix(hashes), 0)


def test_a_freed_block_is_found_by_its_hash() -> None:
    pool = DeviceBlockPool(4)
    block_ids = fill(pool, A, B)
    assert take_prefix(pool, A, B, C) == block_ids
    assert pool.num_free_blocks == 2


@pytest.mark.parametrize(("hashes", "num_found"), [([A, B, C], 2), ([C, A], 0), ([B], 1), ([A, C, B], 1)])
def test_a_prefix_ends_at_the_first_hole(hashes: list[bytes], num_found: int) -> None:
    pool = DeviceBlockPool(4)
    fill(pool, A, B)
    assert len(pool.find_prefix(hashes)) == num_found


def test_blocks_without_a_hash_are_used_again_before_cached_ones() -> None:
    pool = DeviceBlockPool(4)
    fill(pool, A, B)
    partial = pool.allocate([], 1)
    pool.free(partial)

    assert pool.allocate([], 1) == partial
    assert len(pool.find_prefix([A, B])) == 2


def test_the_tail_of_a_prefix_goes_before_its_head() -> None:
    pool = DeviceBlockPool(3)
    fill(pool, A, B, C)
    pool.allocate([], 1)
    assert len(pool.find_prefix([A, B, C])) == 2
    assert pool.find_prefix([C]) == []


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = DeviceBlockPool(2)
    fill(pool, A)
    fill(pool, B)
    pool.free(take_prefix(pool, A))
    pool.allocate([], 1)
    assert pool.find_prefix([B]) == []
    assert len(pool.find_prefix([A])) == 1


def test_a_used_block_is_not_given_to_another_request() -> None:
    pool = DeviceBlockPool(3)
    fill(pool, A, B)
    pool.allocate(pool.find_prefix([A, B]), 1)

    assert (pool.num_free_blocks, pool.has_room([], 1)) == (0, False)
    with pytest.raises(DevicePoolError, match="num_device_blocks=3"):
        pool.allocate([], 1)
    pool.check()


def test_a_refused_allocation_changes_nothing() -> None:
    pool = DeviceBlockPool(2)
    fill(pool, A, B)
    with pytest.raises(DevicePoolError):
        pool.allocate(pool.find_prefix([A]), 2)
    assert pool.num_free_blocks == 2
    assert len(pool.find_prefix([A, B])) == 2


def test_the_prefix_itself_takes_room_from_what_is_free() -> None:
    pool = DeviceBlockPool(3)
    fill(pool, A, B)

    assert pool.has_room(pool.find_prefix([A, B]), 1)
    assert not pool.has_room(pool.find_prefix([A, B]), 2)


def test_a_prefix_in_use_takes_no_further_room() -> None:
    pool = DeviceBlockPool(3)
    fill(pool, A, B)
    take_prefix(pool, A, B)

    assert pool.has_room(pool.find_prefix([A, B]), 1)


def test_a_second_block_of_the_same_hash_does_not_displace_the_first() -> None:
    pool = DeviceBlockPool(3)
    first = fill(pool, A)
    second = pool.allocate([], 1)
    pool.publish(second, [A])
    pool.free(second)
    assert pool.find_prefix([A]) == first
    assert pool.allocate([], 1) == second
    pool.check()


def test_a_shared_block_is_free_only_when_its_last_request_ends() -> None:
    pool = DeviceBlockPool(1)
    fill(pool, A)
    users = [take_prefix(pool, A), take_prefix(pool, A)]
    pool.free(users[0])
    assert pool.num_free_blocks == 0
    pool.free(users[1])
    assert pool.num_free_blocks == 1


def test_held_blocks_are_those_in_use_and_those_that_can_be_found() -> None:
    pool = DeviceBlockPool(5)
    assert pool.num_held_blocks == 0

    taken = pool.allocate([], 3)
    assert pool.num_held_blocks == 3
    pool.publish(taken[:2], [A, B])
    pool.free(taken)
    assert pool.num_held_blocks == 2
    assert pool.num_free_blocks == 5

    prefix = pool.allocate(pool.find_prefix([A, B]), 3)
    assert pool.num_held_blocks == 5
    pool.free(prefix)
    assert pool.num_held_blocks == 2


def test_dropping_the_cache_forgets_used_blocks_too() -> None:
    pool = DeviceBlockPool(2)
    fill(pool, A, B)
    used = take_prefix(pool, A)
    pool.drop_cached()
    assert pool.find_prefix([A, B]) == []
    assert (pool.num_cached_blocks, pool.num_held_blocks) == (0, 1)
    pool.free(used)
    pool.check()
    assert pool.num_free_blocks == 2


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one block"):
        DeviceBlockPool(0)


@given(
    st.lists(st.tuples(st.sampled_from(["take", "free", "alloc", "drop"]), st.integers(0, 5)), max_size=60)
)
def test_no_block_is_lost_whatever_happens(operations: list[tuple[str, int]]) -> None:
    pool = DeviceBlockPool(6)
    hashes = [bytes([n]) * 32 for n in range(6)]
    users: list[list[int]] = []
    for operation, number in operations:
        if operation == "take":
            users.append(take_prefix(pool, *hashes[:number]))
        elif operation == "alloc" and pool.has_room([], number):
            taken = pool.allocate([], number)
            pool.publish(taken, [hashes[block_id] for block_id in taken])
            users.append(taken)
        elif operation == "free" and users:
            pool.free(users.pop(number % len(users)))
        elif operation == "drop":
            pool.drop_cached()
        pool.check()
