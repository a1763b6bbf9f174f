"""Serves one request at a time, from its admission to its end, on a device pool with tiers behind it.

1. Admission (``admit``): the request's prefix is found on the device, then in the tiers; it gets device blocks, and
   what a tier has is loaded into them.
2. Prefill: the cached tokens are copied into the working sequence, which the model reads, and the rest of the prompt is
   computed in chunks (``compute_chunk``). Blocks that became full go to the pool, where later requests find them.
3. Decoding: one token in each step. A step stores what earlier steps have computed, while the model computes.
4. The end (``_end``), however it comes: a step without tokens starts the last stores, and the blocks are freed. Stores
   go on while the next request is served, and ``drain`` waits for them.

A step (``_step``) calls both halves of kvtier's connector in the order of ``kvtier.connector.protocols``; steps without
tokens wait for lookups and loads. An interrupt is delivered where both halves agree: while the model computes, and
between two steps. The keys and values of the request that is served are twice in device memory: in pages, and
contiguous in the working sequence.
"""

import itertools
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from kvtier.config import parse_settings
from kvtier.connector.common import OffloadingConnectorMetadata, StopReason
from kvtier.engines.common.step import StepOutput, WorkerOutput, begin_step, end_step
from kvtier.engines.transformers.config import EngineConfig
from kvtier.engines.transformers.connector_halves import ConnectorHalves
from kvtier.engines.transformers.identity import ModelFollower
from kvtier.engines.transformers.interrupt import DeferredInterrupt
from kvtier.engines.transformers.model_adapter import ModelAdapter
from kvtier.engines.transformers.paged_cache import DeviceCache
from kvtier.engines.transformers.request import Request, make_range_root, make_root_digest
from kvtier.engines.transformers.result import DEVICE, split_origins
from kvtier.engines.transformers.rope import LengthRange
from kvtier.engines.transformers.sampling import Sampler, SamplingParams
from kvtier.engines.transformers.sequence_cache import SequenceCache
from kvtier.engines.transformers.token_ids import TokenIds, read_token_ids
from kvtier.errors import DevicePoolError, EngineStateError
from kvtier.hints.values import TENANT, parse_hints
from kvtier.observe.spans import RequestSpans
from kvtier.operating import DrainResult
from kvtier.tenants import make_tenants

POLL_INTERVAL_S = 0.0002
"""Pause between two steps that wait for a tier. A longer one delays the first token by as much; a shorter one takes the
interpreter from the threads that do the work."""

SWITCH_DRAIN_S = 10.0
"""Seconds for which a change of the model waits until what was computed before it is in the tiers. Zero drops what is
still on its way; more delays the next request behind a slow tier."""

MAX_USED_STATES = 2
"""Pages with recurrent states that a request uses at once: those it computes from, and those it computes."""


