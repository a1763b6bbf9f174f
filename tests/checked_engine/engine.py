"""A small engine that drives both halves of the connector as vLLM does, and checks each byte that it computes with.

It schedules with chunked prefill, drafts, pre-emption, aborts and resets, up to two steps ahead of their outputs.
The order of its decisions is vLLM's: running requests first, then those that hold blocks of a load, then those
that wait; a pre-empted request waits until its steps under way have come back, unless a reset has thrown their
output away; a load gets the blocks of what it brings and nothing more.

The storm and the model of the connector drive it, each over tiers and with operations of its own.

Source: the scheduler of vLLM 0.28 to 0.32.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

from tests.checked_engine.blocks import CheckedGroup, DeviceCache
from tests.checked_engine.laws import check_found_prefix, check_metadata
from tests.checked_engine.memory import GARBAGE, NULL_BLOCK, HostRows
from tests.checked_engine.requests import (
    CheckedRequest,
    Phase,
    Plan,
    Run,
    Step,
    Tables,
    Work,
)
from tests.checked_engine.rules import EngineRules, ResetKind
from tests.checked_engine.workers import CheckedWorker, execute_step, expect_stores
from tests.connector.fakes import HASH_TOKENS, FakeBlocks, FakeRegionSpec, FakeSpec

from kvtier.base import GPULoadStoreSpec, OffloadingManager
from kvtier.config import GroupKind, OffloadingConfig
from kvtier.connector.common import LostLoadStoreSpec, OffloadingConnectorMetadata
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.cpu.block_table import BlockTable
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.engines.common.step import NamedStates, NewRequest, WorkerOutput


class CheckedEngine:
    """The engine.

    Args:
        config: KV groups and number of workers.
        manager: what the scheduler half asks.
        table: host memory, as the manager has it.
        rows: its bytes.
        num_device_blocks: size of the device pool, the null block included.
        rules: how it goes about its steps.
        weights: of the model at the start.
        clock: seconds, monotonic.
        wall_clock: seconds since 1970.

    Attributes:
        seen: how often each kind of event has happened.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        manager: OffloadingManager,
        table: BlockTable,
        rows: HostRows,
        num_device_blocks: int,
        rules: EngineRules,
        weights: int = 0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.groups = [
            CheckedGroup(group.kind, group.block_size_tokens, group.window_tokens) for group in config.groups
        ]
        spec = FakeRegionSpec if rules.has_region else FakeSpec
        self.scheduler = OffloadingConnectorScheduler(
            spec(config, manager), clock=clock, wall_clock=wall_clock
        )
        self.workers = [
            CheckedWorker(rank, config, rows, num_device_blocks, spec) for rank in range(config.world_size)
        ]
        self.cache = DeviceCache(self.groups, num_device_blocks)
        self.waiting: list[CheckedRequest] = []
        self.holding: list[CheckedRequest] = []
        self.running: list[CheckedRequest] = []
        self.loading: dict[str, CheckedRequest] = {}
        self.steps: list[Step] = []
        self.weights = weights
        self.num_resets = 0
        self.seen: Counter[str] = Counter()
        self._config, self._table, self._rules = config, table, rules
        self._preempted: set[str] = set()
        self._has_void_jobs = False
        self._may_move = not rules.has_region

    @property
    def requests(self) -> list[CheckedRequest]:
        """Requests that have not ended, and aborted ones whose load has not."""
        aborted = [request for request in self.loading.values() if request.phase is Phase.ENDED]
        return [*self.waiting, *self.holding, *self.running, *aborted]

    def add(self, request: CheckedRequest) -> None:
        """Let a request wait."""
        request.tables = [[] for _ in self.groups]
        self.waiting.append(request)

    def step(self, chunk_tokens: int, drafts: Sequence[bool] = ()) -> None:
        """Let one step pass as a whole, or planned ahead of the one before where the engine does that."""
        while len(self.steps) > self._rules.num_steps_ahead:
            self.execute()
            self.process_output()
        self.schedule(chunk_tokens, drafts)
        self.execute()
        while len(self.steps) > self._rules.num_steps_ahead:
            self.process_output()

    def settle(self) -> None:
        """Execute what was planned and take its output."""
        while self.steps:
            self.execute()
            self.process_output()

    def schedule(self, chunk_tokens: int, drafts: Sequence[bool] = ()) -> None:
        """Plan one step, unless the engine is as far ahead as it may be."""
        if len(self.steps) > self._rules.num_steps_ahead:
            return
        plan = Plan()
        self.cache.begin_step()
        num_preempted = self.seen["pre-empted for blocks"]
        for request in list(self.running):
            if request.phase is Phase.RUNNING:
                self._schedule_running(request, chunk_tokens, list(drafts), plan)
        if self.seen["pre-empted for blocks"] == num_preempted:
            self._admit(chunk_tokens, plan)
        states = None
        if self._rules.state_interval is not None:
            named = self.cache.name_states(plan.works, self._rules.state_interval)
            states = NamedStates(named)
            self.seen["states named"] += any(named.values())
        output = plan.output(self._preempted, states)
        self._preempted = set()
        num_refused = self.scheduler.counters.refused_stores
        metadata = self.scheduler.build_connector_meta(output)
        for work in plan.works:
            work.request.was_refused = self.scheduler.counters.refused_stores > num_refused
        holders = {request.request_id: request for request in [*self.running, *self.holding]}
        check_metadata(metadata, holders, self.groups, self._config)
        self._note_load_jobs(metadata)
        self.seen["two steps under way"] += bool(plan.works and self.steps and self.steps[-1].works)
        assert self._may_move or not (metadata.store_jobs or metadata.load_jobs)
        step = Step(metadata, plan.works, self.weights)
        expect_stores(step, self.workers, self.groups)
        self.steps.append(step)

    def execute(self) -> None:
        """Carry out the oldest step that was not, if there is one, on every worker."""
        step = next((step for step in self.steps if step.report is None), None)
        if step is not None:
            is_hooked = self._rules.calls_preemption_hook
            execute_step(step, self.workers, self.groups, calls_preemption_hook=is_hooked)

    def process_output(self, *, is_stopping: bool = False) -> None:
        """Take the output of the oldest step if it was executed; with ``is_stopping`` each sampling request ends."""
        if not self.steps or self.steps[0].report is None:
            return
        step = self.steps.pop(0)
        for _, req_id, failed_blocks in step.ended_loads:
            if failed_blocks is not None:
                self._note_failure(self.loading[req_id], failed_blocks)
        for work, sampled in zip(step.works, step.sampled, strict=True):
            assert GARBAGE not in sampled, "what was computed with a failed load is served"
            self._take_tokens(work, sampled, is_stopping=is_stopping)
        # Requests that ended by these tokens are finished by now: vLLM hands on the workers' reports last.
        self.scheduler.update_connector_output(WorkerOutput(step.report))
        for rank, req_id, failed_blocks in step.ended_loads:
            self._note_load(rank, req_id, has_failed=failed_blocks is not None)
        self._may_move = True
        self._has_void_jobs &= bool(self.loading) or self.scheduler.has_open_stores()

    def copy(self, num_jobs: int, rng: random.Random | None = None) -> None:
        """Let each handler carry out some jobs."""
        for worker in self.workers:
            worker.loads.work(num_jobs, rng)
            worker.stores.work(num_jobs, rng)

    def broken_laws(self) -> list[str]:
        """Return what the handlers have noticed."""
        return [law for worker in self.workers for law in worker.broken_laws]

    def abort(self, request: CheckedRequest) -> None:
        """End a request wherever it is; the blocks of a load under way stay until it ends."""
        self.seen[f"aborted while {request.phase.value}"] += 1
        self.seen["aborted with a step under way"] += request.num_in_flight > 0
        self._end(request)

    def preempt(self, request: CheckedRequest, *, is_dropping_stale: bool = False) -> None:
        """Take a running request's blocks away."""
        self._preempted.add(request.request_id)
        self.running.remove(request)
        self.cache.free(request)
        self.seen["pre-empted with a step under way"] += request.num_in_flight > 0
        request.phase, request.run, request.is_mixed = Phase.WAITING, None, False
        request.is_dropping_stale = is_dropping_stale or (request.is_dropping_stale and request.num_stale > 0)
        request.num_stale = request.num_in_flight
        request.num_computed = request.num_placeholders = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)

    def reset(self, kind: ResetKind, weights: int) -> bool:
        """Reset the connector, and what ``kind`` says besides.

        Args:
            kind: vLLM changes the weights at any time, and pre-empts every request. Others wait until no output is
                outstanding; loads may be under way then, and fail; running requests may keep the KV that the old
                weights have computed. Or the connector alone forgets: the device's own cache stays, and so do the
                weights.
            weights: the new ones.

        Returns:
            False, and nothing but the pre-emption was done, when vLLM would refuse as a request holds blocks of a load.
        """
        if kind is ResetKind.CONNECTOR:
            self.seen["reset of the connector alone"] += bool(self.steps and self.loading)
        elif kind is ResetKind.AS_VLLM:
            for request in reversed(self.running):
                self.preempt(request, is_dropping_stale=True)
            if self.holding or self.loading:
                return False
            self.seen["reset with a step under way"] += bool(self.steps)
        else:
            self.settle()
            self._void(is_keeping=kind is ResetKind.KEEPING)
        if kind is not ResetKind.CONNECTOR:
            self.cache.forget()
            self.weights = weights
        self.scheduler.reset()
        self.num_resets += 1
        self.seen["reset"] += 1
        self._has_void_jobs = bool(self.loading) or self.scheduler.has_open_stores()
        return True

    def _void(self, *, is_keeping: bool) -> None:
        """Take back what the old weights have computed or loads bring, but from requests that keep it."""
        for request in list(self.running):
            request.is_mixed = True
            self.seen["kept running over a reset"] += is_keeping
            if not is_keeping:
                self.preempt(request)
        for request in [request for request in self.holding if request.phase is Phase.LOADED]:
            self.cache.free(request)
            request.num_computed = 0
        for request in self.loading.values():
            request.is_load_void = True
            self.seen["reset with a load under way"] += 1

    def _schedule_running(self, request: CheckedRequest, chunk: int, drafts: list[bool], plan: Plan) -> None:
        missing = request.num_tokens + request.num_placeholders - request.num_computed
        if missing < 1 or request.num_tokens + request.num_placeholders >= request.max_tokens:
            return
        drafts = drafts if missing == 1 else []
        num_tokens = min(missing, chunk) + len(drafts)
        appended = self._grow_or_preempt(request, request.num_computed + num_tokens)
        if appended is None:
            return
        ids = tuple(list(table) for table in appended) if any(appended) else None
        plan.cached.append((request.request_id, False, ids, request.num_computed))
        self._start_work(request, num_tokens, drafts, plan)

    def _grow_or_preempt(self, request: CheckedRequest, num_tokens: int) -> Tables | None:
        nothing: Tables = [[] for _ in self.groups]
        while (appended := self.cache.grow(request, request.num_computed, num_tokens, nothing)) is None:
            victim = self.running[-1]
            self.preempt(victim)
            self.seen["pre-empted for blocks"] += 1
            if victim is request:
                return None
        return appended

    def _admit(self, chunk: int, plan: Plan) -> None:
        """Start what waits, in order, until something finds no room."""
        for request in [*self.holding, *self.waiting]:
            is_delayed = request.num_stale > 0 and not request.is_dropping_stale
            if request.phase is Phase.LOADING or is_delayed:
                continue
            if request.phase is Phase.LOADED and not any(request.tables):
                self.holding.remove(request)
                self.waiting.insert(0, request)
                request.phase = Phase.WAITING
            if not self._start(request, chunk, plan):
                return

    def _start(self, request: CheckedRequest, chunk: int, plan: Plan) -> bool:
        """Start a request, or its load; return False when there is no room for it."""
        searched = self._search(request)
        if searched is None:
            return True
        num_local, num_external, local = searched
        num_computed = request.num_computed or num_local + num_external
        missing = request.num_tokens - num_computed
        is_to_wait = num_external > 0
        num_new = 0 if is_to_wait else min(chunk, missing)
        if self.cache.holds_new_state(local) or not self.cache.fits(
            request, local, num_computed, request.num_tokens
        ):
            return False
        num_reserved = self._num_reserved_blocks() if is_to_wait else 0
        if self.cache.grow(request, num_computed, num_computed + num_new, local, num_reserved) is None:
            self.seen["no room for a load"] += num_external > 0
            return False
        self.scheduler.update_state_after_alloc(request, FakeBlocks(tables_of(request)), num_external)
        if request.first_begin is None:
            request.first_begin = (num_local, num_external)
        self._note_begun(request, num_computed)
        if is_to_wait:
            self._note_load_begun(request, num_local, num_external)
            return True
        self.seen["device hit"] += num_local > 0
        request.phase = Phase.RUNNING
        request.run = Run(list(request.tokens), [self.weights] * num_computed)
        self.running.append(request)
        self._announce(request, plan)
        self._start_work(request, num_new, [], plan)
        return True

    def _search(self, request: CheckedRequest) -> tuple[int, int, Tables] | None:
        """Return the tokens on the device, those to be loaded, and cached blocks; None: wait."""
        if request.num_computed > 0:
            return 0, 0, [[] for _ in self.groups]
        num_local, local = self.cache.find_prefix(request)
        found, is_async = self.scheduler.get_num_new_matched_tokens(request, num_local)
        if found is None:
            self._note_wait(request)
            return None
        assert is_async is (found > 0)
        assert is_async or num_local + found < request.num_tokens, "a token must be left to compute"
        assert found == 0 or not request.has_failed_load, (
            f"{request.request_id} loads again after a failed load"
        )
        check_found_prefix(self.groups, request, num_local, found, self._config, self._table)
        return num_local, found, local

    def _note_begun(self, request: CheckedRequest, num_computed: int) -> None:
        request.num_computed = num_computed
        if request.epoch != self.num_resets:
            request.epoch, request.is_whole = self.num_resets, num_computed == 0 and not self._has_void_jobs
        self._leave(request)

    def _announce(self, request: CheckedRequest, plan: Plan) -> None:
        tables, computed = tables_of(request), request.num_computed
        if request.num_preemptions:
            self.seen["resumed with output"] += request.num_tokens > request.num_prompt_tokens
            self.seen["resumed in the step of its pre-emption"] += request.request_id in self._preempted
        if request.num_preemptions and not self._rules.names_resumed_as_new:
            plan.cached.append((request.request_id, True, tables, computed))
        else:
            plan.new.append(NewRequest(request.request_id, tables, computed))

    def _start_work(self, request: CheckedRequest, num_tokens: int, drafts: list[bool], plan: Plan) -> None:
        assert request.run is not None
        plan.num_tokens[request.request_id] = num_tokens
        if not request.is_mixed:
            self.cache.publish(request, request.num_computed + num_tokens)
        request.num_computed += num_tokens
        request.num_in_flight += num_tokens
        is_sampling = request.num_computed >= request.num_tokens + request.num_placeholders
        if is_sampling:
            request.num_placeholders += 1 + len(drafts)
        else:
            self.seen["chunk of a prompt"] += 1
        plan.works.append(
            Work(request, request.run, list(tables_of(request)), num_tokens, drafts, is_sampling)
        )

    def _take_tokens(self, work: Work, sampled: list[int], *, is_stopping: bool) -> None:
        request = work.request
        request.num_in_flight -= work.num_tokens
        is_stale = request.num_stale > 0
        request.num_stale -= work.num_tokens if is_stale else 0
        if request.phase is Phase.ENDED or not work.is_sampling:
            return
        if is_stale and request.is_dropping_stale:
            self.seen["output dropped"] += 1
            return
        num_rejected = 1 + len(work.drafts) - len(sampled)
        if is_stale:
            self.seen["output after a pre-emption"] += 1
        else:
            request.num_placeholders -= 1 + len(work.drafts)
            request.num_computed -= num_rejected
            self.seen["draft accepted"] += len(sampled) > 1
            self.seen["draft rejected"] += num_rejected > 0
            self.seen["draft rejected with the next step planned"] += num_rejected > 0 < request.num_in_flight
        request.tokens += sampled[: max(0, request.max_tokens - request.num_tokens)]
        if is_stopping or request.num_tokens >= request.max_tokens:
            self._end(request)
        elif request.phase is Phase.RUNNING and not request.is_mixed:
            self.cache.publish(request, request.num_computed - request.num_placeholders)

    def _note_wait(self, request: CheckedRequest) -> None:
        self.seen["told to wait"] += 1
        first_block = request.block_hashes[:1]
        is_shared = any(other.block_hashes[:1] == first_block for other in self.loading.values())
        self.seen["told to wait while its prefix is loaded"] += is_shared

    def _note_load_begun(self, request: CheckedRequest, num_local: int, num_external: int) -> None:
        request.phase, request.reports, request.num_external = Phase.LOADING, {}, num_external
        self.holding.append(request)
        self.loading[request.request_id] = request
        self.seen["load beyond a device hit"] += num_local > 0
        self.seen["load to resume"] += request.num_preemptions > 0
        self.seen["load of part of a table"] += any(table[0] == NULL_BLOCK for table in request.tables)
        self.seen["load of output tokens"] += request.num_computed > request.num_prompt_tokens
        self.seen["load within a limit"] += request.limit("load") < request.num_tokens
        sources = self.scheduler.get_tokens_by_tier(request.request_id, num_external)
        assert sum(sources.values()) == num_external
        self.seen["load from a tier"] += len(sources.keys() - {"CPU"})

    def _note_load_jobs(self, metadata: OffloadingConnectorMetadata) -> None:
        """Remember which slots each load reads: no block is loaded twice at the same time."""
        for job in metadata.load_jobs.values():
            source, destination = job.transfer_spec
            self.seen["load lost"] += isinstance(source, LostLoadStoreSpec)
            slots = set(source.block_ids.tolist()) if isinstance(source, CPULoadStoreSpec) else set()
            for other in self.loading.values():
                assert not slots & other.load_slots, (
                    f"{job.req_id}: a block is loaded that {other.request_id} loads"
                )
            self.loading[job.req_id].load_slots = slots
            assert isinstance(destination, GPULoadStoreSpec)
            factor = self._config.block_size_factor
            for size, first in zip(destination.group_sizes, destination.block_indices, strict=True):
                self.seen["load of the rest of a block"] += size > 0 and first % factor > 0

    def _note_failure(self, request: CheckedRequest, failed_blocks: list[int]) -> None:
        """Draw vLLM's conclusion from a failed load: with one group it goes on from the first lost block."""
        request.has_failed_load = True
        # Blocks that left a window were not loaded either, so their places before the first lost block hold nothing.
        if len(self.groups) > 1 or self.groups[0].kind is not GroupKind.FULL:
            request.num_computed = 0
            return
        num_blocks = self.groups[0].num_blocks(request.num_computed)
        table = request.tables[0][:num_blocks]
        lost = [block for block, block_id in enumerate(table) if block_id in failed_blocks]
        request.num_computed = lost[0] * self.groups[0].block_tokens if lost else request.num_computed

    def _note_load(self, rank: int, req_id: str, *, has_failed: bool) -> None:
        request = self.loading[req_id]
        assert rank not in request.reports, f"worker {rank} reported the load of {req_id} twice"
        assert has_failed or not request.is_load_void, f"{req_id}: a load of before the reset was served"
        request.reports[rank] = has_failed
        if len(request.reports) < len(self.workers):
            return
        del self.loading[req_id]
        request.load_slots = set()
        num_failed = sum(request.reports.values())
        assert request.has_failed_load is (num_failed > 0)
        outcome = "good" if num_failed == 0 else "failed" if num_failed > 1 else "failed on one worker"
        self.seen[f"load {outcome}"] += 1
        if request.phase is Phase.ENDED:
            self.cache.free(request)
            return
        request.phase = Phase.LOADED
        if request.is_load_void or request.num_computed == 0:
            request.num_computed, request.is_load_void = 0, False
            self.cache.free(request)
        self.cache.publish(request, request.num_computed)
        if request.num_computed == request.num_tokens:
            request.num_computed -= 1  # the token to sample from is computed again
            self.seen["load of a whole prompt"] += 1

    def _num_reserved_blocks(self) -> int:
        """Return the blocks that prompts under way still need: a load must not take them."""
        prompts = [request for request in self.running if request.num_computed < request.num_tokens]
        return sum(map(self.cache.num_missing, [*self.holding, *prompts]))

    def _end(self, request: CheckedRequest) -> None:
        num_output_blocks = len(request.block_hashes) - request.num_prompt_tokens // HASH_TOKENS
        is_prompt_only = self._config.settings.offload_prompt_only
        self.seen["blocks of output, prompts stored alone"] += is_prompt_only and num_output_blocks > 0
        self.scheduler.request_finished(request)
        self._leave(request)
        if request.phase is not Phase.LOADING:
            self.cache.free(request)
        request.phase = Phase.ENDED

    def _leave(self, request: CheckedRequest) -> None:
        for queue in (self.waiting, self.holding, self.running):
            if request in queue:
                queue.remove(request)


def tables_of(request: CheckedRequest) -> tuple[list[int], ...]:
    """Return a copy of a request's block tables."""
    return tuple(list(table) for table in request.tables)
