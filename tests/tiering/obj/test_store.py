"""What the tier writes and what it never writes over. Damaged and missing objects are in ``test_roles.py``."""

import numpy as np
from tests.tiering.obj.conftest import Bucket, StartTier

from kvtier.namespace import make_namespace
from kvtier.testing.tier_suite import ROW_BYTES, TierDriver, content_of, key_of, make_config
from kvtier.tiering.kit import envelope


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


def test_an_object_that_exists_is_never_overwritten(start_tier: StartTier, bucket: Bucket) -> None:
    driver = start_tier()
    driver.store([1])
    name = bucket.name_of(1)
    theirs = flipped(bucket.read(name), 5000)
    bucket.write(name, theirs)
    assert start_tier().store([1]).success
    assert bucket.read(name) == theirs


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
