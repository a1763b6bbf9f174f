"""The replay of a trace through the host alone follows its rules and gives the numbers they were specified with."""

import pytest
from tests.cpu.policies.learner import NOTING_LEARNER, NotingLearner

from kvtier.errors import ConfigError, UnknownNameError
from kvtier.sim.host_replay import HostCache, HostReplay, blocks_of_share, replay_host
from kvtier.sim.trace import Trace, TraceRequest, make_trace

SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


def trace_of(*prompts: tuple[int, ...]) -> Trace:
    """Return a trace of prompts, one a second."""
    return make_trace(
        [TraceRequest(second, 512 * len(ids), 1, ids) for second, ids in enumerate(prompts)], 512
    )


def hits_of(num_blocks: int, *prompts: tuple[int, ...]) -> int:
    return replay_host(trace_of(*prompts), HostCache(num_blocks)).num_hits


def percents(trace: Trace, shares: tuple[float, ...]) -> list[float]:
    """Return the hit ratio in percent at each of ``shares``, to two decimals."""
    caches = [HostCache(blocks_of_share(trace, share)) for share in shares]
    return [round(100 * replay_host(trace, cache).hit_ratio, 2) for cache in caches]


def test_only_the_leading_run_of_held_blocks_is_a_hit() -> None:
    assert hits_of(8, (1, 2, 3), (1, 2, 3)) == 3
    assert hits_of(8, (1, 2, 3), (1, 9, 3)) == 1
    assert hits_of(8, (1, 2, 3), (9, 2, 3)) == 0


def test_a_prompt_without_a_full_block_neither_finds_nor_changes_anything() -> None:
    assert hits_of(8, (1, 2), (), (1, 2)) == 2
    assert replay_host(trace_of((), ()), HostCache(1)).hit_ratio == 0.0


def test_of_one_request_the_tail_leaves_first() -> None:
    assert hits_of(3, (1, 2, 3), (4,), (1, 2)) == 2


def test_held_blocks_behind_the_first_miss_are_renewed() -> None:
    assert hits_of(4, (1, 2), (3,), (9, 2), (5,), (3, 2)) == 2


def test_a_prompt_longer_than_the_host_is_stored_as_far_as_it_goes() -> None:
    found = replay_host(trace_of((1, 2, 3, 4, 5), (1, 2, 3, 4, 5)), HostCache(3))

    assert (found.num_hits, found.num_stored, found.num_evicted) == (3, 3, 0)


def test_a_host_full_of_the_request_s_own_blocks_stores_nothing_more() -> None:
    found = replay_host(trace_of((1, 2), (1, 2, 3)), HostCache(2))

    assert (found.num_hits, found.num_stored) == (2, 2)


def test_a_prompt_stored_in_chunks_has_its_head_most_recent_and_later_chunks_replace_earlier_ones() -> None:
    prompts = trace_of((1, 2, 3, 4), (5,), (1, 2, 3))

    found = replay_host(prompts, HostCache(4, chunk_blocks=2))

    assert (found.num_hits, found.num_stored) == (3, 5)
    assert replay_host(trace_of((1, 2, 3, 4), (1, 2)), HostCache(2, chunk_blocks=2)).num_hits == 0
    with pytest.raises(ConfigError, match="chunk_blocks=0"):
        replay_host(prompts, HostCache(4, chunk_blocks=0))


def test_the_result_counts_what_was_written_and_what_left() -> None:
    found = replay_host(trace_of((1, 2), (3, 4), (1, 2)), HostCache(2))

    assert found == HostReplay(3, 6, 4, num_hits=0, num_stored=6, num_evicted=4)
    assert found.writes_per_unique_block == 1.5
    assert found.hit_ratio == 0


def test_the_reuse_filter_keeps_what_was_named_once_out() -> None:
    prompts = trace_of((1, 2), (1, 2), (1, 2))

    assert replay_host(prompts, HostCache(4, store_threshold=2)).num_hits == 2


def test_a_share_of_the_unique_blocks_is_rounded_to_the_nearest_and_is_one_block_at_least() -> None:
    trace = trace_of(tuple(range(10)))

    assert [blocks_of_share(trace, share) for share in (0.01, 0.24, 0.26, 2)] == [1, 2, 3, 20]
    with pytest.raises(ConfigError, match="share of the unique blocks"):
        blocks_of_share(trace, 0)
    with pytest.raises(ConfigError, match="share=inf"):
        blocks_of_share(trace, float("inf"))


def test_what_the_production_manager_refuses_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        replay_host(trace_of((1,)), HostCache(0))
    with pytest.raises(UnknownNameError, match="eviction policy"):
        replay_host(trace_of((1,)), HostCache(1, "lr"))


def test_lru_tail_first_gives_the_specified_hit_ratios_to_two_decimals(conversation: Trace) -> None:
    assert percents(conversation, SHARES) == [4.40, 5.25, 7.93, 19.58, 27.89, 34.53, 36.31]


def test_arc_tail_first_gives_the_documented_hit_ratios(conversation: Trace) -> None:
    caches = [HostCache(blocks_of_share(conversation, share), "arc") for share in (0.01, 0.05)]

    assert [round(100 * replay_host(conversation, cache).hit_ratio, 2) for cache in caches] == [6.52, 20.99]


def test_lru_tail_first_on_agents_gives_the_specified_hit_ratios_to_a_hundredth_of_a_point(
    agentic_dev: Trace,
) -> None:
    assert percents(agentic_dev, (0.01, 0.05)) == pytest.approx([6.62, 53.39], abs=0.0101)


def test_a_reuse_filter_that_forgets_nothing_gives_the_specified_hit_ratios(conversation: Trace) -> None:
    num_unique = conversation.num_unique_blocks
    caches = [
        HostCache(blocks_of_share(conversation, share), store_threshold=2, max_tracker_size=num_unique)
        for share in (0.01, 0.1)
    ]

    found = [round(100 * replay_host(conversation, cache).hit_ratio, 2) for cache in caches]

    assert found == [8.53, 21.24]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_replay_gives_the_same_numbers_each_time(agentic_dev: Trace, policy: str) -> None:
    beginning = make_trace(agentic_dev.requests[:300], agentic_dev.block_tokens)
    cache = HostCache(blocks_of_share(beginning, 0.1), policy)

    assert replay_host(beginning, cache) == replay_host(beginning, cache)


@pytest.mark.parametrize(("share", "least"), [(0.01, 10.5), (0.02, 15.0), (0.05, 22.5), (0.1, 29.5)])
def test_hazard_hits_what_was_promised_of_a_chat_service(
    conversation: Trace, share: float, least: float
) -> None:
    cache = HostCache(blocks_of_share(conversation, share), "hazard")

    assert 100 * replay_host(conversation, cache).hit_ratio >= least


@pytest.mark.parametrize(("share", "least"), [(0.005, 9.5), (0.02, 30.0)])
def test_hazard_hits_what_was_promised_of_agents(agentic_dev: Trace, share: float, least: float) -> None:
    cache = HostCache(blocks_of_share(agentic_dev, share), "hazard")

    assert 100 * replay_host(agentic_dev, cache).hit_ratio >= least


def test_a_policy_that_learns_is_told_when_the_requests_came() -> None:
    replay_host(trace_of((1,), (2,), (1, 2)), HostCache(4, NOTING_LEARNER))

    learner = NotingLearner.made[-1]
    assert [request.arrival_s for request in learner.requests] == [0.0, 1.0, 2.0]
    assert [len(request.chains[0]) for request in learner.requests] == [1, 1, 2]
    assert learner.finished == ["0", "1", "2"]
