"""A cache for programs that call ``model.generate``: filled from the tiers, and stored into them afterwards.

One line changes:

    cache = engine.cache_for(input_ids)
    output = model.generate(input_ids, cache=cache, max_new_tokens=32)
    cache.commit(output)

transformers reads from the cache how many tokens it holds and computes the others. The engine can serve requests while
the model generates, because the cache has keys and values of its own.
"""

from collections.abc import Mapping
from types import TracebackType
from typing import Self

import torch

from kvtier.engines.transformers.result import COMPUTED
from kvtier.engines.transformers.sequence_cache import SequenceCache
from kvtier.engines.transformers.serving import RequestServer
from kvtier.engines.transformers.token_ids import TokenIds, read_token_ids
from kvtier.errors import ConfigError, ModelError

HEADROOM_TOKENS = 256
"""Room for output tokens at first. More costs memory that short answers never use; with less the cache is copied more
often, each time that it grows by half."""


class KVTierCache(SequenceCache):
    """The keys and values of one prompt, for one call of ``model.generate``.

    The model must be the engine's own, and its prompt the one given here, without padding: a cache receives neither
    tokens nor masks, so anything else would be stored under the wrong key. ``generate`` treats every pad token as
    padding; pass an ``attention_mask`` of ones when the prompt may contain that token. As a context manager the cache
    commits when its block ends without an error.

    Args:
        server: of the engine.
        input_ids: the prompt: ids, or what a tokenizer returned for one text; a leading dimension of one is fine.
        tenant: whose prompt it is, where the engine's setting ``tenants`` names tenants.

    Attributes:
        sources: prompt tokens by origin, as in ``GenerationResult.sources``; the model computes those of ``computed``.
    """

    def __init__(self, server: RequestServer, input_ids: TokenIds, tenant: str | None = None) -> None:
        self._server = server
        self._tenant = tenant
        self._prompt = server.adapter.read_prompt(input_ids)
        self._range = server.adapter.rope.range_of(len(self._prompt))
        self._is_committed = False
        super().__init__(server.adapter.shape, len(self._prompt) + HEADROOM_TOKENS)
        found = self._load_prefix()
        self._epoch = server.epoch
        self._num_stored_tokens = self.num_tokens
        num_computed = len(self._prompt) - sum(found.values())
        self.sources: Mapping[str, int] = dict(found) | {COMPUTED: num_computed}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens of one layer, and return all of its tokens.

        Raises:
            ModelError: the prompt came in pieces, and the model rotates the keys of the first as those of a short
                prompt.
        """
        num_tokens = self.get_seq_length(layer_idx) + key_states.shape[2]
        if num_tokens <= self._range.above:
            raise ModelError(
                f"{num_tokens} tokens of a prompt of {len(self._prompt)} were computed by themselves: this model's "
                f"longrope rotates keys of more than {self._range.above} tokens otherwise; give it the prompt at once "
                "(prefill_chunk_size=None)"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def commit(self, output_ids: TokenIds | None = None) -> int:
        """Store what the model has computed, for this and other requests.

        Args:
            output_ids: the result of ``model.generate``, prompt included: a tensor, or with ``return_dict_in_generate``
                its output object. Without it only the prompt is stored, because a cache does not receive token ids.

        Returns:
            How many tokens were stored, counted from the first; 0 when the engine was reset, or the model changed,
            meanwhile.

        Raises:
            ConfigError: ``output_ids`` does not begin with the prompt.
        """
        token_ids = self._prompt
        if output_ids is not None:
            token_ids = read_token_ids(output_ids, self._server.adapter.vocabulary_size)
            if token_ids[: len(self._prompt)] != self._prompt:
                shown = f"{len(token_ids)} tokens that begin with {token_ids[:8]}"
                raise ConfigError("output_ids", shown, "must begin with the prompt of this cache")
        self._is_committed = True
        if self._server.adapter.shape.states:
            # They were kept while the engine computed the prompt. `generate` goes on from token to token, or in pieces
            # that end anywhere, so later states cannot be told from those in between.
            return self._num_stored_tokens if self._epoch == self._server.epoch else 0
        # The model has not computed the last token of the output.
        num_known = len(token_ids) - (output_ids is not None)
        num_tokens = self._range.cut(min(num_known, self.num_tokens))
        return num_tokens if num_tokens > 0 and self._store(token_ids[:num_tokens]) else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and not self._is_committed:
            self.commit()

    def _load_prefix(self) -> Mapping[str, int]:
        """Fill this cache with the cached prefix of its prompt, at most all but the last token.

        Effects: for a model with recurrent states, computes and stores what is missing up to the last state that can
            be kept, because the caller computes the prompt in one piece and no state within it is seen.

        Returns:
            Tokens by origin; those that were computed are not among them.
        """
        request = self._server.make_request(self._prompt, tenant=self._tenant)
        interval, end = request.sizes.state_interval_tokens, request.num_tokens - 1
        if interval is None:
            end = 0
        elif not request.goes_on_by_token:
            end = end // interval * interval
        with self._server.serving(request):
            self._server.admit(request, self)
            while request.num_computed_tokens < end:
                self._server.compute_chunk(request, self)
        return {origin: num_tokens for origin, num_tokens in request.origins.items() if num_tokens}

    def _store(self, token_ids: list[int]) -> bool:
        """Store the full blocks of ``token_ids``, the first of this cache, on the device and in the tiers.

        Returns:
            Whether they are stored: not when the engine was reset or the model changed meanwhile.
        """
        self._server.require_idle()
        self._server.follow_model()
        if self._epoch != self._server.epoch:
            return False
        request = self._server.make_request(
            token_ids,
            kv_transfer_params={"skip_load": True},
            length_range=self._range,
            tenant=self._tenant,
        )
        request.is_traffic = False
        with self._server.serving(request):
            self._server.admit(request, None)
            num_missing = request.num_tokens - request.num_computed_tokens
            if num_missing:
                self._server.advance(request, self, num_missing, lambda: None)
        return True
