"""How a request chooses its next token and when it ends: what the caller says, then what the model's files say.

A caller's arguments come first. What they leave open comes from the model's ``generation_config``, as
``model.generate`` takes it, as far as the engine can apply it; a field that it cannot apply is named in one warning. A
draw depends only on the logits and on the request's own generator, so it does not depend on where the keys and values
came from.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from typing import Any, TypedDict

import torch
from transformers import GenerationConfig, TopKLogitsWarper, TopPLogitsWarper

from kvtier.engines.transformers.token_ids import is_whole
from kvtier.errors import ConfigError, UnknownNameError

logger = logging.getLogger(__name__)

MIN_TEMPERATURE = 1e-4
"""Logits divided by a smaller temperature overflow; zero means the most likely token."""

EndTokens = int | Iterable[int] | torch.Tensor
"""One token or several that end an answer; no token with an empty list."""

APPLIED = frozenset({"max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "eos_token_id"})
"""Fields of a generation configuration that stand where the caller gives nothing."""

CALLERS = "the caller's max_new_tokens stands"
UNPADDED = "one sequence is served at a time, without padding"
KEPT = "how the cache is kept; the engine has one of its own"
RETURNED = "what model.generate returns"
SPED_UP = "how fast an answer comes, and not which"
ONLY_BEAMS = "a part of beam search, of which num_beams warns"

WITHOUT_EFFECT: Mapping[str, str] = {
    "max_length": CALLERS,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id"), UNPADDED),
    **dict.fromkeys(("use_cache", "cache_implementation", "cache_config", "max_cache_len"), KEPT),
    **dict.fromkeys(("low_memory", "prefill_chunk_size", "continuous_batching_config"), KEPT),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "output_scores", "output_logits"), RETURNED
    ),
    "return_dict_in_generate": RETURNED,
    **dict.fromkeys(("compile_config", "disable_compile", "use_mtp", "is_assistant"), SPED_UP),
    **dict.fromkeys(("num_assistant_tokens", "num_assistant_tokens_schedule", "speculation_type"), SPED_UP),
    **dict.fromkeys(("assistant_confidence_threshold", "assistant_early_exit"), SPED_UP),
    **dict.fromkeys(("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"), SPED_UP),
    **dict.fromkeys(("prompt_lookup_num_tokens", "max_matching_ngram_size"), SPED_UP),
    **dict.fromkeys(("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"), ONLY_BEAMS),
    "renormalize_logits": "draws are made from normalised probabilities anyway",
    "transformers_version": "says which release wrote the file",
}
"""Fields that do not change an answer of the engine, with the reason. All others that are set are warned of."""

NEUTRAL_ONES = frozenset(
    {"num_beams", "typical_p", "repetition_penalty", "encoder_repetition_penalty", "num_return_sequences"}
    | {"guidance_scale", "top_h"}
)
"""Fields that do nothing at one. Any other does nothing at zero, at false, and when it is empty."""


class GenerationArguments(TypedDict, total=False):
    """What ``generate`` and ``run`` take besides the prompt; None is as good as left out.

    Attributes:
        max_tokens: another name of ``max_new_tokens``.
        do_sample: False takes the most likely token, True draws.
        temperature: divides the logits before a draw; zero takes the most likely token.
        top_p: a draw is among the fewest likeliest tokens whose probabilities add up to it; above 0, at most 1.
        top_k: a draw is among so many likeliest tokens; 0 for all.
        seed: seed of the draws; without it each request draws others.
        eos_token_id: one token or several that end the output and are part of it; with an empty list none does.
    """

    max_tokens: int | None
    do_sample: bool | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    eos_token_id: EndTokens | None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    Attributes:
        max_new_tokens: tokens to generate at most, at least one.
        temperature: zero takes the most likely token; larger values flatten the distribution.
        seed: seed of the request's generator; None takes a new one from the operating system.
        eos_token_ids: tokens that end the request and are part of the output.
        top_p: a draw is among the fewest likeliest tokens whose probabilities add up to it.
        top_k: a draw is among so many likeliest tokens; 0 for all.
    """

    max_new_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not _is_whole(self.max_new_tokens, 1):
            raise ConfigError("max_new_tokens", self.max_new_tokens, "must be a whole number of at least one")
        if not _is_number(self.temperature) or not (
            self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < inf
        ):
            remedy = f"must be a number of at least {MIN_TEMPERATURE}, or zero for the most likely token"
            raise ConfigError("temperature", self.temperature, remedy)
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            remedy = "must be a number above 0 and at most 1; for the most likely token give do_sample=False"
            raise ConfigError("top_p", self.top_p, remedy)
        if not _is_whole(self.top_k, 0):
            raise ConfigError(
                "top_k", self.top_k, "must be a whole number of at least one, or zero for all tokens"
            )
        if self.seed is not None and not _is_whole(self.seed, 0, 2**64):
            raise ConfigError("seed", self.seed, "must be a whole number from 0, below 2**64")

    def is_last(self, token_id: int, num_tokens: int) -> bool:
        """Return whether a token ends the request that has ``num_tokens`` with it. Pure."""
        return token_id in self.eos_token_ids or num_tokens >= self.max_new_tokens


