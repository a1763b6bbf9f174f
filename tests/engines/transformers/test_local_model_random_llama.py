"""The random model is the same each time, and what it says depends on every part of its prompt."""

import pytest
import torch

from kvtier.engines.transformers.local_model import make_random_llama
from kvtier.errors import ConfigError

PROMPT = torch.arange(200)[None] * 7 % 256
ROUNDING = 1e-3
"""Far above what float32 rounding moves a logit of this model."""


@torch.no_grad()
def last_logits(prompt: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return the logits after a prompt."""
    logits: torch.Tensor = make_random_llama(2, 256, seed)(prompt).logits[0, -1]
    return logits


def test_equal_arguments_give_equal_weights_and_another_seed_others() -> None:
    assert torch.equal(last_logits(PROMPT), last_logits(PROMPT))
    assert not torch.allclose(last_logits(PROMPT), last_logits(PROMPT, seed=1))


@pytest.mark.parametrize("position", [0, 3, 50, 120, 190])
def test_one_other_token_anywhere_moves_the_answer_well_above_rounding(position: int) -> None:
    other = PROMPT.clone()
    other[0, position] = (other[0, position] + 1) % 256

    moved = (last_logits(other) - last_logits(PROMPT)).abs().max()

    assert moved > 10 * ROUNDING


def test_the_demo_size_has_the_parameters_of_a_small_real_model() -> None:
    with torch.device("meta"):
        num_parameters = make_random_llama(10, 1024, 0).num_parameters()

    assert 100e6 < num_parameters < 300e6


@pytest.mark.parametrize("hidden_size", [0, -256, 100, 320])
def test_a_width_without_whole_heads_is_refused(hidden_size: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 256"):
        make_random_llama(1, hidden_size, 0)
