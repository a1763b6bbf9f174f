"""Measures what hazard's guard lets through: rows of the table in docs/concepts/hazard.md.

Made-up chats beside jobs that come back after a quarter of an hour to an hour are replayed through hazard and through
LRU, each with host memory of 3 and of 6 % of the blocks. A row says by how many points of the hit ratio hazard is ahead
in the mean, and by how many it loses at worst, over the whole and in ten minutes.

    python -m scripts.guard_losses --seeds 1000-1039 --scale 10 --jobs 2
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import fmean

from kvtier.base import ReqContext
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.sim.host_replay import blocks_of_share, serve
from kvtier.sim.made_up import make_chats_beside_jobs
from kvtier.sim.trace import BlockKeys, Trace

SHARES = (0.03, 0.06)

TEN_MINUTES_S = 600.0

MAX_LOSS_POINTS, MAX_LOSS_POINTS_OF_TEN_MINUTES = 0.5, 2.0


@dataclass(frozen=True, slots=True)
class Lead:
    """By how many points of the hit ratio hazard was ahead of LRU; a loss is below zero.

    Attributes:
        seed: of the traffic.
        share: of the unique blocks that host memory holds.
        num_blocks: how many these are.
        whole: over the whole.
        worst: in the worst ten minutes.
    """

    seed: int
    share: float
    num_blocks: int
    whole: float
    worst: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Print each replay that loses more than the aim allows, and a row for all."""
    parser = argparse.ArgumentParser(description="Measure what hazard's guard lets through.")
    parser.add_argument("--seeds", type=parse_seeds, default=range(20), help="first and last, such as 0-19")
    parser.add_argument("--scale", type=float, default=1.0, help="so many times the traffic")
    parser.add_argument(
        "--jobs", type=int, default=1, help="replays at the same time, each in its own process"
    )
    options = parser.parse_args(arguments)
    cells = [(seed, share) for seed in options.seeds for share in SHARES]
    with ProcessPoolExecutor(options.jobs) as executor:
        futures = [executor.submit(lead_over_lru, seed, share, options.scale) for seed, share in cells]
        leads = [future.result() for future in futures]
    beyond = [lead for lead in leads if lead.worst < -MAX_LOSS_POINTS_OF_TEN_MINUTES]
    for lead in beyond:
        print(f"seed {lead.seed}, {100 * lead.share:g} %, {lead.num_blocks} blocks: {lead.worst:.1f}")
    held = [lead.num_blocks for lead in leads]
    print(f"host memory of {min(held):,} to {max(held):,} blocks")
    print("| replays | mean gain | worst loss, whole | worst loss, ten minutes | beyond 2 there |")
    worst = max(0.0, *(-lead.whole for lead in leads))
    worst_ten = max(0.0, *(-lead.worst for lead in leads))
    print(
        f"| {len(leads)} | {fmean(lead.whole for lead in leads):.2f} | {worst:.2f} | {worst_ten:.1f} | {len(beyond)} |"
    )


def parse_seeds(text: str) -> range:
    """Return the seeds of a text such as ``0-19`` or ``4``. Pure.

    Raises:
        argparse.ArgumentTypeError: it is no such text.
    """
    first, _, last = text.partition("-")
    try:
        seeds = range(int(first), int(last or first) + 1)
    except ValueError:
        seeds = range(0)
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a range of seeds such as 0-19")
    return seeds


def lead_over_lru(seed: int, share: float, scale: float = 1.0) -> Lead:
    """Return by how much hazard is ahead of LRU on the traffic of a seed."""
    trace = make_chats_beside_jobs(seed, scale=scale)
    num_blocks = blocks_of_share(trace, share)
    ours, lru = (hits_by_ten_minutes(trace, policy, num_blocks) for policy in ("hazard", "lru"))
    leads = [(mine[0] - theirs[0], mine[1]) for mine, theirs in zip(ours, lru, strict=True)]
    whole = 100 * sum(lead for lead, _ in leads) / trace.num_accesses
    worst = min(100 * lead / num for lead, num in leads if num)
    return Lead(seed, share, num_blocks, whole, worst)


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


if __name__ == "__main__":
    main()
