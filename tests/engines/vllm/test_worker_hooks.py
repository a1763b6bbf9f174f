"""Canonical views of KV caches: what a layer writes is what they read, block by block and nothing else."""

from collections.abc import Mapping, Sequence
from math import prod

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from tests.engines.vllm.configs import (
    HAS_LAYER_STRIDES,
    NUM_BLOCKS,
    cache_config,
    full,
    group,
    mla,
    state,
    uniform,
    window,
)
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvtier.base import CanonicalKVCaches
from kvtier.engines.vllm.worker_hooks import (
    PageRun,
    find_pages,
    find_state_pages,
    make_canonical_kv_caches,
    merge_adjacent,
)
from kvtier.errors import KVCacheLayoutError

Caches = dict[str, torch.Tensor]


def separate(names: Sequence[str], shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Caches:
    """Return one allocation a layer, filled with zeros."""
    return {name: torch.zeros(*shape, dtype=dtype) for name in names}


def strided(
    backing: torch.Tensor, offset: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return a layer's view of an allocation of bytes; ``offset`` and ``strides`` in elements of ``dtype``."""
    return torch.as_strided(backing.view(dtype), shape, strides, offset)


def fill(caches: Mapping[str, torch.Tensor], names: Sequence[str], salt: int = 0) -> None:
    """Give each layer's bytes of each device block values of their own, through the layer's own tensor."""
    for position, name in enumerate(names):
        cache = caches[name]
        numbers = torch.arange(cache.numel() * cache.element_size(), dtype=torch.int64)
        pattern = ((numbers * 31 + position * 97 + salt * 57 + numbers // 7) % 251).to(torch.uint8)
        cache.copy_(pattern.view(cache.dtype).reshape(cache.shape))


def bytes_of(caches: Mapping[str, torch.Tensor], name: str, block: int) -> bytes:
    """Return a layer's bytes of one device block, in the layer's own order."""
    cache = caches[name]
    parts = cache.shape[0] // NUM_BLOCKS
    piece = cache[block * parts : (block + 1) * parts].contiguous()
    return bytes(piece.view(torch.uint8).reshape(-1).tolist())


def read(canonical: CanonicalKVCaches, group_idx: int, block: int) -> bytes:
    """Return a group's bytes of one device block as a handler copies them."""
    pieces = [
        canonical.tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes]
        for ref in canonical.group_data_refs[group_idx]
    ]
    return b"".join(bytes(piece.view(torch.uint8).tolist()) for piece in pieces)


def write(canonical: CanonicalKVCaches, group_idx: int, block: int, row: bytes) -> None:
    """Put a group's bytes of one device block back as a handler does."""
    position = 0
    for ref in canonical.group_data_refs[group_idx]:
        piece = torch.tensor(list(row[position : position + ref.page_size_bytes]), dtype=torch.uint8)
        canonical.tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes] = piece.view(torch.int8)
        position += ref.page_size_bytes
    assert position == len(row)


def check_round_trip(config: KVCacheConfig, caches: Caches, row_bytes: Sequence[int]) -> CanonicalKVCaches:
    """Check, for each group, that a block's row is exactly its layers' bytes and writes back exactly these.

    Args:
        config: the groups.
        caches: what vLLM would register; groups may share memory, so only one of them is looked at a time.
        row_bytes: bytes of a block for each group.
    """
    canonical = make_canonical_kv_caches(config, caches)
    assert len(canonical.group_data_refs) == len(config.kv_cache_groups)
    for idx, kv_group in enumerate(config.kv_cache_groups):
        names = kv_group.layer_names
        fill(caches, names)
        rows = [read(canonical, idx, block) for block in range(NUM_BLOCKS)]
        layers = [[bytes_of(caches, name, block) for name in names] for block in range(NUM_BLOCKS)]
        assert {len(row) for row in rows} == {row_bytes[idx]}
        assert [sorted(row) for row in rows] == [sorted(b"".join(own)) for own in layers]
        fill(caches, names, salt=1)
        other = [[bytes_of(caches, name, block) for name in names] for block in range(NUM_BLOCKS)]
        write(canonical, idx, 3, rows[1])
        for block in range(NUM_BLOCKS):
            expected = layers[1] if block == 3 else other[block]
            assert [bytes_of(caches, name, block) for name in names] == expected
    return canonical


def test_layers_with_an_allocation_each_are_copied_layer_by_layer() -> None:
    config = cache_config(group(full(), "a", "b", "c"))
    caches = separate("abc", (NUM_BLOCKS, 2, 16, 16))

    canonical = check_round_trip(config, caches, [3 * 2048])

    assert [ref.page_size_bytes for ref in canonical.group_data_refs[0]] == [2048, 2048, 2048]
    assert canonical.tensors[0].tensor.shape == (NUM_BLOCKS, 2048)
    assert canonical.tensors[0].tensor.dtype is torch.int8


def test_rows_of_separate_allocations_follow_the_layers_and_not_the_addresses() -> None:
    config = cache_config(group(full(), "a", "b"))
    one, other = torch.zeros(NUM_BLOCKS, 2, 16, 16), torch.zeros(NUM_BLOCKS, 2, 16, 16)

    for first, second in ((one, other), (other, one)):
        caches = {"a": first, "b": second}
        fill(caches, "ab")
        row = read(make_canonical_kv_caches(config, caches), 0, 2)

        assert row == bytes_of(caches, "a", 2) + bytes_of(caches, "b", 2)


def test_heads_inside_or_outside_tokens_make_no_difference_to_a_block() -> None:
    config = cache_config(group(full(), "a"))
    tokens_outside = torch.zeros(NUM_BLOCKS, 16, 2, 16).permute(0, 2, 1, 3)

    check_round_trip(config, {"a": tokens_outside}, [2048])


def test_groups_that_overlay_one_region_share_its_tensors() -> None:
    config = cache_config(group(full(), "f0", "f1"), group(window(), "w0", "w1"), group(window(), "w2"))
    regions = [torch.zeros(NUM_BLOCKS, 2, 16, 16) for _ in range(2)]
    caches = {"f0": regions[0], "f1": regions[1], "w0": regions[0], "w1": regions[1], "w2": regions[0]}

    canonical = check_round_trip(config, caches, [4096, 4096, 2048])

    assert len(canonical.tensors) == 2
    refs = [[ref.tensor_idx for ref in own] for own in canonical.group_data_refs]
    assert refs == [[0, 1], [0, 1], [0]]


def test_a_smaller_page_of_another_group_is_the_first_bytes_of_the_larger() -> None:
    config = cache_config(group(full(page_size_padded=4096), "small"), group(window(num_kv_heads=4), "large"))
    region = torch.zeros(NUM_BLOCKS * 4096, dtype=torch.int8)
    caches = {
        "small": strided(region, 0, (NUM_BLOCKS, 2, 16, 16), (1024, 256, 16, 1), torch.float32),
        "large": strided(region, 0, (NUM_BLOCKS, 4, 16, 16), (1024, 256, 16, 1), torch.float32),
    }

    canonical = check_round_trip(config, caches, [2048, 4096])

    assert len(canonical.tensors) == 1
    assert canonical.tensors[0].page_size_bytes == 4096


def test_padding_is_never_copied() -> None:
    config = cache_config(group(full(page_size_padded=3072), "a"))
    region = torch.full((NUM_BLOCKS * 3072,), 99, dtype=torch.int8)
    caches = {"a": strided(region, 0, (NUM_BLOCKS, 2, 16, 16), (768, 256, 16, 1), torch.float32)}

    check_round_trip(config, caches, [2048])

    padding = region.view(NUM_BLOCKS, 3072)[:, 2048:]
    assert bool((padding == 99).all())


def packed(spec_bytes: Mapping[str, int], dtype: torch.dtype = torch.float32) -> tuple[Caches, int]:
    """Return layers whose pages of one device block lie side by side, and the bytes of such a block."""
    block_bytes = sum(spec_bytes.values())
    backing = torch.zeros(NUM_BLOCKS * block_bytes, dtype=torch.int8)
    item = dtype.itemsize
    caches, offset = {}, 0
    for name, page_bytes in spec_bytes.items():
        shape = (NUM_BLOCKS, 1, 16, page_bytes // item // 16)
        strides = (block_bytes // item, page_bytes // item, shape[3], 1)
        caches[name] = strided(backing, offset // item, shape, strides, dtype)
        offset += page_bytes
    return caches, block_bytes


def test_pages_that_lie_side_by_side_in_a_group_are_one_copy() -> None:
    config = cache_config(group(full(), "a", "b", "c"))
    caches, block_bytes = packed(dict.fromkeys("abc", 2048))

    canonical = check_round_trip(config, caches, [block_bytes])

    assert [ref.page_size_bytes for ref in canonical.group_data_refs[0]] == [3 * 2048]
    assert canonical.tensors[0].tensor.stride() == (block_bytes, 1)


def test_pages_of_another_group_between_two_of_one_are_not_copied_with_them() -> None:
    config = cache_config(group(full(), "a", "c"), group(window(), "b"))
    caches, _ = packed(dict.fromkeys("abc", 2048))

    canonical = check_round_trip(config, caches, [4096, 2048])

    assert [len(own) for own in canonical.group_data_refs] == [2, 1]


def test_packed_groups_that_overlay_a_block_differently_keep_their_own_pages() -> None:
    config = cache_config(group(full(), "a", "b"), group(full(heads=4), "wide"), tensors=[])
    backing = torch.zeros(NUM_BLOCKS * 4096, dtype=torch.int8)
    caches = {
        "a": strided(backing, 0, (NUM_BLOCKS, 2, 16, 16), (1024, 256, 16, 1), torch.float32),
        "b": strided(backing, 512, (NUM_BLOCKS, 2, 16, 16), (1024, 256, 16, 1), torch.float32),
        "wide": strided(backing, 0, (NUM_BLOCKS, 4, 16, 16), (1024, 256, 16, 1), torch.float32),
    }

    canonical = check_round_trip(config, caches, [4096, 4096])

    assert len(canonical.tensors) == 1


def test_regions_that_follow_one_another_are_not_taken_for_pages_side_by_side() -> None:
    config = cache_config(group(full(), "a", "b"))
    backing = torch.zeros(2 * NUM_BLOCKS * 2048, dtype=torch.int8)
    shape, strides = (NUM_BLOCKS, 2, 16, 16), (512, 256, 16, 1)
    caches = {
        "a": strided(backing, 0, shape, strides, torch.float32),
        "b": strided(backing, NUM_BLOCKS * 512, shape, strides, torch.float32),
    }

    canonical = check_round_trip(config, caches, [4096])

    assert len(canonical.tensors) == 2


@pytest.mark.parametrize("parts_per_block", [2, 4])
def test_a_block_that_the_kernel_sees_as_several_is_still_one(parts_per_block: int) -> None:
    config = cache_config(group(full(), "a"))
    caches = {"a": torch.zeros(NUM_BLOCKS * parts_per_block, 2, 16 // parts_per_block, 16)}

    canonical = check_round_trip(config, caches, [2048])

    assert canonical.tensors[0].tensor.shape == (NUM_BLOCKS, 2048)


def test_a_cross_layer_tensor_gives_one_copy_for_all_layers() -> None:
    config = cache_config(group(full(), "a", "b"))
    whole = torch.zeros(NUM_BLOCKS, 2, 2, 16, 16)

    canonical = check_round_trip(config, {"a": whole[:, 0], "b": whole[:, 1]}, [4096])

    assert len(canonical.group_data_refs[0]) == 1


def test_a_latent_vector_and_its_indexer_keep_pages_of_their_own_size() -> None:
    layers = {"m0": mla(), "i0": mla(head_size=8), "m1": mla(), "i1": mla(head_size=8)}
    config = cache_config(uniform(layers))
    caches = {
        name: torch.zeros(NUM_BLOCKS, 1, 16, spec.head_size, dtype=torch.bfloat16)
        for name, spec in layers.items()
    }

    canonical = check_round_trip(config, caches, [2 * 768 + 2 * 256])

    assert [ref.page_size_bytes for ref in canonical.group_data_refs[0]] == [768, 256, 768, 256]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.bfloat16])
def test_bytes_are_copied_as_they_are_whatever_their_type(dtype: torch.dtype) -> None:
    config = cache_config(group(full(dtype=dtype), "a", "b"))

    check_round_trip(config, separate("ab", (NUM_BLOCKS, 2, 16, 16), dtype), [2 * 512 * dtype.itemsize])


@pytest.mark.skipif(not HAS_LAYER_STRIDES, reason="vLLM plans such layouts from 0.29 on")
@pytest.mark.parametrize("layout_name", ["LBNHC", "LBHNC", "BLNHC", "BLHNC"])
def test_the_views_that_vllm_itself_makes_of_a_layout_round_trip(layout_name: str) -> None:
    from vllm.v1.kv_cache_interface import compute_layout_strides, create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layout, spec = KVCacheLayout[layout_name], full()
    block_bytes = 2 * spec.page_size_bytes
    fixed_stride = block_bytes if layout.is_block_outermost else None
    layer_stride, block_stride, *_ = compute_layout_strides(
        spec, NUM_BLOCKS, 2, layout, fixed_strides=(None, fixed_stride, None, None, None)
    )
    config = cache_config(group(spec, "a", "b"))
    (tensor,) = config.kv_cache_tensors
    tensor.layer_stride, tensor.block_stride = layer_stride, block_stride
    raw = torch.zeros(NUM_BLOCKS * block_bytes, dtype=torch.int8)
    caches = dict(zip("ab", create_kv_cache_views(raw, spec, NUM_BLOCKS, layout, tensor), strict=True))

    canonical = check_round_trip(config, caches, [block_bytes])

    assert len(canonical.tensors) == (1 if layout.is_block_outermost else 2)


@pytest.mark.skipif(not HAS_LAYER_STRIDES, reason="vLLM plans such layouts from 0.29 on")
@pytest.mark.parametrize("layout_name", ["LHBNC", "BHLNC"])
def test_a_layout_with_heads_outside_blocks_or_layers_is_refused_by_layer(layout_name: str) -> None:
    from vllm.v1.kv_cache_interface import compute_layout_strides, create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layout, spec = KVCacheLayout[layout_name], full()
    block_bytes = 2 * spec.page_size_bytes
    fixed_stride = block_bytes if layout.is_block_outermost else None
    layer_stride, block_stride, *_ = compute_layout_strides(
        spec, NUM_BLOCKS, 2, layout, fixed_strides=(None, fixed_stride, None, None, None)
    )
    config = cache_config(group(spec, "a", "b"))
    (tensor,) = config.kv_cache_tensors
    tensor.layer_stride, tensor.block_stride = layer_stride, block_stride
    raw = torch.zeros(NUM_BLOCKS * block_bytes, dtype=torch.int8)
    caches = dict(zip("ab", create_kv_cache_views(raw, spec, NUM_BLOCKS, layout, tensor), strict=True))

    with pytest.raises(KVCacheLayoutError, match=r"layer 'a'.*VLLM_KV_CACHE_LAYOUT"):
        make_canonical_kv_caches(config, caches)


REFUSED = {
    "keys and values in halves of their own": (torch.zeros(2, NUM_BLOCKS, 2, 16, 8), "first dimension"),
    "the block within": (torch.zeros(2, NUM_BLOCKS, 16, 16).transpose(0, 1), "are not contiguous"),
    "halves seen block first": (torch.zeros(2, NUM_BLOCKS, 2, 16, 8).transpose(0, 1), "are not contiguous"),
    "parts of a block with gaps": (torch.zeros(4 * NUM_BLOCKS, 2, 8, 16)[::2], "are not contiguous"),
    "pages too small": (torch.zeros(NUM_BLOCKS, 1, 16, 16), "are not contiguous"),
    "not a tensor": ([torch.zeros(NUM_BLOCKS, 2, 16, 16)], "registered list"),
    "nothing": (None, "registered NoneType"),
    "no dimension": (torch.zeros(()), "first dimension"),
    "empty": (torch.zeros(0, 2, 16, 16), "first dimension"),
}


@pytest.mark.parametrize(("cache", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_keep_a_block_together_is_refused_with_the_name_of_its_layer(
    cache: object, reason: str
) -> None:
    with pytest.raises(KVCacheLayoutError, match=f"layer 'model.layers.7.attn'.*{reason}"):
        find_pages("model.layers.7.attn", cache, 2048, NUM_BLOCKS)


def test_pages_longer_than_the_allocation_are_refused_instead_of_growing_it() -> None:
    region = torch.zeros(NUM_BLOCKS * 2048 - 4, dtype=torch.int8)
    short = strided(region, 0, (NUM_BLOCKS, 511), (512, 1), torch.float32)

    with pytest.raises(KVCacheLayoutError, match="contradicts what it allocated"):
        find_pages("a", short, 2048, NUM_BLOCKS)
    assert region.untyped_storage().nbytes() == NUM_BLOCKS * 2048 - 4


def test_adjacent_pages_merge_in_any_order_of_the_layers() -> None:
    caches, block_bytes = packed(dict.fromkeys("abc", 2048))
    runs = [find_pages(name, caches[name], 2048, NUM_BLOCKS) for name in "cab"]

    (merged,) = merge_adjacent(runs)

    assert (merged.start_byte, merged.page_bytes, merged.stride_bytes) == (0, block_bytes, block_bytes)


def run(start_byte: int, stride_bytes: int, page_bytes: int = 2048) -> PageRun:
    """Return pages within the one allocation of these tests."""
    return PageRun(ALLOCATION.untyped_storage(), start_byte, stride_bytes, page_bytes)


ALLOCATION = torch.zeros(2**20, dtype=torch.int8)

APART = {
    "strides differ": [run(0, 4096), run(2048, 8192)],
    "a gap between": [run(0, 8192), run(2049, 8192)],
    "the second is the next block of the first": [run(0, 2048), run(2048, 2048)],
}


@pytest.mark.parametrize("runs", APART.values(), ids=APART)
def test_pages_merge_only_where_each_block_has_both_side_by_side(runs: list[PageRun]) -> None:
    assert merge_adjacent(runs) == runs


def test_every_byte_of_a_packed_allocation_belongs_to_one_block_and_one_page() -> None:
    config = cache_config(group(full(), "a", "b"))
    caches, block_bytes = packed(dict.fromkeys("ab", 2048))
    canonical = make_canonical_kv_caches(config, caches)

    for block in range(NUM_BLOCKS):
        write(canonical, 0, block, bytes([block + 1]) * block_bytes)

    values = torch.cat(
        [caches[name].contiguous().view(torch.uint8).reshape(NUM_BLOCKS, -1) for name in "ab"], dim=1
    )
    assert values.shape == (NUM_BLOCKS, block_bytes)
    assert prod(values.shape) == NUM_BLOCKS * block_bytes
    assert [set(row.tolist()) for row in values] == [{block + 1} for block in range(NUM_BLOCKS)]


def state_parts(backing: torch.Tensor, page_bytes: int) -> list[torch.Tensor]:
    """Return the convolution and the sums of a state, one behind the other in pages of an allocation of bytes."""
    convolution = strided(backing, 0, (NUM_BLOCKS, 3, 32), (page_bytes // 2, 32, 1), torch.bfloat16)
    sums = strided(backing, 192 // 4, (NUM_BLOCKS, 2, 8, 8), (page_bytes // 4, 64, 8, 1), torch.float32)
    return [convolution, sums]


def test_a_state_is_its_parts_without_the_padding_and_shares_its_region_with_attention() -> None:
    config = cache_config(group(state(page_size_padded=2048), "s"), group(full(), "a"))
    backing = torch.zeros(NUM_BLOCKS * 2048, dtype=torch.uint8)
    parts = state_parts(backing, 2048)
    attention = strided(backing, 0, (NUM_BLOCKS, 2, 16, 16), (512, 256, 16, 1), torch.float32)
    canonical = make_canonical_kv_caches(config, {"s": parts, "a": attention})

    backing.copy_(torch.arange(backing.numel()) % 251)
    row = read(canonical, 0, 5)
    assert row == bytes(backing[5 * 2048 : 5 * 2048 + 704].tolist())
    assert row[:192] == bytes(parts[0][5].contiguous().view(torch.uint8).reshape(-1).tolist())
    assert row[192:] == bytes(parts[1][5].contiguous().view(torch.uint8).reshape(-1).tolist())
    assert len(read(canonical, 1, 5)) == 2048

    before = backing.clone()
    write(canonical, 0, 7, row)
    changed = (backing != before).nonzero().flatten()
    assert int(changed.min()) >= 7 * 2048
    assert int(changed.max()) < 7 * 2048 + 704, "the padding is left alone"
    assert read(canonical, 0, 7) == row


def test_parts_of_a_state_with_a_gap_or_of_another_size_are_refused() -> None:
    backing = torch.zeros(NUM_BLOCKS * 2048, dtype=torch.uint8)
    convolution, sums = state_parts(backing, 2048)

    with pytest.raises(KVCacheLayoutError, match="do not lie one behind the other"):
        find_state_pages("s", [sums, convolution], 704, NUM_BLOCKS)
    with pytest.raises(KVCacheLayoutError, match="has 800 bytes, but the tensors of its KV cache have 704"):
        find_state_pages("s", [convolution, sums], 800, NUM_BLOCKS)
    with pytest.raises(KVCacheLayoutError, match="registered NoneType"):
        find_state_pages("s", [None], 704, NUM_BLOCKS)
