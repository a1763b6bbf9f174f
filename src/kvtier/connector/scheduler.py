"""The scheduler half: which requests wait, what is loaded for them, what is stored of them.

It moves no byte and never blocks. What it decides lives beside it: how much of a prefix can be loaded
(prefix_search), which device blocks a load writes (load_planner), which tiers it comes from (hit_sources), what
can be stored (store_planner), which stores others must wait for (fences), what is in flight (transfer_jobs),
whether it may start at all (handshake), what is recorded (recorder). The order of a step stands in ``protocols``.

Source: the division follows vLLM's OffloadingConnectorScheduler as of May 2026.
"""

import logging
import time
from collections.abc import Callable, Sequence
from itertools import takewhile

from kvtier.base import (
    OffloadingManager,
    OffloadingSpec,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    TransferJobId,
    TransferSpec,
    get_offload_block_hash,
)
from kvtier.connector.common import (
    BlockRemoved,
    BlockStored,
    LostLoadStoreSpec,
    OffloadingConnectorMetadata,
    TransferJob,
)
from kvtier.connector.groups import make_group_layouts
from kvtier.connector.handshake import RegionHandshake
from kvtier.connector.jobs import BlockFences, JobKind, OpenTransfer, TransferJobs
from kvtier.connector.layerwise import LayerwiseChoice
from kvtier.connector.load_or_compute import LoadOrCompute
from kvtier.connector.metrics import SchedulerCounters, count_hit_sources
from kvtier.connector.planning import iterate_load_keys, list_storable_blocks, offer_blocks, plan_load
from kvtier.connector.prefix_search import find_loadable_end, maximal_prefix_lookup, sliding_window_lookup
from kvtier.connector.protocols import (
    ConnectorOutput,
    DeviceBlocks,
    PromotingManager,
    Request,
    SchedulerOutput,
)
from kvtier.connector.request_state import RequestState, follow_allocations, make_request_state
from kvtier.errors import BlockNotReadyError
from kvtier.recording.recorder import TraceRecorder
from kvtier.recording.trace_line import StopReason

logger = logging.getLogger(__name__)

WAIT: tuple[int | None, bool] = (None, False)
NOTHING: tuple[int | None, bool] = (0, False)


