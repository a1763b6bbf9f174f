"""Which KV groups of vLLM are offloaded, as what, and which are refused with one message."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from tests.engines.vllm.configs import (
    BLOCK_TOKENS,
    HAS_LAYER_STRIDES,
    cache_config,
    find_spec_class,
    flattened,
    full,
    group,
    mla,
    state,
    uniform,
    window,
)
from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvtier.config import GroupKind, ModelIdentity, OffloadingConfig, StatePart
from kvtier.connector.groups import GroupLayout, make_group_layouts
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.engines.vllm import compat
from kvtier.engines.vllm.groups import (
    can_recompute_from_block,
    make_kv_groups,
    mark_replicated,
    page_bytes_of_layers,
)
from kvtier.errors import ModelError

needs_failed_recving = pytest.mark.skipif(
    not compat.HAS_FAILED_RECVING, reason="this vLLM cannot be told which request's load failed"
)


def sink() -> KVCacheSpec:
    """Return full attention that also sees tokens of no request."""
    return SinkFullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=8, dtype=torch.float32, sink_len=16
    )


@pytest.mark.parametrize("make_spec", [full, mla, sink])
def test_full_attention_of_any_known_class_needs_its_whole_prefix(
    make_spec: Callable[[], KVCacheSpec],
) -> None:
    spec = make_spec()

    (kv_group,) = make_kv_groups(cache_config(group(spec, "a", "b")))

    assert kv_group.kind is GroupKind.FULL
    assert kv_group.window_tokens is None
    assert kv_group.block_size_tokens == BLOCK_TOKENS
    assert kv_group.layer_names == ("a", "b")
    assert kv_group.page_size_bytes == 2 * spec.page_size_bytes


@needs_failed_recving
@pytest.mark.parametrize("spec_class", [SlidingWindowSpec, SlidingWindowMLASpec])
def test_a_window_keeps_what_vllm_retains_beyond_it(spec_class: type[SlidingWindowSpec]) -> None:
    spec = spec_class(
        block_size=BLOCK_TOKENS,
        num_kv_heads=1,
        head_size=8,
        dtype=torch.float32,
        sliding_window=40,
        extra_retained_tokens=3,
    )

    (kv_group,) = make_kv_groups(cache_config(group(spec, "a")))

    assert kv_group.kind is GroupKind.WINDOW
    assert kv_group.window_tokens == 43


@needs_failed_recving
@pytest.mark.parametrize("tokens", [2, 16, 17, 33, 40, 64])
@pytest.mark.parametrize("retained", [0, 5])
def test_kvtier_loads_and_stores_exactly_the_window_blocks_that_vllm_does_not_null(
    tokens: int, retained: int
) -> None:
    spec = window(tokens, extra_retained_tokens=retained)
    manager = vllm_manager(spec)
    layout = layout_of(spec)

    for num_tokens in range(8 * BLOCK_TOKENS):
        num_null_blocks = manager.get_num_skipped_tokens(num_tokens) // BLOCK_TOKENS
        num_blocks = -(-num_tokens // BLOCK_TOKENS)

        loaded = layout.span(0, num_tokens)

        assert (loaded.first_device_block, loaded.end_device_block) == (
            min(num_null_blocks, num_blocks),
            num_blocks,
        )
        assert layout.first_live_block(num_tokens) == num_null_blocks


needs_named_states = pytest.mark.skipif(
    not compat.NAMES_KEPT_STATES, reason="this vLLM does not say which blocks hold a recurrent state"
)


@needs_named_states
def test_a_recurrent_state_in_the_aligned_mode_is_a_group_of_its_own_kind_without_padding() -> None:
    padded = state(page_size_padded=2048)

    attention, states = make_kv_groups(cache_config(group(full(), "a"), group(padded, "b", "c")))

    assert (attention.kind, states.kind) == (GroupKind.FULL, GroupKind.STATE)
    assert states.window_tokens is None
    assert states.page_size_bytes == 2 * (3 * 32 * 2 + 2 * 8 * 8 * 4)
    assert padded.page_size_bytes == 2048


@needs_named_states
@pytest.mark.parametrize("num_local_blocks", [0, 1, 3])
def test_kvtier_loads_a_state_into_the_only_block_that_vllm_allocates_for_it(num_local_blocks: int) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    pool = BlockPool(num_gpu_blocks=20, enable_caching=True, hash_block_size=BLOCK_TOKENS)
    manager = MambaManager(
        state(), block_pool=pool, enable_caching=True, kv_cache_group_id=0, scheduler_block_size=BLOCK_TOKENS
    )
    layout = layout_of(state())
    num_local = num_local_blocks * BLOCK_TOKENS
    for num_blocks in range(num_local_blocks + 1, 8):
        end = num_blocks * BLOCK_TOKENS
        name = f"{num_local}-{end}"
        manager.add_local_computed_blocks(name, [], num_local, end - num_local)
        manager.allocate_external_computed_blocks(name, num_local, end - num_local)

        loaded = layout.span(num_local, end)

        table = manager.req_to_blocks[name]
        assert [not block.is_null for block in table] == [False] * (num_blocks - 1) + [True]
        assert (loaded.first_device_block, loaded.end_device_block) == (num_blocks - 1, num_blocks)
        pool.free_blocks([table[-1]])


def test_states_need_a_vllm_that_names_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "NAMES_KEPT_STATES", False)

    with pytest.raises(ModelError, match=r"KV group 1 is of kind MambaSpec.*use vLLM 0\.32 or later"):
        make_kv_groups(cache_config(group(full(), "a"), group(state(), "b")))


def test_the_parts_of_a_state_are_those_of_each_of_its_layers() -> None:
    if not compat.NAMES_KEPT_STATES:
        pytest.skip("this vLLM does not say which blocks hold a recurrent state")
    config = cache_config(group(full(), "a"), group(state(), "b", "c"))
    parts = StatePart("bfloat16", 3 * 32 * 2), StatePart("float32", 2 * 8 * 8 * 4)

    assert [one.state_parts for one in make_kv_groups(config)] == [(), parts * 2]


def test_a_state_with_room_for_drafts_has_no_parts_because_some_bytes_mean_nothing() -> None:
    if not compat.NAMES_KEPT_STATES:
        pytest.skip("this vLLM does not say which blocks hold a recurrent state")
    config = cache_config(group(full(), "a"), group(state(num_speculative_blocks=2), "b"))

    assert [one.state_parts for one in make_kv_groups(config)] == [(), ()]


def vllm_manager(spec: SlidingWindowSpec) -> SlidingWindowManager:
    """Return what frees the device blocks of a window in vLLM."""
    pool = BlockPool(num_gpu_blocks=4, enable_caching=True, hash_block_size=BLOCK_TOKENS)
    return SlidingWindowManager(
        spec, block_pool=pool, enable_caching=True, kv_cache_group_id=0, scheduler_block_size=BLOCK_TOKENS
    )


def layout_of(spec: KVCacheSpec) -> GroupLayout:
    """Return how kvtier's connector sees a group of one layer."""
    config = OffloadingConfig(
        engine_id="e",
        model=ModelIdentity("m"),
        groups=make_kv_groups(cache_config(group(spec, "a"))),
        hash_block_size=BLOCK_TOKENS,
        extra_config={"cpu_bytes_to_use": "1MiB"},
    )
    (layout,) = make_group_layouts(CPUOffloadingSpec(config))
    return layout


