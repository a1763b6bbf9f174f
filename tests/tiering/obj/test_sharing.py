"""Several engines share one bucket and never talk."""

import json

import numpy as np
from tests.tiering.obj.conftest import Bucket, StartTier

from kvtier.testing.tier_suite import content_of


def test_a_second_engine_finds_and_loads_what_the_first_has_stored(start_tier: StartTier) -> None:
    first, second = start_tier(), start_tier()
    assert first.store([1, 2, 3]).success
    assert second.lookup(2)
    assert second.load([3, 1]).success
    assert np.array_equal(second.rows[0], content_of(3))


def test_both_store_the_same_blocks_and_each_is_there_once(start_tier: StartTier, bucket: Bucket) -> None:
    first, second = start_tier(), start_tier()
    numbers = list(range(16))
    for driver in (first, second):
        for number in numbers:
            driver.rows[number] = content_of(number)
    jobs = [
        (driver, driver.submit([number], [number], is_promotion=False))
        for number in numbers
        for driver in (first, second)
    ]
    assert all(driver.wait(job).success for driver, job in jobs)
    assert len(bucket.names(".kv")) == 16
    written = [driver.tier.stats()["stored_blocks"] for driver in (first, second)]
    assert sum(written) == 16
    assert second.load(numbers).success


def test_a_block_that_another_engine_removed_after_the_lookup_fails_alone(
    start_tier: StartTier, bucket: Bucket
) -> None:
    driver = start_tier()
    driver.store([1, 2])
    assert driver.lookup(2)
    bucket.remove(bucket.name_of(2))
    result = driver.load([1, 2])
    assert not result.success
    assert not result.is_fault
    assert driver.tier.stats()["absent"] == 1
    assert not driver.lookup(2)


def test_tiers_with_different_prefixes_see_nothing_of_each_other(start_tier: StartTier, prefix: str) -> None:
    first, second = start_tier(prefix=f"{prefix}/a"), start_tier(prefix=f"{prefix}/b")
    first.store([1])
    assert not second.lookup(1)
    assert not second.load([1]).success
    assert first.load([1]).success


def test_a_path_in_the_url_goes_in_front_of_the_prefix(
    start_tier: StartTier, prefix: str, bucket: Bucket
) -> None:
    start_tier(url=f"s3://blocks/{prefix}", prefix="inner").store([1])
    assert bucket.name_of(1).startswith(f"{prefix}/inner/")


def test_another_model_sees_nothing_and_its_blocks_stand_under_another_name(
    start_tier: StartTier, bucket: Bucket
) -> None:
    first, second = start_tier("model-a"), start_tier("model-b")
    first.store([1])
    assert not second.lookup(1)
    second.store([1])
    assert len(bucket.names(".kv")) == 2
    models = {json.loads(bucket.read(name))["model"]["name"] for name in bucket.names("namespace.json")}
    assert models == {"model-a", "model-b"}
