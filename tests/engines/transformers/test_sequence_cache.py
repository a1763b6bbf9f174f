"""A sequence cache is to a model what transformers' own growing cache is."""

import torch
from tests.cache_name import CACHE_NAME
from transformers import DynamicCache, LlamaForCausalLM

from kvtier.engines.transformers.model_adapter import KVShape, LayerShape, ModelAdapter
from kvtier.engines.transformers.sequence_cache import SequenceCache

SHAPE = KVShape((LayerShape("layers.0", 2, 3, 1, 5),), torch.float32, torch.device("cpu"))


def states(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, 2, num_tokens, 3), torch.randn(1, 1, num_tokens, 5)


def test_updates_append_and_return_everything_held() -> None:
    cache = SequenceCache(SHAPE)
    pairs = [states(4), states(1), states(200)]
    for keys, values in pairs:
        held_keys, held_values = cache.update(keys, values, 0)
    assert torch.equal(held_keys, torch.cat([keys for keys, _ in pairs], dim=2))
    assert torch.equal(held_values, torch.cat([values for _, values in pairs], dim=2))
    assert cache.get_seq_length() == cache.num_tokens == 205


def test_cropping_drops_the_last_tokens() -> None:
    cache = SequenceCache(SHAPE)
    keys, values = states(10)
    cache.update(keys, values, 0)
    cache.crop(-4)
    assert torch.equal(cache.sequence_layers[0].key_buffer[:6], keys[0, :, :6].transpose(0, 1))
    cache.crop(0)
    assert cache.get_seq_length() == 6


def test_a_reset_cache_is_empty_and_usable() -> None:
    cache = SequenceCache(SHAPE)
    cache.update(*states(10), 0)
    for layer in cache.sequence_layers:
        layer.reset()
    assert cache.get_seq_length() == 0
    keys, values = states(2)
    assert torch.equal(cache.update(keys, values, 0)[0], keys)


def test_a_model_cannot_tell_it_from_a_dynamic_cache(llama: LlamaForCausalLM, prompt: list[int]) -> None:
    shape = ModelAdapter(llama).shape
    inputs = torch.tensor([prompt])
    with torch.no_grad():
        expected = llama(inputs, **{CACHE_NAME: DynamicCache()}).logits
        cache = SequenceCache(shape)
        pieces = [
            llama(inputs[:, first : first + 20], **{CACHE_NAME: cache}).logits for first in range(0, 75, 20)
        ]
    assert float((torch.cat(pieces, dim=1) - expected).abs().max()) < 1e-4


def test_a_cache_made_in_inference_mode_can_be_written_outside(llama: LlamaForCausalLM) -> None:
    with torch.inference_mode():
        cache = SequenceCache(SHAPE)
        cache.update(*states(3), 0)
    cache.update(*states(300), 0)
    cache.update(*states(1), 0)
    assert cache.get_seq_length() == 304
