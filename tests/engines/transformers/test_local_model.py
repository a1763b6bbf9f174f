"""A local model is loaded as it was saved, and what is none is one clear error."""

from pathlib import Path

import pytest
import torch

from kvtier.engines.transformers.local_model import load_local_model, make_random_llama
from kvtier.errors import ModelError


def test_a_saved_model_comes_back_with_its_weights(tmp_path: Path) -> None:
    saved = make_random_llama(1, 256, 3)
    saved.save_pretrained(tmp_path)

    loaded = load_local_model(tmp_path)

    weights = loaded.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in saved.state_dict().items())
    assert not loaded.training


def test_a_directory_without_a_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no causal model") as caught:
        load_local_model(tmp_path)

    assert "\n" not in str(caught.value)


def test_a_model_that_knows_too_few_tokens_is_refused(tmp_path: Path) -> None:
    make_random_llama(1, 256, 3).save_pretrained(tmp_path)

    with pytest.raises(ModelError, match="has a vocabulary of 256 tokens: 300 are needed"):
        load_local_model(tmp_path, min_vocabulary_size=300)
