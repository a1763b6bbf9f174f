"""A block that is damaged, foreign, gone or of another's making costs itself only, and is counted with its reason."""

import numpy as np
import pytest
from tests.tiering.obj.conftest import Bucket, StartTier

from kvtier.base import OffloadKey
from kvtier.namespace import make_namespace
from kvtier.testing.tier_suite import ROW_BYTES, TierDriver, content_of, key_of, make_config
from kvtier.tiering.kit import envelope
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES

BLOCK_BYTES = ENVELOPE_BYTES + ROW_BYTES
GROUPED = {"blocks_per_object": 4, "num_threads": 1}


def flipped(body: bytes, offset: int) -> bytes:
    """Return ``body`` with one bit changed."""
    changed = bytearray(body)
    changed[offset] ^= 1
    return bytes(changed)


def failed_alone(driver: TierDriver, number: int) -> bool:
    """Load ``number`` between two good blocks; return whether it failed and the others succeeded."""
    result = driver.load([1, number, 3])
    assert all(np.array_equal(driver.rows[slot], content_of(block)) for slot, block in ((0, 1), (2, 3)))
    return not result.success and result.successful_keys == frozenset({key_of(1), key_of(3)})


@pytest.mark.parametrize("offset", [0, 8, 40, 82, 127, ENVELOPE_BYTES, BLOCK_BYTES - 1])
def test_a_damaged_object_is_a_miss_counted_and_removed(
    start_tier: StartTier, bucket: Bucket, offset: int
) -> None:
    driver = start_tier()
    driver.store([1, 2, 3])
    name = bucket.name_of(2)
    bucket.write(name, flipped(bucket.read(name), offset))
    result_is_right = failed_alone(driver, 2)
    assert result_is_right
    assert np.all(driver.rows[1] == 0)
    assert driver.tier.stats()["damaged"] == 1
    assert not driver.lookup(2)
    assert name not in bucket.names()


@pytest.mark.parametrize("length", [0, 1, 127, 128, 148, 5000, BLOCK_BYTES - 1])
def test_a_truncated_object_is_a_miss_counted_and_removed(
    start_tier: StartTier, bucket: Bucket, length: int
) -> None:
    driver = start_tier()
    driver.store([1, 2, 3])
    name = bucket.name_of(2)
    bucket.write(name, bucket.read(name)[:length])
    assert failed_alone(driver, 2)
    assert driver.tier.stats()["damaged"] == 1
    assert name not in bucket.names()


def test_an_object_that_is_too_long_is_not_read_and_removed(start_tier: StartTier, bucket: Bucket) -> None:
    driver = start_tier()
    driver.store([1, 2, 3])
    name = bucket.name_of(2)
    bucket.write(name, bucket.read(name) + bytes(100))
    assert failed_alone(driver, 2)
    assert driver.tier.stats()["damaged"] == 1


def test_an_object_of_a_wrong_length_is_not_found(start_tier: StartTier, bucket: Bucket) -> None:
    start_tier().store([1])
    name = bucket.name_of(1)
    bucket.write(name, bucket.read(name)[:-1])
    assert not start_tier().lookup(1)


def test_after_damage_the_block_can_be_stored_again(start_tier: StartTier, bucket: Bucket) -> None:
    driver = start_tier()
    driver.store([1])
    name = bucket.name_of(1)
    bucket.write(name, flipped(bucket.read(name), 5000))
    assert not driver.load([1]).success
    assert driver.store([1]).success
    assert driver.load([1]).success


def test_another_namespaces_bytes_under_our_name_are_a_miss_and_left_alone(
    start_tier: StartTier, bucket: Bucket
) -> None:
    driver = start_tier()
    driver.store([1, 2, 3])
    name = bucket.name_of(2)
    foreign = make_namespace(make_config("another"), ROW_BYTES).digest
    row = bytes(content_of(2))
    body = envelope.make_header(key_of(2), foreign, row) + row
    bucket.write(name, body)
    assert failed_alone(driver, 2)
    assert driver.tier.stats()["foreign"] == 1
    assert bucket.read(name) == body


