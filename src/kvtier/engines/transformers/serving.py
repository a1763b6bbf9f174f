"""Serves requests one after another on a device pool: admits a request, generates its tokens, and ends it.

One request at a time holds the server. However it ends, its blocks are freed and its transfers are completed. The keys
and values of the request that is being served are twice in device memory: in pages, and contiguous in the working
sequence that the model reads.
"""

import itertools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from kvtier.config import parse_settings
from kvtier.connector.common import StopReason
from kvtier.engines.common.block_pool import DeviceBlockPool
from kvtier.engines.transformers.block_sizes import BlockSizes
from kvtier.engines.transformers.config import EngineConfig
from kvtier.engines.transformers.model_adapter import KVShape, ModelAdapter
from kvtier.engines.transformers.model_switch import ModelSwitch
from kvtier.engines.transformers.request import Request, make_range_root, make_root_digest
from kvtier.engines.transformers.rope import LengthRange
from kvtier.engines.transformers.sampling import Sampler, SamplingParams
from kvtier.engines.transformers.scheduler import RequestScheduler
from kvtier.engines.transformers.sequence_cache import SequenceCache
from kvtier.engines.transformers.token_ids import TokenIds, read_token_ids
from kvtier.errors import ConfigError, DevicePoolError, EngineStateError
from kvtier.hints.values import TENANT, parse_hints
from kvtier.tenants import make_tenants

MAX_USED_STATES = 2
"""Pages with recurrent states that a request uses at once: those it computes from, and those it computes."""


