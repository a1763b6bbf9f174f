"""A small engine that drives both halves of the production connector, and checks each byte before it computes with it.

It plans, executes and processes one step at a time, with chunks of prompts, pre-emption, aborts and resets. It has no
prefix cache of its own: whatever a request does not compute must come from kvtier.
"""

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
from tests.storm.memory import (
    GARBAGE,
    NULL_BLOCK,
    PAGE_BYTES,
    HostRows,
    StormHandler,
    StormSpec,
    content_of,
)

from kvtier.base import CanonicalKVCaches, GPULoadStoreSpec, HandlerEntry, OffloadingManager
from kvtier.config import OffloadingConfig
from kvtier.connector.common import OffloadingConnectorMetadata, OffloadingWorkerMetadata
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.engines.common.step import CachedRequests, NewRequest, StepOutput, WorkerOutput

BLOCK_TOKENS = 4

Params: TypeAlias = dict[str, Any] | None  # Any: a client's JSON
"""The hints of a request."""


class Phase(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    LOADING = "loading"
    LOADED = "loaded"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False)
class StormRequest:
    """A request; the connector reads it through its protocol.

    Attributes:
        request_id: its name.
        hashes: of every block that it may ever have, prompt and answer.
        num_tokens: prompt and answer so far.
        max_tokens: length at which it ends.
        kv_transfer_params: the client's hints.
        tenant: whose blocks it may find; empty for those that name none.
        is_served: whether its tenant is one that is served.
        num_prompt_tokens: length of the prompt.
        phase: where it is.
        tables: for each group its device blocks.
        num_computed: tokens whose KV is there.
        num_external: tokens of its last load.
        reported: workers that have reported that load.
        has_failed_load: whether a load of it has ever failed.
        is_load_void: whether a reset made its load void.
        is_mixed: whether it goes on with KV of weights of before a reset: its blocks are of no use to others.
        was_scheduled: whether it has ever been.
        num_steps: how often it has waited for a step.
    """

    request_id: str
    hashes: list[bytes]
    num_tokens: int
    max_tokens: int
    kv_transfer_params: Params = None
    tenant: bytes = b""
    is_served: bool = True
    num_prompt_tokens: int = 0
    phase: Phase = Phase.WAITING
    tables: list[list[int]] = field(default_factory=list)
    num_computed: int = 0
    num_external: int = 0
    reported: set[int] = field(default_factory=set)
    has_failed_load: bool = False
    is_load_void: bool = False
    is_mixed: bool = False
    was_scheduled: bool = False
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens

    @property
    def block_hashes(self) -> list[bytes]:
        """Hashes of the full blocks."""
        return self.hashes[: self.num_tokens // BLOCK_TOKENS]

    def content(self, block: int, group: int, weights: int, rank: int) -> bytes:
        """Return what one of its blocks holds on one worker."""
        return content_of(self.hashes[block], group, weights, rank, self.tenant)


@dataclass(frozen=True)
class _Blocks:
    tables: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.tables


class StormWorker:
    """A worker: device memory, both handlers, the worker half."""

    def __init__(self, rank: int, config: OffloadingConfig, rows: HostRows, num_device_blocks: int) -> None:
        self.rank = rank
        self.device = np.full((num_device_blocks, PAGE_BYTES), GARBAGE, dtype=np.uint8)
        self.broken_laws: list[str] = []
        factor = config.block_size_factor
        self.loads = StormHandler(self.device, rows.part(rank), factor, self.broken_laws)
        self.stores = StormHandler(self.device, rows.part(rank), factor, self.broken_laws)
        entries = [
            HandlerEntry(CPULoadStoreSpec, GPULoadStoreSpec, self.loads),
            HandlerEntry(GPULoadStoreSpec, CPULoadStoreSpec, self.stores),
        ]
        self.half = OffloadingConnectorWorker(StormSpec(config, entries=entries), pause=lambda _: None)
        self.half.register_kv_caches(CanonicalKVCaches([], []))


class StormEngine:
    """The engine.

    Args:
        config: KV groups and number of workers.
        manager: what the scheduler half asks.
        rows: host memory.
        num_device_blocks: size of the device pool, the null block included.
        weights: of the model at the start.
        clocks: monotonic and wall clock.
        pages: where the contents of device blocks are noted, once computed.

    Attributes:
        scheduler: the scheduler half.
        workers: the workers.
        requests: those that have not ended, and aborted ones whose load has not.
        weights: of the model now.
        seen: how often each kind of event has happened.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        manager: OffloadingManager,
        rows: HostRows,
        num_device_blocks: int,
        weights: int,
        clocks: tuple[Any, Any],  # Any: two callables
        pages: set[bytes],
    ) -> None:
        clock, wall_clock = clocks
        self.scheduler = OffloadingConnectorScheduler(
            StormSpec(config, manager), clock=clock, wall_clock=wall_clock
        )
        self.workers = [
            StormWorker(rank, config, rows, num_device_blocks) for rank in range(config.world_size)
        ]
        self.requests: dict[str, StormRequest] = {}
        self.weights = weights
        self.seen: Counter[str] = Counter()
        self._pages = pages
        self._config = config
        self._groups = config.groups
        self._free: deque[int] = deque(range(1, num_device_blocks))
        self._preempted: set[str] = set()

    def add(self, request: StormRequest) -> None:
        """Let a request wait."""
        request.tables = [[] for _ in self._groups]
        self.requests[request.request_id] = request

    def in_phase(self, *phases: Phase) -> list[StormRequest]:
        """Return the requests in a phase, oldest first."""
        return [request for request in self.requests.values() if request.phase in phases]

    def step(self, chunk_tokens: int) -> None:
        """Plan, execute and process one step."""
        new: list[NewRequest] = []
        cached: list[tuple[str, bool, tuple[list[int], ...] | None, int]] = []
        scheduled: dict[str, int] = {}
        for request in self.in_phase(Phase.RUNNING):
            if request.phase is Phase.RUNNING:  # a pre-emption takes later ones away
                self._schedule_running(request, chunk_tokens, cached, scheduled)
        for request in self.in_phase(Phase.LOADED, Phase.WAITING):
            if request.request_id not in self._preempted:
                self._start(request, chunk_tokens, new, cached, scheduled)
        output = StepOutput(
            new,
            CachedRequests(
                [entry[0] for entry in cached],
                {entry[0] for entry in cached if entry[1]},
                [entry[2] for entry in cached],
                [entry[3] for entry in cached],
            ),
            scheduled,
            self._preempted or None,
        )
        self._preempted = set()
        metadata = self.scheduler.build_connector_meta(output)
        self._expect_stores(metadata)
        report, ended = self._execute(metadata, scheduled)
        for rank, req_id, failed in ended:
            self._note_load(rank, req_id, failed)
        self._sample(scheduled)
        self.scheduler.update_connector_output(WorkerOutput(report))

    def end(self, request: StormRequest) -> None:
        """End a request, wherever it is; blocks of a load under way stay until it ends."""
        self.seen[f"ended while {request.phase.value}"] += 1
        self.scheduler.request_finished(request)
        if request.phase is not Phase.LOADING:
            self._release(request)
            del self.requests[request.request_id]
        request.phase = Phase.ENDED

    def preempt(self, request: StormRequest) -> None:
        """Take a running request's blocks away."""
        self._preempted.add(request.request_id)
        self._release(request)
        request.phase, request.num_computed, request.is_mixed = Phase.WAITING, 0, False
        self.seen["pre-empted"] += 1

    def reset(self, weights: int, *, is_keeping: bool) -> None:
        """Change the weights: nothing that was computed before may be used by others.

        Args:
            weights: the new ones.
            is_keeping: running requests go on with what the old weights have computed.
        """
        for request in self.in_phase(Phase.RUNNING):
            request.is_mixed = True
            if not is_keeping:
                self.preempt(request)
        for request in self.in_phase(Phase.LOADED):
            self._release(request)
            request.phase, request.num_computed = Phase.WAITING, 0
        for request in self.requests.values():
            if request.phase is Phase.LOADING or request.reported:
                request.is_load_void = True
        self.weights = weights
        self.scheduler.reset()
        self.seen["reset"] += 1

    def copy(self, rng: random.Random, num_jobs: int) -> None:
        """Let handlers work."""
        for worker in self.workers:
            worker.loads.work(rng, num_jobs)
            worker.stores.work(rng, num_jobs)

    def broken_laws(self) -> list[str]:
        """Return what the handlers have noticed."""
        return [law for worker in self.workers for law in worker.broken_laws]

    def _schedule_running(
        self,
        request: StormRequest,
        chunk: int,
        cached: list[tuple[str, bool, tuple[list[int], ...] | None, int]],
        scheduled: dict[str, int],
    ) -> None:
        num_tokens = min(chunk, request.num_tokens - request.num_computed)
        if num_tokens < 1:
            return
        while (appended := self._grow(request, request.num_computed + num_tokens)) is None:
            victim = self.in_phase(Phase.RUNNING)[-1]
            scheduled.pop(victim.request_id, None)
            cached[:] = [entry for entry in cached if entry[0] != victim.request_id]
            self.preempt(victim)
            if victim is request:
                return
        is_grown = any(appended)
        cached.append((request.request_id, False, appended if is_grown else None, request.num_computed))
        scheduled[request.request_id] = num_tokens

    def _start(
        self,
        request: StormRequest,
        chunk: int,
        new: list[NewRequest],
        cached: list[tuple[str, bool, tuple[list[int], ...] | None, int]],
        scheduled: dict[str, int],
    ) -> None:
        num_external = 0
        if request.phase is Phase.WAITING:
            found, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
            request.num_steps += 1
            if found is None:
                self.seen["told to wait"] += 1
                return
            assert found == 0 or not request.has_failed_load, (
                f"{request.request_id} loads again after a failure"
            )
            assert found == 0 or request.is_served, (
                f"{request.request_id} loads for a tenant that is not served"
            )
            assert is_async is (found > 0)
            assert found < request.num_tokens, "no token is left to compute"
            num_external = found
        num_held = request.num_computed or num_external
        num_tokens = 0 if num_external else min(chunk, request.num_tokens - num_held)
        if num_external and self._num_reserved_blocks(request) > len(self._free):
            return  # or several loaded requests would wait for each other's blocks
        if self._grow(request, num_held + num_tokens) is None:
            return
        tables = tuple(list(table) for table in request.tables)
        self.scheduler.update_state_after_alloc(request, _Blocks(tables), num_external)
        if num_external:
            request.phase, request.num_external, request.reported = Phase.LOADING, num_external, set()
            request.is_load_void = False
            self.seen["load begun"] += 1
            return
        request.phase = Phase.RUNNING
        if request.was_scheduled:
            cached.append((request.request_id, True, tables, request.num_computed))
        else:
            new.append(NewRequest(request.request_id, tables, request.num_computed))
        request.was_scheduled = True
        scheduled[request.request_id] = num_tokens

    def _execute(
        self, metadata: OffloadingConnectorMetadata, scheduled: dict[str, int]
    ) -> tuple[OffloadingWorkerMetadata, list[tuple[int, str, list[int] | None]]]:
        total = OffloadingWorkerMetadata()
        ended: list[tuple[int, str, list[int] | None]] = []
        for worker in self.workers:
            half = worker.half
            half.handle_preemptions(metadata)
            half.start_kv_transfers(metadata)
            for req_id, num_tokens in scheduled.items():
                self._compute(worker, self.requests[req_id], num_tokens)
            if scheduled:
                half.prepare_store_kv(metadata)
            sent, received = half.get_finished(set())
            assert not sent
            failed = half.take_failed_loads()
            assert failed.keys() <= received
            ended += [(worker.rank, req_id, failed.get(req_id)) for req_id in sorted(received)]
            report = half.build_connector_worker_meta()
            if report is not None:
                total = total.aggregate(report)
            assert (worker.device[NULL_BLOCK] == GARBAGE).all(), "something was written to the null block"
        return total, ended

    def _compute(self, worker: StormWorker, request: StormRequest, num_tokens: int) -> None:
        """Check what the tokens attend to, and write their KV."""
        self._check_held(worker, request)
        end = request.num_computed + num_tokens
        for idx, table in enumerate(request.tables):
            for block in range(request.num_computed // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)):
                if request.is_mixed:
                    worker.device[table[block]] = GARBAGE
                elif (block + 1) * BLOCK_TOKENS <= end:
                    content = request.content(block, idx, self.weights, worker.rank)
                    worker.device[table[block]] = np.frombuffer(content, dtype=np.uint8)
                    self._pages.add(content)

    def _check_held(self, worker: StormWorker, request: StormRequest) -> None:
        if request.is_mixed:
            return
        for idx, (group, table) in enumerate(zip(self._groups, request.tables, strict=True)):
            first = 0
            if group.window_tokens is not None:
                first = max(0, request.num_computed - group.window_tokens + 1) // BLOCK_TOKENS
            for block in range(first, request.num_computed // BLOCK_TOKENS):
                expected = request.content(block, idx, self.weights, worker.rank)
                assert worker.device[table[block]].tobytes() == expected, (
                    f"{request.request_id}: wrong bytes in block {block} of group {idx} on worker {worker.rank}"
                )

    def _sample(self, scheduled: dict[str, int]) -> None:
        for req_id, num_tokens in scheduled.items():
            request = self.requests[req_id]
            request.num_computed += num_tokens
            if request.num_computed >= request.num_tokens:
                request.num_tokens += 1
                if request.num_tokens >= request.max_tokens:
                    self.end(request)

    def _note_load(self, rank: int, req_id: str, failed: list[int] | None) -> None:
        request = self.requests[req_id]
        assert rank not in request.reported, f"worker {rank} reported the load of {req_id} twice"
        assert failed is not None or not request.is_load_void, f"{req_id}: a load of before a reset is served"
        request.reported.add(rank)
        if failed is not None:
            request.has_failed_load = True
            request.num_external = min(request.num_external, self._num_good_tokens(request, failed))
        if len(request.reported) < len(self.workers):
            return
        request.reported = set()
        self.seen["load ended"] += 1
        if request.phase is Phase.ENDED:
            self._release(request)
            del self.requests[req_id]
            return
        request.phase, request.num_computed = Phase.LOADED, request.num_external
        if request.is_load_void or not request.num_computed:
            self._release(request)
            request.phase, request.num_computed, request.is_load_void = Phase.WAITING, 0, False
        for worker in self.workers:
            self._check_held(worker, request)
        if request.num_computed:
            self.seen["load good"] += 1

    def _num_good_tokens(self, request: StormRequest, failed: list[int]) -> int:
        """Return how much of a failed load an engine uses: with one group what lies before the first lost block."""
        if len(self._groups) > 1 or self._groups[0].window_tokens is not None:
            return 0
        lost = [block for block, block_id in enumerate(request.tables[0]) if block_id in failed]
        return lost[0] * BLOCK_TOKENS if lost else request.num_external

    def _expect_stores(self, metadata: OffloadingConnectorMetadata) -> None:
        for job_id, job in metadata.store_jobs.items():
            source, request = job.transfer_spec.source, self.requests[job.req_id]
            assert isinstance(source, GPULoadStoreSpec)
            assert not request.is_mixed, f"{job.req_id}: blocks of before a reset are stored after it"
            assert request.is_served, f"{job.req_id}: blocks of a tenant that is not served are stored"
            block_ids = source.block_ids.tolist()
            for worker in self.workers:
                expected: list[bytes] = []
                begin = 0
                for idx, size in enumerate(source.group_sizes):
                    for block_id in block_ids[begin : begin + size]:
                        block = request.tables[idx].index(block_id)
                        expected.append(request.content(block, idx, self.weights, worker.rank))
                    begin += size
                worker.stores.expected[job_id] = expected

    def _grow(self, request: StormRequest, num_tokens: int) -> tuple[list[int], ...] | None:
        """Give a request blocks for so many tokens; return what was appended, None when there are too few."""
        wanted = -(-num_tokens // BLOCK_TOKENS)
        missing = [max(0, wanted - len(table)) for table in request.tables]
        if sum(missing) > len(self._free):
            return None
        appended = tuple([self._free.popleft() for _ in range(num)] for num in missing)
        for table, blocks in zip(request.tables, appended, strict=True):
            table.extend(blocks)
        return appended

    def _num_reserved_blocks(self, request: StormRequest) -> int:
        """Return the blocks that a request's prompt and those of loaded requests still need."""
        holding = [request, *self.in_phase(Phase.LOADING, Phase.LOADED)]
        return sum(
            max(0, -(-one.num_tokens // BLOCK_TOKENS) - len(table)) for one in holding for table in one.tables
        )

    def _release(self, request: StormRequest) -> None:
        for table in request.tables:
            self._free.extend(reversed(table))
        request.tables = [[] for _ in self._groups]


def chain_hashes(prefix: Sequence[bytes], labels: Sequence[bytes]) -> list[bytes]:
    """Return ``prefix`` and one chained hash for each further block. Pure."""
    import hashlib

    hashes = list(prefix)
    for label in labels:
        previous = hashes[-1] if hashes else b""
        hashes.append(hashlib.blake2b(previous + label, digest_size=16).digest())
    return hashes
