"""What the simulated engine does with the last block of a prompt of whole blocks."""

import pytest

from kvtier.sim.engine import SimulatedEngine
from kvtier.sim.link import LinkSpeed
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.request import SimulatedRequest, make_request
from kvtier.sim.trace import TraceRequest

FAST = LinkSpeed(1e9, 1e9)


@pytest.mark.parametrize(("block_tokens", "found"), [(32, {"device": 64}), (64, {"device": 128, "host": 63})])
def test_a_short_last_block_alone_is_computed_and_not_loaded(
    block_tokens: int, found: dict[str, int]
) -> None:
    engine = EngineModel(block_tokens, 100, num_device_blocks=9, prefill_tokens_per_s=1000)
    prompts = [TraceRequest(at, 3 * block_tokens, 1, (1, 2, 3)) for at in (0.0, 10.0)]
    done: list[SimulatedRequest] = []

    SimulatedEngine(engine, HostModel(9, speed=FAST), done.append).run(
        [make_request(number, one, block_tokens) for number, one in enumerate(prompts)]
    )

    again = done[1]
    loaded = {"device": again.num_device_tokens, **again.loaded_tokens}
    assert loaded == found
