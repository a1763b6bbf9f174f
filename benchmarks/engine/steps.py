"""The scheduler half's cost per step when nothing changes, for a thousand requests.

"promotion": each waits for a tier, with the real tiering manager; "load": each waits for a load of another request;
"running": each decodes one token and fills no block. A step is a thousand searches, or a thousand scheduled requests,
and build_connector_meta. The bar is for those that wait.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness.measurement import OURS, Bar, Better, Measurement
from benchmarks.harness.rounds import timed
from benchmarks.harness.suite import Options
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
from kvtier.cpu.manager import CPUOffloadingManager, CPUPrimaryTierOffloadingManager
from kvtier.engines.common.step import CachedRequests, NewRequest, StepOutput
from kvtier.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from kvtier.tiering.manager import TieringOffloadingManager

NUM_REQUESTS = 1000
BLOCK_TOKENS = 16
PROMPT_BLOCKS = 64
NUM_ROUNDS, NUM_QUICK_ROUNDS = 200, 20
BAR_MS = 1.0
NEVER_S = 1e9


@dataclass(eq=False, slots=True)
class BenchRequest:
    """A request of an engine."""

    request_id: str
    num_tokens: int
    block_hashes: list[bytes]
    kv_transfer_params: dict[str, Any] | None = None  # Any: a client's JSON

    @property
    def num_prompt_tokens(self) -> int:
        """Return its tokens, which are all of the prompt."""
        return self.num_tokens

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Return its block table: the first device blocks."""
        return (list(range(PROMPT_BLOCKS + 1)),)


class BenchSpec(OffloadingSpec):
    """A spec around a manager."""

    def __init__(self, config: OffloadingConfig, manager: OffloadingManager) -> None:
        super().__init__(config)
        self._manager = manager

    def get_manager(self) -> OffloadingManager:
        """Return the manager."""
        return self._manager

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerEntry]:
        """Return none: no bytes are moved."""
        del kv_caches
        return iter(())


class HungTier(SecondaryTierManager):
    """A tier that holds every block and never delivers one."""

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

    def reset(self, epoch: bytes) -> None:
        """Do nothing: no block ever comes."""


class BenchRows:
    """Rows of one byte.

    Args:
        num_rows: number of rows.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def create_kv_memoryview(self) -> memoryview:
        """Return the rows."""
        return np.zeros((self._num_rows, 1), dtype=np.int8).data

    def cleanup(self) -> None:
        """Do nothing."""


def measure(options: Options) -> Iterator[Measurement]:
    """Yield the time of a step by what the requests do."""
    num_rounds = NUM_QUICK_ROUNDS if options.is_quick else NUM_ROUNDS
    for doing, make_step, bar in (
        ("wait for a promotion", make_promotion_step, Bar(None, BAR_MS)),
        ("wait for another's load", make_load_step, Bar(None, BAR_MS)),
        ("run, and fill no block", make_running_step, None),
    ):
        step = make_step(NUM_REQUESTS)
        step()
        times_ms = tuple(1e3 * timed(step) for _ in range(num_rounds))
        labels: dict[str, str | int] = {"a step in which they": doing, "requests": NUM_REQUESTS}
        yield Measurement(labels, "ms", Better.LOWER, {OURS: times_ms}, bar)


def make_config() -> OffloadingConfig:
    """Return a configuration of one group."""
    group = KVGroup(BLOCK_TOKENS, ("layer",), 1)
    return OffloadingConfig("bench", ModelIdentity("bench"), (group,), BLOCK_TOKENS)


def make_request(number: int, *, is_shared: bool) -> BenchRequest:
    """Return a request; shared ones have the same prompt."""
    prefix = 0 if is_shared else number
    hashes = [prefix.to_bytes(16, "big") + block.to_bytes(16, "big") for block in range(PROMPT_BLOCKS)]
    return BenchRequest(f"request-{number}", PROMPT_BLOCKS * BLOCK_TOKENS + 1, hashes)


def make_promotion_step(num_requests: int) -> Callable[[], None]:
    """Return a step of requests that wait for a tier."""
    config = make_config()
    num_slots = num_requests * PROMPT_BLOCKS
    primary = CPUPrimaryTierOffloadingManager(num_slots, BenchRows(num_slots))
    tier = HungTier(config, primary.get_kv_memoryview())
    manager = TieringOffloadingManager(primary, [tier], lookup_deadline_s=NEVER_S)
    half = OffloadingConnectorScheduler(BenchSpec(config, manager))
    return make_search_step(half, [make_request(number, is_shared=False) for number in range(num_requests)])


def make_load_step(num_requests: int) -> Callable[[], None]:
    """Return a step of requests whose prompt is being loaded for another one."""
    manager = CPUOffloadingManager(num_requests * PROMPT_BLOCKS)
    half = OffloadingConnectorScheduler(BenchSpec(make_config(), manager))
    first = make_request(num_requests, is_shared=True)
    keys = [make_offload_key(block_hash, 0) for block_hash in first.block_hashes]
    context = ReqContext("before")
    manager.prepare_store(keys, context)
    manager.complete_store(keys, context)
    num_tokens, _ = half.get_num_new_matched_tokens(first, 0)
    half.update_state_after_alloc(first, first, num_tokens or 0)
    return make_search_step(half, [make_request(number, is_shared=True) for number in range(num_requests)])


def make_search_step(half: OffloadingConnectorScheduler, requests: list[BenchRequest]) -> Callable[[], None]:
    """Return a step in which each request searches and has to wait."""
    step = StepOutput()

    def search() -> None:
        for request in requests:
            answer, _ = half.get_num_new_matched_tokens(request, 0)
            if answer is not None:
                raise RuntimeError(f"{request.request_id} does not wait but was answered {answer}")
        half.build_connector_meta(step)

    return search


def make_running_step(num_requests: int) -> Callable[[], None]:
    """Return a step in which each request computes a token that fills no block."""
    half = OffloadingConnectorScheduler(
        BenchSpec(make_config(), CPUOffloadingManager(num_requests * PROMPT_BLOCKS))
    )
    requests = [make_request(number, is_shared=True) for number in range(num_requests)]
    for request in requests:
        half.get_num_new_matched_tokens(request, 0)
    names = [request.request_id for request in requests]
    new = [NewRequest(request.request_id, request.get_block_ids()) for request in requests]
    num_tokens = [request.num_tokens for request in requests]
    first = StepOutput(new, num_scheduled_tokens=dict(zip(names, num_tokens, strict=True)))
    cached = CachedRequests(names, (), [None] * num_requests, num_tokens)
    later = StepOutput(scheduled_cached_reqs=cached, num_scheduled_tokens=dict.fromkeys(names, 1))
    half.build_connector_meta(first)

    def decode() -> None:
        half.build_connector_meta(later)

    return decode
