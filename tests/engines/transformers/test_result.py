"""Loaded tokens are counted for the tier that promoted them, and for the host otherwise."""

from kvtier.engines.transformers.result import split_origins


def test_what_no_tier_promoted_was_in_host_memory() -> None:
    assert split_origins(64, {"CPU": 16, "fs": 48}) == {"fs": 48, "host": 16}


def test_what_did_not_arrive_is_not_counted() -> None:
    assert split_origins(32, {"fs": 48, "obj": 16}) == {"fs": 32, "obj": 0, "host": 0}


def test_without_a_load_the_host_has_none() -> None:
    assert split_origins(0, {}) == {"host": 0}
