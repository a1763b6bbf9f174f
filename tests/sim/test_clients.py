"""Simulated clients foresee what a trace tells, say it with the errors they are given, and are worth listening to."""

from dataclasses import replace

import pytest

from kvtier.errors import ConfigError
from kvtier.sim.chain_replay import NO_TIME, ChainReplay, replay_chain
from kvtier.sim.clients import (
    EXACT,
    HOSTILE_RETURN_S,
    ClientHints,
    Clients,
    Future,
    HintNoise,
    Honesty,
    foresee,
    make_hints,
)
from kvtier.sim.host_replay import HostCache, blocks_of_share, replay_host
from kvtier.sim.link import LinkSpeed
from kvtier.sim.made_up import make_chat
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.simulate import simulate
from kvtier.sim.tier import TierModel
from kvtier.sim.trace import Trace, TraceRequest, make_trace
from kvtier.tiering.admission import TierAdmission
from kvtier.tiering.base import TierSettings

CONTINUES, RETURNS = ClientHints.CONTINUES, ClientHints.RETURNS


def trace_of(*prompts: tuple[int, ...]) -> Trace:
    """Return a trace of prompts, one every ten seconds."""
    return make_trace(
        [TraceRequest(10.0 * number, 512 * len(ids), 1, ids) for number, ids in enumerate(prompts)], 512
    )


def test_a_request_is_continued_when_a_later_one_begins_with_half_of_its_blocks() -> None:
    trace = trace_of((1, 2, 3, 4), (1, 5), (1, 2, 6), (1, 2, 3, 4, 7), ())
    assert [future.returns_in_s for future in foresee(trace)] == [20.0, 10.0, 10.0, None, None]


def test_a_session_is_what_continues_and_a_shared_head_is_no_session() -> None:
    trace = trace_of((1, 2, 3), (1, 9, 8), (1, 2, 3, 4), (1, 9, 8, 7), (1, 5, 6))
    assert [future.session for future in foresee(trace)] == [0, 1, 0, 1, 4]


FUTURES = [Future(number, 60.0 if number % 2 else None) for number in range(2_000)]


def said(known: ClientHints, noise: HintNoise) -> list[float | None]:
    """Return the return times that clients say; None: that nothing follows, -1: that they are silent."""
    hints = make_hints(FUTURES, known, noise)
    return [
        -1.0 if hint is None else hint.get("returns_in_s", 0.0) if hint["continues"] else None
        for hint in hints
    ]


def test_clients_without_errors_say_what_will_be() -> None:
    assert said(RETURNS, EXACT) == [future.returns_in_s for future in FUTURES]
    assert said(CONTINUES, EXACT) == [None if future.returns_in_s is None else 0.0 for future in FUTURES]


def test_errors_are_as_many_and_as_large_as_said() -> None:
    flipped = [found != 0.0 for found in said(CONTINUES, HintNoise(wrong_share=0.3))]
    num_wrong = sum(
        is_end != (future.returns_in_s is None) for is_end, future in zip(flipped, FUTURES, strict=True)
    )
    assert num_wrong == pytest.approx(600, abs=80)
    assert said(RETURNS, HintNoise(silent_share=0.5)).count(-1.0) == pytest.approx(1_000, abs=100)
    times = sorted(found for found in said(RETURNS, HintNoise(time_factor=2.0)) if found is not None)
    assert times[500] == pytest.approx(60.0, rel=0.15)
    assert times[841] == pytest.approx(120.0, rel=0.2)


def test_liars_say_the_opposite_or_anything_and_the_others_are_honest() -> None:
    hostile = said(RETURNS, HintNoise(honesty=Honesty.HOSTILE))
    assert hostile == [HOSTILE_RETURN_S if future.returns_in_s is None else None for future in FUTURES]
    half = said(RETURNS, HintNoise(honesty=Honesty.HOSTILE, liar_share=0.5))
    num_honest = sum(found == future.returns_in_s for found, future in zip(half, FUTURES, strict=True))
    assert num_honest == 1_000
    assert len(set(said(RETURNS, HintNoise(honesty=Honesty.RANDOM)))) == 7
    assert said(CONTINUES, HintNoise(honesty=Honesty.RANDOM)).count(None) == pytest.approx(1_000, abs=100)


def test_equal_seeds_give_equal_hints_and_others_others() -> None:
    noise = HintNoise(wrong_share=0.3)
    assert said(CONTINUES, noise) == said(CONTINUES, noise) != said(CONTINUES, replace(noise, seed=2))


