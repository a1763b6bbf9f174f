"""Wrappers pass on what they do not change, what only some tiers can do too."""

import random
from collections.abc import Callable, Collection, Sequence

import pytest

from kvtier.base import OffloadKey, ReqContext
from kvtier.errors import TierError
from kvtier.testing.clock import ManualClock
from kvtier.testing.faults import Faults, FaultyTier
from kvtier.testing.tier_driver import key_of, make_config, make_rows
from kvtier.testing.wrapped_tier import SlowTier, WrappedTier
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.example import ExampleSecondaryTier

Wrap = Callable[[SecondaryTierManager], WrappedTier]

REQUEST = ReqContext("request")

WRAPS: dict[str, Wrap] = {
    "wrapped": WrappedTier,
    "faulty": lambda inner: FaultyTier(inner, Faults(), random.Random(1)),
    "slow": lambda inner: SlowTier(inner, ManualClock()),
}


class AbleTier(ExampleSecondaryTier):
    """A tier with every ability, which notes the calls that leave no other trace."""

    def __init__(self) -> None:
        super().__init__(make_config(), make_rows())
        self.told: list[object] = []

    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        self.told.append((chains, req_context))

    def request_finished(self, req_context: ReqContext) -> None:
        self.told.append(req_context)

    def end_step(self) -> None:
        self.told.append("end of step")

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.told.append(keys)

    def reset(self, epoch: bytes) -> None:
        self.told.append(epoch)

    def drain_evicted(self) -> Collection[OffloadKey]:
        return [key_of(7)]

    def drain_unanswered(self) -> int:
        return 3

    def waiting_s(self) -> float:
        return 4.5

    def stats(self) -> dict[str, float]:
        return {"of_the_inner_tier": 1.0}

    def drain(self, timeout_s: float) -> bool:
        return False

    def shutdown(self, timeout_s: float) -> bool:
        return False

    def check_reachable(self) -> None:
        raise TierError("able", "away on purpose")


class PlainTier(SecondaryTierManager):
    """A tier that can do nothing beside what it must."""

    @staticmethod
    def get_tier_type() -> str:
        return "plain"

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool:
        return False

    def submit_store(self, job: object) -> None: ...

    def submit_load(self, job: object) -> None: ...

    def get_finished(self) -> tuple[()]:
        return ()

    def reset(self, epoch: bytes) -> None: ...


def test_everything_that_a_tier_can_be_asked_is_passed_on() -> None:
    """A new method that nobody passes on fails here; a run of lookups is lookups, which a wrapper may change."""
    contract = vars(SecondaryTierManager)
    methods = {name for name, one in contract.items() if callable(one) and name[0] != "_"}

    assert methods - {"lookup_run"} <= vars(WrappedTier).keys()


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_what_the_inner_tier_is_told_reaches_it(wrap: Wrap) -> None:
    inner = AbleTier()
    tier = wrap(inner)

    tier.note_request([[key_of(1)]], REQUEST)
    tier.touch([key_of(2)], REQUEST)
    tier.end_step()
    tier.request_finished(REQUEST)
    tier.reset(bytes(16))

    assert inner.told == [([[key_of(1)]], REQUEST), [key_of(2)], "end of step", REQUEST, bytes(16)]


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_what_the_inner_tier_says_is_said(wrap: Wrap) -> None:
    inner = AbleTier()
    tier = wrap(inner)

    assert tier.drain_evicted() == [key_of(7)]
    assert tier.drain_unanswered() == 3
    assert tier.waiting_s() == 4.5
    assert tier.stats() == {"of_the_inner_tier": 1.0}
    assert tier.capacity_blocks == inner.capacity_blocks
    assert not tier.drain(0.0)
    assert not tier.shutdown(0.0)
    with pytest.raises(TierError, match="away on purpose"):
        tier.check_reachable()


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_an_ability_that_the_inner_tier_lacks_is_nothing_that_happens(wrap: Wrap) -> None:
    tier = wrap(PlainTier(make_config(), make_rows()))

    tier.check_reachable()
    tier.note_request([[key_of(1)]], REQUEST)

    assert tier.drain_unanswered() == 0
    assert list(tier.drain_evicted() or ()) == []
    assert tier.drain_answered() is None
