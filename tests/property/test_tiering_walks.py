"""Long random walks of the tiering model break no law, and meet what they should."""

import itertools

import pytest
from tests.property.test_tiering_model import TieringModel, walk

from kvtier.misses import MissCause

MET_BY_WALKS = frozenset(MissCause) - {
    MissCause.OTHER_NAMESPACE,
    MissCause.EXPIRED,
    MissCause.DAMAGED,
    MissCause.GROUP_SHORT,
    MissCause.SLOWER,
    MissCause.AUDITED,
    MissCause.PARTIAL_BLOCK,
}
"""Every cause but those of tiers of their own, of the connector's choices, and of several KV groups."""


@pytest.mark.parametrize("seed", range(60))
def test_a_long_random_walk_breaks_no_law(seed: int) -> None:
    """The same rules, weighted towards what an engine does all the time, for runs that shrinking would cut."""
    walk(seed)


@pytest.mark.walks
def test_walks_meet_every_cause_that_the_manager_gives() -> None:
    met: set[MissCause] = set()
    for seed in range(100, 160):
        model = TieringModel()
        walk(seed, model)
        met |= model.causes
        if met >= MET_BY_WALKS:
            return
    raise AssertionError(f"no walk has met {MET_BY_WALKS - met}")


@pytest.mark.walks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(10))
def test_a_router_is_never_lied_to_in_a_hundred_thousand_steps(part: int) -> None:
    num_steps = itertools.accumulate(map(walk, itertools.count(1000 * (part + 1))))
    assert any(total >= 10_000 for total in num_steps)
