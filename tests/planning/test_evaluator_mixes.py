"""A mix is judged by the production replay and simulation, with nothing added and nothing left out."""

import dataclasses

import pytest
from tests.sim.chats import chats
from tests.sim.media import DISK, HOST, STORE

from kvtier.planning.evaluator import (
    NO_TIME,
    ScreeningEvaluator,
    TimedEvaluator,
    UntimedEvaluator,
    replay_chain,
)
from kvtier.planning.tier_mix import Mix, MixOutcome, Share
from kvtier.sim.host_replay import HostCache, replay_host
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.results import DEVICE
from kvtier.sim.simulate import simulate
from kvtier.sim.tier import TierModel

TRACE = chats()
ENGINE = EngineModel(16, 2**30, num_device_blocks=20, prefill_tokens_per_s=16, decode_tokens_per_s=10)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_host_memory_alone_is_replayed_alone(policy: str) -> None:
    found = UntimedEvaluator(TRACE, policy).evaluate(Mix((Share(HOST, 8),)))

    assert found == MixOutcome(replay_host(TRACE, HostCache(8, policy)).hit_ratio, {"host": 0}, {"host": 0})


def test_tiers_are_replayed_without_time_however_slow_their_medium_is() -> None:
    glacier = dataclasses.replace(DISK, latency_ms=1e7)
    chain = replay_chain(
        TRACE, HostModel(4, tiers=(TierModel("disk", 8, NO_TIME), TierModel("store", 32, NO_TIME)))
    )

    found = UntimedEvaluator(TRACE, "lru").evaluate(
        Mix((Share(HOST, 4), Share(glacier, 8), Share(STORE, 32)))
    )

    assert found.hit_ratio == chain.hit_ratio > 0.3
    assert found.written_blocks == {"host": 0, **chain.written_blocks}
    assert found.read_blocks == {"host": 0, **chain.read_blocks}
    assert found.first_token is None


def test_without_time_media_of_one_capacity_are_replayed_once() -> None:
    evaluator = UntimedEvaluator(TRACE, "lru")
    counted: list[None] = []

    first = evaluator.evaluate(Mix((Share(HOST, 4), Share(DISK, 32))), lambda: counted.append(None))
    other = evaluator.evaluate(Mix((Share(HOST, 4), Share(STORE, 32))), lambda: counted.append(None))

    assert len(counted) == len(TRACE.requests)
    assert other.written_blocks == {"host": 0, "store": first.written_blocks["disk"]}
    evaluator.evaluate(Mix((Share(HOST, 8), Share(STORE, 32))), lambda: counted.append(None))
    assert len(counted) == 2 * len(TRACE.requests)


def test_on_simulated_time_the_device_s_hits_count_but_save_nothing() -> None:
    mix = Mix((Share(HOST, 8), Share(DISK, 32)))
    served = simulate(TRACE, ENGINE, mix.host_model("lru"))

    found = TimedEvaluator(TRACE, ENGINE, "lru").evaluate(mix)

    total = served.total
    assert total.hit_tokens[DEVICE] > 0
    assert found.hit_ratio == sum(total.hit_tokens.values()) / total.num_prompt_tokens
    assert found.num_saved_tokens == sum(total.hit_tokens.values()) - total.hit_tokens[DEVICE]
    assert found.first_token == total.first_token
    assert list(found.written_blocks) == ["host", "disk"]
    assert found.written_blocks["disk"] == served.tiers[1].num_written_blocks
    assert found.read_blocks["disk"] == served.tiers[1].num_read_blocks


def test_a_tier_that_cannot_keep_up_is_told() -> None:
    hasty = dataclasses.replace(ENGINE, prefill_tokens_per_s=1e6)
    tape = dataclasses.replace(DISK, read_gb_s=0.001, write_gb_s=0.001)

    evaluator = TimedEvaluator(TRACE, hasty, "lru")

    assert evaluator.evaluate(Mix((Share(HOST, 8), Share(tape, 32)))).num_overloads > 0
    assert evaluator.evaluate(Mix((Share(HOST, 8), Share(DISK, 32)))).num_overloads == 0


def test_no_offloading_has_the_device_s_hits_alone() -> None:
    found = TimedEvaluator(TRACE, ENGINE, "lru").evaluate(Mix(()))

    assert found.num_saved_tokens == 0
    assert found.hit_ratio == simulate(TRACE, ENGINE, None).hit_ratio(DEVICE) > 0
    assert (found.written_blocks, found.read_blocks) == ({}, {})
    assert UntimedEvaluator(TRACE, "lru").evaluate(Mix(())) == MixOutcome(0.0, {}, {})


def test_what_capacity_alone_rules_out_is_not_simulated_and_nothing_else_is_left_out() -> None:
    timed = TimedEvaluator(TRACE, ENGINE, "lru")
    device = timed.evaluate(Mix(())).hit_ratio

    for host, disk in ((1, 2), (4, 8), (8, 16), (8, 32), (16, 64)):
        mix = Mix((Share(HOST, host), Share(DISK, disk)))
        truth = timed.evaluate(mix)
        for goal in (0.1, 0.3, 0.5, 0.7, truth.hit_ratio):
            found = ScreeningEvaluator(timed, goal, device).evaluate(mix)
            assert (found.hit_ratio >= goal) == (truth.hit_ratio >= goal)
            assert found in (truth, UntimedEvaluator(TRACE, "lru").evaluate(mix))
    small = ScreeningEvaluator(timed, 0.7, device).evaluate(Mix((Share(HOST, 2),)))
    assert small.first_token is None
