"""The scheduler half's cost per step when nothing changes, for a thousand requests.

    python -m benchmarks.connector [--quick] [--json FILE]

"promotion": each waits for a tier, with the real tiering manager; "load": each waits for a load of another request;
"running": each decodes one token and fills no block. A step is the thousand searches, or the thousand scheduled
requests, and build_connector_meta. Numbers are the median and the worst of the rounds. The bar: 1 ms a step for
those that wait.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.base import (
    CanonicalKVCaches,
    HandlerEntry,
    OffloadingManager,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    make_offload_key,
)
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from kvtier.tiering.manager import TieringOffloadingManager
from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager

NUM_REQUESTS = 1000
BLOCK_TOKENS = 16
PROMPT_BLOCKS = 64
NUM_SLOTS = NUM_REQUESTS * PROMPT_BLOCKS
BAR_MS = 1.0
NEVER_S = 1e9


@dataclass(frozen=True, slots=True)
class Line:
    """What a step costs, in milliseconds.

    Attributes:
        case: what the requests do.
        median_ms: of the rounds.
        worst_ms: of the rounds.
    """

    case: str
    median_ms: float
    worst_ms: float


@dataclass(eq=False, slots=True)
class BenchRequest:
    """A request as an engine holds it."""

    request_id: str
    num_tokens: int
    block_hashes: list[bytes]
    kv_transfer_params: dict[str, Any] | None = None  # Any: a client's JSON

    @property
    def num_prompt_tokens(self) -> int:
        """Return its tokens: none of them is an answer."""
        return self.num_tokens


@dataclass(slots=True)
class BenchBlocks:
    """A block table."""

    ids: list[int]

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Return it."""
        return (self.ids,)


@dataclass(slots=True)
class BenchNewRequest:
    """A request scheduled for the first time."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass(slots=True)
class BenchCachedRequests:
    """Requests scheduled before."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class BenchStep:
    """A scheduler output."""

    scheduled_new_reqs: list[BenchNewRequest] = field(default_factory=list)
    scheduled_cached_reqs: BenchCachedRequests = field(default_factory=BenchCachedRequests)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: set[str] | None = None


class BenchSpec(OffloadingSpec):
    """A spec around a manager."""

    def __init__(self, config: OffloadingConfig, manager: OffloadingManager) -> None:
        super().__init__(config)
        self._manager = manager

    def get_manager(self) -> OffloadingManager:
        """Return the manager."""
        return self._manager

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerEntry]:
        """Return none: no byte moves here."""
        del kv_caches
        return iter(())


class HungTier(SecondaryTierManager):
    """Has each block and never brings one."""

    @staticmethod
    def get_tier_type() -> str:
        """Return "hung"."""
        return "hung"

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return True."""
        return True

    def submit_store(self, job: JobMetadata) -> None:
        """Do nothing."""

    def submit_load(self, job: JobMetadata) -> None:
        """Do nothing."""

    def get_finished(self) -> Iterable[JobResult]:
        """Return nothing."""
        return ()


class BenchRows:
    """Rows of one byte."""

    def create_kv_memoryview(self) -> memoryview:
        """Return them."""
        return np.zeros((NUM_SLOTS, 1), dtype=np.int8).data

    def cleanup(self) -> None:
        """Do nothing."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    arguments = parser.parse_args()
    num_rounds = 20 if arguments.quick else 200
    lines = [
        measure("promotion", make_promotion_step(), num_rounds),
        measure("load", make_load_step(), num_rounds),
        measure("running", make_running_step(), num_rounds),
    ]
    print(
        f"{'case':<12}{'median ms':>12}{'worst ms':>12}   {NUM_REQUESTS} requests of {PROMPT_BLOCKS} blocks"
    )
    for line in lines:
        print(f"{line.case:<12}{line.median_ms:>12.3f}{line.worst_ms:>12.3f}")
    print(f"bar for promotion and load: {BAR_MS} ms")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(line) for line in lines], indent=1))