@pytest.mark.parametrize("extra_bytes", [0, 100])
def test_another_versions_object_is_left_alone_whatever_its_length(
    start_tier: StartTier, bucket: Bucket, extra_bytes: int
) -> None:
    driver = start_tier()
    driver.store([1, 2, 3])
    name = bucket.name_of(2)
    body = bytearray(bucket.read(name) + bytes(extra_bytes))
    body[4] += 1
    bucket.write(name, bytes(body))
    assert failed_alone(driver, 2)
    assert driver.tier.stats()["foreign"] == 1
    assert bucket.read(name) == bytes(body)


def test_a_block_moved_to_another_name_is_not_loaded_and_removed(
    start_tier: StartTier, bucket: Bucket
) -> None:
    driver = start_tier()
    driver.store([1, 2, 3])
    bucket.write(bucket.name_of(2), bucket.read(bucket.name_of(1)))
    assert failed_alone(driver, 2)
    assert driver.tier.stats()["damaged"] == 1


def test_an_object_that_exists_is_never_overwritten(start_tier: StartTier, bucket: Bucket) -> None:
    driver = start_tier()
    driver.store([1])
    name = bucket.name_of(1)
    theirs = flipped(bucket.read(name), 5000)
    bucket.write(name, theirs)
    assert start_tier().store([1]).success
    assert bucket.read(name) == theirs


@pytest.mark.parametrize("length", [0, 15, BLOCK_BYTES - 1])
def test_a_truncated_object_is_not_taken_for_the_block_and_makes_room_for_it(
    start_tier: StartTier, bucket: Bucket, length: int
) -> None:
    start_tier().store([1])
    name = bucket.name_of(1)
    bucket.write(name, bucket.read(name)[:length])
    driver = start_tier()
    assert not driver.store([1]).success
    assert driver.store([1]).success
    assert driver.load([1]).success


def test_a_truncated_pointer_makes_room_for_the_block(start_tier: StartTier, bucket: Bucket) -> None:
    start_tier(**GROUPED).store([1, 2, 3])
    name = bucket.name_of(2)
    bucket.write(name, bucket.read(name)[:-1])
    driver = start_tier(**GROUPED)
    assert not driver.lookup(2)
    assert driver.store([1, 2, 3]).success
    assert driver.load([1, 2, 3]).success


def test_a_slot_changed_after_its_store_does_not_change_the_block(start_tier: StartTier) -> None:
    for options in ({}, {"url": "memory://", "endpoint": None, "region": None}):
        driver = start_tier(**options)
        driver.store([1])
        driver.rows[0] = 7
        assert driver.load([1]).success
        assert np.array_equal(driver.rows[0], content_of(1))


def test_a_readable_description_stands_beside_the_data(start_tier: StartTier, bucket: Bucket) -> None:
    driver = start_tier()
    driver.store([1])
    (name,) = bucket.names("namespace.json")
    document = make_namespace(make_config(), ROW_BYTES).document
    assert bucket.read(name).decode() == document
    driver.tier.reset(bytes(16))
    driver.store([1])
    assert len(bucket.names("namespace.json")) == 2


def test_blocks_of_one_call_share_an_object_and_each_has_a_pointer(
    start_tier: StartTier, bucket: Bucket
) -> None:
    driver = start_tier(**GROUPED)
    driver.store(list(range(8)))
    assert [len(bucket.read(name)) for name in bucket.names(".kvg")] == [4 * BLOCK_BYTES, 4 * BLOCK_BYTES]
    assert len(bucket.names(".kv")) == 8
    assert bucket.num_bytes(".kv") == 8 * 148


def test_a_single_block_needs_no_pointer(start_tier: StartTier, bucket: Bucket) -> None:
    driver = start_tier(**GROUPED)
    driver.store([1])
    assert bucket.names(".kvg") == []
    assert start_tier().load([1]).success


