"""A serving engine on simulated time, around the production connector.

``OffloadingConnectorScheduler`` and the managers behind it decide what is found, promoted, loaded, stored and cascaded.
The engine's own rules are modelled on vLLM's, and simpler where a trace has no information:

- Requests arrive at their times and wait in that order. A request starts when fewer than ``max_running`` run and the
  device has blocks for its prompt and its answer; no request is pre-empted. A request whose blocks are in flight is
  overtaken by others.
- Where the model has recurrent states, a prefix is found on the device only where its state is there too, and a request
  reserves the device blocks of the states that it will keep when it starts.
- Prompts are computed one after another at ``prefill_tokens_per_s``, ``max_step_tokens`` a step. The first token exists
  when the prompt is computed; then each request generates at ``decode_tokens_per_s``, independent of the others.
- A step runs after each event: an arrival, a computed part of a prompt, the end of a transfer. While a request waits
  for blocks a step also runs every ``HEARTBEAT_S``, so that deadlines and pauses pass.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from kvtier.connector.common import StopReason
from kvtier.connector.request_records import take_first
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.engines.common.block_pool import DeviceBlockPool
from kvtier.engines.common.step import CachedRequests, NamedStates, NewRequest, StepOutput, WorkerOutput
from kvtier.misses import RequestRecord
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.request import SimulatedRequest
from kvtier.sim.results import name_places
from kvtier.sim.spec import SimulatedSpec
from kvtier.sim.states import RequestStates
from kvtier.sim.timeline import Timeline
from kvtier.sim.worker import SimulatedWorker

HEARTBEAT_S = 0.05
"""Seconds between steps while a request waits and nothing else happens: about a decode step of a large model. Shorter
costs time without benefit; longer blurs the deadline of a waiting request."""

NOTHING = StepOutput()


class RecordReporter:
    """Stands for the connector's recorder of traces: passes on what is known of each request that has ended.

    Args:
        on_record: called with where its prompt came from.
    """

    def __init__(self, on_record: Callable[[RequestRecord], object]) -> None:
        self._on_record = on_record

    def on_arrival(self, req_id: str) -> None:
        """Do nothing: a trace has the arrivals."""

    def on_end(
        self,
        req_id: str,
        num_prompt_tokens: int,
        num_output_tokens: int,
        keys: Sequence[bytes],
        stop: StopReason = StopReason.UNKNOWN,
        record: RequestRecord | None = None,
    ) -> None:
        """Pass on the record of a request that was computed."""
        if record is not None:
            self._on_record(record)

    def forget(self, req_id: str) -> None:
        """Do nothing."""

    def stats(self) -> dict[str, float]:
        """Return nothing, so that a simulation has the same counters with and without records."""
        return {}

    def close(self) -> None:
        """Do nothing."""


class SimulatedEngine:
    """Serves requests. Used from one thread, once.

    Args:
        model: the engine.
        host: host memory and tiers; None: no offloading.
        on_finished: called with each request that has its whole answer, and each that never fits.
        num_keys: full blocks that the requests have, at most; None: unknown.
        on_advance: called, before time advances, with the time until which nothing changes.
        on_record: called with where the prompt of each finished request came from; None: nothing is recorded.

    Attributes:
        timeline: the time.
        spec: the managers; None without offloading.
        worker: the links; None without offloading.
        num_rejected: requests that need more device blocks than there are.
        admitted: requests in the order in which they got device blocks, each with its hits.
    """

    def __init__(
        self,
        model: EngineModel,
        host: HostModel | None,
        on_finished: Callable[[SimulatedRequest], object],
        num_keys: int | None = None,
        on_advance: Callable[[float], object] | None = None,
        on_record: Callable[[RequestRecord], object] | None = None,
    ) -> None:
        self.timeline = Timeline()
        self.spec = SimulatedSpec(model, host, self.timeline, self._wake, num_keys) if host else None
        self.worker = (
            SimulatedWorker(self.timeline, host.speed, model.block_bytes, self._wake) if host else None
        )
        self.num_rejected = 0
        self.admitted: list[SimulatedRequest] = []
        self._on_advance = on_advance
        self._model = model
        self._connector = (
            OffloadingConnectorScheduler(
                self.spec,
                None if on_record is None else RecordReporter(on_record),
                clock=self.timeline,
                wall_clock=self.timeline,
            )
            if self.spec
            else None
        )
        self._pool = DeviceBlockPool(model.num_device_blocks)
        self._states = RequestStates(model, model.states, self._pool) if model.states else None
        self._on_finished = on_finished
        self._waiting: deque[SimulatedRequest] = deque()
        self._loading: dict[str, SimulatedRequest] = {}
        self._to_compute: deque[SimulatedRequest] = deque()
        self._computing: SimulatedRequest | None = None
        self._num_running = 0
        self._has_news = False
        self._has_undecided = False
        self._heartbeat_s = inf

    def run(self, requests: Sequence[SimulatedRequest]) -> None:
        """Serve ``requests``, ordered by arrival, until each has its answer and every transfer has ended."""
        arrivals = deque(requests)
        timeline = self.timeline
        while True:
            now_s = timeline()
            while arrivals and arrivals[0].arrival_s <= now_s:
                self._waiting.append(arrivals.popleft())
                self._has_news = True
            if self._has_news or now_s >= self._heartbeat_s:
                self._step()
                self._heartbeat_s = now_s + HEARTBEAT_S if self._has_undecided else inf
                if self._has_news:
                    continue
            event_s = timeline.next_s
            until_s = min(
                self._heartbeat_s,
                arrivals[0].arrival_s if arrivals else inf,
                inf if event_s is None else event_s,
            )
            if until_s == inf:
                return
            if self._on_advance is not None:
                self._on_advance(until_s)
            timeline.advance_to(until_s)

    def stats(self) -> dict[str, float]:
        """Return the counters of the connector and the managers; empty without offloading."""
        return {} if self._connector is None else self._connector.stats()

    @property
    def records(self) -> Sequence[RequestRecord]:
        """Where the prompts of the latest requests came from; empty without offloading."""
        return () if self._connector is None else self._connector.records.latest

    @property
    def num_held_device_blocks(self) -> int:
        """Device blocks that a request uses or that can be found."""
        return self._pool.num_held_blocks

    def _step(self) -> None:
        self._has_news = False
        self._take_reports()
        self._admit()
        output = self._plan_compute()
        if self._connector is None or self.worker is None:
            self._compute(output)
            return
        self.worker.begin_step(self._connector.build_connector_meta(output))
        if output is not NOTHING:
            self.worker.after_flush(partial(self._compute, output))

    def _wake(self) -> None:
        """Request a step."""
        self._has_news = True

    def _take_reports(self) -> None:
        if self._connector is None or self.worker is None or not self.worker.has_report:
            return
        self._connector.update_connector_output(WorkerOutput(self.worker.drain_report()))
        for req_id, is_good in self.worker.drain_ended_loads().items():
            request = self._loading.pop(req_id)
            if is_good:
                self._name(request, request.num_computed_tokens)
            else:
                request.loaded_tokens = {}
                request.num_computed_tokens = request.num_device_tokens
            self._to_compute.append(request)

    def _admit(self) -> None:
        """Start waiting requests, in order, as far as there is room."""
        if not self._waiting:
            self._has_undecided = False
            return
        undecided: list[SimulatedRequest] = []
        while self._waiting and self._num_running < self._model.max_running:
            request = self._waiting[0]
            num_blocks = self._num_blocks(request)
            num_state_blocks = 0 if self._states is None else self._states.count_blocks(request)
            if num_blocks + num_state_blocks > self._pool.num_blocks:
                self._reject(self._waiting.popleft())
                continue
            prefix, state = self._find_on_device(request)
            num_new = num_blocks + num_state_blocks - len(prefix) - len(state)
            if not self._pool.has_room([*prefix, *state], num_new):
                break
            num_loadable = self._ask(request, len(prefix) * self._model.block_tokens)
            self._waiting.popleft()
            if num_loadable is None:
                undecided.append(request)
            else:
                self._start(request, prefix, state, num_loadable)
        self._waiting.extendleft(reversed(undecided))
        self._has_undecided = bool(undecided)

    def _find_on_device(self, request: SimulatedRequest) -> tuple[list[int], list[int]]:
        """Return the device blocks of the request's prefix, and of its state; a token is left to compute."""
        if self._states is not None:
            return self._states.find_prefix(request)
        num_tokens = request.num_prompt_tokens - self._model.is_last_block_computed
        num_usable = num_tokens // self._model.block_tokens
        return self._pool.find_prefix(request.block_hashes[:num_usable]), []

    def _ask(self, request: SimulatedRequest, num_device_tokens: int) -> int | None:
        if self._connector is None:
            return 0
        return self._connector.get_num_new_matched_tokens(request, num_device_tokens)[0]

    def _start(
        self, request: SimulatedRequest, prefix: list[int], state: list[int], num_loadable: int
    ) -> None:
        request.block_ids = self._pool.allocate(prefix, self._num_blocks(request) - len(prefix))
        num_held_tokens = len(prefix) * self._model.block_tokens
        request.num_device_tokens = min(num_held_tokens, request.num_prompt_tokens - 1)
        # The last token is computed again even if it was loaded.
        request.num_computed_tokens = min(num_held_tokens + num_loadable, request.num_prompt_tokens - 1)
        if self._states is not None:
            num_held_blocks = len(prefix) + num_loadable // self._model.block_tokens
            self._states.start(request, state, num_held_blocks)
        request.admitted_s = self.timeline()
        self.admitted.append(request)
        self._num_running += 1
        if self._connector is not None:
            self._connector.update_state_after_alloc(request, request, num_loadable)
        if num_loadable == 0 or self._connector is None:
            self._to_compute.append(request)
            return
        tokens_by_tier = self._connector.get_tokens_by_tier(request.request_id, num_loadable)
        num_loaded_tokens = request.num_computed_tokens - num_held_tokens
        request.loaded_tokens = name_places(take_first(tokens_by_tier, num_loaded_tokens))
        self._loading[request.request_id] = request

    def _plan_compute(self) -> StepOutput:
        """Return the next part of a prompt to compute; nothing while one is being computed."""
        if self._computing is not None or not self._to_compute:
            return NOTHING
        request = self._computing = self._to_compute[0]
        num_left = request.num_prompt_tokens - request.num_computed_tokens
        tokens = {request.request_id: min(num_left, self._model.max_step_tokens)}
        computed = request.num_computed_tokens
        self._name(request, computed + tokens[request.request_id], first_token=computed)
        named = None
        if self._states is not None:
            kept = self._states.list_kept(request, computed, computed + tokens[request.request_id])
            named = NamedStates({request.request_id: kept})
        if not request.is_scheduled:
            request.is_scheduled = True
            return StepOutput(
                (NewRequest(request.request_id, request.get_block_ids(), computed),),
                num_scheduled_tokens=tokens,
                kv_connector_block_state=named,
            )
        cached = CachedRequests((request.request_id,), (), (None,), (computed,))
        return StepOutput(
            scheduled_cached_reqs=cached, num_scheduled_tokens=tokens, kv_connector_block_state=named
        )

    def _compute(self, output: StepOutput) -> None:
        for num_tokens in output.num_scheduled_tokens.values():
            duration_s = num_tokens / self._model.prefill_tokens_per_s
            self.timeline.at(self.timeline() + duration_s, partial(self._end_compute, num_tokens, duration_s))

    def _end_compute(self, num_tokens: int, duration_s: float) -> None:
        request = self._computing
        assert request is not None, "the step that ended computed a part of a request"
        self._computing = None
        self._has_news = True
        request.num_computed_tokens += num_tokens
        if self._connector is not None and self._connector.load_or_compute is not None:
            self._connector.load_or_compute.report_prefill(num_tokens, duration_s)
        if self.worker is not None:
            self.worker.begin_stores()
        if self._states is not None:
            self._states.free_passed(request, request.num_computed_tokens)
        if request.num_computed_tokens < request.num_prompt_tokens:
            return
        self._to_compute.popleft()
        now_s = request.first_token_s = self.timeline()
        answer_s = request.num_output_tokens / self._model.decode_tokens_per_s
        self.timeline.at(now_s + answer_s, partial(self._finish, request))

    def _finish(self, request: SimulatedRequest) -> None:
        self._has_news |= bool(self._waiting)
        self._num_running -= 1
        if self._connector is not None:
            self._connector.request_finished(request)
        self._pool.free(request.block_ids)
        if self._states is not None:
            self._states.free(request)
        self._on_finished(request)

    def _reject(self, request: SimulatedRequest) -> None:
        self.num_rejected += 1
        self._on_finished(request)

    def _num_blocks(self, request: SimulatedRequest) -> int:
        # Keys and values of an answer's last token are never computed.
        num_tokens = request.num_prompt_tokens + max(0, request.num_output_tokens - 1)
        return -(-num_tokens // self._model.block_tokens)

    def _name(self, request: SimulatedRequest, num_tokens: int, first_token: int = 0) -> None:
        """Register the request's full blocks within ``num_tokens`` for others, as vLLM does when it schedules.

        Blocks that end before ``first_token`` are registered already.
        """
        if self._states is not None:
            self._states.publish(request, first_token, num_tokens)
        first = first_token // self._model.block_tokens
        num_full = min(num_tokens // self._model.block_tokens, len(request.block_hashes))
        self._pool.publish(request.block_ids[first:num_full], request.block_hashes[first:num_full])
