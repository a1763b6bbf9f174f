"""Translates vLLM's KV cache groups into kvtier's, or refuses a model that cannot be offloaded.

Kinds are an allow list of exact classes. A new kind inherits from an old one and keeps other blocks, so an unknown kind
is refused: no start is better than wrong bytes.

vLLM replaces blocks that have left a window by the null block, number 0, which no request owns. It must not be in any
transfer. How vLLM frees blocks ensures this. Full attention frees none while a request runs. A window of ``w`` tokens
frees the blocks that lie entirely before the last ``w - 1`` computed tokens, and of a load it allocates only the
others: kvtier's tail of a window group is these ``w - 1`` tokens. Of a recurrent state it keeps the block of the last
token in the aligned cache mode, names the blocks that hold the state after a whole block in each step, and of a load it
allocates the last block. Kinds that leave other holes (chunked local and reference windows) are refused.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vllm.config import ModelConfig, VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvtier.config import GroupKind, KVGroup, StatePart
from kvtier.engines.vllm import compat
from kvtier.errors import ModelError
from kvtier.namespace import describe_groups

KINDS: Mapping[type[KVCacheSpec], GroupKind] = {
    FullAttentionSpec: GroupKind.FULL,
    MLAAttentionSpec: GroupKind.FULL,
    SinkFullAttentionSpec: GroupKind.FULL,
    SlidingWindowSpec: GroupKind.WINDOW,
    SlidingWindowMLASpec: GroupKind.WINDOW,
    MambaSpec: GroupKind.STATE,
}
"""The supported specifications."""

LATENT_KINDS = frozenset({MLAAttentionSpec, SlidingWindowMLASpec})
"""Of these each worker holds all of a layer's bytes, whatever the number of workers."""

HEAD_KINDS = frozenset({FullAttentionSpec, SlidingWindowSpec})
"""Of these each worker holds the KV heads that are its own."""

MERGE_REMEDY = (
    "start vLLM with --disable-hybrid-kv-cache-manager, which keeps the whole prefix of such layers"
)
NO_REMEDY = "run this model without kvtier"

ALIGNED = "align"
"""The only mode of vLLM in which it names the blocks that hold a state, and frees those that no longer do."""

ALIGN_REMEDY = f"start vLLM with --mamba-cache-mode {ALIGNED}"

REMEDIES = {"ChunkedLocalAttentionSpec": MERGE_REMEDY}
"""The remedy for a kind that is refused; NO_REMEDY for all others."""


def make_kv_groups(kv_cache_config: KVCacheConfig) -> tuple[KVGroup, ...]:
    """Return kvtier's description of each KV group, in vLLM's order; equal in all processes of an engine. Pure.

    Raises:
        ModelError: a group cannot be offloaded; the message has the group and the remedy.
    """
    if not kv_cache_config.kv_cache_groups:
        raise ModelError("vLLM reports no KV cache group: a model without attention has nothing to offload")
    groups = tuple(_make_group(kv_cache_config, idx) for idx in range(len(kv_cache_config.kv_cache_groups)))
    if not can_recompute_from_block(groups) and not compat.HAS_FAILED_RECVING:
        # vLLM merges windows into full attention only where the model has some of that.
        is_mixed = any(group.kind is GroupKind.FULL for group in groups)
        raise ModelError(
            f"the model has KV groups {describe_groups(groups)}, and in vLLM {compat.release()} a connector cannot "
            "report a failed load except with one full-attention group: use vLLM 0.30 or later"
            + (f", or {MERGE_REMEDY}" if is_mixed else "")
        )
    return groups


