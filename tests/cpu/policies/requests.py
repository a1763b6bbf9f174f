"""Requests of a recorded trace, run through the primary tier's manager in the order of an engine's calls."""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from kvtier.base import OffloadKey, ReqContext
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.testing.policy_suite import key_of

TRACES = Path(__file__).parents[4] / "shared" / "traces"
"""Where recorded traces lie beside a checkout; they are not part of the project."""

REQUEST = ReqContext("replayed")


def read_requests(name: str) -> list[list[OffloadKey]]:
    """Return the keys of each request, in order; skips the test where the trace is not at hand."""
    path = TRACES / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"the trace {name} is not beside this checkout")
    with gzip.open(path, "rt", encoding="ascii") as lines:
        return [[key_of(number) for number in json.loads(line)["hash_ids"]] for line in lines]


def count_prefix_hits(manager: CPUOffloadingManager, requests: Iterable[Sequence[OffloadKey]]) -> int:
    """Serve ``requests`` one after the other and return how many blocks were found, each prefix up to its first miss.

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
        store(manager, keys)
    return num_hits


def store(manager: CPUOffloadingManager, keys: Sequence[OffloadKey]) -> None:
    """Store what is missing of ``keys``, half as many after each refusal, until nothing fits."""
    num_offered = len(keys)
    while num_offered:
        output = manager.prepare_store(keys[:num_offered], REQUEST)
        if output is None:
            num_offered //= 2
            continue
        if output.keys_to_store:
            manager.touch(keys[:num_offered], REQUEST)
            manager.complete_store(output.keys_to_store, REQUEST)
        return