class ParamsReader:
    """Reads the arguments of requests to one model.

    Args:
        name: of the model, for warnings.
        vocabulary_size: token ids are below this.
    """

    def __init__(self, name: str, vocabulary_size: int) -> None:
        self._name = name
        self._vocabulary_size = vocabulary_size
        self._warned_of: set[str] = set()

    def read(self, arguments: Mapping[str, object], defaults: GenerationConfig) -> SamplingParams:
        """Return how a request chooses its tokens.

        Args:
            arguments: the caller's ``GenerationArguments`` and ``max_new_tokens``.
            defaults: the model's ``generation_config``; applies where the caller gives nothing.

        Raises:
            ConfigError: a value cannot work, alone or beside another.
            UnknownNameError: there is no such argument.
        """
        known = GenerationArguments.__annotations__.keys() | {"max_new_tokens"}
        if unknown := arguments.keys() - known:
            also = "what else transformers offers is for model.generate with engine.cache_for"
            others = {"tenant", "return_logits"}
            raise UnknownNameError("generation argument", min(unknown), known | others, also=also)
        self._warn_of_ignored(defaults)
        given: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
        # Any: SamplingParams refuses what is of another type
        applied: dict[str, Any] = {
            name: value for name in APPLIED if (value := getattr(defaults, name, None)) is not None
        }
        temperature = _choose_temperature(given, applied)
        filters: dict[str, Any] = {"top_p": 1.0, "top_k": 0}  # Any: as above
        if temperature != 0:  # what no draw uses may be anything in a file
            filters |= {name: applied[name] for name in filters if name in applied}
        filters |= {name: given[name] for name in filters if name in given}
        end = self._choose_end(given, applied)
        try:
            return SamplingParams(
                _choose_length(given, applied), temperature, given.get("seed"), end, **filters
            )
        except ConfigError as error:
            if error.setting in given or error.setting not in applied:
                raise
            remedy = f"{error.remedy}; correct it, or give {error.setting} in the call"
            raise ConfigError(f"generation_config.{error.setting}", error.value, remedy) from None

    def _choose_end(
        self, given: Mapping[str, Any], applied: Mapping[str, Any]
    ) -> frozenset[int]:  # Any: as above
        if "eos_token_id" not in given:
            # One that the model's vocabulary lacks never comes.
            return frozenset(_list_ids(applied.get("eos_token_id", ())))
        token_ids = _list_ids(given["eos_token_id"])
        for token_id in token_ids:
            if not _is_whole(token_id, 0, self._vocabulary_size):
                remedy = f"must be one or several whole numbers from 0, below {self._vocabulary_size}, the vocabulary"
                raise ConfigError("eos_token_id", token_id, remedy)
        return frozenset(map(int, token_ids))

    def _warn_of_ignored(self, defaults: GenerationConfig) -> None:
        for name, value in vars(defaults).items():
            if name in APPLIED or name in WITHOUT_EFFECT or name in self._warned_of or name.startswith("_"):
                continue
            # The token 0 is a token.
            is_off = value is None if name.endswith("token_id") else not value
            if not is_off and not (name in NEUTRAL_ONES and value == 1):
                self._warned_of.add(name)
                logger.warning(
                    "generation_config.%s=%r of %s has no effect in kvtier's engine, whose answers differ from those "
                    "of model.generate: call model.generate with engine.cache_for to apply it, or set it to None",
                    *(name, value, self._name),
                )


