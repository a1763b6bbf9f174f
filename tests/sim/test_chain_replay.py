"""The replay through host memory and tiers finds what they hold together, and gives the specified numbers."""

import pytest
from tests.cpu.policies.learner import NOTING_LEARNER, NotingLearner

from kvtier.sim.chain_replay import NO_TIME, ChainReplay, replay_chain
from kvtier.sim.host_replay import HostCache, blocks_of_share, replay_host
from kvtier.sim.model import HostModel
from kvtier.sim.tier import TierModel
from kvtier.sim.trace import Trace, TraceRequest, make_trace
from kvtier.tiering.admission import TierAdmission
from kvtier.tiering.base import CascadeMode, TierSettings


def trace_of(*prompts: tuple[int, ...]) -> Trace:
    """Return a trace of prompts, one a second."""
    return make_trace(
        [TraceRequest(second, 512 * len(ids), 1, ids) for second, ids in enumerate(prompts)], 512
    )


def replay(
    trace: Trace, host_blocks: int, *tier_blocks: int, settings: TierSettings | None = None
) -> ChainReplay:
    """Replay through a host and tiers named by their position."""
    chosen = settings or TierSettings()
    tiers = [TierModel(str(n), size, NO_TIME, settings=chosen) for n, size in enumerate(tier_blocks)]
    return replay_chain(trace, HostModel(host_blocks, tiers=tuple(tiers)))


def test_what_the_host_has_evicted_is_found_in_a_tier() -> None:
    found = replay(trace_of((1, 2), (3, 4), (1, 2)), 2, 10)

    assert (found.num_hits, found.num_host_hits) == (2, 0)
    assert (found.written_blocks, found.read_blocks) == ({"0": 4}, {"0": 2})


def test_what_the_first_tier_has_evicted_is_found_in_the_second() -> None:
    found = replay(trace_of((1, 2), (3, 4), (1, 2)), 2, 2, 10)

    assert found.num_hits == 2
    assert found.read_blocks == {"0": 0, "1": 2}


def test_a_prefix_that_is_spread_over_host_and_tier_is_one_prefix() -> None:
    found = replay(trace_of((1, 2), (3,), (1, 2)), 2, 10)

    assert (found.num_hits, found.num_host_hits) == (2, 1)


def test_without_tiers_it_is_the_replay_of_the_host(agentic_dev: Trace) -> None:
    beginning = make_trace(agentic_dev.requests[:200], agentic_dev.block_tokens)
    num_blocks = blocks_of_share(beginning, 0.1)

    found = replay(beginning, num_blocks)

    assert found.num_hits == found.num_host_hits == replay_host(beginning, HostCache(num_blocks)).num_hits


def test_a_tier_may_get_blocks_at_their_second_use_only() -> None:
    prompts = trace_of((1, 2), (1, 2), (3, 4), (5, 6), (1, 2), (3, 4))

    found = replay(prompts, 2, 10, settings=TierSettings(store_threshold=2))

    assert found.num_hits == 2 + 2
    assert found.writes_per_unique_block("0") == 4 / 6


def test_write_back_writes_what_leaves_the_host_and_no_more() -> None:
    prompts = trace_of((1, 2), (1, 2), (3,), (1, 2))

    found = replay(prompts, 3, 10, settings=TierSettings(cascade=CascadeMode.ON_EVICT))

    assert found.num_hits == 2 + 2
    assert found.written_blocks["0"] < replay(prompts, 3, 10).written_blocks["0"] == 3


def test_a_disk_of_a_tenth_behind_a_host_of_a_hundredth_gives_about_the_specified_numbers(
    conversation: Trace,
) -> None:
    shares = [blocks_of_share(conversation, share) for share in (0.01, 0.1)]

    found = replay(conversation, *shares)

    assert 100 * found.hit_ratio == pytest.approx(27.89, abs=0.03)
    assert round(100 * found.num_host_hits / found.num_accesses, 2) == 5.25
    assert round(found.writes_per_unique_block("0"), 2) == 1.14


def test_the_policies_of_host_and_tier_are_told_of_each_request() -> None:
    NotingLearner.made.clear()
    tier = TierModel("disk", 10, NO_TIME, cache_policy=NOTING_LEARNER)

    replay_chain(trace_of((1, 2), (1, 2, 3)), HostModel(2, NOTING_LEARNER, tiers=(tier,)))

    told = [
        [(each.arrival_s, len(each.chains[0])) for each in learner.requests] for learner in NotingLearner.made
    ]
    assert told == [[(0.0, 2), (1.0, 3)]] * 2
    assert [learner.finished for learner in NotingLearner.made] == [["0", "1"]] * 2


def test_hazard_before_a_disk_that_takes_what_is_likely_to_come_back_finds_as_much_with_half_the_writes(
    conversation: Trace,
) -> None:
    host_blocks, disk_blocks = (blocks_of_share(conversation, share) for share in (0.01, 0.1))
    likely = TierSettings(admission=TierAdmission(min_reuse_probability=0.3, horizon_s=1024.0))
    disk = TierModel("disk", disk_blocks, NO_TIME, cache_policy="hazard", settings=likely)

    found = replay_chain(conversation, HostModel(host_blocks, "hazard", tiers=(disk,)))

    assert found.hit_ratio >= 0.279
    assert found.writes_per_unique_block("disk") <= 0.65
    assert found.num_host_hits / found.num_accesses >= 0.105
