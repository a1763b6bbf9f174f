"""Loaded tokens are counted for the tier that promoted them, and for the host otherwise."""

from collections import Counter

from kvtier.engines.transformers.origin import count_promoted_blocks, split_origins


def test_counters_of_all_tiers_of_a_type_are_summed() -> None:
    stats = {
        "tier.0.fs.promoted_blocks": 3.0,
        "tier.1.fs.promoted_blocks": 2.0,
        "tier.2.valkey.promoted_blocks": 1.0,
        "tier.2.valkey.errors": 9.0,
        "primary.loaded": 7.0,
    }
    assert count_promoted_blocks(stats) == Counter({"fs": 5, "valkey": 1})


def test_what_no_tier_promoted_was_in_host_memory() -> None:
    assert split_origins(64, {"fs": 48}) == {"fs": 48, "host": 16}


def test_promotions_behind_a_hole_are_not_counted() -> None:
    assert split_origins(32, {"fs": 48, "obj": 16}) == {"fs": 32, "obj": 0, "host": 0}
