"""A simulation says why each prompt token was computed, in the words of the connector."""

from dataclasses import replace

from tests.sim.test_simulate import ENGINE, FAST, request, trace_of

from kvtier.misses import MissCause, RequestRecord
from kvtier.sim.model import HostModel
from kvtier.sim.simulate import simulate
from kvtier.sim.tier import TierModel


def test_hits_and_causes_of_misses_sum_to_the_prompts() -> None:
    trace = trace_of(request(0, 1), request(100, 2), request(200, 1), request(300, 3))
    found = simulate(trace, ENGINE, HostModel(2, tiers=(TierModel("disk", 2, FAST),)))

    num_hits = sum(found.total.hit_tokens.values())
    assert num_hits + sum(found.missed_tokens.values()) == found.total.num_prompt_tokens
    assert found.to_json()["missed_tokens"] == found.missed_tokens
    assert simulate(trace, ENGINE, None).missed_tokens == {}


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
