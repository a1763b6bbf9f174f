"""Count what each eviction policy finds on a recorded trace of requests: the table of docs/policies.md.

It simulates no time and no tier below: ``kvtier.sim.host_replay`` serves the requests one after the other. The trace is
a file of any format that ``kvtier simulate`` reads, plain or compressed with gzip.

    python -m scripts.policy_hits conversation.jsonl.gz --percent 1 5 20 --policy lru arc
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

from kvtier.cpu.policies import CACHE_POLICIES
from kvtier.sim.belady import count_belady_hits
from kvtier.sim.formats.registry import read_trace
from kvtier.sim.host_replay import HostCache, blocks_of_share, replay_host
from kvtier.sim.trace import Trace


def main() -> None:
    """Print a table of the prefix hit ratio in percent, by policy and by capacity in percent of the unique blocks."""
    options = read_options()
    trace = read_trace(options.trace)
    capacities = [blocks_of_share(trace, percent / 100) for percent in options.percent]
    print("| policy |", *(f"{percent:g} |" for percent in options.percent))
    print("|---|", *("---:|" for _ in capacities))
    for policy in options.policy:
        caches = [HostCache(capacity, policy, chunk_blocks=options.chunk_blocks) for capacity in capacities]
        print_row(policy, (replay_host(trace, cache).num_hits for cache in caches), trace.num_accesses)
    accesses = list_accesses(trace)
    bounds = (count_belady_hits(accesses, capacity) for capacity in capacities)
    print_row("Belady", bounds, trace.num_accesses)


def read_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Count what each eviction policy finds on a trace.")
    parser.add_argument("trace", type=Path, help="the file of requests")
    parser.add_argument("--percent", type=float, nargs="+", default=[1, 5, 20], help="capacities")
    parser.add_argument("--policy", nargs="+", default=CACHE_POLICIES.names(), help="names of policies")
    parser.add_argument(
        "--chunk-blocks", type=int, help="blocks that a prompt is computed and stored in at a time"
    )
    return parser.parse_args()


def print_row(name: str, hits: Iterable[int], num_accesses: int) -> None:
    """Print one line of the table."""
    print(f"| {name} |", *(f"{100 * num_hits / num_accesses:.2f} |" for num_hits in hits), flush=True)


def list_accesses(trace: Trace) -> list[int]:
    """Return the ids that the requests of ``trace`` name, in order, repeats included. Pure."""
    return [hash_id for request in trace.requests for hash_id in request.hash_ids]


if __name__ == "__main__":
    main()
