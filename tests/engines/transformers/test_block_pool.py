"""Device blocks are never lost, never given twice, and reused least recently used first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.engines.transformers.block_pool import DeviceBlockPool
from kvtier.errors import DevicePoolError

A, B, C, D = (bytes([n]) * 32 for n in range(4))


def fill(pool: DeviceBlockPool, *digests: bytes) -> list[int]:
    """Use one block for each digest, publish it, and free them all."""
    block_ids = pool.allocate(len(digests))
    for block_id, digest in zip(block_ids, digests, strict=True):
        pool.publish(block_id, digest)
    pool.free(block_ids)
    pool.check()
    return block_ids


def test_a_freed_block_is_found_by_its_digest() -> None:
    pool = DeviceBlockPool(4)
    block_ids = fill(pool, A, B)
    assert pool.take_prefix([A, B, C]) == block_ids
    assert pool.num_free_blocks == 2


def test_a_prefix_ends_at_the_first_hole() -> None:
    pool = DeviceBlockPool(4)
    first, _ = fill(pool, A, C)
    assert pool.take_prefix([A, B, C]) == [first]


def test_blocks_without_content_are_given_away_before_cached_ones() -> None:
    pool = DeviceBlockPool(3)
    cached = fill(pool, A)
    assert set(pool.allocate(2)).isdisjoint(cached)
    assert pool.num_cached_blocks == 1


def test_the_tail_of_a_prefix_goes_before_its_head() -> None:
    pool = DeviceBlockPool(2)
    fill(pool, A, B)
    pool.allocate(1)
    assert len(pool.take_prefix([A])) == 1
    assert pool.take_prefix([B]) == []


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = DeviceBlockPool(2)
    fill(pool, A)
    fill(pool, B)
    pool.free(pool.take_prefix([A]))
    pool.allocate(1)
    assert pool.take_prefix([B]) == []
    assert len(pool.take_prefix([A])) == 1


def test_a_used_block_is_not_given_to_another() -> None:
    pool = DeviceBlockPool(2)
    fill(pool, A)
    pool.take_prefix([A])
    pool.allocate(1)
    with pytest.raises(DevicePoolError, match="num_device_blocks=2"):
        pool.allocate(1)
    pool.check()


def test_a_refused_allocation_changes_nothing() -> None:
    pool = DeviceBlockPool(2)
    fill(pool, A, B)
    with pytest.raises(DevicePoolError):
        pool.allocate(3)
    assert len(pool.take_prefix([A, B])) == 2


def test_a_second_block_of_the_same_digest_does_not_displace_the_first() -> None:
    pool = DeviceBlockPool(3)
    first = fill(pool, A)
    second = pool.allocate(1)
    pool.publish(second[0], A)
    pool.free(second)
    assert pool.take_prefix([A]) == first
    pool.check()


def test_a_shared_block_is_free_only_when_its_last_user_lets_go() -> None:
    pool = DeviceBlockPool(1)
    fill(pool, A)
    users = [pool.take_prefix([A]), pool.take_prefix([A])]
    pool.free(users[0])
    assert pool.num_free_blocks == 0
    pool.free(users[1])
    assert pool.num_free_blocks == 1


def test_dropping_the_cache_forgets_used_blocks_too() -> None:
    pool = DeviceBlockPool(2)
    fill(pool, A, B)
    used = pool.take_prefix([A])
    pool.drop_cached()
    assert pool.take_prefix([A, B]) == []
    pool.free(used)
    pool.check()
    assert pool.num_free_blocks == 2


@given(
    st.lists(st.tuples(st.sampled_from(["take", "free", "alloc", "drop"]), st.integers(0, 5)), max_size=60)
)
def test_no_block_is_lost_whatever_happens(operations: list[tuple[str, int]]) -> None:
    pool = DeviceBlockPool(6)
    digests = [bytes([n]) * 32 for n in range(6)]
    users: list[list[int]] = []
    for operation, number in operations:
        if operation == "take":
            users.append(pool.take_prefix(digests[:number]))
        elif operation == "alloc" and number <= pool.num_free_blocks:
            taken = pool.allocate(number)
            for block_id in taken:
                pool.publish(block_id, digests[block_id])
            users.append(taken)
        elif operation == "free" and users:
            pool.free(users.pop(number % len(users)))
        elif operation == "drop":
            pool.drop_cached()
        pool.check()