class Sampler:
    """The choices of one request.

    Args:
        params: how to choose.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._temperature = params.temperature
        self._filters: list[Any] = []  # Any: transformers' classes are not annotated
        if params.top_k:
            self._filters.append(TopKLogitsWarper(int(params.top_k)))
        if params.top_p < 1:
            self._filters.append(TopPLogitsWarper(float(params.top_p)))
        self._generator = torch.Generator()
        if params.seed is not None:
            self._generator.manual_seed(params.seed)
        elif params.temperature != 0:  # the most likely token needs no file of the system
            self._generator.seed()

    def choose(self, logits: torch.Tensor) -> int:
        """Return the next token.

        Args:
            logits: shape (vocabulary,), float32, on the CPU.
        """
        if self._temperature == 0:
            return int(logits.argmax())
        probabilities = torch.softmax(self.filter(logits), dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def filter(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits at the temperature, those that no draw takes at minus infinity. Pure."""
        scores = logits / self._temperature
        for keep in self._filters:
            # As transformers filters, in its order. It reads no token of the prompt.
            scores = keep(None, scores.unsqueeze(0))[0]
        return scores


def _choose_length(given: Mapping[str, Any], applied: Mapping[str, Any]) -> Any:  # noqa: ANN401  # Any: checked later
    both = [given[name] for name in ("max_new_tokens", "max_tokens") if name in given]
    if len(both) == 2 and both[0] != both[1]:
        raise ConfigError("max_tokens", both[1], f"differs from max_new_tokens={both[0]}: give one of them")
    if both:
        return both[0]
    if "max_new_tokens" not in applied:
        remedy = "give a number of tokens: neither the call nor the model's generation_config has one"
        raise ConfigError("max_new_tokens", None, remedy)
    return applied["max_new_tokens"]


def _choose_temperature(given: Mapping[str, Any], applied: Mapping[str, Any]) -> Any:  # noqa: ANN401  # Any: as above
    do_sample, temperature = given.get("do_sample"), given.get("temperature")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ConfigError("do_sample", do_sample, "must be True or False")
    if do_sample is True and temperature is not None and temperature == 0:
        raise ConfigError(
            "temperature", temperature, "with do_sample=True must be above zero: leave one of them out"
        )
    if do_sample is None:
        # To name a temperature, or the tokens to draw among, is to ask for draws.
        asks = any(name in given for name in ("temperature", "top_p", "top_k"))
        do_sample = asks or bool(applied.get("do_sample"))
    if temperature is None:
        # A configuration that means the most likely token often has a temperature of zero.
        temperature = applied.get("temperature") or 1.0
    else:
        SamplingParams(1, temperature)  # refuses a bad one beside do_sample=False too
    return temperature if do_sample else 0.0


def _list_ids(token_ids: EndTokens) -> list[Any]:  # Any: checked by the caller
    if isinstance(token_ids, torch.Tensor):
        return list(token_ids.reshape(-1).tolist())
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Iterable):
        return [token_ids]
    return [token_id for token_id in token_ids if token_id is not None]


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: object, first: int, end: float = inf) -> bool:
    return isinstance(value, Integral) and is_whole(value) and first <= int(value) < end
