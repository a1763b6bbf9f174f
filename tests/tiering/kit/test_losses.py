"""A backend that evicts by itself: what was stored and is missing has expired, or was evicted."""

from kvtier.departed import Loss, make_losses
from kvtier.misses import Miss, MissCause
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_driver import key_of
from kvtier.tiering.kit.losses import BackendLosses

KEYS = [key_of(number) for number in range(4)]


def test_what_was_never_stored_here_is_not_explained() -> None:
    losses = BackendLosses("valkey", ManualClock())
    assert losses.explain(KEYS[0]) is None
    losses.on_stored(KEYS[:1])
    assert losses.explain(KEYS[1]) is None


def test_what_was_stored_and_is_missing_was_evicted() -> None:
    clock = ManualClock()
    losses = BackendLosses("mooncake", clock)
    losses.on_stored(KEYS)
    clock.advance(1e6)
    losses.on_used(KEYS)

    assert losses.explain(KEYS[0]) == Miss(MissCause.EVICTED, "mooncake")


def test_what_outlived_its_time_has_expired_and_what_did_not_was_evicted() -> None:
    clock = ManualClock()
    losses = BackendLosses("valkey", clock, ttl_s=60.0)
    losses.on_stored(KEYS)
    clock.advance(59.0)
    assert losses.explain(KEYS[0]) == Miss(MissCause.EVICTED, "valkey")
    clock.advance(6.0)
    assert losses.explain(KEYS[0]) == Miss(MissCause.EXPIRED, "valkey", {"ago_s": 5.0, "ttl_s": 60.0})


def test_a_use_begins_the_time_to_live_anew() -> None:
    clock = ManualClock()
    losses = BackendLosses("valkey", clock, ttl_s=60.0)
    losses.on_stored(KEYS)
    clock.advance(50.0)
    losses.on_used(KEYS[:1])
    clock.advance(50.0)

    assert [losses.explain(key) for key in KEYS[:2]] == [
        Miss(MissCause.EVICTED, "valkey"),
        Miss(MissCause.EXPIRED, "valkey", {"ago_s": 40.0, "ttl_s": 60.0}),
    ]


def test_damage_is_named_until_the_block_is_stored_again() -> None:
    clock = ManualClock()
    losses = BackendLosses("obj", clock)
    losses.on_stored(KEYS)
    losses.on_damaged(KEYS[:1])
    clock.advance(3.0)
    assert losses.explain(KEYS[0]) == Miss(MissCause.DAMAGED, "obj", {"ago_s": 3.0})
    losses.on_stored(KEYS[:1])
    assert losses.explain(KEYS[0]) == Miss(MissCause.EVICTED, "obj")


def test_a_reset_forgets() -> None:
    losses = BackendLosses("obj", ManualClock())
    losses.on_stored(KEYS)
    losses.clear()
    assert losses.explain(KEYS[0]) is None


def test_a_tier_that_removes_what_is_too_old_names_it() -> None:
    losses = make_losses("fs", 10, ManualClock())
    losses.report(KEYS[:1], Loss.EXPIRED)
    assert losses.explain(KEYS[0]) == Miss(MissCause.EXPIRED, "fs", {"ago_s": 0.0})
