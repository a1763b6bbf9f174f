"""The embedded engine: what a program calls; ``serving.py`` has the way of a request through it."""

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, Unpack

from transformers import PreTrainedModel

from kvtier.base import OffloadingSpec
from kvtier.config import OffloadingConfig, parse_settings
from kvtier.engines.common.block_pool import DeviceBlockPool
from kvtier.engines.transformers.cache import KVTierCache
from kvtier.engines.transformers.config import EngineConfig, choose_block_sizes, describe_waste
from kvtier.engines.transformers.connector_halves import ConnectorHalves
from kvtier.engines.transformers.identity import ModelFollower, ModelNamer, make_offloading_config
from kvtier.engines.transformers.interrupt import DeferredInterrupt
from kvtier.engines.transformers.model_adapter import ModelAdapter, PeftWrapper
from kvtier.engines.transformers.model_checks import Continuation, require_shareable_prefixes
from kvtier.engines.transformers.model_watch import ModelLook
from kvtier.engines.transformers.paged_cache import DeviceCache, PagedKVCache
from kvtier.engines.transformers.request import make_prompt_hasher
from kvtier.engines.transformers.result import GenerationResult, TokenStream
from kvtier.engines.transformers.sampling import GenerationArguments, ParamsReader
from kvtier.engines.transformers.serving import RequestServer
from kvtier.engines.transformers.token_ids import TokenIds
from kvtier.errors import ModelError
from kvtier.factory import OffloadingSpecFactory
from kvtier.histogram import HistogramSnapshot
from kvtier.observe.prometheus import open_metrics
from kvtier.operating import DrainResult

logger = logging.getLogger(__name__)

DEFAULT_SHUTDOWN_S = 10.0
"""Seconds for which shutdown waits for unfinished stores. Zero drops them; more delays the end behind a slow tier."""


