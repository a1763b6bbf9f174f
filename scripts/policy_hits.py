"""Counts the hits of each eviction policy on a recorded trace of requests: the table of docs/concepts/policies.md.

``kvtier.sim.host_replay`` serves the requests one after the other, without time and without tiers. The trace is a file
of any format that ``kvtier simulate`` reads, plain or compressed with gzip.

    python -m scripts.policy_hits conversation.jsonl.gz --percent 1 5 20 --policy lru arc
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvtier.cpu.policies import CACHE_POLICIES
from kvtier.errors import KVTierError, TraceError
from kvtier.sim.bound import count_belady_hits
from kvtier.sim.formats.registry import read_trace
from kvtier.sim.host_replay import HostCache, blocks_of_share, replay_host
from kvtier.sim.trace import Trace


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of the prefix hit ratio in percent, by policy and by capacity in percent of the unique blocks.

    Args:
        arguments: what follows the script's name; None: the command line.

    Raises:
        SystemExit: an argument is not valid: status 2, with one line on stderr.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    trace = read_blocks(options.trace, parser)
    capacities = [blocks_of_share(trace, percent / 100) for percent in options.percent]
    print("| policy |", *(f"{percent:g} |" for percent in options.percent))
    print("|---|", *("---:|" for _ in capacities))
    for policy in options.policy:
        caches = [HostCache(capacity, policy, chunk_blocks=options.chunk_blocks) for capacity in capacities]
        print_row(policy, (replay_host(trace, cache).num_hits for cache in caches), trace.num_accesses)
    accesses = list_accesses(trace)
    bounds = (count_belady_hits(accesses, capacity) for capacity in capacities)
    print_row("Belady", bounds, trace.num_accesses)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Count the hits of each eviction policy on a trace.")
    parser.add_argument("trace", type=Path, help="the file of requests")
    parser.add_argument(
        "--percent", type=parse_percent, nargs="+", default=[1.0, 5.0, 20.0], help="capacities"
    )
    policies = CACHE_POLICIES.names()
    policy_help = f"{', '.join(policies)}, or package.module:Class"
    parser.add_argument("--policy", nargs="+", type=parse_policy, default=policies, help=policy_help)
    parser.add_argument(
        "--chunk-blocks", type=parse_chunk, help="blocks of a prompt that are computed and stored at a time"
    )
    return parser


def parse_percent(text: str) -> float:
    """Return a share in percent. Pure.

    Raises:
        argparse.ArgumentTypeError: it is not a number above zero.
    """
    try:
        percent = float(text)
    except ValueError:
        percent = math.nan
    if not 0 < percent < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: a capacity must be a number above zero, such as 5")
    return percent


def parse_policy(text: str) -> str:
    """Return the name of a policy.

    Raises:
        argparse.ArgumentTypeError: the policy does not exist.
    """
    try:
        CACHE_POLICIES.resolve(text)
    except KVTierError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def parse_chunk(text: str) -> int:
    """Return a number of blocks. Pure.

    Raises:
        argparse.ArgumentTypeError: it is not an integer from 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a chunk must be an integer number of blocks, at least 1")
    return int(text)


def read_blocks(path: Path, parser: argparse.ArgumentParser) -> Trace:
    """Return the trace; end the script if it cannot be read or has no full block."""
    try:
        trace = read_trace(path)
    except TraceError as error:
        parser.error(str(error))
    if not trace.num_accesses:
        parser.error(
            f"{path}: no prompt has a full block of {trace.block_tokens} tokens: there is nothing to find"
        )
    return trace


def print_row(name: str, hits: Iterable[int], num_accesses: int) -> None:
    """Print one line of the table."""
    print(f"| {name} |", *(f"{100 * num_hits / num_accesses:.2f} |" for num_hits in hits), flush=True)


def list_accesses(trace: Trace) -> list[int]:
    """Return the ids of the requests of ``trace``, in order, repeats included. Pure."""
    return [hash_id for request in trace.requests for hash_id in request.hash_ids]


if __name__ == "__main__":
    main()
