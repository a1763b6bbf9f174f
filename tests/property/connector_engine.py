"""A small simulated engine that drives the connector as vLLM does, and checks each byte it reads.

It schedules with chunked prefill, drafts, pre-emption, aborts and resets, up to two steps ahead of their outputs,
over two workers. Before a forward pass computes a token, each KV that the token attends to must be what the
oracle says: a function of the tokens before it, of the group and of the weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from tests.connector.fakes import (
    FakeBlocks,
    FakeNewRequest,
    FakeOutput,
    FakeSpec,
    FakeStep,
    hash_tokens,
)
from tests.property.connector_device import (
    BLOCK_TOKENS,
    NULL_BLOCK,
    BlockPool,
    HostRows,
    SlowHandler,
    kv_of,
    next_token,
)

from kvtier.base import CanonicalKVCaches, GPULoadStoreSpec, HandlerEntry, OffloadingManager
from kvtier.config import OffloadingConfig
from kvtier.connector.common import OffloadingConnectorMetadata, OffloadingWorkerMetadata
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.cpu.common import CPULoadStoreSpec


class Phase(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False)
class Run:
    """What the workers know of a request between its start, or resumption, and its end or pre-emption."""

    tokens: list[int]
    num_computed: int


@dataclass(eq=False)
class SimRequest:
    """A request of the simulated engine; the connector reads the attributes of the protocol."""

    request_id: str
    tokens: list[int]
    max_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    phase: Phase = Phase.WAITING
    tables: list[list[int]] = field(default_factory=list)
    num_computed: int = 0
    num_placeholders: int = 0
    num_local: int = 0
    is_known: bool = False
    is_load_void: bool = False
    run: Run | None = None
    reports: dict[int, bool] = field(default_factory=dict)
    num_loaded: int = 0
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        return hash_tokens(self.tokens)


@dataclass(frozen=True)
class Work:
    """What one step computes for one request."""

    request: SimRequest
    run: Run
    tables: list[list[int]]
    num_tokens: int
    drafts: list[bool]
    is_sampling: bool


@dataclass
class Step:
    """A step between its schedule and the processing of its output."""

    metadata: OffloadingConnectorMetadata
    works: list[Work]
    sampled: list[tuple[Work, list[int]]] = field(default_factory=list)
    ended_loads: list[tuple[int, str, bool]] = field(default_factory=list)
    report: OffloadingWorkerMetadata | None = None


class SimWorker:
    """One worker: device memory, both handlers, the worker half."""

    def __init__(self, rank: int, config: OffloadingConfig, rows: HostRows, num_device_blocks: int) -> None:
        self.device = np.zeros((num_device_blocks, BLOCK_TOKENS), dtype=np.int64)
        factor = config.block_size_factor
        self.loads = SlowHandler(self.device, rows.part(rank), factor)
        self.stores = SlowHandler(self.device, rows.part(rank), factor)
        entries = [
            HandlerEntry(CPULoadStoreSpec, GPULoadStoreSpec, self.loads),
            HandlerEntry(GPULoadStoreSpec, CPULoadStoreSpec, self.stores),
        ]
        self.half = OffloadingConnectorWorker(FakeSpec(config, entries=entries), pause=lambda _: None)
        self.half.register_kv_caches(CanonicalKVCaches([], []))


class SimEngine:
    """The engine.

    Args:
        config: KV groups and number of workers.
        manager: what the scheduler half asks.
        rows: host memory.
        num_device_blocks: size of the device pool, the null block included.
    """

    def __init__(
        self, config: OffloadingConfig, manager: OffloadingManager, rows: HostRows, num_device_blocks: int
    ) -> None:
        self.windows = [group.window_tokens for group in config.groups]
        self.scheduler = OffloadingConnectorScheduler(FakeSpec(config, manager))
        self.workers = [SimWorker(rank, config, rows, num_device_blocks) for rank in range(config.world_size)]
        self.pool = BlockPool(num_device_blocks)
        self.waiting: list[SimRequest] = []
        self.running: list[SimRequest] = []
        self.loading: dict[str, SimRequest] = {}
        self.steps: list[Step] = []
        self.weights = 0
        self.num_loaded_tokens = 0
        self.num_failed_loads = 0
        self._preempted: set[str] = set()

    @property
    def requests(self) -> list[SimRequest]:
        """Requests that have not ended, and aborted ones whose load has not."""
        return [*self.waiting, *self.running, *self.loading.values()]

    def add(self, request: SimRequest) -> None:
        """Let a request wait."""
        request.tables = [[] for _ in self.windows]
        self.waiting.append(request)

    def schedule(self, chunk_tokens: int, drafts: Sequence[bool]) -> None:
        """Plan one step."""
        output = FakeStep(preempted_req_ids=self._preempted)
        works: list[Work] = []
        for request in list(self.running):
            self._schedule_running(request, chunk_tokens, list(drafts), output, works)
        for request in list(self.waiting):
            self._schedule_waiting(request, chunk_tokens, output, works)
        output.preempted_req_ids = set(self._preempted) or None
        self._preempted = set()
        self.steps.append(Step(self.scheduler.build_connector_meta(output), works))

    def execute(self) -> None:
        """Carry out the oldest step that was not, on every worker."""
        step = next(step for step in self.steps if step.report is None)
        step.report = OffloadingWorkerMetadata()
        for worker in self.workers:
            worker.half.handle_preemptions(step.metadata)
            worker.half.start_kv_transfers(step.metadata)
        for work in step.works:
            sampled = self._forward(work)
            if work.is_sampling:
                step.sampled.append((work, sampled))
        for rank, worker in enumerate(self.workers):
            worker.half.prepare_store_kv(step.metadata)
            sent, received = worker.half.get_finished(set())
            assert not sent
            failed = worker.half.take_failed_loads()
            assert failed.keys() <= received
            step.ended_loads += [(rank, req_id, req_id in failed) for req_id in received]
            step.report = step.report.aggregate(
                worker.half.build_connector_worker_meta() or OffloadingWorkerMetadata()
            )

    def process_output(self, *, is_stopping: bool = False) -> None:
        """Take the output of the oldest executed step; with ``is_stopping`` each sampling request ends."""
        step = self.steps.pop(0)
        self.scheduler.update_connector_output(FakeOutput(step.report))
        for rank, req_id, has_failed in step.ended_loads:
            self._note_load(rank, req_id, has_failed=has_failed)
        for work, sampled in step.sampled:
            self._take_tokens(work, sampled, is_stopping=is_stopping)
        for request in self.running:
            self._publish(request)

    def abort(self, request: SimRequest) -> None:
        """End a request wherever it is; the blocks of a load under way stay until it ends."""
        self.scheduler.request_finished(request)
        if request.phase is not Phase.LOADING:
            self._leave(request)
            self._free_tables(request)
        request.phase = Phase.ENDED

    def preempt(self, request: SimRequest) -> None:
        """Take a running request's blocks away."""
        self._preempted.add(request.request_id)
        self.running.remove(request)
        self._free_tables(request)
        request.phase, request.run = Phase.WAITING, None
        request.num_computed = request.num_placeholders = 0
        self.waiting.insert(0, request)

    def reset(self) -> None:
        """Change the weights: pre-empt everybody, empty the prefix cache, reset the connector."""
        assert not self.steps
        for request in list(self.running):
            self.preempt(request)
        for request in self.waiting:
            self._free_tables(request)
            request.num_computed = 0
        for request in self.loading.values():
            request.is_load_void = True
        self.pool.forget_all()
        self.scheduler.reset()
        self.weights += 1

    def _schedule_running(
        self, request: SimRequest, chunk: int, drafts: list[bool], output: FakeStep, works: list[Work]
    ) -> None:
        if request.phase is not Phase.RUNNING:
            return
        missing = request.num_tokens + request.num_placeholders - request.num_computed
        if missing < 1 or request.num_tokens + request.num_placeholders >= request.max_tokens:
            return
        drafts = drafts if missing == 1 else []
        num_tokens = min(missing, chunk) + len(drafts)
        new_blocks = self._grow_or_preempt(request, num_tokens, output)
        if new_blocks is None:
            return
        ids = tuple(new_blocks) if any(new_blocks) else None
        output.scheduled_cached_reqs.add(request.request_id, request.num_computed, ids)
        works.append(self._start_work(request, num_tokens, drafts, output))

    def _grow_or_preempt(
        self, request: SimRequest, num_tokens: int, output: FakeStep
    ) -> list[list[int]] | None:
        while (new_blocks := self._grow(request, request.num_computed + num_tokens)) is None:
            others = [other for other in self.running if other.request_id not in output.num_scheduled_tokens]
            self.preempt(others[-1])
            if others[-1] is request:
                return None
        return new_blocks

    def _schedule_waiting(self, request: SimRequest, chunk: int, output: FakeStep, works: list[Work]) -> None:
        if request.request_id in self._preempted:
            return
        num_external = 0
        if request.num_computed == 0:
            shared = self._find_on_device(request)
            request.num_local = len(shared) * BLOCK_TOKENS
            found, is_async = self.scheduler.get_num_new_matched_tokens(request, request.num_local)
            if found is None:
                return
            assert is_async is (found > 0)
            num_external = found
            self.pool.share(shared)
            request.tables = [list(shared) if idx == 0 else [] for idx in range(len(self.windows))]
            request.num_computed = request.num_local + num_external
        missing = request.num_tokens - request.num_computed
        assert missing > 0, "a token must be left to compute"
        num_tokens = min(chunk, missing)
        # Whoever loads gets the blocks of its whole prompt, or two loaded requests could wait for each other.
        if self._grow(request, request.num_computed + (missing if num_external else num_tokens)) is None:
            self._free_tables(request)
            request.num_computed = 0
            return
        self.scheduler.update_state_after_alloc(request, FakeBlocks(tables_of(request)), num_external)
        self.waiting.remove(request)
        if num_external:
            request.num_loaded = num_external
            request.phase, request.reports = Phase.LOADING, {}
            self.loading[request.request_id] = request
            return
        request.phase, request.run = Phase.RUNNING, Run(list(request.tokens), request.num_computed)
        self.running.append(request)
        self._announce(request, output)
        works.append(self._start_work(request, num_tokens, [], output))

    def _announce(self, request: SimRequest, output: FakeStep) -> None:
        tables, computed = tables_of(request), request.num_computed
        if request.is_known:
            output.scheduled_cached_reqs.add(request.request_id, computed, tables, is_resumed=True)
        else:
            output.scheduled_new_reqs.append(FakeNewRequest(request.request_id, tables, computed))
        request.is_known = True

    def _start_work(self, request: SimRequest, num_tokens: int, drafts: list[bool], output: FakeStep) -> Work:
        output.num_scheduled_tokens[request.request_id] = num_tokens
        request.num_computed += num_tokens
        is_sampling = request.num_computed >= request.num_tokens + request.num_placeholders
        if is_sampling:
            request.num_placeholders += 1 + len(drafts)
        assert request.run is not None
        return Work(request, request.run, list(tables_of(request)), num_tokens, drafts, is_sampling)

    def _forward(self, work: Work) -> list[int]:
        """Compute a request's tokens on every worker and return what was sampled."""
        run = work.run
        first, drafted = run.num_computed, list(run.tokens[: run.num_computed])
        num_known = work.num_tokens - len(work.drafts)
        drafted += run.tokens[first : first + num_known]
        num_accepted, is_accepting = 0, True
        for is_right in work.drafts:
            drafted.append(next_token(drafted) + (not is_right))
            is_accepting &= is_right
            num_accepted += is_accepting
        for worker in self.workers:
            for group, table in enumerate(work.tables):
                self._check_context(worker, work, group, table, first)
                for position in range(first, first + work.num_tokens):
                    kv = kv_of(tuple(drafted[: position + 1]), group, self.weights)
                    worker.device[table[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = kv
        run.num_computed = first + num_known + num_accepted
        if not work.is_sampling:
            return []
        sampled = drafted[first + num_known : run.num_computed]
        sampled.append(next_token(drafted[: run.num_computed]))
        run.tokens += sampled
        return sampled

    def _check_context(self, worker: SimWorker, work: Work, group: int, table: list[int], first: int) -> None:
        """Compare what the first token of the step attends to with the oracle."""
        window = self.windows[group]
        oldest = 0 if window is None else max(0, first - window + 1)
        cells = worker.device[table].reshape(-1)[oldest:first].tolist()
        for position, found in enumerate(cells, oldest):
            expected = kv_of(tuple(work.run.tokens[: position + 1]), group, self.weights)
            assert found == expected, f"{work.request.request_id}: wrong bytes at token {position}"

    def _take_tokens(self, work: Work, sampled: list[int], *, is_stopping: bool) -> None:
        request = work.request
        if request.run is not work.run or request.phase is not Phase.RUNNING:
            return
        request.num_placeholders -= 1 + len(work.drafts)
        request.num_computed -= 1 + len(work.drafts) - len(sampled)
        request.tokens += sampled
        if is_stopping or request.num_tokens >= request.max_tokens:
            self._publish(request)
            self.abort(request)

    def _note_load(self, rank: int, req_id: str, *, has_failed: bool) -> None:
        request = self.loading[req_id]
        assert rank not in request.reports, f"worker {rank} reported the load of {req_id} twice"
        assert has_failed or not request.is_load_void, f"{req_id}: a load of before the reset was served"
        request.reports[rank] = has_failed
        if len(request.reports) < len(self.workers):
            return
        del self.loading[req_id]
        if request.phase is Phase.ENDED:
            self._free_tables(request)
            return
        request.phase = Phase.WAITING
        self.waiting.insert(0, request)
        if any(request.reports.values()):
            self.num_failed_loads += 1
            request.num_computed = 0 if request.is_load_void else request.num_local
            if request.num_computed == 0:
                self._free_tables(request)
        else:
            self.num_loaded_tokens += request.num_loaded
        request.is_load_void = False

    def _find_on_device(self, request: SimRequest) -> list[int]:
        if self.windows != [None]:
            return []
        return self.pool.find(request.block_hashes[: (request.num_tokens - 1) // BLOCK_TOKENS])

    def _publish(self, request: SimRequest) -> None:
        """Let others find the full blocks of confirmed tokens that have been computed."""
        if self.windows != [None] or request.run is None:
            return
        num_full = min(request.run.num_computed, request.num_computed, request.num_tokens) // BLOCK_TOKENS
        for block_id, block_hash in zip(request.tables[0][:num_full], request.block_hashes, strict=False):
            self.pool.publish(block_id, block_hash)

    def _grow(self, request: SimRequest, num_tokens: int) -> list[list[int]] | None:
        """Give a request the blocks for that many tokens; what has left a window is freed."""
        num_sure = request.num_computed - request.num_placeholders
        lengths = [len(table) for table in request.tables]
        num_blocks = -(-num_tokens // BLOCK_TOKENS)
        dead = [
            0 if window is None else max(0, num_sure - window + 1) // BLOCK_TOKENS for window in self.windows
        ]
        wanted = [
            max(0, num_blocks - max(length, first)) for length, first in zip(lengths, dead, strict=True)
        ]
        if sum(wanted) > self.pool.num_free:
            return None
        for table, first, num_new in zip(request.tables, dead, wanted, strict=True):
            self.pool.free(table[:first])
            table[:first] = [NULL_BLOCK] * min(first, len(table))
            table.extend([NULL_BLOCK] * max(0, min(first, num_blocks) - len(table)))
            table.extend(self.pool.allocate(num_new) or [])
        return [table[length:] for table, length in zip(request.tables, lengths, strict=True)]

    def _free_tables(self, request: SimRequest) -> None:
        for table in request.tables:
            self.pool.free(table)
        request.tables = [[] for _ in self.windows]

    def _leave(self, request: SimRequest) -> None:
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)


def tables_of(request: SimRequest) -> tuple[list[int], ...]:
    """Return a copy of a request's block tables."""
    return tuple(list(table) for table in request.tables)
