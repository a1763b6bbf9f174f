"""A cache for people who call ``model.generate`` themselves: filled from the tiers, and given back to them.

It generates nothing. One line changes:

    cache = engine.cache_for(input_ids)
    output = model.generate(input_ids, past_key_values=cache, max_new_tokens=32)
    cache.commit(output)

transformers sees how many tokens the cache holds and computes the others. The engine is free while the model
generates; the cache has keys and values of its own.
"""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

import torch

from kvtier.engines.transformers.model_adapter import KVShape
from kvtier.engines.transformers.result import COMPUTED
from kvtier.engines.transformers.rope import LengthRange
from kvtier.engines.transformers.sequence_cache import SequenceCache
from kvtier.engines.transformers.token_ids import TokenIds, read_token_ids
from kvtier.errors import ConfigError, ModelError

SPARE_TOKENS = 256
"""Room for output tokens at first. More costs memory that short answers never use; less copies the cache in
longer ones, once for every half it grows by."""


class PrefixStore(Protocol):
    """What a KVTierCache is filled from and given back to: the engine."""

    @property
    def shape(self) -> KVShape:
        """What one token leaves in the model's cache."""

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""

    @property
    def epoch(self) -> int:
        """How often everything was forgotten; keys and values of an older epoch must not be kept."""

    def read_prompt(self, token_ids: TokenIds) -> list[int]:
        """Return a prompt as a list, or refuse it."""

    def range_of(self, num_prompt_tokens: int) -> LengthRange:
        """Return the lengths in which a prompt of that many tokens shares keys with others, or refuse it."""

    def load_prefix(self, token_ids: Sequence[int], sequence: SequenceCache) -> Mapping[str, int]:
        """Fill ``sequence`` with a known prefix of ``token_ids``; return tokens by origin."""

    def store_sequence(
        self, token_ids: Sequence[int], sequence: SequenceCache, length_range: LengthRange
    ) -> None:
        """Keep the full blocks of ``sequence``."""


class KVTierCache(SequenceCache):
    """The keys and values of one prompt, for one call of ``model.generate``.

    The model must be the engine's own, and the prompt given to it the one given here, without padding: a cache
    sees neither tokens nor masks, so anything else would be kept under the wrong name. ``generate`` takes the
    pad token for padding wherever it finds it; give it an ``attention_mask`` of ones when the prompt may contain
    that token. As a context manager the cache commits when the block ends well.

    Args:
        store: the engine.
        input_ids: the prompt: ids, or what a tokenizer returned for one text; a leading dimension of one is fine.

    Attributes:
        sources: prompt tokens by origin, as in ``GenerationResult.sources``; ``computed`` are left to the model.
    """

    def __init__(self, store: PrefixStore, input_ids: TokenIds) -> None:
        self._store = store
        self._prompt = store.read_prompt(input_ids)
        self._range = store.range_of(len(self._prompt))
        self._is_committed = False
        self._epoch = store.epoch
        super().__init__(store.shape, len(self._prompt) + SPARE_TOKENS)
        found = store.load_prefix(self._prompt, self)
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
        """Append new tokens of one layer, and return everything that it holds.

        Raises:
            ModelError: a prompt given in pieces, the first of which the model takes for a shorter one.
        """
        num_tokens = self.sequence_layers[layer_idx].num_tokens + key_states.shape[2]
        if num_tokens <= self._range.above:
            raise ModelError(
                f"{num_tokens} tokens of a prompt of {len(self._prompt)} were computed by themselves: this model's "
                f"longrope rotates keys of more than {self._range.above} tokens otherwise; give it the prompt at once "
                "(prefill_chunk_size=None)"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def commit(self, output_ids: TokenIds | None = None) -> int:
        """Keep what the model has computed, for this and other requests.

        Args:
            output_ids: what ``model.generate`` returned, prompt included, a tensor or with ``return_dict_in_generate``;
                without it only the prompt is kept, because the cache does not know the tokens it was given later.

        Returns:
            How many tokens were handed over, counted from the first; none when the engine was reset meanwhile.

        Raises:
            ConfigError: ``output_ids`` does not begin with the prompt.
        """
        token_ids = self._prompt
        if output_ids is not None:
            token_ids = read_token_ids(output_ids, self._store.vocabulary_size)
            if token_ids[: len(self._prompt)] != self._prompt:
                shown = f"{len(token_ids)} tokens that begin with {token_ids[:8]}"
                raise ConfigError("output_ids", shown, "must begin with the prompt of this cache")
        self._is_committed = True
        # The last token of an output was never given back to the model.
        num_known = len(token_ids) - (output_ids is not None)
        num_held = self._range.cut(min(num_known, self.num_tokens))
        num_tokens = num_held if self._epoch == self._store.epoch else 0
        if num_tokens:
            self._store.store_sequence(token_ids[:num_tokens], self, self._range)
        return num_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and not self._is_committed:
            self.commit()
