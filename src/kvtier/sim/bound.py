"""The most that an engine could have found with the memory it has: Belady's bound of a simulation.

It decides nothing and no engine can do it: it looks into the future, takes device, host and every tier for one memory
with room for all their blocks, and moves blocks in no time. Why nothing finds more, whatever the policy: a hit needs
its block in some slot; a block comes into a slot only after a request has asked for it; and when a request gets its
device blocks, it has a slot for each block it asked for, so that taking a missing block in is no choice.

What counts is what an engine can find. Requests come in the order in which this engine admitted them, for that is when
their hits are decided. Of a prompt the full blocks are asked for, and those are hits that leave one token to compute.
"""

from collections.abc import Sequence

from kvtier.sim.belady import count_belady_hits
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.request import SimulatedRequest


def count_bound_tokens(
    admitted: Sequence[SimulatedRequest], engine: EngineModel, host: HostModel | None
) -> int:
    """Return the most prompt tokens that need not have been computed. Pure.

    Args:
        admitted: the requests in the order of their admission.
        engine: its device cache.
        host: host memory and the tiers behind it; None for the device cache alone.
    """
    num_blocks = engine.num_device_blocks
    if host is not None:
        num_blocks += host.num_blocks + sum(tier.num_blocks for tier in host.tiers)
    asked = [block_hash for request in admitted for block_hash in request.block_hashes]
    is_hit_possible = [
        position < (request.num_prompt_tokens - 1) // engine.block_tokens
        for request in admitted
        for position in range(len(request.block_hashes))
    ]
    return engine.block_tokens * count_belady_hits(asked, num_blocks, is_hit_possible)
