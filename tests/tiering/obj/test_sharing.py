"""Tiers share a bucket under names of their own. How engines share blocks is in ``test_roles.py``."""

from tests.tiering.obj.conftest import Bucket, StartTier


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
