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


def test_a_key_too_long_for_an_envelope_is_not_held(start_tier: StartTier) -> None:
    driver = start_tier()
    assert driver.tier.lookup(OffloadKey(bytes(41)), driver.request) is False
