"""What a policy costs that learns from requests: hazard beside LRU on made-up chats, through the manager.

Each request is driven as the connector drives it, ``note_request`` first, in a cache of a tenth of the unique blocks.
All calls of the manager count, lookups, pins and stores included, on the thread's processor time; so does the learning,
which is hazard's own, and the garbage collector as far as it visits what a contestant made. What an engine does anyway,
naming the blocks of a request, is done before. A block is one that a request names.
"""

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.harness.chats import make_chats
from benchmarks.harness.measurement import OURS, Bar, Better, Measurement
from benchmarks.harness.rounds import Contestant, fixed, run_rounds
from kvtier.base import OffloadKey, ReqContext
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies.hazard import HazardCachePolicy
from kvtier.sim.host_replay import TouchOrder, blocks_of_share, serve
from kvtier.sim.trace import BlockKeys, Trace

SHARE = 0.1
"""Of the unique blocks: where the bars are set."""

NUM_HOURS = 4
"""Of made-up traffic: the first minutes, in which fits come often, are then a small part, as in production."""

NUM_ROUNDS = 6
QUICK_ROUNDS = 2
COST_BAR_US = 10.0
COST_BAR_TIMES = 10.0
GHOST_BAR = 4.0
LRU = "lru"
COST = "us a block"


class Arrival(NamedTuple):
    """A request.

    Attributes:
        at_s: when it comes.
        keys: its blocks, first positions first.
    """

    at_s: float
    keys: list[OffloadKey]


def measure(*, is_quick: bool) -> Iterator[Measurement]:
    """Yield hazard's time per block, how many times LRU's it is, and its ghosts."""
    trace = make_chats(num_hours=1 if is_quick else NUM_HOURS)
    num_blocks = blocks_of_share(trace, SHARE)
    arrivals = arrivals_of(trace)
    contestants: dict[str, Contestant] = {
        OURS: partial(cost_once, arrivals, num_blocks, "hazard"),
        LRU: partial(cost_once, arrivals, num_blocks, "lru"),
    }
    rounds = run_rounds(contestants, fixed(QUICK_ROUNDS if is_quick else NUM_ROUNDS))[COST]
    labels: dict[str, str | int] = {"operation": "whole requests", "policy": "hazard", "blocks": num_blocks}
    yield Measurement(labels, COST, Better.LOWER, rounds, Bar(None, COST_BAR_US))
    times = tuple(ours / lru for ours, lru in zip(rounds[OURS], rounds[LRU], strict=True))
    compared = labels | {"operation": "whole requests, times LRU's"}
    yield Measurement(compared, "times", Better.LOWER, {OURS: times}, Bar(None, COST_BAR_TIMES))
    remembered = labels | {"operation": "ghosts a block of capacity"}
    ghosts = (count_ghosts(arrivals, num_blocks) / num_blocks,)
    yield Measurement(remembered, "blocks", Better.LOWER, {OURS: ghosts}, Bar(None, GHOST_BAR))


def arrivals_of(trace: Trace) -> list[Arrival]:
    """Return the requests of a trace, their blocks named. Pure."""
    block_keys = BlockKeys()
    return [Arrival(request.arrival_s, block_keys.of(request.hash_ids)) for request in trace.requests]


def cost_once(arrivals: Sequence[Arrival], num_blocks: int, policy: str) -> Mapping[str, float]:
    """Return the processor time of serving all, in microseconds for each block that a request names."""
    gc.collect()
    gc.freeze()
    begun_s = time.thread_time()
    serve_all(arrivals, num_blocks, policy)
    spent_s = time.thread_time() - begun_s
    gc.unfreeze()
    return {COST: 1e6 * spent_s / sum(len(arrival.keys) for arrival in arrivals)}


def serve_all(arrivals: Sequence[Arrival], num_blocks: int, policy: str) -> CPUOffloadingManager:
    """Serve every request at its time and return the manager, which began empty."""
    now_s = 0.0
    manager = CPUOffloadingManager(num_blocks, policy, clock=lambda: now_s)
    for number, arrival in enumerate(arrivals):
        now_s = arrival.at_s
        serve(manager, arrival.keys, ReqContext(str(number)), TouchOrder.TAIL_FIRST)
    return manager


def count_ghosts(arrivals: Sequence[Arrival], num_blocks: int) -> int:
    """Return how many blocks hazard remembers, at the end, that it does not hold."""
    policy = serve_all(arrivals, num_blocks, "hazard")._policy  # noqa: SLF001 - ghosts show nowhere else
    assert isinstance(policy, HazardCachePolicy)
    return policy._shadow.tree.num_ghosts  # noqa: SLF001 - as above