def test_an_engine_that_knows_one_key_finds_a_block_in_a_group(start_tier: StartTier) -> None:
    start_tier(**GROUPED).store([1, 2, 3, 4])
    for options in ({}, GROUPED):
        other = start_tier(**options)
        assert other.lookup(3)
        assert other.load([3]).success
        assert np.array_equal(other.rows[0], content_of(3))
        assert start_tier(**options).load([4, 1]).success


def test_held_blocks_are_not_written_again_in_a_group(start_tier: StartTier, bucket: Bucket) -> None:
    start_tier().store([2])
    start_tier(**GROUPED).store([1, 2, 3])
    assert [len(bucket.read(name)) for name in bucket.names(".kvg")] == [2 * BLOCK_BYTES]
    driver = start_tier()
    assert driver.load([1, 2, 3]).success
    assert np.array_equal(driver.rows[1], content_of(2))


def test_a_damaged_block_in_a_group_loses_its_pointer_and_nothing_else(
    start_tier: StartTier, bucket: Bucket
) -> None:
    driver = start_tier(**GROUPED)
    driver.store([1, 2, 3])
    (group,) = bucket.names(".kvg")
    bucket.write(group, flipped(bucket.read(group), BLOCK_BYTES + 500))
    assert failed_alone(driver, 2)
    assert len(bucket.names(".kv")) == 2
    assert bucket.names(".kvg") == [group]
    assert driver.store([2]).success
    assert driver.load([1, 2, 3]).success


@pytest.mark.parametrize("offset", [0, 30, 130])
def test_a_damaged_pointer_is_a_miss_and_removed(start_tier: StartTier, bucket: Bucket, offset: int) -> None:
    start_tier(**GROUPED).store([1, 2, 3])
    name = bucket.name_of(2)
    bucket.write(name, flipped(bucket.read(name), offset))
    driver = start_tier(**GROUPED)
    assert not driver.lookup(2)
    assert failed_alone(driver, 2)
    assert driver.tier.stats()["damaged"] == 1
    assert name not in bucket.names()


@pytest.mark.parametrize("is_known", [True, False])
def test_a_pointer_whose_group_is_gone_is_a_miss_and_removed(
    start_tier: StartTier, bucket: Bucket, is_known: bool
) -> None:
    start_tier(**GROUPED).store([1, 2])
    driver = start_tier(**GROUPED)
    assert not is_known or driver.lookup(2)
    (group,) = bucket.names(".kvg")
    bucket.remove(group)
    assert not driver.load([1, 2]).success
    assert bucket.names(".kv") == []
    assert driver.tier.stats()["absent"] == 2
    namespace = driver.tier._namespace  # type: ignore[attr-defined]  # every pooled tier has one
    assert namespace.location(key_of(2)) is None
    assert driver.store([1, 2]).success
    assert driver.load([1, 2]).success


def test_a_group_cut_short_loses_its_last_blocks_only(start_tier: StartTier, bucket: Bucket) -> None:
    start_tier(**GROUPED).store([1, 3, 2])
    (group,) = bucket.names(".kvg")
    bucket.write(group, bucket.read(group)[: 2 * BLOCK_BYTES])
    driver = start_tier(num_threads=1)
    assert failed_alone(driver, 2)


def test_a_block_that_another_engine_wrote_anew_is_found_past_an_old_pointer(
    start_tier: StartTier, bucket: Bucket
) -> None:
    driver = start_tier(**GROUPED)
    driver.store([1, 2])
    for name in bucket.names(".kv") + bucket.names(".kvg"):
        bucket.remove(name)
    start_tier(**GROUPED).store([2, 1])
    assert driver.load([1, 2]).success
    assert np.array_equal(driver.rows[1], content_of(2))


def test_a_key_too_long_for_an_envelope_is_not_held(start_tier: StartTier) -> None:
    driver = start_tier()
    assert driver.tier.lookup(OffloadKey(bytes(41)), driver.request) is False