def mark_replicated(
    groups: Sequence[KVGroup], vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> tuple[KVGroup, ...]:
    """Return the groups, marked where several workers hold the same bytes; equal in all processes of an engine. Pure.

    Under tensor parallelism each worker computes the whole latent vector of latent attention (MLA), and of fewer KV
    heads than workers each is computed by consecutive ones. A draft model's layers, which may share a group, have
    heads of their own.
    """
    num_workers = vllm_config.parallel_config.tensor_parallel_size
    if num_workers == 1 or vllm_config.speculative_config is not None:
        return tuple(groups)
    num_heads = find_num_kv_heads(vllm_config.model_config)
    # vLLM gives worker r the head r // (workers / heads), and refuses numbers that do not divide each other.
    workers_per_head = num_workers // num_heads if num_heads and num_workers % num_heads == 0 else 1
    kinds = [type(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    num_holders = [
        num_workers if kind in LATENT_KINDS else max(1, workers_per_head) if kind in HEAD_KINDS else 1
        for kind in kinds
    ]
    return tuple(
        replace(group, is_replicated=True)
        if held_by == num_workers
        else replace(group, workers_per_part=held_by)
        for group, held_by in zip(groups, num_holders, strict=True)
    )


def find_num_kv_heads(model_config: ModelConfig) -> int | None:
    """Return the number of KV heads of every attention layer of a model; None where layers may differ. Pure.

    Some models give several counts, such as one for layers of global attention.
    """
    described = model_config.hf_text_config.to_dict()
    counts = [count for name, count in described.items() if "key_value_heads" in name or "kv_heads" in name]
    num_heads = int(model_config.get_total_num_kv_heads())
    return num_heads if all(count in (num_heads, None) for count in counts) else None


def can_recompute_from_block(groups: Sequence[KVGroup]) -> bool:
    """Return whether a request can be recomputed from any block of its prefix. Pure.

    A window or state group lacks the blocks before a load's tail, and block numbers are unique within a group only. So
    except with one full-attention group, a request whose load failed is computed from its first token.
    """
    return len(groups) == 1 and groups[0].kind is GroupKind.FULL


def page_bytes_of_layers(kv_cache_config: KVCacheConfig, group: KVCacheGroupSpec) -> dict[str, int]:
    """Return the bytes of one device block for each layer of a group, in the order of ``layer_names``. Pure.

    Raises:
        ModelError: a worker's specification of a layer contradicts the one that the scheduler's process has.
    """
    first = first_spec(group)
    # Layers of one state group have equal padded pages, so the layout of the tensors says nothing of what is in them.
    is_state = isinstance(first, MambaSpec)
    stored = None if is_state else compat.stored_page_bytes(kv_cache_config, group, first)
    pages = dict.fromkeys(group.layer_names, unpadded_bytes(first)) if stored is None else stored
    for name, spec in _own_specs(group).items():
        own_bytes = unpadded_bytes(spec)
        if own_bytes > pages[name] or (stored is None and own_bytes != pages[name]):
            raise ModelError(
                f"layer {name!r} has pages of {own_bytes} bytes, but in vLLM {compat.release()} its scheduler has "
                f"{pages[name]}: {NO_REMEDY}, or use a later vLLM"
            )
    return {name: int(pages[name]) for name in group.layer_names}


def unpadded_bytes(spec: KVCacheSpec) -> int:
    """Return the bytes that a layer uses of a page. Pure."""
    if not isinstance(spec, MambaSpec):
        return int(spec.unpadded_page_size_bytes)
    sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
    return sum(sizes)


def first_spec(group: KVCacheGroupSpec) -> KVCacheSpec:
    """Return the specification of the group's first layer, which the scheduler's process has for all. Pure."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec


def _make_group(kv_cache_config: KVCacheConfig, idx: int) -> KVGroup:
    group = kv_cache_config.kv_cache_groups[idx]
    kinds = {_kind_of(idx, spec) for spec in (first_spec(group), *_own_specs(group).values())}
    if len(kinds) > 1:
        raise ModelError(f"KV group {idx} mixes layers that need different parts of a prefix: {MERGE_REMEDY}")
    if not compat.has_content_hashes(group):
        raise ModelError(f"the blocks of KV group {idx} have no content hash to find them by: {NO_REMEDY}")
    ((kind, window_tokens),) = kinds
    return KVGroup(
        block_size_tokens=group.kv_cache_spec.block_size,
        layer_names=tuple(group.layer_names),
        page_size_bytes=sum(page_bytes_of_layers(kv_cache_config, group).values()),
        kind=kind,
        window_tokens=window_tokens,
        state_parts=_parts_of_states(group),
    )


def _parts_of_states(group: KVCacheGroupSpec) -> tuple[StatePart, ...]:
    """Return the parts of a page of recurrent states, layer after layer; empty where a part has bytes without meaning.

    With speculative decoding a convolution has room for drafted tokens, which may be of a rejected draft.
    """
    spec = first_spec(group)
    if not isinstance(spec, MambaSpec) or spec.num_speculative_blocks:
        return ()
    parts = [
        StatePart(str(dtype).removeprefix("torch."), math.prod(shape) * dtype.itemsize)
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]
    return tuple(parts * len(group.layer_names))


def _kind_of(idx: int, spec: KVCacheSpec) -> tuple[GroupKind, int | None]:
    """Return which part of a prefix a layer needs, or refuse an unsupported kind."""
    kind = KINDS.get(type(spec))
    name = type(spec).__name__
    if kind is None:
        raise ModelError(
            f"KV group {idx} is of kind {name}, whose blocks cannot be identified by content hashes: "
            f"{REMEDIES.get(name, NO_REMEDY)}"
        )
    if getattr(spec, "non_causal", False):
        raise ModelError(
            f"KV group {idx} attends to later tokens, so the hash of a prefix does not identify its bytes: {NO_REMEDY}"
        )
    if isinstance(spec, MambaSpec):
        _require_named_states(idx, spec)
    if kind is not GroupKind.WINDOW:
        return kind, None
    # Retained tokens are outside the window at first, but drafting several tokens may attend to them again.
    return kind, int(spec.sliding_window + spec.extra_retained_tokens)


def _require_named_states(idx: int, spec: MambaSpec) -> None:
    """Refuse recurrent states of which vLLM does not say which device blocks hold them.

    Raises:
        ModelError: the cache mode is another one, or the release is too old.
    """
    name = type(spec).__name__
    if spec.mamba_cache_mode != ALIGNED:
        raise ModelError(
            f"KV group {idx} is of kind {name} in cache mode {spec.mamba_cache_mode!r}, in which its recurrent states "
            f"are not kept at the ends of blocks alone: {ALIGN_REMEDY}"
        )
    if not compat.NAMES_KEPT_STATES:
        raise ModelError(
            f"KV group {idx} is of kind {name}, and vLLM {compat.release()} does not say which blocks hold a recurrent "
            "state: use vLLM 0.32 or later, or run this model without kvtier"
        )


def _own_specs(group: KVCacheGroupSpec) -> Mapping[str, KVCacheSpec]:
    """Return the specification of each layer; only workers have them, in other processes it is empty."""
    spec = group.kv_cache_spec
    return spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