def attention(name: str, **fields: object) -> KVCacheSpec | None:
    """Return an attention layer of a class by name, None where this vLLM lacks it."""
    spec_class = find_spec_class(name)
    common = {"block_size": BLOCK_TOKENS, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
    return None if spec_class is None else spec_class(**(common | fields))


class ForeignSpec(FullAttentionSpec):
    """A kind that a plug-in adds; it inherits from a known one and may keep other blocks."""


REFUSED = {
    "chunked": (
        attention("ChunkedLocalAttentionSpec", attention_chunk_size=32),
        "--disable-hybrid-kv-cache-manager",
    ),
    "reference window": (attention("RSWASpec", rswa_window=32), "without kvtier"),
    "hidden states": (attention("HiddenStateCacheSpec"), "without kvtier"),
    "ring": (attention("CircularBufferSpec"), "without kvtier"),
    "pooled tail": (attention("KpoolTailSpec", sliding_window=32), "without kvtier"),
    "cross attention": (attention("CrossAttentionSpec"), "without kvtier"),
    "encoder": (attention("EncoderOnlyAttentionSpec"), "without kvtier"),
    "states of every block": (state(mamba_cache_mode="all"), "--mamba-cache-mode align"),
    "one state": (state(mamba_cache_mode="none"), "--mamba-cache-mode align"),
    "plug-in": (
        ForeignSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=8, dtype=torch.float32),
        "without kvtier",
    ),
}


