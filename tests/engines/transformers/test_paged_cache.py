"""What is scattered into pages is gathered from them, byte for byte, and kvtier sees the same bytes."""

import torch

from kvtier.engines.transformers.config import BlockSizes
from kvtier.engines.transformers.model_adapter import KVShape, LayerShape
from kvtier.engines.transformers.paged_cache import PagedKVCache
from kvtier.engines.transformers.sequence_cache import SequenceCache

LAYERS = (LayerShape("layers.0", 2, 3, 1, 5), LayerShape("layers.1", 1, 4, 2, 2))
SHAPE = KVShape(LAYERS, torch.float32, torch.device("cpu"))


def make_sequence(num_tokens: int) -> SequenceCache:
    cache = SequenceCache(SHAPE, num_tokens)
    for index, layer in enumerate(LAYERS):
        keys = torch.randn(1, layer.num_key_heads, num_tokens, layer.key_dim)
        values = torch.randn(1, layer.num_value_heads, num_tokens, layer.value_dim)
        cache.update(keys, values, index)
    return cache


def assert_equal_up_to(one: SequenceCache, other: SequenceCache, num_tokens: int) -> None:
    assert one.num_tokens == num_tokens
    for left, right in zip(one.sequence_layers, other.sequence_layers, strict=True):
        assert torch.equal(left.key_buffer[:num_tokens], right.key_buffer[:num_tokens])
        assert torch.equal(left.value_buffer[:num_tokens], right.value_buffer[:num_tokens])


def test_a_sequence_survives_the_pages() -> None:
    pages = PagedKVCache(SHAPE, 8, BlockSizes(4))
    source, target = make_sequence(14), SequenceCache(SHAPE)
    pages.scatter(source, 0, [5, 2])
    pages.scatter(source, 2, [7])
    pages.gather([5, 2, 7], target, 12)
    assert_equal_up_to(target, source, 12)


def test_a_prefix_may_end_within_a_block() -> None:
    pages = PagedKVCache(SHAPE, 8, BlockSizes(4))
    source, target = make_sequence(8), make_sequence(3)
    pages.scatter(source, 0, [0, 1])
    pages.gather([0, 1], target, 7)
    assert_equal_up_to(target, source, 7)


def test_gathering_nothing_empties_the_sequence() -> None:
    target = make_sequence(3)
    PagedKVCache(SHAPE, 2, BlockSizes(4)).gather([], target, 0)
    assert target.num_tokens == 0


def test_the_canonical_tensor_is_the_pool_itself() -> None:
    pages = PagedKVCache(SHAPE, 3, BlockSizes(4))
    (tensor,) = pages.canonical.tensors
    token_bytes = 4 * (2 * 3 + 1 * 5 + 1 * 4 + 2 * 2)
    assert tensor.tensor.shape == (3, 4 * token_bytes)
    assert tensor.page_size_bytes == pages.page_size_bytes == 4 * token_bytes
    source, target = make_sequence(4), SequenceCache(SHAPE)
    pages.scatter(source, 0, [0])
    tensor.tensor[2].copy_(tensor.tensor[0].clone())
    pages.gather([2], target, 4)
    assert_equal_up_to(target, source, 4)