class KVTierEngine:
    """A model with a tiered KV cache. Used from one thread.

    Args:
        model: any causal language model of transformers, on one device, or what peft made of one; it is switched to
            evaluation mode.
        config: sizes, and kvtier's own settings.
        clock: seconds, monotonic.
        pause: waits for that many seconds.
        make_spec: builds an offloading spec, once for each half of the connector.

    Attributes:
        config: the sizes and settings.
        metrics: serves its metrics; None without the setting ``metrics_port``.

    Raises:
        ModelError: the model has no cache of keys and values of every token, or prompts cannot share it.
        ConfigError: a setting has a value that cannot work.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftWrapper,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        make_spec: Callable[[OffloadingConfig], OffloadingSpec] = OffloadingSpecFactory.create_spec,
    ) -> None:
        self.config = config
        adapter = ModelAdapter(model)
        before = ModelLook(adapter.model)
        continuation = require_shareable_prefixes(adapter)
        namer = ModelNamer(adapter, config, unread=before.changed_names())
        sizes = choose_block_sizes(config, adapter.shape)
        if waste := describe_waste(adapter.shape, sizes):
            logger.warning("%s: %s", adapter.name, waste)
        pages = PagedKVCache(adapter.shape, config.num_device_blocks, sizes)
        self._device = DeviceCache(DeviceBlockPool(config.num_device_blocks), pages, sizes)
        self._params_reader = ParamsReader(adapter.name, adapter.vocabulary_size)
        self._can_generate_with_cache = adapter.can_generate_with_cache
        self._halves: ConnectorHalves | None = None
        look, identity = ModelLook(adapter.model, namer.unread), None
        if config.extra_config is not None:
            identity = namer.name_probed()
            hash_prompt = make_prompt_hasher(
                config.salt, sizes.block_size_tokens, lambda num: adapter.rope.range_of(num).name
            )
            worker = make_offloading_config(adapter, config, config.extra_config, identity)
            self._halves = ConnectorHalves.open(worker, make_spec, pages.canonical, clock, hash_prompt)
        try:
            self._server = RequestServer(
                adapter,
                config,
                self._device,
                self._halves,
                ModelFollower(namer, look, identity),
                clock,
                pause,
                goes_on_by_token=continuation is Continuation.ONE_BY_ONE,
            )
            self.metrics = open_metrics(self, parse_settings(config.extra_config or {}))
        except BaseException:
            if self._halves is not None:
                self._halves.shutdown()
            raise

    def generate(
        self,
        token_ids: TokenIds,
        max_new_tokens: int | None = None,
        *,
        return_logits: bool = False,
        tenant: str | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> TokenStream:
        """Return the stream of tokens that follow a prompt; the first ``next`` starts the request.

        Args:
            token_ids: the prompt, at least one token: ids, or what a tokenizer returned for one text; a leading
                dimension of one is fine.
            max_new_tokens: tokens to generate at most; None takes that of the model's ``generation_config``.
            return_logits: whether the result keeps every token's logits.
            tenant: whose request it is, where the setting ``tenants`` names tenants.
            arguments: how tokens are chosen and when to stop: ``GenerationArguments``. What is left out comes from the
                model's ``generation_config``.

        Raises:
            ConfigError: an argument cannot work.
            UnknownNameError: there is no such argument.
            SequenceLengthError: prompt and output cross a length at which the model rotates keys in another way.
            DevicePoolError: prompt and output do not fit the device pool.
        """
        model = self._server.adapter.model
        given = {"max_new_tokens": max_new_tokens, **arguments}
        params = self._params_reader.read(given, model.generation_config)
        # The last token's keys and values are never computed, so it needs no room.
        request = self._server.make_request(token_ids, params.max_new_tokens - 1, tenant=tenant)
        request.logits = [] if return_logits else None
        return TokenStream(request, self._server.serve(request, params))

    def run(
        self,
        token_ids: TokenIds,
        max_new_tokens: int | None = None,
        *,
        return_logits: bool = False,
        tenant: str | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> GenerationResult:
        """Generate every token and return the result; the arguments are those of ``generate``."""
        stream = self.generate(
            token_ids, max_new_tokens, return_logits=return_logits, tenant=tenant, **arguments
        )
        # One signal handler for the whole run: each step defers interrupts around its bookkeeping only.
        with DeferredInterrupt() as deferred, deferred.lifted(), stream:
            for _ in stream:
                pass
        return stream.result

    def cache_for(self, input_ids: TokenIds, *, tenant: str | None = None) -> KVTierCache:
        """Return a cache for ``model.generate(input_ids, cache=cache)``, filled from the tiers.

        Before transformers 5.24 the argument of ``generate`` is named ``past_key_values``.

        Args:
            input_ids: the prompt.
            tenant: whose prompt it is, where the setting ``tenants`` names tenants.

        Effects: for a model with recurrent states, computes the prompt up to the last state that is kept.

        Raises:
            ModelError: the model's ``generate`` takes no cache that holds a prefix.
        """
        if not self._can_generate_with_cache:
            raise ModelError(
                f"{self._server!r}: generate() of a model with recurrent states alone computes each prompt from its "
                "first token; call engine.generate or engine.run instead of cache_for"
            )
        return KVTierCache(self._server, input_ids, tenant)

    def drop_device_cache(self) -> None:
        """Clear the device's prefix cache, not the tiers."""
        self._server.require_idle()
        self._device.pool.drop_cached()

    def reset(self) -> None:
        """Forget every block, on the device and in every tier; shared tiers keep blocks for other engines."""
        self._server.reset()

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by dotted name; those of the device pool begin with ``device``.

        Thread: any. ``docs/reference/metrics.md`` has the metric families that are made from them.
        """
        stats, pool = {} if self._halves is None else self._halves.scheduler.stats(), self._device.pool
        return stats | {
            "device.num_blocks": float(pool.num_blocks),
            "device.free_blocks": float(pool.num_free_blocks),
            "device.cached_blocks": float(pool.num_cached_blocks),
        }

    def histograms(self) -> dict[str, HistogramSnapshot]:
        """Return histograms of sizes and durations by dotted name. Thread: any."""
        return {} if self._halves is None else self._halves.scheduler.histograms()

    def drain(self, timeout_s: float) -> DrainResult:
        """Wait until every store has reached host memory and the tiers, or ``timeout_s`` has passed.

        Returns:
            True when every block is where it should be; false when time ran out, or a block was lost on its way to a
            tier since the last drain that ended. Its fields say how many.
        """
        self._server.require_idle()
        return self._server.drain(timeout_s)

    def shutdown(self, timeout_s: float = DEFAULT_SHUTDOWN_S) -> None:
        """Drain for at most ``timeout_s``, then end every thread and free the memory; idempotent.

        Effects: ends the request that is being served; its stream has no further token. None in a forked child.
        """
        if self._server.is_forked:
            return  # the memory goes with the process, and whom it would wait for is not there
        if self.metrics is not None:
            self.metrics.close()
        self._server.shutdown(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"KVTierEngine({self._server!r}, {self._device.pool!r})"
