"""Count what each eviction policy finds on a recorded trace of requests: the table of docs/policies.md.

It simulates no time and no tier below: requests are served one after the other by the primary tier's manager, in the order
of an engine's calls. A trace has one JSON object a line, whose ``hash_ids`` name the blocks of one prompt from its head, equal
ids for equal blocks behind equal prefixes; the file may be compressed with gzip.

    python -m scripts.policy_hits conversation.jsonl.gz --percent 1 5 20 --policy lru arc
"""

import argparse
import gzip
import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from kvtier.base import OffloadKey, ReqContext, make_offload_key
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies import CACHE_POLICIES
from kvtier.sim.belady import count_belady_hits

REQUEST = ReqContext("replayed")


def main() -> None:
    """Print a table of the prefix hit ratio in percent, by policy and by capacity in percent of the unique blocks."""
    options = read_options()
    requests = read_requests(options.trace)
    accesses = [key for keys in requests for key in keys]
    capacities = [round(len(set(accesses)) * percent / 100) for percent in options.percent]
    print("| policy |", *(f"{percent:g} |" for percent in options.percent))
    print("|---|", *("---:|" for _ in capacities))
    for policy in options.policy:
        hits = [
            count_prefix_hits(CPUOffloadingManager(capacity, policy), requests) for capacity in capacities
        ]
        print_row(policy, hits, len(accesses))
    print_row("Belady", [count_belady_hits(accesses, capacity) for capacity in capacities], len(accesses))


def read_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Count what each eviction policy finds on a trace.")
    parser.add_argument("trace", type=Path, help="the file of requests")
    parser.add_argument("--percent", type=float, nargs="+", default=[1, 5, 20], help="capacities")
    parser.add_argument("--policy", nargs="+", default=CACHE_POLICIES.names(), help="names of policies")
    return parser.parse_args()


def print_row(name: str, hits: Iterable[int], num_accesses: int) -> None:
    """Print one line of the table."""
    print(f"| {name} |", *(f"{100 * num_hits / num_accesses:.2f} |" for num_hits in hits), flush=True)


def read_requests(path: Path) -> list[list[OffloadKey]]:
    """Return the keys of each request of a trace, in order."""
    opened = gzip.open(path, "rt", encoding="ascii") if path.suffix == ".gz" else path.open(encoding="ascii")
    with opened as lines:
        return [[trace_key(number) for number in json.loads(line)["hash_ids"]] for line in lines]


def trace_key(number: int) -> OffloadKey:
    """Return the key of a block that a trace names by a number. Pure."""
    return make_offload_key(number.to_bytes(8, "big"), 0)


def count_prefix_hits(manager: CPUOffloadingManager, requests: Iterable[Sequence[OffloadKey]]) -> int:
    """Serve ``requests`` one after the other; return how many blocks were found, each prefix up to its first miss.

    As the connector does it: touched on arrival, loaded and touched, stored as far as there is room, and touched again
    while the writes are in flight.
    """
    num_hits = 0
    for keys in requests:
        manager.touch(keys, REQUEST)
        num_held = next((idx for idx, key in enumerate(keys) if not manager.lookup(key, REQUEST)), len(keys))
        num_hits += num_held
        if num_held:
            manager.prepare_load(keys[:num_held], REQUEST)
            manager.complete_load(keys[:num_held], REQUEST)
            manager.touch(keys, REQUEST)
        store_what_fits(manager, keys)
    return num_hits


def store_what_fits(manager: CPUOffloadingManager, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
    """Store what is missing of ``keys``, half as many after each refusal, and return what was stored."""
    num_offered = len(keys)
    while num_offered:
        output = manager.prepare_store(keys[:num_offered], REQUEST)
        if output is not None:
            manager.touch(keys[:num_offered], REQUEST)
            manager.complete_store(output.keys_to_store, REQUEST)
            return output.keys_to_store
        num_offered //= 2
    return ()


if __name__ == "__main__":
    main()