class RequestServer:
    """Serves one request at a time. Used from one thread.

    Args:
        adapter: the model.
        config: the engine's settings.
        device: the device blocks.
        halves: of the connector; None without offloading.
        follower: notices that the model has changed.
        clock: seconds, monotonic.
        pause: waits for that many seconds.
        goes_on_by_token: whether the model goes on from recurrent states one token at a time.

    Attributes:
        adapter: as given.
        epoch: the number of resets and of changes of the model that were noticed: what was computed in another epoch is
            not stored.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        config: EngineConfig,
        device: DeviceCache,
        halves: ConnectorHalves | None,
        follower: ModelFollower,
        clock: Callable[[], float],
        pause: Callable[[float], None],
        *,
        goes_on_by_token: bool = False,
    ) -> None:
        self.adapter = adapter
        self.epoch = 0
        self._goes_on_by_token = goes_on_by_token
        self._config = config
        self._device = device
        self._halves = halves
        self._follower = follower
        self._clock = clock
        self._pause = pause
        self._working = SequenceCache(adapter.shape)
        self._logits = torch.empty(0)
        self._root = make_root_digest(config.salt)
        self._tenants = make_tenants(parse_settings(config.extra_config or {}))
        self._request_numbers = itertools.count()
        self._active: Request | None = None
        self._is_loading = False
        self._failed_block_ids: set[int] = set()
        self._longest_tokens = 0
        self._is_closed = False
        self._pid = os.getpid()
        if halves is not None:
            self._spans = RequestSpans(halves.scheduler.layouts[0].block_tokens)
            # A first step in which both halves compare their regions; no load can start before it.
            self._step(StepOutput())

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child, which lacks the threads that copies and tiers wait for."""
        return self._halves is not None and os.getpid() != self._pid

    def make_request(
        self,
        token_ids: TokenIds,
        num_new_tokens: int = 0,
        kv_transfer_params: dict[str, Any] | None = None,  # Any: the connector's contract
        length_range: LengthRange | None = None,
        tenant: str | None = None,
    ) -> Request:
        """Return a request that has not started.

        Args:
            token_ids: its prompt.
            num_new_tokens: output tokens whose keys and values are kept while it is served.
            kv_transfer_params: hints for the connector.
            length_range: the range in which its keys were computed; None takes that of the prompt.
            tenant: whose it is, where the setting ``tenants`` names tenants; None: of none.

        Raises:
            ConfigError: the prompt is not one sequence of the model's tokens.
            SequenceLengthError: prompt and output are in different ranges, or in none, or beyond the last position.
            DevicePoolError: the request needs more blocks than the pool has.
        """
        if length_range is None:
            prompt = self.adapter.read_prompt(token_ids)
            length_range = self.adapter.rope.range_of(len(prompt))
        else:
            # Media tokens that the model itself has generated are ordinary tokens; only a prompt must not contain them.
            prompt = read_token_ids(token_ids, self.adapter.vocabulary_size)
        length_range.require(len(prompt), num_new_tokens)
        self.adapter.length.require(len(prompt), num_new_tokens)
        request_id = f"request-{next(self._request_numbers)}"
        if tenant is not None:
            kv_transfer_params = {**(kv_transfer_params or {}), TENANT: tenant}
        request = Request(
            request_id=request_id,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sizes=self._device.sizes,
            root=make_range_root(self._root, length_range.name),
            min_step_end_tokens=length_range.above + 1,
            goes_on_by_token=self._goes_on_by_token,
            kv_transfer_params=kv_transfer_params,
            device_key=self._make_device_key(kv_transfer_params, request_id),
        )
        num_tokens, pool = len(prompt) + num_new_tokens, self._device.pool
        num_states = min(MAX_USED_STATES, request.num_states_for(num_tokens))
        num_needed = request.num_blocks_for(num_tokens) + num_states
        if num_needed > pool.num_blocks:
            raise DevicePoolError(pool.num_blocks, num_needed, pool.num_free_blocks)
        return request

    def serve(self, request: Request, params: SamplingParams) -> Generator[int, None, None]:
        """Yield the tokens that follow the request's prompt; the first ``next`` starts it."""
        sampler = Sampler(params)
        with self.serving(request):
            self.admit(request, self._working)
            token_id = self._compute_next(request, sampler)
            request.first_token_s = self._clock()
            if request.num_tokens > self._longest_tokens:
                self._longest_tokens = request.num_tokens
                self._follower.learn()
            while not params.is_last(token_id, len(request.output_ids)):
                yield token_id
                token_id = self._compute_next(request, sampler)
            if token_id in params.eos_token_ids:
                request.stop = StopReason.END_TURN
        # The request has ended before its last token is returned, so a caller may stop reading there.
        yield token_id

    @contextmanager
    def serving(self, request: Request) -> Iterator[None]:
        """Serve one request exclusively; however it ends, its blocks are freed and its transfers completed."""
        self.require_idle()
        self.follow_model()
        try:
            request.started_s = self._clock()
            self._active = request
            yield
            if self._active is request and request.is_known:
                self._store_rest(request)
        finally:
            self._end(request)

    def admit(self, request: Request, sequence: SequenceCache | None) -> None:
        """Give the request its blocks, and fill them and ``sequence`` with its cached tokens, of the device or a tier.

        Effects: sets ``num_computed_tokens`` and ``origins``. A model gives logits only for tokens that it computes, so
            the last token of a fully cached prompt is computed again. Recurrent states cannot go back to it, so of such
            a prompt an earlier state is found, or none.

        Raises:
            DevicePoolError: the pool is too small for the request's tokens.
        """
        num_device_tokens = self._device.use_prefix(request)
        num_external_tokens = self._find_in_tiers(request)
        self._device.grow(request, request.num_tokens, num_device_tokens + num_external_tokens)
        request.origins = {DEVICE: num_device_tokens} | self._load(request, num_external_tokens)
        if sequence is None:
            return
        if request.num_computed_tokens >= request.num_tokens:
            request.num_computed_tokens -= 1
            latest = [origin for origin, num_tokens in request.origins.items() if num_tokens][-1]
            request.origins[latest] -= 1
        self._device.gather(request, sequence)

    def compute_chunk(self, request: Request, sequence: SequenceCache) -> None:
        """Compute as many of the request's missing tokens as one step does."""
        first = request.num_computed_tokens
        last = request.end_of_step(first, self._config.prefill_chunk_tokens)
        chunk = request.token_ids[first:last]
        self.advance(request, sequence, len(chunk), partial(self._compute, chunk, sequence))

    def advance(
        self, request: Request, sequence: SequenceCache, num_tokens: int, compute: Callable[[], None]
    ) -> None:
        """Do one step: allocate blocks, compute, write the blocks that became full into the pool.

        Args:
            request: the request.
            sequence: holds the keys and values of the new tokens when ``compute`` has returned.
            num_tokens: how many tokens to compute, at least one.
            compute: computes them; when it raises, none counts as computed.

        Raises:
            DevicePoolError: the pool is full.
        """
        end = request.num_computed_tokens + num_tokens
        plan = request.plan_step(num_tokens, self._device.grow(request, end, end))

        def compute_and_keep() -> None:
            compute()
            self._device.keep_full_blocks(request, sequence, end)

        request.is_known = True
        self._step(plan, compute_and_keep)
        request.num_computed_tokens = end

    def drain(self, timeout_s: float) -> DrainResult:
        """Step until every store has ended and no tier has work, or ``timeout_s`` has passed."""
        if self._halves is None:
            return DrainResult()
        scheduler, manager = self._halves.scheduler, self._halves.manager
        end_s = self._clock() + timeout_s
        if scheduler.control is not None and scheduler.control.is_wanted:
            self._step(StepOutput())  # an idle engine does here what its operators want
        while not scheduler.is_idle() and self._clock() < end_s:
            self._step(StepOutput())
            self._pause(POLL_INTERVAL_S)
        if not scheduler.is_idle():
            return DrainResult(has_ended=False)
        left_s = max(0.0, end_s - self._clock())
        return manager.drain(left_s)

    def reset(self) -> None:
        """Forget every block, on the device and in every tier; a later return to this model does not find them."""
        self.require_idle()
        self._forget_device_blocks()
        if self._halves is not None:
            # What no name identifies is in host memory alone, and stays there.
            has_name = self._follower.on_reset()
            self._forget_in_tiers(None if has_name else partial(self._halves.manager.switch_model, None))

    def follow_model(self) -> None:
        """Go on with the model as it is now, if it has changed; called between two requests.

        The device pool and host memory are emptied, and the tiers move to the namespace of the model's new name. Blocks
        of before stay in the tiers under the name of before: they are found when the model is again what it was.

        Effects: switches a model that has changed to evaluation mode.
        """
        change = self._follower.find_change()
        if change is None:
            return
        if change.is_other:
            self.drain(SWITCH_DRAIN_S)
        with DeferredInterrupt():
            if change.is_other:
                self._forget_device_blocks()
            if change.is_other and self._halves is not None:
                self._forget_in_tiers(partial(self._halves.manager.switch_model, change.identity))
                if change.was_reset:
                    self._forget_in_tiers()  # what was stored before that reset must not be found again
            self._follower.accept(change)

    def shutdown(self, timeout_s: float) -> None:
        """End the request that is being served, drain for at most ``timeout_s``, and end the tiers; idempotent."""
        is_first, self._is_closed = not self._is_closed, True
        if not is_first:
            return
        try:
            if self._active is not None:
                self._end(self._active)
            self.drain(timeout_s)
        finally:
            if self._halves is not None:
                self._halves.shutdown()

    def require_idle(self) -> None:
        """Raise unless the engine is open and serves no request.

        Raises:
            EngineStateError: a request is being served, the engine is shut down, or this is a forked child.
        """
        if self.is_forked:
            message = "was made by a process of which this one is a fork: threads do not live on in it; make a new one"
            raise EngineStateError(f"the engine {message}")
        if self._is_closed:
            raise EngineStateError("the engine is shut down: make a new one")
        if self._active is not None:
            raise EngineStateError(
                f"request {self._active.request_id!r} is being served: take all its tokens or close its stream"
            )

    def __repr__(self) -> str:
        state = "shut down" if self._is_closed else "idle" if self._active is None else "busy"
        return f"RequestServer({self.adapter.name}, {state})"

    def _make_device_key(
        self,
        params: dict[str, Any] | None,  # Any: the connector's contract
        request_id: str,
    ) -> bytes:
        """Return what keeps a request's blocks on the device apart from other tenants'; empty without tenants."""
        if self._tenants is None:
            return b""
        tenant = self._tenants.find(params, parse_hints(params))
        # A request of a tenant that is not served shares its blocks with no other.
        return request_id.encode() if tenant is None else tenant.hash_key

    def _find_in_tiers(self, request: Request) -> int:
        """Return how many tokens after the computed ones the tiers hold; blocks until every tier has answered."""
        if self._halves is None:
            return 0
        while True:
            with DeferredInterrupt():
                answer, _ = self._halves.scheduler.get_num_new_matched_tokens(
                    request, request.num_computed_tokens
                )
            if answer is not None:
                return answer
            self._step(StepOutput())
            self._pause(POLL_INTERVAL_S)

    def _load(self, request: Request, num_external_tokens: int) -> dict[str, int]:
        """Load that many tokens into the request's blocks; return how many were, by origin."""
        if self._halves is None:
            return {}
        scheduler = self._halves.scheduler
        with DeferredInterrupt():
            scheduler.update_state_after_alloc(request, request, num_external_tokens)
            self._is_loading = num_external_tokens > 0
            tokens_by_tier = scheduler.get_tokens_by_tier(request.request_id, num_external_tokens)
        if not num_external_tokens:
            return {}
        failed = self._wait_for_load()
        return split_origins(self._device.complete_load(request, num_external_tokens, failed), tokens_by_tier)

    def _wait_for_load(self) -> set[int]:
        """Step until the load under way has ended; return the device blocks whose load failed."""
        while self._is_loading:
            self._step(StepOutput())
            if self._is_loading and self._halves is not None:
                # An interrupt must not leave the reports of the copy threads half read.
                with DeferredInterrupt():
                    self._halves.worker.wait_for_loads()
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def _compute_next(self, request: Request, sampler: Sampler) -> int:
        """Compute the request's missing tokens, choose its next token and append it."""
        if self._active is not request:
            raise EngineStateError(f"request {request.request_id!r} was ended by shutdown: make a new engine")
        num_missing_tokens = request.num_tokens - request.num_computed_tokens
        begun_s = self._clock()
        while request.num_computed_tokens < request.num_tokens:
            self.compute_chunk(request, self._working)
        # The device works asynchronously; choosing a token waits for it, so the time is taken afterwards.
        token_id = sampler.choose(self._logits)
        if num_missing_tokens > 1 and self._halves is not None:
            choice = self._halves.scheduler.load_or_compute
            if choice is not None:
                choice.report_prefill(num_missing_tokens, self._clock() - begun_s)
        if request.logits is not None:
            request.logits.append(self._logits)
        request.append(token_id)
        return token_id

    def _compute(self, token_ids: list[int], sequence: SequenceCache) -> None:
        self._logits = self.adapter.forward(token_ids, sequence)

    def _step(self, plan: StepOutput, compute: Callable[[], None] | None = None) -> None:
        """Do one step of the connector.

        Args:
            plan: the tokens to compute.
            compute: computes them and writes the device blocks; when it raises, the step still ends in order.
        """
        if self._halves is None:
            if compute is not None:
                compute()
            return
        is_computed = compute is None
        with DeferredInterrupt() as deferred:
            metadata = self._halves.scheduler.build_connector_meta(plan)
            begin_step(self._halves.worker, metadata)
            try:
                if compute is not None:
                    with deferred.lifted():
                        compute()
                    is_computed = True
            finally:
                self._end_step(self._halves, metadata, is_computed=is_computed)

    def _end_step(
        self, halves: ConnectorHalves, metadata: OffloadingConnectorMetadata, *, is_computed: bool
    ) -> None:
        loads, report = end_step(halves.worker, metadata, is_computed=is_computed)
        for block_ids in loads.values():
            self._failed_block_ids.update(block_ids or ())
            self._is_loading = False  # one request is served, so one load is under way
        halves.scheduler.update_connector_output(WorkerOutput(report))

    def _store_rest(self, request: Request) -> None:
        """Store the rest of a computed request as host memory gets room, where a tier must get every block."""
        if self._halves is None:
            return
        scheduler, manager = self._halves.scheduler, self._halves.manager
        plan = request.plan_step(0)

        def may_come() -> bool:
            return scheduler.has_open_stores() or manager.will_have_room()

        # Room that came while a step ended is there for the next: a step that began with none to come is the last.
        had_to_come = True
        while scheduler.has_unstored(request.request_id) and (had_to_come or may_come()):
            had_to_come = may_come()
            self._step(plan)
            self._pause(POLL_INTERVAL_S)

    def _end(self, request: Request) -> None:
        """End a request, complete or not, unless shutdown has ended it: its blocks are freed even after an error."""
        if self._active is not request:
            return
        with DeferredInterrupt():
            try:
                self._finish(request)
            finally:
                self._device.free(request)
                self._active = None
                request.ended_s = self._clock()

    def _finish(self, request: Request) -> None:
        """End the request for the connector: a step without tokens starts its last stores, and waits for none."""
        if self._halves is None:
            return
        scheduler = self._halves.scheduler
        self._wait_for_load()
        scheduler.request_finished(request, request.stop, is_traffic=request.is_traffic)
        self._step(StepOutput(finished_req_ids=frozenset({request.request_id})))
        if self._spans.is_active:
            self._spans.export(scheduler.records.latest, scheduler.records.num_requests)

    def _forget_device_blocks(self) -> None:
        self.epoch += 1
        self._device.pool.drop_cached()

    def _forget_in_tiers(self, begin_anew: Callable[[], None] | None = None) -> None:
        """Make the manager forget every block, by its ``reset`` or as given."""
        assert self._halves is not None, "without tiers the device has all blocks"
        with DeferredInterrupt():
            self._halves.scheduler.reset(begin_anew)
            self._step(StepOutput())