@pytest.mark.parametrize(
    "values",
    [{"wrong_share": 1.1}, {"silent_share": -0.1}, {"liar_share": float("nan")}, {"time_factor": 0.5}],
)
def test_errors_that_make_no_sense_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        HintNoise(**values)  # type: ignore[arg-type]  # shares are floats


@pytest.fixture(scope="module")
def chat() -> Trace:
    return make_chat(1)


def hits(trace: Trace, policy: str, known: ClientHints, noise: HintNoise = EXACT) -> float:
    """Return the hit ratio in percent at 3 % of the unique blocks."""
    cache = HostCache(blocks_of_share(trace, 0.03), policy, client_hints=known, hint_noise=noise)
    return 100 * replay_host(trace, cache).hit_ratio


@pytest.mark.slow
def test_on_made_up_chats_hints_are_worth_points_and_lies_cost_little(chat: Trace) -> None:
    without = hits(chat, "hazard", ClientHints.NONE)
    assert hits(chat, "hazard", CONTINUES) > without + 2
    assert hits(chat, "hazard", RETURNS) > without + 8
    for honesty in (Honesty.RANDOM, Honesty.HOSTILE):
        for known in (CONTINUES, RETURNS):
            assert hits(chat, "hazard", known, HintNoise(honesty=honesty)) > without - 0.5


def test_lru_lets_ended_sessions_leave_first_and_does_not_listen_to_liars(chat: Trace) -> None:
    without = hits(chat, "lru", ClientHints.NONE)
    assert hits(chat, "lru", CONTINUES) > without + 1
    assert hits(chat, "lru", CONTINUES, HintNoise(honesty=Honesty.HOSTILE)) > without - 0.5
    assert hits(chat, "lru", CONTINUES, HintNoise(honesty=Honesty.RANDOM)) > without - 0.5


def behind(trace: Trace, known: ClientHints) -> ChainReplay:
    """Replay through a small host and a tier that takes what is likely to be used within a minute."""
    settings = TierSettings(admission=TierAdmission(0.3, 60.0))
    tier = TierModel("disk", blocks_of_share(trace, 0.2), NO_TIME, settings=settings)
    host = HostModel(blocks_of_share(trace, 0.02), tiers=(tier,), client_hints=known)
    return replay_chain(trace, host)


@pytest.mark.slow
def test_a_tier_with_admission_writes_less_of_what_ends_or_comes_back_too_late(chat: Trace) -> None:
    without, ends, returns = (behind(chat, known) for known in (ClientHints.NONE, CONTINUES, RETURNS))
    assert ends.written_blocks["disk"] < 0.9 * without.written_blocks["disk"]
    assert returns.written_blocks["disk"] < ends.written_blocks["disk"]
    assert min(ends.num_hits, returns.num_hits) > without.num_hits


def test_simulated_engines_get_the_hints_too(chat: Trace) -> None:
    beginning = make_trace(chat.requests[:600], chat.block_tokens)
    engine = EngineModel(chat.block_tokens, 1 << 20, num_device_blocks=40, prefill_tokens_per_s=1e6)
    host = HostModel(blocks_of_share(beginning, 0.05), "hazard", LinkSpeed(1e12, 1e12))

    def saved_with(known: ClientHints) -> float:
        return simulate(beginning, engine, replace(host, client_hints=known)).not_computed_ratio

    assert saved_with(RETURNS) > saved_with(ClientHints.NONE)


def test_without_knowledge_of_the_future_no_trace_is_needed() -> None:
    assert Clients(ClientHints.NONE).hints_of(TraceRequest(0.0, 1, 1, ())) is None


GOLDEN_HITS = {
    (CONTINUES, HintNoise(wrong_share=0.2)): 36_619,
    (RETURNS, HintNoise(time_factor=2.0)): 59_168,
    (RETURNS, HintNoise(honesty=Honesty.RANDOM)): 30_945,
    (RETURNS, HintNoise(honesty=Honesty.HOSTILE)): 31_215,
}
"""Blocks that hazard finds in a hundredth of the blocks of `conversation`; 31,511 without hints."""

OTHER_PROCESSOR = 0.002
"""How far the hits of another kind of processor may be off: numpy's exp rounds as its vector units do."""


@pytest.mark.parametrize(("known", "noise"), GOLDEN_HITS)
def test_with_hints_hazard_finds_what_it_found(
    conversation: Trace, known: ClientHints, noise: HintNoise
) -> None:
    cache = HostCache(blocks_of_share(conversation, 0.01), "hazard", client_hints=known, hint_noise=noise)
    num_hits = replay_host(conversation, cache).num_hits
    assert num_hits == pytest.approx(GOLDEN_HITS[known, noise], rel=OTHER_PROCESSOR)
