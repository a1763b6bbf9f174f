"""Hit ratio against capacity: one replay of the host tier for each capacity of a geometric series.

Each point is a ``replay_host`` with the production manager and policy. Policies that learn or refuse blocks allow no
shortcut such as stack distances, so none is used for LRU either. Where recurrent states are kept the replay is
``replay_chain`` without tiers, which knows them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.errors import ConfigError
from kvtier.planning.evaluator import replay_chain
from kvtier.sim.host_replay import HostCache, replay_host
from kvtier.sim.model import HostModel, KeptStates
from kvtier.sim.states import list_pages
from kvtier.sim.trace import Trace

SMALLEST_SHARE = 1 / 512
"""Share of the unique blocks. A smaller cache turns over within seconds on the traces that we know."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Hits of host memory of one size.

    Attributes:
        num_blocks: its capacity; a state takes the room of a block.
        hit_ratio: blocks of found prefixes over all accessed blocks.
        writes_per_unique_block: how often a block, or a state, was stored on average.
    """

    num_blocks: int
    hit_ratio: float
    writes_per_unique_block: float


def list_capacities(smallest_blocks: int, largest_blocks: int) -> tuple[int, ...]:
    """Return doublings from ``smallest_blocks`` to ``largest_blocks``, both included, ascending. Pure.

    Raises:
        ConfigError: the smallest is below one or above the largest.
    """
    if not 1 <= smallest_blocks <= largest_blocks:
        raise ConfigError("smallest_blocks", smallest_blocks, f"must be from 1 to {largest_blocks}")
    found: list[int] = []
    num_blocks = smallest_blocks
    while num_blocks < largest_blocks:
        found.append(num_blocks)
        num_blocks *= 2
    return (*found, largest_blocks)


def draw_curve(
    trace: Trace,
    cache_policy: str,
    capacities: tuple[int, ...] | None = None,
    on_request: Callable[[], object] | None = None,
    states: KeptStates | None = None,
) -> tuple[CurvePoint, ...]:
    """Return the hit ratio of each capacity.

    Args:
        trace: the requests.
        cache_policy: registered name of the policy.
        capacities: in blocks; None: doublings from SMALLEST_SHARE of the unique blocks up to all of them.
        on_request: called after each request of each replay, for a progress bar.
        states: which recurrent states the engine keeps; None: its model has none.

    Raises:
        UnknownNameError: the policy does not exist.
    """
    points: list[CurvePoint] = []
    pages = list_pages(trace, states)
    for num_blocks in capacities or default_capacities(pages):
        if states is None:
            found = replay_host(trace, HostCache(num_blocks, cache_policy), on_request)
            points.append(CurvePoint(num_blocks, found.hit_ratio, found.writes_per_unique_block))
        else:
            chain = replay_chain(trace, HostModel(num_blocks, cache_policy), on_request, states)
            writes = chain.num_host_stored / max(1, pages.num_unique_blocks)
            points.append(CurvePoint(num_blocks, chain.hit_ratio, writes))
    return tuple(points)


def default_capacities(trace: Trace) -> tuple[int, ...]:
    """Return doublings from SMALLEST_SHARE of the trace's unique blocks up to all of them. Pure."""
    largest = max(1, trace.num_unique_blocks)
    return list_capacities(max(1, round(largest * SMALLEST_SHARE)), largest)