@pytest.mark.parametrize(("spec", "remedy"), REFUSED.values(), ids=REFUSED)
def test_a_kind_without_a_rule_is_refused_by_its_name_with_what_helps(
    spec: KVCacheSpec | None, remedy: str
) -> None:
    if spec is None:
        pytest.skip("this vLLM has no such kind")

    with pytest.raises(ModelError, match=f"KV group 1 is of kind {type(spec).__name__}.*{remedy}"):
        make_kv_groups(cache_config(group(full(), "a"), group(spec, "b"), tensors=[]))


def test_layers_that_attend_to_later_tokens_are_refused() -> None:
    with pytest.raises(ModelError, match="attends to later tokens"):
        make_kv_groups(cache_config(group(full(non_causal=True), "a")))


def test_a_model_without_a_kv_cache_is_refused() -> None:
    with pytest.raises(ModelError, match="no KV cache group"):
        make_kv_groups(cache_config(tensors=[]))


def test_a_window_that_is_rebuilt_and_never_looked_up_is_refused() -> None:
    if "bounded_replay" not in SlidingWindowMLASpec.__dataclass_fields__:
        pytest.skip("this vLLM has no such windows")
    spec = attention("SlidingWindowMLASpec", num_kv_heads=1, sliding_window=32, bounded_replay=True)

    with pytest.raises(ModelError, match="KV group 1 have no content hash"):
        make_kv_groups(cache_config(group(full(), "a"), group(spec, "b"), tensors=[]))


@pytest.mark.parametrize(("mark", "value"), [("host_resident", True), ("enable_kv_transfer", False)])
def test_a_group_whose_blocks_are_not_vllms_device_blocks_is_refused(mark: str, value: bool) -> None:
    kv_group = group(full(), "a")
    if not hasattr(kv_group, mark):
        pytest.skip("this vLLM has no such groups")
    setattr(kv_group, mark, value)

    with pytest.raises(ModelError, match="KV group 0 have no content hash"):
        make_kv_groups(cache_config(kv_group))


@needs_failed_recving
def test_a_group_that_mixes_windows_is_refused() -> None:
    with pytest.raises(ModelError, match="mixes layers"):
        make_kv_groups(cache_config(uniform({"a": window(32), "b": window(48)})))


@pytest.mark.skipif(compat.HAS_FAILED_RECVING, reason="this vLLM can be told which request's load failed")
@pytest.mark.parametrize(
    ("kv_groups", "is_mixed"),
    [([group(window(), "w")], False), ([group(full(), "a"), group(window(), "b")], True)],
)
def test_what_cannot_be_recomputed_from_a_block_needs_a_vllm_that_takes_failed_requests(
    kv_groups: list[KVCacheGroupSpec], is_mixed: bool
) -> None:
    with pytest.raises(ModelError, match=r"use vLLM 0\.30 or later") as refused:
        make_kv_groups(cache_config(*kv_groups))
    assert ("--disable-hybrid-kv-cache-manager" in str(refused.value)) is is_mixed


@needs_failed_recving
def test_only_one_full_attention_group_can_be_recomputed_from_any_block() -> None:
    one_full = make_kv_groups(cache_config(group(full(), "a")))
    one_window = make_kv_groups(cache_config(group(window(), "a")))
    two_full = make_kv_groups(cache_config(group(full(), "a"), group(full(), "b")))

    assert [can_recompute_from_block(groups) for groups in (one_full, one_window, two_full)] == [
        True,
        False,
        False,
    ]


LAYOUTS = {
    "one kind": [group(full(), "a", "b")],
    "padded": [group(full(page_size_padded=3072), "a", "b")],
    "unlike pages": [uniform({"m": mla(), "i": mla(head_size=8)})],
    "unlike pages, later first": [uniform({"i": mla(head_size=8), "m": mla()})],
    "alike in a wrapper": [uniform({"a": mla(), "b": mla()})],
    "alike and padded in a wrapper": [
        uniform({"a": mla(page_size_padded=1024), "b": mla(page_size_padded=1024)})
    ],
}


