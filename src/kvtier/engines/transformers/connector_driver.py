"""Drives both halves of kvtier's connector, step by step, in one process.

The order within a step is the contract of ``kvtier.connector.protocols``. An engine without a scheduling loop also
needs steps without tokens, in which it waits for lookups and loads.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial

from kvtier.base import CanonicalKVCaches, OffloadingManager, OffloadingSpec, TransferJobId
from kvtier.config import ModelIdentity
from kvtier.connector.common import OffloadingConnectorMetadata
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.engines.common.step import StepOutput, WorkerOutput, begin_step, end_step
from kvtier.engines.transformers.interrupt import DeferredInterrupt
from kvtier.engines.transformers.request import Request
from kvtier.histogram import HistogramSnapshot
from kvtier.observe.control import open_control
from kvtier.observe.control_commands import PromptHasher
from kvtier.observe.spans import RequestSpans
from kvtier.operating import DrainResult
from kvtier.recording.recorder import open_recorder

POLL_INTERVAL_S = 0.0002
"""Pause between two steps that wait for a tier. A longer one delays the first token by as much; a shorter one takes the
interpreter from the threads that do the work."""


class ConnectorDriver:
    """Both halves of the connector and the steps between them. Used from one thread.

    Args:
        scheduler_spec: builds the manager.
        worker_spec: builds the handlers; a separate object, because each half maps the region itself.
        kv_caches: the device pool.
        clock: seconds, monotonic.
        pause: waits for that many seconds.
        hash_prompt: makes the hashes of a prompt's blocks, for operators' commands about a prefix.
    """

    def __init__(
        self,
        scheduler_spec: OffloadingSpec,
        worker_spec: OffloadingSpec,
        kv_caches: CanonicalKVCaches,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        hash_prompt: PromptHasher | None = None,
    ) -> None:
        self._specs = (worker_spec, scheduler_spec)
        self._scheduler = _make_scheduler(scheduler_spec, clock, hash_prompt)
        # This engine pauses between the steps in which it waits; a pause in each step would delay the first token.
        self._worker = OffloadingConnectorWorker(worker_spec, pause=lambda _: None)
        try:
            self._worker.register_kv_caches(kv_caches)
        except BaseException:
            self._shut_down_halves()
            raise
        self._spans = RequestSpans(self._scheduler.layouts[0].block_tokens)
        self._clock = clock
        self._pause = pause
        self._open_jobs: set[TransferJobId] = set()
        self._loading: set[str] = set()
        self._failed_block_ids: dict[str, set[int]] = {}
        # A first step in which both halves compare their regions; no load can start before it.
        self.step(StepOutput())

    @property
    def manager(self) -> OffloadingManager:
        """The manager of the tiers."""
        return self._scheduler.manager

    def match(self, request: Request) -> int:
        """Return how many tokens after the computed ones the tiers hold; blocks until every tier has answered."""
        while True:
            with DeferredInterrupt():
                answer, _ = self._scheduler.get_num_new_matched_tokens(request, request.num_computed_tokens)
            if answer is not None:
                return answer
            self.step(StepOutput())
            self._pause(POLL_INTERVAL_S)

    def on_allocated(self, request: Request, num_external_tokens: int) -> Mapping[str, int]:
        """Pass the request's device blocks to the connector, which loads that many tokens into them.

        Returns:
            These tokens by the medium or type of their tier.
        """
        with DeferredInterrupt():
            self._scheduler.update_state_after_alloc(request, request, num_external_tokens)
            if num_external_tokens:
                self._loading.add(request.request_id)
            return self._scheduler.get_tokens_by_tier(request.request_id, num_external_tokens)

    def wait_for_load(self, request: Request) -> set[int]:
        """Step until the request's load has ended; return the device blocks whose load failed."""
        while request.request_id in self._loading:
            self.step(StepOutput())
            if request.request_id in self._loading:
                with (
                    DeferredInterrupt()
                ):  # an interrupt must not leave the reports of the copy threads half read
                    self._worker.wait_for_loads()
        return self._failed_block_ids.pop(request.request_id, set())

    def step(self, plan: StepOutput, compute: Callable[[], None] | None = None) -> None:
        """Do one step.

        Args:
            plan: the tokens to compute.
            compute: computes them and writes the device blocks; when it raises, the step still ends in order.
        """
        is_computed = compute is None
        with DeferredInterrupt() as deferred:
            metadata = self._scheduler.build_connector_meta(plan)
            begin_step(self._worker, metadata)
            try:
                if compute is not None:
                    with deferred.lifted():
                        compute()
                    is_computed = True
            finally:
                self._end_step(metadata, is_computed=is_computed)

    def report_prefill(self, num_tokens: int, time_s: float) -> None:
        """Report how long the computation of ``num_tokens`` prompt tokens took."""
        if self._scheduler.load_or_compute is not None:
            self._scheduler.load_or_compute.report_prefill(num_tokens, time_s)

    def wait_for_room(self, request: Request, plan: StepOutput) -> None:
        """Store the rest of a computed request as host memory gets room, where it keeps blocks for tiers.

        Args:
            request: every token of it is computed.
            plan: a step that computes nothing of it.
        """
        manager = self.manager
        while self._scheduler.has_unstored(request.request_id) and manager.will_have_room():
            self.step(plan)
            self._pause(POLL_INTERVAL_S)

    def finish(self, request: Request) -> None:
        """End the request; a step without tokens starts its last stores, and does not wait for them."""
        with DeferredInterrupt():
            self.wait_for_load(request)
            self._scheduler.request_finished(request, request.stop, is_traffic=request.is_traffic)
            self.step(StepOutput(finished_req_ids=frozenset({request.request_id})))
            if self._spans.is_active:
                records = self._scheduler.records
                self._spans.export(records.latest, records.num_requests)

    def drain(self, timeout_s: float) -> DrainResult:
        """Step until every store has ended and no tier has work, or ``timeout_s`` has passed."""
        end_s = self._clock() + timeout_s
        control = self._scheduler.control
        if control is not None and control.is_wanted:
            self.step(StepOutput())  # an idle engine does here what its operators want
        while self._open_jobs and self._clock() < end_s:
            self.step(StepOutput())
            self._pause(POLL_INTERVAL_S)
        if self._open_jobs:
            return DrainResult(has_ended=False)
        left_s = max(0.0, end_s - self._clock())
        return self.manager.drain(left_s)

    def reset(self) -> None:
        """Forget every block in every tier; the caller resets the device pool."""
        with DeferredInterrupt():
            self._scheduler.reset()
            self.step(StepOutput())

    def switch_model(self, model: ModelIdentity | None) -> None:
        """Forget every block and go on with those of other weights; the caller resets the device pool.

        Args:
            model: the weights; what is stored of them is found. None for weights that nothing names: their blocks are
                kept in host memory alone.
        """
        with DeferredInterrupt():
            self._scheduler.reset(partial(self.manager.switch_model, model))
            self.step(StepOutput())

    def stats(self) -> dict[str, float]:
        """Return counters and gauges of the connector and the tiers, by dotted name."""
        return self._scheduler.stats()

    def histograms(self) -> dict[str, HistogramSnapshot]:
        """Return histograms of the connector and its manager by dotted name."""
        return self._scheduler.histograms()

    def shutdown(self, timeout_s: float) -> None:
        """Drain for at most ``timeout_s``, then shut down worker, manager and tiers; idempotent."""
        try:
            self.drain(timeout_s)
        finally:
            self._shut_down_halves()

    def _shut_down_halves(self) -> None:
        self._worker.shutdown()
        self._scheduler.shutdown()
        for spec in self._specs:
            spec.shutdown()

    def _end_step(self, metadata: OffloadingConnectorMetadata, *, is_computed: bool) -> None:
        self._open_jobs.update(metadata.load_jobs, metadata.store_jobs)
        loads, report = end_step(self._worker, metadata, is_computed=is_computed)
        for req_id, block_ids in loads.items():
            if block_ids is not None:
                self._failed_block_ids.setdefault(req_id, set()).update(block_ids)
        self._loading.difference_update(loads)
        self._open_jobs.difference_update(report.completed_jobs)
        self._scheduler.update_connector_output(WorkerOutput(report))


def _make_scheduler(
    spec: OffloadingSpec, clock: Callable[[], float], hash_prompt: PromptHasher | None
) -> OffloadingConnectorScheduler:
    recorder = open_recorder(spec.config, clock=clock)
    control = open_control(spec.config, hash_prompt)
    try:
        return OffloadingConnectorScheduler(spec, recorder, clock, control)
    except BaseException:
        if recorder is not None:
            recorder.close()
        if control is not None:
            control.close()
        raise
