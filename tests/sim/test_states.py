"""A simulated prefix counts only where the recurrent state at its end is held too, and states take room."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.sim.engine import SimulatedEngine
from kvtier.sim.link import LinkSpeed
from kvtier.sim.model import EngineModel, HostModel, KeptStates
from kvtier.sim.request import SimulatedRequest, make_request
from kvtier.sim.simulate import simulate
from kvtier.sim.tier import TierModel
from kvtier.sim.trace import Trace, TraceRequest, make_trace
from kvtier.testing.examples import num_examples

BLOCK_TOKENS = 10
FAST = LinkSpeed(1e9, 1e9)
PAUSE_S = 100.0
ROOMY = EngineModel(
    BLOCK_TOKENS, 100, num_device_blocks=1000, prefill_tokens_per_s=1e4, decode_tokens_per_s=1e4
)
LAST = KeptStates(interval_tokens=1000)
"""So rare that only the last state of a prompt is kept, as with vLLM's default."""

EACH_BLOCK = KeptStates()
HOST = HostModel(1000, speed=FAST)


def trace_of(*prompts: tuple[int, ...], num_rest_tokens: int = 5) -> Trace:
    """Return requests far apart, each of some blocks and a few tokens more."""
    requests = [
        TraceRequest(number * PAUSE_S, BLOCK_TOKENS * len(ids) + num_rest_tokens, 1, ids)
        for number, ids in enumerate(prompts)
    ]
    return make_trace(requests, BLOCK_TOKENS)


def serve(trace: Trace, engine: EngineModel, host: HostModel | None = None) -> list[SimulatedRequest]:
    """Return the requests in their order."""
    done: list[SimulatedRequest] = []
    simulated = SimulatedEngine(engine, host, done.append)
    simulated.run([make_request(number, one, BLOCK_TOKENS) for number, one in enumerate(trace.requests)])
    simulated._pool.check()
    assert simulated._pool.num_free_blocks == engine.num_device_blocks, "a block of a state is lost"
    return sorted(done, key=lambda one: int(one.request_id))


def hits_of(done: list[SimulatedRequest]) -> list[int]:
    """Return the tokens of each request that were on the device or loaded."""
    return [one.num_device_tokens + sum(one.loaded_tokens.values()) for one in done]


@pytest.mark.parametrize("host", [None, HOST], ids=["device", "host"])
def test_a_continued_prompt_is_found_and_one_that_branches_off_before_its_end_is_not(
    host: HostModel | None,
) -> None:
    prompts = trace_of((1, 2, 3), (1, 2, 3, 4), (1, 2, 5), (1, 2, 3))
    tight = replace(ROOMY if host is None else replace(ROOMY, num_device_blocks=9), states=LAST)

    assert hits_of(serve(prompts, tight, host)) == [0, 30, 0, 30]
    assert hits_of(serve(prompts, replace(tight, states=EACH_BLOCK, num_device_blocks=14), host)) == [
        0,
        30,
        20,
        30,
    ]
    assert hits_of(serve(prompts, replace(ROOMY, states=None))) == [0, 30, 20, 30]


def test_states_are_kept_at_the_multiples_of_an_interval_and_the_last_one_where_the_engine_does() -> None:
    prompts = trace_of((1, 2, 3, 4, 5), (1, 2, 3, 4, 6), (1, 2, 3, 7), (1, 2, 3, 4, 5))
    kept = KeptStates(interval_tokens=20)

    assert hits_of(serve(prompts, replace(ROOMY, states=kept))) == [0, 40, 20, 50]
    assert hits_of(serve(prompts, replace(ROOMY, states=replace(kept, keeps_last=False)))) == [0, 40, 20, 40]


def test_a_prompt_of_whole_blocks_leaves_the_last_one_to_compute() -> None:
    prompts = trace_of((1, 2, 3), (1, 2, 3), num_rest_tokens=0)

    assert hits_of(serve(prompts, replace(ROOMY, states=EACH_BLOCK))) == [0, 20]
    assert hits_of(serve(prompts, replace(ROOMY, states=EACH_BLOCK, num_device_blocks=10), HOST)) == [0, 20]


def test_states_take_room_on_the_device_in_host_memory_and_in_tiers() -> None:
    prompts = trace_of((1, 2, 3))
    tier = TierModel("fs", 1000, FAST)

    plain = simulate(prompts, ROOMY, replace(HOST, tiers=(tier,)))
    every = simulate(prompts, replace(ROOMY, states=EACH_BLOCK), replace(HOST, tiers=(tier,)))
    last = simulate(prompts, replace(ROOMY, states=LAST), replace(HOST, tiers=(tier,)))

    written = [[one.num_written_blocks for one in found.tiers] for found in (plain, every, last)]
    assert written == [[3, 3], [6, 6], [4, 4]]
    # Three blocks and the answer's, three states, the running one, room for one that is cached and one that is loaded.
    assert simulate(prompts, replace(ROOMY, states=EACH_BLOCK, num_device_blocks=9), HOST).num_rejected == 1
    assert simulate(prompts, replace(ROOMY, states=EACH_BLOCK, num_device_blocks=10), HOST).num_rejected == 0


def test_a_load_brings_keys_and_values_and_one_state() -> None:
    prompts = trace_of((1, 2, 3), (4, 5, 6), (1, 2, 3))
    engine = replace(ROOMY, states=EACH_BLOCK, num_device_blocks=10)

    found = simulate(prompts, engine, HOST)

    assert found.tiers[0].num_read_blocks == 3 + 1


@pytest.mark.parametrize("interval", [0, 15])
def test_an_interval_within_a_block_is_refused(interval: int) -> None:
    with pytest.raises(ConfigError, match=f"interval_tokens={interval}: must be a multiple of a block"):
        replace(ROOMY, states=KeptStates(interval_tokens=interval))


prompts_of_blocks = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple), min_size=1, max_size=12
)


@settings(max_examples=num_examples(60), deadline=None)
@given(
    drawn=prompts_of_blocks,
    step=st.sampled_from([None, 1, 2, 3]),
    keeps_last=st.booleans(),
    num_rest_tokens=st.sampled_from([0, 5]),
    num_device_blocks=st.sampled_from([18, 24, 1000]),
)
def test_the_connector_finds_what_the_rules_say_wherever_it_is(
    drawn: list[tuple[int, ...]],
    step: int | None,
    keeps_last: bool,
    num_rest_tokens: int,
    num_device_blocks: int,
) -> None:
    kept = KeptStates(None if step is None else step * BLOCK_TOKENS, keeps_last)
    # Ids of a trace name a block with all before it.
    prompts = [tuple(hash(ids[: end + 1]) % 2**31 for end in range(len(ids))) for ids in drawn]
    engine = replace(ROOMY, states=kept, num_device_blocks=num_device_blocks)

    done = serve(trace_of(*prompts, num_rest_tokens=num_rest_tokens), engine, HOST)

    held: set[int] = set()
    expected: list[int] = []
    for ids in prompts:
        num_usable = (len(ids) * BLOCK_TOKENS + num_rest_tokens - 1) // BLOCK_TOKENS
        found = max((end for end in range(1, num_usable + 1) if ids[end - 1] in held), default=0)
        expected.append(found * BLOCK_TOKENS)
        ends = set(range(step or 1, len(ids) + 1, step or 1)) | ({num_usable} if keeps_last else set())
        held |= {ids[end - 1] for end in ends if end > found}
    assert hits_of(done) == expected
