"""A simulation says why each prompt token was computed, in the words of the connector."""

from collections import Counter
from dataclasses import replace

import pytest
from tests.sim.test_simulate import ENGINE, FAST, request, trace_of

from kvtier.misses import MissCause, RequestRecord
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.simulate import simulate
from kvtier.sim.tier import TierModel
from kvtier.sim.trace import Trace, make_trace


def test_hits_and_causes_of_misses_sum_to_the_prompts() -> None:
    trace = trace_of(request(0, 1), request(100, 2), request(200, 1), request(300, 3))
    found = simulate(trace, ENGINE, HostModel(2, tiers=(TierModel("disk", 2, FAST),)))

    num_hits = sum(found.total.hit_tokens.values())
    assert num_hits + sum(found.missed_tokens.values()) == found.total.num_prompt_tokens
    assert found.to_json()["missed_tokens"] == found.missed_tokens
    assert simulate(trace, ENGINE, None).missed_tokens == {}


@pytest.mark.traces
def test_origins_and_causes_sum_to_the_prompt_for_each_request_of_a_chat_service(conversation: Trace) -> None:
    """Law 10, where requests wait, evict each other's blocks, and find them in host memory and on a disk."""
    trace = make_trace(conversation.requests[:3000], conversation.block_tokens)
    engine = EngineModel(
        trace.block_tokens,
        block_bytes=1 << 20,
        num_device_blocks=1000,
        prefill_tokens_per_s=100_000,
        decode_tokens_per_s=10_000,
        max_step_tokens=8192,
    )
    host = HostModel(2000, tiers=(TierModel("disk", 8000, FAST),))
    records: list[RequestRecord] = []
    found = simulate(trace, engine, host, on_record=records.append)

    for record in records:
        record.check()
    prompts = Counter(one.num_prompt_tokens for one in trace.requests)
    assert Counter(record.num_prompt_tokens for record in records) == prompts
    assert {origin for record in records for origin in record.tokens_by_origin} == {"device", "host", "disk"}
    assert sum(record.num_missed_tokens for record in records) == sum(found.missed_tokens.values())


def test_a_large_tier_knows_a_block_that_left_by_those_behind_it() -> None:
    # A directory of more than 4,096 blocks remembers one of eight that leave.
    turns = [range(first, first + 1000) for first in (*range(1, 9000, 1000), 1)]
    trace = trace_of(*(request(1000.0 * n, *ids) for n, ids in enumerate(turns)))
    engine = replace(ENGINE, num_device_blocks=1100, prefill_tokens_per_s=1e6)
    records: list[RequestRecord] = []
    host = HostModel(1100, tiers=(TierModel("disk", 5000, FAST),))
    simulate(trace, engine, host, on_record=records.append)

    first = records[-1].missed[0].miss
    assert (first.cause, first.tier) == (MissCause.EVICTED, "disk")
