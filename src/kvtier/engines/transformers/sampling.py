"""Chooses the next token: the most likely one, or a draw from the distribution at a temperature.

A draw depends only on the logits and on the request's own generator, so it does not depend on where the keys and values
came from.
"""

from dataclasses import dataclass
from math import inf
from numbers import Real

import torch

from kvtier.engines.transformers.token_ids import is_whole
from kvtier.errors import ConfigError

MIN_TEMPERATURE = 1e-4
"""Logits divided by a smaller temperature overflow; zero means the most likely token."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    Attributes:
        max_new_tokens: tokens to generate at most, at least one.
        temperature: zero takes the most likely token; larger values flatten the distribution.
        seed: seed of the request's generator; None takes a new one from the operating system.
        eos_token_ids: tokens that end the request and are part of the output.
    """

    max_new_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not is_whole(self.max_new_tokens) or self.max_new_tokens < 1:
            raise ConfigError("max_new_tokens", self.max_new_tokens, "must be a whole number of at least one")
        is_number = isinstance(self.temperature, Real) and not isinstance(self.temperature, bool)
        if not is_number or not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < inf):
            raise ConfigError("temperature", self.temperature, f"must be zero, or at least {MIN_TEMPERATURE}")
        if self.seed is not None and not (is_whole(self.seed) and 0 <= self.seed < 2**64):
            raise ConfigError("seed", self.seed, "must be a whole number from 0, below 2**64")
        odd = [token_id for token_id in self.eos_token_ids if not is_whole(token_id)]
        if odd:
            raise ConfigError("eos_token_id", odd[0], "must be a whole number, or several")

    def is_last(self, token_id: int, num_tokens: int) -> bool:
        """Return whether a token ends the request that has ``num_tokens`` with it. Pure."""
        return token_id in self.eos_token_ids or num_tokens >= self.max_new_tokens


class Sampler:
    """The choices of one request.

    Args:
        params: how to choose.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._temperature = params.temperature
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
        probabilities = torch.softmax(logits / self._temperature, dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))