class OffloadingConnectorScheduler:
    """Decides, for every step of the engine, what the workers load and store. Used from one thread.

    Args:
        spec: builds the manager; its configuration names the KV groups and the number of workers.
        recorder: writes a trace of the requests; None records nothing.
        clock: seconds, monotonic; how long steps take is measured with it.

    Attributes:
        manager: which blocks are held; both searches depend on it alone.
        counters: what was decided so far.
        layerwise: what is loaded while its request computes.
        recorder: the recorder; an engine that knows when a request came tells it before the first search.
        load_choice: how much of what is found is loaded.
    """

    def __init__(
        self,
        spec: OffloadingSpec,
        recorder: TraceRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recorder = recorder
        self.manager = spec.get_manager()
        # An isinstance of a protocol is dear, and the answer never changes.
        self._promoting = self.manager if isinstance(self.manager, PromotingManager) else None
        self.counters = SchedulerCounters()
        self.layerwise = LayerwiseChoice(spec)
        self._layouts = make_group_layouts(spec)
        self._handshake = RegionHandshake(spec)
        self._requests: dict[str, RequestState] = {}
        self.load_choice = LoadOrCompute(spec, self.manager, self._requests, clock)
        self._jobs = TransferJobs(spec.config.world_size)
        self._fences = BlockFences()
        self._load_jobs: dict[TransferJobId, TransferJob] = {}
        self._jobs_to_flush: set[TransferJobId] = set()
        self._jobs_to_fail: set[TransferJobId] = set()
        self._is_prompt_only = spec.config.settings.offload_prompt_only

    def get_num_new_matched_tokens(
        self,
        request: Request,
        num_computed_tokens: int,
        key_salt: bytes = b"",
        *,
        can_wait_by_layer: bool = False,
    ) -> tuple[int | None, bool]:
        """Say how many tokens of a waiting request can be loaded.

        Args:
            request: asked for in every step until it is scheduled.
            num_computed_tokens: leading tokens that device memory holds.
            key_salt: what decides the bytes of the request's blocks beyond what its content hashes cover, for
                example the weights of an adapter; at most 64 bytes. Another salt finds other blocks.
            can_wait_by_layer: whether the engine may schedule the request at once, waits for each layer in the step
                that then begins its load, and plans no further step before that one's report.

        Returns:
            How many tokens beyond those can be loaded, and True when the load runs beside the engine's steps and the
            request waits for it; False when none can, or when it is scheduled at once and waits layer by layer. None:
            ask again in the next step. At least one token is left to compute.
        """
        state = self._requests.get(request.request_id)
        is_early = self.layerwise.shares_blocks(request, num_computed_tokens)
        if is_early or _still_waits(state, num_computed_tokens, self.manager, self._jobs):
            return WAIT
        if state is None:
            state = self._requests[request.request_id] = make_request_state(
                request, len(self._layouts), is_prompt_only=self._is_prompt_only, key_salt=key_salt
            )
            state.grow_keys(self._layouts)
            self.manager.note_request([tuple(keys) for keys in state.keys], state.context)
            if self.recorder is not None:
                self.recorder.on_arrival(request.request_id)
        state.num_local_tokens = num_computed_tokens
        if state.has_failed_load or not self._handshake.is_open:
            return WAIT if self._handshake.is_awaited else NOTHING
        end_token = self._find_loadable_end(state, num_computed_tokens)
        if end_token is None:
            return WAIT
        if end_token > num_computed_tokens:
            # What is being loaded for another request is waited for and not loaded twice.
            wanted = iterate_load_keys(self._layouts, state.keys, num_computed_tokens, end_token)
            state.blocking_job = self._jobs.find_load_of(wanted)
            if state.blocking_job is not None:
                return WAIT
        if not state.is_touched:
            state.is_touched = True
            self._touch(state, request.num_tokens)
        num_tokens = end_token - num_computed_tokens
        return self.layerwise.answer(state, self._jobs, num_tokens, can_wait_by_layer=can_wait_by_layer)

    def update_state_after_alloc(
        self, request: Request, blocks: DeviceBlocks, num_external_tokens: int
    ) -> None:
        """Begin the load of a request whose device blocks are allocated.

        Args:
            request: the request.
            blocks: its whole block table.
            num_external_tokens: what get_num_new_matched_tokens answered, or 0 when nothing is to be loaded.

        Raises:
            InvariantError: there are fewer device blocks than tokens to load.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            return
        if num_external_tokens == 0:
            self.load_choice.on_begun(state, 0, self.counters)
            return
        first_token = state.num_local_tokens or 0
        end_token = first_token + num_external_tokens
        plan = plan_load(self._layouts, state.keys, blocks.get_block_ids(), first_token, end_token)
        state.has_blocks = True
        promoted = {} if self._promoting is None else self._promoting.promoted_for(state.context)
        state.hit_sources = count_hit_sources(self._layouts, state, promoted, num_external_tokens)
        self.counters.load_jobs += 1
        try:
            transfer = TransferSpec(self.manager.prepare_load(plan.keys, state.context), plan.device_spec)
            job_id = self._jobs.open(JobKind.LOAD, state, plan.keys)
        except BlockNotReadyError as error:
            # The engine waits for this load already, and only a worker can tell it that a load ended. So one is
            # sent that fails there; raising would end the engine over a block that is merely recomputed.
            logger.warning("request %s: its load is lost, it is computed: %s", request.request_id, error)
            self.counters.lost_load_jobs += 1
            transfer = TransferSpec(LostLoadStoreSpec(), plan.device_spec)
            job_id = self._jobs.open(JobKind.LOAD, state, [])
        self._load_jobs[job_id] = TransferJob(request.request_id, transfer, state.is_layerwise)
        if state.is_layerwise:
            self.layerwise.begin(job_id, request, first_token)
            self.counters.layerwise_load_jobs += 1
        self.load_choice.on_begun(state, num_external_tokens, self.counters)
        self._flush(plan.device_spec.block_ids.tolist())

    def get_hit_sources(self, req_id: str, num_external_tokens: int) -> dict[str, int]:
        """Say where the tokens of a load come from; ask when update_state_after_alloc has begun it.

        Args:
            req_id: the request.
            num_external_tokens: tokens of the load.

        Returns:
            Tokens by "CPU", for the primary tier, or a secondary tier's type, for blocks that were promoted
            while the request waited for them. They sum to ``num_external_tokens``; empty when that is 0 or the
            request is unknown.
        """
        state = self._requests.get(req_id)
        return {} if state is None or num_external_tokens == 0 else dict(state.hit_sources)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OffloadingConnectorMetadata:
        """Return what the workers have to do in this step, and end the manager's step.

        Effects:
            Follows the engine's block tables, prepares stores, starts promotions.
        """
        if not self._handshake.is_open:
            self._handshake.on_step()
        written = follow_allocations(self._layouts, self._requests, scheduler_output)
        if written:
            self._flush(written)
        store_jobs: dict[TransferJobId, TransferJob] = {}
        if self._handshake.is_open:
            for req_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
                state = self._requests.get(req_id)
                if state is not None and state.may_fill_block(num_tokens):
                    store_jobs.update(self._prepare_stores(state, num_tokens))
        load_jobs = self._load_jobs
        waits_by_layer = bool(load_jobs) and any(job.is_layerwise for job in load_jobs.values())
        metadata = OffloadingConnectorMetadata(
            load_jobs,
            store_jobs,
            self._jobs_to_flush or None,
            self._jobs_to_fail or None,
            is_idle=not scheduler_output.num_scheduled_tokens,
            # How long a step waits for a load says nothing of how fast the engine computes.
            measured_step=None if waits_by_layer else self.load_choice.begin_step(scheduler_output),
        )
        self._load_jobs, self._jobs_to_flush, self._jobs_to_fail = {}, set(), set()
        self.manager.end_step()
        return metadata

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """Take what the workers reported; jobs that every worker has ended are completed in the manager."""
        report = output.kv_connector_worker_meta
        self.load_choice.take_report(report)
        if report is None:
            return
        self._handshake.record(report.region_identities)
        self.layerwise.count_workers(report.layerwise_workers)
        for job in self._jobs.count(report):
            if job.kind is JobKind.LOAD:
                self._end_load(job)
            else:
                self._end_store(job)

    def request_finished(
        self, request: Request, stop: StopReason = StopReason.UNKNOWN, *, is_traffic: bool = True
    ) -> tuple[bool, None]:
        """Forget a request that ended or was aborted; its jobs go on.

        Args:
            request: the request, with what it has generated.
            stop: why its answer ended.
            is_traffic: whether somebody has asked it; the engine's own requests are not recorded.

        Returns:
            False, the engine may free its device blocks (unfinished stores fence them), and no parameters.
        """
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            self.manager.request_finished(state.context)
        if self.recorder is not None:
            if state is None or not is_traffic:
                self.recorder.forget(request.request_id)
            else:
                record_request(self.recorder, state, stop)
        return False, None

    def take_events(self) -> list[BlockStored | BlockRemoved]:
        """Return what media have gained and lost since the last call, oldest first."""
        events: list[BlockStored | BlockRemoved] = []
        for event in self.manager.take_events():
            hashes = tuple(get_offload_block_hash(key) for key in event.keys)
            made = BlockRemoved(hashes, event.medium) if event.removed else BlockStored(hashes, event.medium)
            events.append(made)
        return events

    def has_open_stores(self) -> bool:
        """Return True until every worker has reported each store; steps, which may be empty, bring that about.

        What tiers still write does not count: they go on without steps.
        """
        return self._jobs.num_stores > 0

    def reset(self) -> None:
        """Forget every block: nothing stored so far is found again.

        Loads under way fail, so that their requests are computed; stores under way end without being kept.
        Requests that hold device blocks now are not stored until they are computed anew from their first
        token. The engine empties its own prefix cache before it calls this, and calls it when no step's output is
        outstanding: a load that such an output reports as good cannot be taken back.
        """
        loads = self._jobs.void_all()
        for job_id, job in self._load_jobs.items():
            lost = TransferSpec(LostLoadStoreSpec(), job.transfer_spec.destination)
            self._load_jobs[job_id] = TransferJob(job.req_id, lost, job.is_layerwise)
        # Workers report every load once, so a load that is on its way is failed by them and not dropped here.
        self._jobs_to_fail |= loads - self._load_jobs.keys()
        for state in self._requests.values():
            state.on_reset()
        self.manager.reset()

    def stats(self) -> dict[str, float]:
        """Return counters and gauges of the connector and of its manager, by dotted name."""
        gauges = {
            "connector.open_jobs": float(len(self._jobs)),
            "connector.fenced_jobs": float(len(self._fences)),
            "connector.requests": float(len(self._requests)),
        }
        recorded = {} if self.recorder is None else self.recorder.stats()
        chosen = self.load_choice.stats()
        return {**self.manager.stats(), **self.counters.snapshot(), **gauges, **chosen, **recorded}

    def shutdown(self) -> None:
        """End the manager and the recording, in which requests that have not ended stand as far as they got."""
        self.manager.shutdown()
        if self.recorder is not None:
            for state in self._requests.values():
                record_request(self.recorder, state, StopReason.UNKNOWN)
            self.recorder.close()

    def _maximal_prefix_lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> int | None:
        return maximal_prefix_lookup(self.manager, keys, req_context)

    def _sliding_window_lookup(
        self, keys: Sequence[OffloadKey], sliding_window_size: int, req_context: ReqContext
    ) -> int | None:
        return sliding_window_lookup(self.manager, keys, sliding_window_size, req_context)

    def _find_loadable_end(self, state: RequestState, num_local_tokens: int) -> int | None:
        state.grow_keys(self._layouts)
        # The engine needs a token to compute: without one there is no output to sample from.
        max_end_token = state.request.num_tokens - 1
        if state.limits.max_load_tokens is not None:
            max_end_token = min(max_end_token, state.limits.max_load_tokens)
        end_token = self.load_choice.find_limit(state, num_local_tokens, max_end_token)
        if end_token is None:
            return None
        return find_loadable_end(
            self._layouts,
            state.keys,
            num_local_tokens,
            end_token,
            lambda keys: self._maximal_prefix_lookup(keys, state.context),
            lambda keys, size: self._sliding_window_lookup(keys, size, state.context),
        )

    def _flush(self, block_ids: list[int]) -> None:
        """Make the workers finish, before this step writes to ``block_ids``, every store that reads them."""
        job_ids = self._fences.take(block_ids)
        if job_ids:
            self._jobs_to_flush |= job_ids
            self.counters.flushed_store_jobs += len(job_ids)

    def _prepare_stores(
        self, state: RequestState, num_scheduled_tokens: int
    ) -> dict[TransferJobId, TransferJob]:
        storable = list_storable_blocks(self._layouts, state, num_scheduled_tokens)
        if self._jobs.void_keys:
            storable = list(takewhile(lambda block: block.key not in self._jobs.void_keys, storable))
        if not storable:
            return {}

        def offer(keys: list[OffloadKey]) -> PrepareStoreOutput | None:
            output = self.manager.prepare_store(keys, state.context)
            self.counters.refused_stores += output is None
            return output

        jobs: dict[TransferJobId, TransferJob] = {}
        for plan in offer_blocks(self._layouts, state, storable, offer):
            job_id = self._jobs.open(JobKind.STORE, state, plan.keys)
            self._fences.add(job_id, plan.device_spec.block_ids.tolist())
            jobs[job_id] = TransferJob(state.context.req_id, TransferSpec(plan.device_spec, plan.slots))
        if jobs:
            self.counters.store_jobs += len(jobs)
            self._touch(state, storable[-1].end_token)
        return jobs

    def _end_load(self, job: OpenTransfer) -> None:
        self.layerwise.end(job)
        if job.keys:
            self.manager.complete_load(job.keys, job.state.context)
        if job.has_failed:
            logger.warning("request %s: its load failed, it is computed", job.state.context.req_id)
            job.state.has_failed_load = True
            self.counters.failed_load_jobs += 1
            return
        self.counters.count_loaded(job.state.hit_sources)
        if self._requests.get(job.state.context.req_id) is job.state:
            self._touch(job.state, job.state.request.num_tokens)

    def _end_store(self, job: OpenTransfer) -> None:
        self._fences.remove(job.job_id)
        self.manager.complete_store(job.keys, job.state.context, success=not job.has_failed)
        self.counters.failed_store_jobs += job.has_failed

    def _touch(self, state: RequestState, end_token: int) -> None:
        """Renew the request's blocks, its first most: the tail of a prefix is evicted before its head."""
        keys = state.keys_by_position(self._layouts, end_token)
        if keys:
            self.manager.touch(keys, state.context)


def record_request(recorder: TraceRecorder, state: RequestState, stop: StopReason) -> None:
    """Record a request under the blocks of its first KV group; their content is that of the others'."""
    request = state.request
    num_output_tokens = request.num_tokens - request.num_prompt_tokens
    recorder.on_end(request.request_id, request.num_prompt_tokens, num_output_tokens, state.keys[0], stop)


def _still_waits(
    state: RequestState | None, num_computed_tokens: int, manager: OffloadingManager, jobs: TransferJobs
) -> bool:
    """Return whether nothing has changed for a request that was told to wait; most questions end here. Pure."""
    return (
        state is not None
        and num_computed_tokens == state.num_local_tokens
        and (manager.is_waiting(state.context) or state.blocking_job in jobs)
    )