@pytest.mark.parametrize("kv_groups", LAYOUTS.values(), ids=LAYOUTS)
def test_the_scheduler_and_a_worker_derive_equal_groups(kv_groups: list[KVCacheGroupSpec]) -> None:
    of_worker = cache_config(*kv_groups)

    assert make_kv_groups(flattened(of_worker)) == make_kv_groups(of_worker)


def test_pages_of_unlike_layers_come_from_the_layout_and_others_are_unpadded() -> None:
    unlike = cache_config(uniform({"m": mla(), "i": mla(head_size=8)}))
    padded = cache_config(group(full(page_size_padded=3072), "a"))

    assert page_bytes_of_layers(unlike, unlike.kv_cache_groups[0]) == {"m": 768, "i": 256}
    assert page_bytes_of_layers(padded, padded.kv_cache_groups[0]) == {"a": 2048}


@pytest.mark.parametrize("own_head_size", [16, 32])
def test_a_layer_whose_page_the_scheduler_would_misjudge_is_refused(own_head_size: int) -> None:
    layers = {"a": mla(page_size_padded=1024), "b": mla(head_size=own_head_size, page_size_padded=1024)}
    config = cache_config(uniform(layers))
    if HAS_LAYER_STRIDES:
        # One entry for both says that they are alike, which they are not.
        config.kv_cache_tensors[0].layers = ["a", "b"]
        del config.kv_cache_tensors[1:]

    with pytest.raises(ModelError, match=f"layer 'b' has pages of {32 * own_head_size} bytes"):
        make_kv_groups(config)


@pytest.mark.skipif(not HAS_LAYER_STRIDES, reason="before 0.29 the layout names one page size a layer")
def test_a_layout_whose_pages_are_too_small_for_a_layer_is_refused() -> None:
    config = cache_config(uniform({"a": mla(), "b": mla(head_size=32)}))
    config.kv_cache_tensors[1].block_stride = 512

    with pytest.raises(ModelError, match="layer 'b' has pages of 1024 bytes"):
        make_kv_groups(config)


def parallel(num_workers: int, num_heads: int, *, drafts: bool = False, **counts: int) -> VllmConfig:
    """Return what ``mark_replicated`` reads of a configuration."""
    text_config = SimpleNamespace(to_dict=lambda: {"num_key_value_heads": num_heads, "layers": 4, **counts})
    model_config = SimpleNamespace(hf_text_config=text_config, get_total_num_kv_heads=lambda: num_heads)
    stand_in = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=num_workers),
        speculative_config=object() if drafts else None,
        model_config=model_config,
    )
    return cast("VllmConfig", stand_in)


@pytest.mark.parametrize(
    ("num_workers", "num_heads", "marks"),
    [
        pytest.param(1, 1, [(False, 1), (False, 1)], id="one worker"),
        pytest.param(2, 2, [(False, 1), (True, 1)], id="a head for each"),
        pytest.param(4, 8, [(False, 1), (True, 1)], id="two heads for each"),
        pytest.param(4, 2, [(False, 2), (True, 1)], id="each head on two"),
        pytest.param(8, 2, [(False, 4), (True, 1)], id="each head on four"),
        pytest.param(4, 1, [(True, 1), (True, 1)], id="one head for all"),
    ],
)
def test_groups_are_marked_with_how_many_workers_hold_the_same_bytes(
    num_workers: int, num_heads: int, marks: list[tuple[bool, int]]
) -> None:
    config = cache_config(group(full(), "a"), group(mla(), "b"))

    marked = mark_replicated(make_kv_groups(config), parallel(num_workers, num_heads), config)

    assert [(one.is_replicated, one.workers_per_part) for one in marked] == marks


@pytest.mark.parametrize(
    "vllm_config",
    [
        pytest.param(parallel(4, 2, drafts=True), id="a draft model"),
        pytest.param(parallel(4, 2, num_global_key_value_heads=4), id="layers with other numbers of heads"),
    ],
)
def test_heads_that_may_differ_between_layers_are_taken_as_those_of_each_worker(
    vllm_config: VllmConfig,
) -> None:
    config = cache_config(group(full(), "a"))

    (marked,) = mark_replicated(make_kv_groups(config), vllm_config, config)

    assert (marked.is_replicated, marked.workers_per_part) == (False, 1)