def measure(case: str, step: Callable[[], None], num_rounds: int) -> Line:
    """Time ``step``."""
    step()
    times_ms = []
    for _ in range(num_rounds):
        start_s = time.perf_counter()
        step()
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    return Line(case, statistics.median(times_ms), max(times_ms))


def make_config() -> OffloadingConfig:
    """Return a configuration of one group."""
    group = KVGroup(BLOCK_TOKENS, ("layer",), 1)
    return OffloadingConfig("bench", ModelIdentity("bench"), (group,), BLOCK_TOKENS)


def make_request(number: int, *, is_shared: bool) -> BenchRequest:
    """Return a request; shared ones have the same prompt."""
    prefix = 0 if is_shared else number
    hashes = [prefix.to_bytes(16, "big") + block.to_bytes(16, "big") for block in range(PROMPT_BLOCKS)]
    return BenchRequest(f"request-{number}", PROMPT_BLOCKS * BLOCK_TOKENS + 1, hashes)


def make_promotion_step() -> Callable[[], None]:
    """Return a step of requests that wait for a tier."""
    config = make_config()
    primary = CPUPrimaryTierOffloadingManager(NUM_SLOTS, BenchRows())
    tier = HungTier(config, primary.get_kv_memoryview())
    manager = TieringOffloadingManager(primary, [tier], lookup_deadline_s=NEVER_S)
    half = OffloadingConnectorScheduler(BenchSpec(config, manager))
    return make_search_step(half, [make_request(number, is_shared=False) for number in range(NUM_REQUESTS)])


def make_load_step() -> Callable[[], None]:
    """Return a step of requests whose prompt is being loaded for another one."""
    manager = CPUOffloadingManager(NUM_SLOTS)
    half = OffloadingConnectorScheduler(BenchSpec(make_config(), manager))
    first = make_request(NUM_REQUESTS, is_shared=True)
    keys = [make_offload_key(block_hash, 0) for block_hash in first.block_hashes]
    context = ReqContext("before")
    manager.prepare_store(keys, context)
    manager.complete_store(keys, context)
    num_tokens, _ = half.get_num_new_matched_tokens(first, 0)
    half.update_state_after_alloc(first, BenchBlocks(list(range(PROMPT_BLOCKS))), num_tokens or 0)
    return make_search_step(half, [make_request(number, is_shared=True) for number in range(NUM_REQUESTS)])


def make_search_step(half: OffloadingConnectorScheduler, requests: list[BenchRequest]) -> Callable[[], None]:
    """Return a step in which each request asks, and is told to wait."""
    step = BenchStep()

    def search() -> None:
        for request in requests:
            answer, _ = half.get_num_new_matched_tokens(request, 0)
            if answer is not None:
                raise RuntimeError(f"{request.request_id} does not wait but was answered {answer}")
        half.build_connector_meta(step)

    return search


def make_running_step() -> Callable[[], None]:
    """Return a step in which each request computes a token that fills no block."""
    half = OffloadingConnectorScheduler(BenchSpec(make_config(), CPUOffloadingManager(NUM_SLOTS)))
    requests = [make_request(number, is_shared=True) for number in range(NUM_REQUESTS)]
    table = list(range(PROMPT_BLOCKS + 1))
    first, later = BenchStep(), BenchStep()
    for request in requests:
        half.get_num_new_matched_tokens(request, 0)
        first.scheduled_new_reqs.append(BenchNewRequest(request.request_id, (list(table),), 0))
        first.num_scheduled_tokens[request.request_id] = request.num_tokens
        later.num_scheduled_tokens[request.request_id] = 1
        cached = later.scheduled_cached_reqs
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append(None)
        cached.num_computed_tokens.append(request.num_tokens)
    half.build_connector_meta(first)

    def decode() -> None:
        half.build_connector_meta(later)

    return decode


if __name__ == "__main__":
    main()
