"""A simulation says why each prompt token was computed, in the words of the connector."""

from tests.sim.test_simulate import ENGINE, FAST, request, trace_of

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