class RequestServer:
    """Serves one request at a time; a ``PrefixStore`` for KVTierCache. Used from one thread.

    Args:
        adapter: the model.
        config: the engine's settings.
        sizes: of its blocks.
        pool: the device blocks.
        scheduler: runs the steps of requests.
        model_switch: notices that the model has changed.
        clock: seconds, monotonic.
        goes_on_by_token: whether the model goes on from recurrent states one token at a time.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        config: EngineConfig,
        sizes: BlockSizes,
        pool: DeviceBlockPool,
        scheduler: RequestScheduler,
        model_switch: ModelSwitch,
        clock: Callable[[], float],
        *,
        goes_on_by_token: bool = False,
    ) -> None:
        self._adapter = adapter
        self._goes_on_by_token = goes_on_by_token
        self._config = config
        self._sizes = sizes
        self._pool = pool
        self._scheduler = scheduler
        self._model_switch = model_switch
        self._clock = clock
        self._working = SequenceCache(adapter.shape)
        self._logits = torch.empty(0)
        self._root = make_root_digest(config.salt)
        self._tenants = make_tenants(parse_settings(config.extra_config or {}))
        self._request_numbers = itertools.count()
        self._active: Request | None = None
        self._longest_tokens = 0
        self._is_closed = False
        self._pid = os.getpid()

    @property
    def epoch(self) -> int:
        """The number of resets and of changes of the model that were noticed."""
        return self._model_switch.epoch

    @property
    def shape(self) -> KVShape:
        """The KV that one token adds to the model's cache."""
        return self._adapter.shape

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        return self._adapter.vocabulary_size

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child, which lacks the threads that copies and tiers wait for."""
        return self._config.extra_config is not None and os.getpid() != self._pid

    def read_prompt(self, token_ids: TokenIds) -> list[int]:
        """Return a prompt as a list.

        Raises:
            ConfigError: it is not one sequence of the model's tokens, or has placeholders of images or sounds.
        """
        prompt = read_token_ids(token_ids, self.vocabulary_size)
        media = next((token_id for token_id in prompt if token_id in self._adapter.media_token_ids), None)
        if media is not None:
            remedy = (
                "is a placeholder of an image, a video or a sound, whose content ids do not identify: give a prompt of "
                "text only, or call model.generate without kvtier"
            )
            raise ConfigError("token_ids", media, remedy)
        return prompt

    def range_of(self, num_prompt_tokens: int) -> LengthRange:
        """Return the range of lengths in which a prompt of that many tokens shares keys with others.

        Raises:
            SequenceLengthError: there is none.
        """
        return self._adapter.rope.range_of(num_prompt_tokens)

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
            SequenceLengthError: prompt and output are in different ranges, or in none.
            DevicePoolError: the request needs more blocks than the pool has.
        """
        if length_range is None:
            prompt = self.read_prompt(token_ids)
            length_range = self.range_of(len(prompt))
        else:
            # Media tokens that the model itself has generated are ordinary tokens; only a prompt must not contain them.
            prompt = read_token_ids(token_ids, self.vocabulary_size)
        length_range.require(len(prompt), num_new_tokens)
        request_id = f"request-{next(self._request_numbers)}"
        if tenant is not None:
            kv_transfer_params = {**(kv_transfer_params or {}), TENANT: tenant}
        request = Request(
            request_id=request_id,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sizes=self._sizes,
            root=make_range_root(self._root, length_range.name),
            min_step_end_tokens=length_range.above + 1,
            goes_on_by_token=self._goes_on_by_token,
            kv_transfer_params=kv_transfer_params,
            device_key=self._make_device_key(kv_transfer_params, request_id),
        )
        num_tokens = len(prompt) + num_new_tokens
        num_needed = request.num_blocks_for(num_tokens) + min(
            MAX_USED_STATES, request.num_states_for(num_tokens)
        )
        if num_needed > self._pool.num_blocks:
            raise DevicePoolError(self._pool.num_blocks, num_needed, self._pool.num_free_blocks)
        return request

    def serve(self, request: Request, params: SamplingParams) -> Generator[int, None, None]:
        """Yield the tokens that follow the request's prompt; the first ``next`` starts it."""
        sampler = Sampler(params)
        with self._serving(request):
            self._scheduler.admit(request)
            self._scheduler.gather_prefix(request, self._working)
            token_id = self._compute_next(request, sampler)
            request.first_token_s = self._clock()
            if request.num_tokens > self._longest_tokens:
                self._longest_tokens = request.num_tokens
                self._model_switch.learn()
            while not params.is_last(token_id, len(request.output_ids)):
                yield token_id
                token_id = self._compute_next(request, sampler)
            if token_id in params.eos_token_ids:
                request.stop = StopReason.END_TURN
        # The request has ended before its last token is returned, so a caller may stop reading there.
        yield token_id

    def load_prefix(
        self, token_ids: Sequence[int], sequence: SequenceCache, tenant: str | None
    ) -> Mapping[str, int]:
        """Fill ``sequence`` with the cached prefix of ``token_ids``, at most all but the last token.

        Effects: for a model with recurrent states, computes and stores what is missing up to the last state that can
            be kept, because the caller computes the prompt in one piece and no state within it is seen.

        Returns:
            Tokens by origin; those that were computed are not among them.
        """
        request = self.make_request(token_ids, tenant=tenant)
        with self._serving(request):
            self._scheduler.admit(request)
            self._scheduler.gather_prefix(request, sequence)
            while request.num_computed_tokens < self._end_of_states(request):
                self._compute_chunk(request, sequence)
        return {origin: num_tokens for origin, num_tokens in request.origins.items() if num_tokens}

    def store_sequence(
        self,
        token_ids: Sequence[int],
        sequence: SequenceCache,
        length_range: LengthRange,
        tenant: str | None,
        epoch: int,
    ) -> bool:
        """Store the full blocks of ``sequence`` on the device and in the tiers.

        Args:
            token_ids: the first tokens of ``sequence``, which may hold more.
            sequence: keys and values that the engine's own model computed for them.
            length_range: the range of the prompt for which they were computed.
            tenant: whose they are.
            epoch: the one in which they were computed.

        Returns:
            Whether they are stored: not when the engine was reset or the model changed meanwhile.
        """
        self.require_idle()
        self._model_switch.follow()
        if epoch != self.epoch:
            return False
        request = self.make_request(
            token_ids, kv_transfer_params={"skip_load": True}, length_range=length_range, tenant=tenant
        )
        request.is_traffic = False
        with self._serving(request):
            self._scheduler.admit(request)
            num_missing = request.num_tokens - request.num_computed_tokens
            if num_missing:
                self._scheduler.advance(request, sequence, num_missing, lambda: None)
        return True

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

    def close(self) -> None:
        """End the request that is being served, and refuse others; idempotent."""
        self._is_closed = True
        if self._active is not None:
            self._end(self._active)

    def __repr__(self) -> str:
        state = "shut down" if self._is_closed else "idle" if self._active is None else "busy"
        return f"RequestServer({self._adapter.name}, {state})"

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

    def _compute_next(self, request: Request, sampler: Sampler) -> int:
        """Compute the request's missing tokens, choose its next token and append it."""
        if self._active is not request:
            raise EngineStateError(f"request {request.request_id!r} was ended by shutdown: make a new engine")
        num_missing_tokens = request.num_tokens - request.num_computed_tokens
        begun_s = self._clock()
        while request.num_computed_tokens < request.num_tokens:
            self._compute_chunk(request, self._working)
        # The device works asynchronously; choosing a token waits for it, so the time is taken afterwards.
        token_id = sampler.choose(self._logits)
        if num_missing_tokens > 1:
            self._scheduler.report_prefill(num_missing_tokens, self._clock() - begun_s)
        if request.logits is not None:
            request.logits.append(self._logits)
        request.append(token_id)
        return token_id

    def _compute_chunk(self, request: Request, sequence: SequenceCache) -> None:
        """Compute as many of the request's missing tokens as one step does."""
        first = request.num_computed_tokens
        last = request.end_of_step(first, self._config.prefill_chunk_tokens)
        chunk = request.token_ids[first:last]
        self._scheduler.advance(request, sequence, len(chunk), partial(self._compute, chunk, sequence))

    def _compute(self, token_ids: list[int], sequence: SequenceCache) -> None:
        self._logits = self._adapter.forward(token_ids, sequence)

    def _end_of_states(self, request: Request) -> int:
        """Return up to which token a prompt is computed here so that the caller can go on from its states."""
        interval = self._sizes.state_interval_tokens
        if interval is None:
            return 0
        if self._goes_on_by_token:
            return request.num_tokens - 1
        return (request.num_tokens - 1) // interval * interval

    @contextmanager
    def _serving(self, request: Request) -> Iterator[None]:
        """Serve one request exclusively; however it ends, its blocks are freed and its transfers completed."""
        self.require_idle()
        self._model_switch.follow()
        try:
            request.started_s = self._clock()
            self._active = request
            yield
            if self._active is request:
                self._scheduler.store_rest(request)
        finally:
            self._end(request)

    def _end(self, request: Request) -> None:
        """End a request, unless shutdown has ended it already."""
        if self._active is not request:
            return
        try:
            self._scheduler.finish(request)
        finally:
            self._active = None
            request.ended_s = self._clock()
