"""Models share a fingerprint exactly when all their weights are equal."""

import copy
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.utils import hub

from kvtier.engines.transformers.identity import describe_model_config, fingerprint_weights
from kvtier.errors import ModelError


def test_equal_models_have_equal_fingerprints(llama: LlamaForCausalLM) -> None:
    assert fingerprint_weights(copy.deepcopy(llama)) == fingerprint_weights(llama)


def test_the_last_bit_of_any_weight_counts(llama: LlamaForCausalLM) -> None:
    expected = fingerprint_weights(llama)
    for name, _ in llama.named_parameters():
        changed = copy.deepcopy(llama)
        with torch.no_grad():
            weight = changed.get_parameter(name).view(-1)
            weight[-1] = torch.nextafter(weight[-1], torch.tensor(torch.inf))
        assert fingerprint_weights(changed) != expected, name


def test_the_last_rows_of_the_embedding_count(llama: LlamaForCausalLM) -> None:
    changed = copy.deepcopy(llama)
    with torch.no_grad():
        changed.get_parameter("model.embed_tokens.weight")[-4:] += 1
    assert fingerprint_weights(changed) != fingerprint_weights(llama)


def test_each_buffer_counts_though_no_checkpoint_keeps_it(llama: LlamaForCausalLM) -> None:
    names = [name for name, _ in llama.named_buffers() if name not in llama.state_dict()]
    for name in names:
        changed = copy.deepcopy(llama)
        changed.get_buffer(name).view(-1)[-1] *= 2
        assert fingerprint_weights(changed) != fingerprint_weights(llama), name
    assert names


def test_weights_that_are_not_in_memory_are_refused(llama: LlamaForCausalLM) -> None:
    hollow = copy.deepcopy(llama)
    torch.nn.Module.to(hollow.lm_head, "meta")
    with pytest.raises(ModelError, match=r"lm_head\.weight are not in memory.*model_revision"):
        fingerprint_weights(hollow)


REMOTE_CODE = """
from transformers import LlamaForCausalLM
from .parts import SCALE
class OwnLlama(LlamaForCausalLM):
    pass
"""


def test_code_that_came_with_the_model_counts(
    llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprints = [fingerprint_weights(llama)]
    for name, scale in (("one", 1), ("other", 2)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "modeling.py").write_text(REMOTE_CODE)
        (folder / "parts.py").write_text(f"SCALE = {scale}")
        own_class = load_remote_class(name, folder, monkeypatch)
        own = own_class(llama.config)
        own.load_state_dict(llama.state_dict())
        fingerprints.append(fingerprint_weights(own))

    assert len(set(fingerprints)) == 3


def load_remote_class(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., LlamaForCausalLM]:
    """Import a model's class from its folder under the name that transformers gives such code."""
    top = hub.TRANSFORMERS_DYNAMIC_MODULE_NAME
    package = f"{top}.{name}"
    for module_name, path in ((top, folder.parent), (package, folder)):
        module = ModuleType(module_name)
        module.__path__ = [str(path)]
        monkeypatch.setitem(sys.modules, module_name, module)
    own_class: Callable[..., LlamaForCausalLM] = importlib.import_module(f"{package}.modeling").OwnLlama
    return own_class


def test_the_same_numbers_in_another_dtype_differ(llama: LlamaForCausalLM) -> None:
    halves = copy.deepcopy(llama)
    torch.nn.Module.to(halves, torch.bfloat16)
    expected = fingerprint_weights(halves)
    torch.nn.Module.to(halves, torch.float32)
    assert fingerprint_weights(halves) != expected


def test_rope_changes_the_digest_of_the_configuration_and_the_path_does_not(llama: LlamaForCausalLM) -> None:
    other = copy.deepcopy(llama)
    other.config.name_or_path = "/somewhere/else"
    assert describe_model_config(other) == describe_model_config(llama)
    other.config.rope_parameters = {"rope_type": "default", "rope_theta": 5.0}
    assert describe_model_config(other) != describe_model_config(llama)


def test_another_way_to_compute_attention_is_another_configuration(llama: LlamaForCausalLM) -> None:
    other = copy.deepcopy(llama)
    llama.set_attn_implementation("sdpa")
    other.set_attn_implementation("eager")
    assert describe_model_config(other) != describe_model_config(llama)


def test_the_configuration_in_words_names_rope_and_window(llama: LlamaForCausalLM) -> None:
    words = json.loads(describe_model_config(llama))
    assert words["hidden_size"] == llama.config.hidden_size
    assert "rope_theta" in json.dumps(words)
    assert "_name_or_path" not in words
