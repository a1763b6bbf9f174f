"""Models share a fingerprint exactly when all their weights are equal."""

import copy

import torch
from transformers import LlamaForCausalLM

from kvtier.engines.transformers.identity import digest_model_config, fingerprint_weights


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


def test_the_same_numbers_in_another_dtype_differ(llama: LlamaForCausalLM) -> None:
    halves = copy.deepcopy(llama)
    torch.nn.Module.to(halves, torch.bfloat16)
    expected = fingerprint_weights(halves)
    torch.nn.Module.to(halves, torch.float32)
    assert fingerprint_weights(halves) != expected


def test_rope_changes_the_digest_of_the_configuration_and_the_path_does_not(llama: LlamaForCausalLM) -> None:
    other = copy.deepcopy(llama)
    other.config.name_or_path = "/somewhere/else"
    assert digest_model_config(other) == digest_model_config(llama)
    other.config.rope_parameters = {"rope_type": "default", "rope_theta": 5.0}
    assert digest_model_config(other) != digest_model_config(llama)
