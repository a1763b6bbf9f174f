"""The cost of a policy that learns from requests: hazard against LRU on synthetic chats, through the manager.

Each request is driven as the connector does it, ``note_request`` first, in a cache of a tenth of the unique blocks.
All calls of the manager count, lookups, pins and stores included, by the thread's processor time; so does hazard's
learning, and the garbage collector as far as it visits a contestant's objects. Naming the blocks of a request, which
every engine does anyway, is done before. Times are per block of the requests.
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
from kvtier.sim.host_replay import blocks_of_share, serve
from kvtier.sim.trace import BlockKeys, Trace

SHARE = 0.1
"""Share of the unique blocks for which the bars are set."""

NUM_HOURS = 4
"""Hours of synthetic traffic: the first minutes, in which fits are frequent, are then a small part, as in
production."""

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
        at_s: its time.
        keys: its blocks, first positions first.
    """

    at_s: float
    keys: list[OffloadKey]


def measure(*, is_quick: bool) -> Iterator[Measurement]:
    """Yield hazard's time per block, its ratio to LRU's, and its ghosts."""
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
    """Return the requests of a trace with the keys of their blocks. Pure."""
    block_keys = BlockKeys()
    return [Arrival(request.arrival_s, block_keys.of(request.hash_ids)) for request in trace.requests]


def cost_once(arrivals: Sequence[Arrival], num_blocks: int, policy: str) -> Mapping[str, float]:
    """Return the processor time of serving all, in microseconds per block of the requests."""
    gc.collect()
    gc.freeze()
    begun_s = time.thread_time()
    serve_all(arrivals, num_blocks, policy)
    spent_s = time.thread_time() - begun_s
    gc.unfreeze()
    return {COST: 1e6 * spent_s / sum(len(arrival.keys) for arrival in arrivals)}


def serve_all(arrivals: Sequence[Arrival], num_blocks: int, policy: str) -> CPUOffloadingManager:
    """Serve every request at its time through an empty manager, and return the manager."""
    now_s = 0.0
    manager = CPUOffloadingManager(num_blocks, policy, clock=lambda: now_s)
    for number, arrival in enumerate(arrivals):
        now_s = arrival.at_s
        serve(manager, arrival.keys, ReqContext(str(number)))
    return manager


def count_ghosts(arrivals: Sequence[Arrival], num_blocks: int) -> int:
    """Return how many blocks hazard remembers at the end without holding them."""
    policy = serve_all(arrivals, num_blocks, "hazard")._policy  # noqa: SLF001 - ghosts have no public counter
    assert isinstance(policy, HazardCachePolicy)
    return policy._shadow.tree.num_ghosts  # noqa: SLF001 - as above
