"""The scheduler half: which requests wait, what is loaded for them, what is stored of them.

It never blocks. ``protocols`` has the order of a step. Its decisions are in the modules beside this one: how much of a
prefix can be loaded (prefix_search), which keys and device blocks a job moves (planning), what is in flight (jobs),
whether transfers may start at all (handshake). What is optional is plugged in (features): whether a hit is worth its
load (load_or_compute), which hits are computed to check them (audit), and what is recorded of requests.

Source: the division follows vLLM's OffloadingConnectorScheduler as of May 2026.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile

from kvtier.base import OffloadingSpec, TransferJobId, TransferSpec
from kvtier.connector.allocations import follow_states, list_written_blocks
from kvtier.connector.audit import make_audit
from kvtier.connector.common import (
    BlockRemoved,
    BlockStored,
    LostLoadStoreSpec,
    OffloadingConnectorMetadata,
    StopReason,
    TransferJob,
    make_block_events,
)
from kvtier.connector.features import Hooks, RequestFeature, StepControl
from kvtier.connector.groups import make_group_layouts
from kvtier.connector.handshake import make_handshake
from kvtier.connector.jobs import JobKind, OpenTransfer, TransferJobs
from kvtier.connector.load_or_compute import make_load_or_compute
from kvtier.connector.metrics import SchedulerCounters, SearchMeter, TransferMeter, add_tokens
from kvtier.connector.planning import count_tokens_by_tier, list_storable_blocks, offer_blocks, plan_load
from kvtier.connector.prefix_search import PrefixSearch, maximal_prefix_lookup, sliding_window_lookup
from kvtier.connector.protocols import (
    ConnectorOutput,
    DeviceBlocks,
    Request,
    SchedulerOutput,
)
from kvtier.connector.recording import Recording, RequestRecorder
from kvtier.connector.request_records import RequestRecords
from kvtier.connector.request_state import RequestState, follow_allocations, make_state_maker
from kvtier.errors import BlockNotReadyError
from kvtier.histogram import HistogramSnapshot
from kvtier.log_limit import limit_log_lines

logger = logging.getLogger(__name__)

WAIT: tuple[int | None, bool] = (None, False)

FeatureMaker = Callable[["OffloadingConnectorScheduler"], RequestFeature]
"""Makes a feature for a half that is complete but for its features. A class whose constructor takes the half is one."""


class OffloadingConnectorScheduler:
    """Decides what the workers load and store in every step of the engine. Used from one thread.

    Args:
        spec: builds the manager; its configuration names the KV groups and the number of workers.
        recorder: records the requests; the scheduler half closes it. None records nothing.
        clock: seconds, monotonic; how long steps take is measured with it.
        control: serves operators of the living engine; the scheduler half closes it. None serves none.
        wall_clock: seconds since 1970, for records.
        features: make what else is plugged in.

    Attributes:
        manager: which blocks are held; both searches depend on it alone.
        layouts: the KV groups.
        counters: what was decided so far.
        jobs: what is in flight.
        search: how far a request can be loaded.
        load_or_compute: how much of a hit is loaded; None when all of it is.
        audit: computes some hits to compare them with what is held; None when it is off.
        recorder: the recorder; an engine that reports arrivals calls its ``on_arrival`` before the search.
        control: what serves the operators; None when nothing does.
        records: where the prompts of the latest requests came from, and counts of all.
    """

    def __init__(
        self,
        spec: OffloadingSpec,
        recorder: RequestRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
        control: StepControl | None = None,
        wall_clock: Callable[[], float] = time.time,
        features: Sequence[FeatureMaker] = (),
    ) -> None:
        self.manager = spec.get_manager()
        limit_log_lines()
        self.counters = SchedulerCounters()
        self._transfers = TransferMeter()
        self._searches = SearchMeter()
        self._clock = clock
        self._requests: dict[str, RequestState] = {}
        self.layouts = make_group_layouts(spec)
        has_states = any(layout.is_state for layout in self.layouts)
        self._follow = follow_states if has_states else follow_allocations
        self.jobs = TransferJobs(spec.config.world_size)
        # The contract names these two searches; the way of a request calls the functions of prefix_search itself.
        self._maximal_prefix_lookup = partial(maximal_prefix_lookup, self.manager)
        self._sliding_window_lookup = partial(sliding_window_lookup, self.manager)
        # None without a region, and from the moment on when every worker has reported the scheduler's own.
        self._handshake = make_handshake(spec)
        self._load_jobs: dict[TransferJobId, TransferJob] = {}
        self._jobs_to_flush: set[TransferJobId] = set()
        self._jobs_to_fail: set[TransferJobId] = set()
        self._make_state = make_state_maker(spec.config, len(self.layouts))
        self._hooks = hooks = Hooks()
        self.search = PrefixSearch(
            self.layouts, self.manager, self.jobs, spec.config.computes_last_token, hooks.limit
        )
        self.records = RequestRecords(self.layouts, self.manager, clock, wall_clock, hooks.why_computed)
        self.audit = make_audit(spec, self.manager, self.jobs, self.records, clock, self.search)
        self.load_or_compute = make_load_or_compute(spec, self.manager, self._requests, clock, self.audit)
        self.recorder, self.control = recorder, control
        recording = None if recorder is None else Recording(recorder, self.records)
        makers = features if control is None else (*features, control.attach)
        for built_in in filter(None, (self.audit, self.load_or_compute, recording, self.records)):
            hooks.add(built_in)
        for make in makers:
            hooks.add(make(self))
        has_answers = hooks.withholds or hooks.shorten
        self._find_end = self._find_unless_withheld if has_answers else self.search.find_end

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, key_salt: bytes = b""
    ) -> tuple[int | None, bool]:
        """Return how many tokens of a waiting request can be loaded; the engine calls this until it schedules it.

        Args:
            request: not scheduled yet.
            num_computed_tokens: leading tokens that device memory holds.
            key_salt: what decides the bytes of the request's blocks beyond what its content hashes cover, for
                example the weights of an adapter; at most 64 bytes. Another salt finds other blocks.

        Returns:
            How many tokens beyond those can be loaded, and whether the request waits for a load that runs beside the
            engine's steps: True unless there is none. None: call again in the next step. At least one token is left,
            unless the engine ``computes_last_token`` again.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._add_request(request, key_salt)
        else:
            # Most calls end here: nothing has changed for a request that was answered None.
            is_same = num_computed_tokens == state.search.num_local_tokens
            if is_same and (
                state.search.blocking_job in self.jobs.by_id or self.manager.is_waiting(state.context)
            ):
                return WAIT
            state.grow_keys(self.layouts)
        # Workers report a load by its request's name: another request of that name would take it for its own.
        if request.request_id in self.jobs.loading_requests:
            return WAIT
        state.search.num_local_tokens = num_computed_tokens
        if self._handshake is not None:
            return self._handshake.answer()
        began_s = self._clock()
        end_token = self._find_end(state, num_computed_tokens)
        self._searches.on_search(state.search, began_s, self._clock(), is_final=end_token is not None)
        if end_token is None:
            return WAIT
        num_found = end_token - num_computed_tokens
        return num_found, num_found > 0

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
            self.records.on_begun_excluded(request)
            return
        for on_begun in self._hooks.on_begun:
            on_begun(state, num_external_tokens)
        if num_external_tokens:
            self._begin_load(state, blocks, num_external_tokens)
        for on_pinned in self._hooks.on_pinned:
            on_pinned(state, num_external_tokens)

    def get_tokens_by_tier(self, req_id: str, num_external_tokens: int) -> dict[str, int]:
        """Return where the tokens of a load come from; call it when update_state_after_alloc has begun the load.

        Args:
            req_id: the request.
            num_external_tokens: tokens of the load.

        Returns:
            Tokens by "CPU", for the primary tier, or a secondary tier's type, for blocks that were promoted
            while the request waited for them. They sum to ``num_external_tokens``; empty when that is 0 or the
            request is unknown.
        """
        state = self._requests.get(req_id)
        return {} if state is None or num_external_tokens == 0 else dict(state.load.tokens_by_tier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OffloadingConnectorMetadata:
        """Return the workers' work of this step, and end the manager's step.

        Effects:
            Follows the engine's block tables, prepares stores, starts promotions.
        """
        num_scheduled_tokens = scheduler_output.num_scheduled_tokens
        if self.jobs.fenced:
            self._flush(list_written_blocks(self.layouts, self._requests, scheduler_output))
        self._follow(self._requests, scheduler_output)
        plan = OffloadingConnectorMetadata(
            self._load_jobs,
            {},
            self._jobs_to_flush or None,
            self._jobs_to_fail or None,
            is_idle=not num_scheduled_tokens,
        )
        self._load_jobs, self._jobs_to_flush, self._jobs_to_fail = {}, set(), set()
        for plan_step in self._hooks.plan_step:
            plan_step(scheduler_output, plan)
        if self._handshake is not None:
            self._handshake.on_step()
        else:
            for req_id, num_tokens in num_scheduled_tokens.items():
                state = self._requests.get(req_id)
                if state and state.blocks.num_computed_tokens + num_tokens >= state.stores.next_tokens:
                    self._prepare_stores(state, num_tokens, plan.store_jobs)
        self.manager.end_step()
        for on_step_end in self._hooks.on_step_end:
            on_step_end()
        return plan

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """Process the workers' reports; jobs that every worker has ended are completed in the manager."""
        report = output.kv_connector_worker_meta
        ended: Sequence[OpenTransfer] = ()
        if report is not None:
            if self._handshake is not None:
                self._handshake.record(report.region_identities)
                if self._handshake.is_open:
                    self._handshake = None
            if report.completed_jobs:
                if report.transfers:
                    self._transfers.add(report.transfers)
                ended = self.jobs.count(report)
        for job in ended:
            if job.kind is JobKind.LOAD:
                self._end_load(job)
            elif job.kind is JobKind.STORE:
                self.manager.complete_store(job.keys, job.state.context, success=not job.has_failed)
                self.counters.failed_store_jobs += job.has_failed
        for on_report in self._hooks.on_report:
            on_report(report, ended)

    def request_finished(
        self, request: Request, stop: StopReason = StopReason.UNKNOWN, *, is_traffic: bool = True
    ) -> tuple[bool, None]:
        """Forget a request that ended or was aborted; its jobs go on.

        Args:
            request: the request, with what it has generated.
            stop: why its answer ended.
            is_traffic: whether it came from outside; the engine's own requests are not recorded.

        Returns:
            False, the engine may free its device blocks (unfinished stores fence them), and no parameters.
        """
        state = self._requests.pop(request.request_id, None)
        if state is None:
            for on_dropped in self._hooks.on_dropped:
                on_dropped(request.request_id)
            return False, None
        for on_finished in self._hooks.on_finished:
            on_finished(state, stop, is_traffic)
        self.manager.request_finished(state.context)
        if state.search.waits_since_s is not None:
            self._searches.on_wait_ended(state.search, self._clock())
        return False, None

    def take_events(self) -> list[BlockStored | BlockRemoved]:
        """Return which blocks can be loaded, or no longer, since the last call, oldest first."""
        return [one for event in self.manager.take_events() for one in make_block_events(event)]

    def has_open_stores(self) -> bool:
        """Return whether a worker has to report a store: steps, also empty ones, end it. Tiers write without steps."""
        return self.jobs.num_stores > 0

    def has_unstored(self, req_id: str) -> bool:
        """Return whether a request has blocks for which the last step's stores had no room."""
        state = self._requests.get(req_id)
        return state is not None and state.stores.batch_blocks is not None

    def needs_step(self) -> bool:
        """Return whether the engine should make further steps, which may be empty, before it rests."""
        return self.has_open_stores() or any(needs_step() for needs_step in self._hooks.needs_step)

    def is_idle(self) -> bool:
        """Return whether there is neither a request nor a transfer under way, so that the engine may rest now."""
        return not self._requests and not self.jobs.by_id

    def reset(self, begin_anew: Callable[[], None] | None = None) -> None:
        """Forget every block, so that none stored before is found again.

        Loads under way fail, so that their requests are computed; stores under way end without being kept.
        Requests that hold device blocks now are not stored until they are computed anew from their first
        token. The engine empties its own prefix cache before it calls this, and calls it when no step's output is
        outstanding: a load that such an output reports as good cannot be taken back. ``begin_anew`` makes the manager
        forget; by default its ``reset``.
        """
        loads = self.jobs.void_all()
        for job_id, job in self._load_jobs.items():
            lost = TransferSpec(LostLoadStoreSpec(), job.transfer_spec.destination)
            self._load_jobs[job_id] = TransferJob(job.req_id, lost)
        # Workers report every load once, so a load that is on its way is failed by them and not dropped here.
        self._jobs_to_fail |= loads - self._load_jobs.keys()
        for state in self._requests.values():
            state.on_reset()
        for on_reset in self._hooks.on_reset:
            on_reset()
        (begin_anew or self.manager.reset)()

    def stats(self) -> dict[str, float]:
        """Return counters and gauges of the connector and of its manager, by dotted name.

        Thread: any. Numbers that change meanwhile may be of slightly different moments.
        """
        numbers = {**self.manager.stats(), "connector.requests": float(len(self._requests))}
        for part in (self.counters, self._transfers, self.jobs):
            numbers |= part.stats()
        for stats in self._hooks.stats:
            numbers |= stats()
        return numbers

    def histograms(self) -> dict[str, HistogramSnapshot]:
        """Return the histograms of the connector and of its manager, by dotted name. Thread: any."""
        own = {**self._transfers.histograms(), **self._searches.histograms()}
        return {**self.manager.histograms(), **own}

    def shutdown(self) -> None:
        """End the features, which get the unfinished requests with their output so far, and shut down the manager."""
        for close in self._hooks.close:
            close(self._requests.values())
        self.manager.shutdown()

    def _add_request(self, request: Request, key_salt: bytes) -> RequestState:
        state = self._requests[request.request_id] = self._make_state(request, key_salt=key_salt)
        self.counters.unknown_tenant_requests += state.tenant is None
        state.search.began_s = self._clock()
        state.grow_keys(self.layouts)
        self.manager.note_request([tuple(keys) for keys in state.keys], state.context)
        for on_arrived in self._hooks.on_arrived:
            on_arrived(state)
        return state

    def _find_unless_withheld(self, state: RequestState, first_token: int) -> int | None:
        """Return up to which token to load the request, as features let it; None when it has to wait."""
        for withholds in self._hooks.withholds:
            if withholds(state):
                return first_token
        found_end = self.search.find_end(state, first_token)
        if found_end is None:
            return None
        end_token = found_end
        for shorten in self._hooks.shorten:
            end_token = shorten(state, first_token, end_token)
        return (
            found_end if end_token >= found_end else self.search.find_shorter(state, first_token, end_token)
        )

    def _begin_load(self, state: RequestState, blocks: DeviceBlocks, num_external_tokens: int) -> None:
        request = state.request
        first_token = state.search.num_local_tokens or 0
        end_token = first_token + num_external_tokens
        plan = plan_load(self.layouts, state.keys, blocks.get_block_ids(), first_token, end_token)
        state.blocks.is_allocated = True
        promoted = self.manager.promoted_for(state.context)
        state.load.tokens_by_tier = count_tokens_by_tier(
            self.layouts, state.keys, promoted, first_token, end_token
        )
        self.counters.load_jobs += 1
        try:
            transfer = TransferSpec(self.manager.prepare_load(plan.keys, state.context), plan.device_spec)
            job_id = self.jobs.open_load(state, plan.keys)
        except BlockNotReadyError as error:
            # The engine already waits for this load, and only a worker can report that a load ended. So a load is sent
            # that fails there; raising would end the engine over a block that is merely recomputed.
            logger.warning("request %s: its load is lost, it is computed: %s", request.request_id, error)
            self.counters.lost_load_jobs += 1
            transfer = TransferSpec(LostLoadStoreSpec(), plan.device_spec)
            job_id = self.jobs.open_load(state, [])
        self._load_jobs[job_id] = TransferJob(request.request_id, transfer)
        if self.jobs.fenced:
            self._flush(plan.device_blocks)

    def _flush(self, written_blocks: Sequence[int]) -> None:
        """Make the workers finish, before this step writes to these device blocks, every store that reads them."""
        job_ids = self.jobs.take_fenced(written_blocks)
        self._jobs_to_flush |= job_ids
        self.counters.flushed_store_jobs += len(job_ids)

    def _prepare_stores(
        self, state: RequestState, num_scheduled_tokens: int, store_jobs: dict[TransferJobId, TransferJob]
    ) -> None:
        """Add stores to ``store_jobs`` as far as the manager has room."""
        storable = list_storable_blocks(self.layouts, state, num_scheduled_tokens)
        if storable and self.jobs.void_keys:
            storable = list(takewhile(lambda block: block.key not in self.jobs.void_keys, storable))
            state.stores.next_tokens = 0  # the others are offered when those jobs have ended
        if not storable:
            return
        offers = offer_blocks(self.layouts, state, storable, self.manager.prepare_store)
        self.counters.refused_stores += offers.num_refused
        for plan in offers.plans:
            job_id = self.jobs.open_store(state, plan.keys, plan.device_blocks)
            store_jobs[job_id] = TransferJob(state.context.req_id, TransferSpec(plan.device_spec, plan.slots))
            for on_stored in self._hooks.on_stored:
                on_stored(state, plan.keys)
        if offers.plans:
            self.counters.store_jobs += len(offers.plans)
            state.touch(self.manager, self.layouts, storable[-1].end_token)

    def _end_load(self, job: OpenTransfer) -> None:
        state = job.state
        if job.keys:
            self.manager.complete_load(job.keys, state.context)
        for on_load_ended in self._hooks.on_load_ended:
            on_load_ended(job)
        if job.has_failed:
            logger.warning("request %s: its load failed, it is computed", state.context.req_id)
            state.load.has_failed = True
            self.counters.failed_load_jobs += 1
            return
        add_tokens(self.counters.loaded_tokens, state.load.tokens_by_tier)
        if self._requests.get(state.context.req_id) is state:
            state.touch(self.manager, self.layouts, state.request.num_tokens)
