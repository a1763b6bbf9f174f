"""What kvtier must know of vLLM's KV cache groups, or why a model cannot be offloaded.

It sees specifications only, no tensor. Kinds are an allow list of exact classes: a new kind inherits from an old one
and keeps other blocks, so what is not known is refused. Better no start than wrong bytes.

vLLM replaces blocks that have left a window by the null block, number 0, which belongs to nobody. Three rules keep it
out of every transfer, and each rests on how vLLM's manager of that kind frees blocks. Full attention frees none
while a request lives. A window of ``w`` tokens frees the blocks that lie whole before the last ``w - 1`` computed
tokens, and of a load it allocates the others only: kvtier's tail of a window group is those ``w - 1`` tokens.
Whatever leaves other holes (recurrent states, chunked local and reference windows) is refused.
"""

from collections.abc import Mapping, Sequence

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvtier.config import GroupKind, KVGroup
from kvtier.engines.vllm import compat
from kvtier.errors import ModelError

KINDS: Mapping[type[KVCacheSpec], GroupKind] = {
    FullAttentionSpec: GroupKind.FULL,
    MLAAttentionSpec: GroupKind.FULL,
    SinkFullAttentionSpec: GroupKind.FULL,
    SlidingWindowSpec: GroupKind.WINDOW,
    SlidingWindowMLASpec: GroupKind.WINDOW,
}
"""The specifications that kvtier has a rule for."""

MERGE_REMEDY = (
    "start vLLM with --disable-hybrid-kv-cache-manager, which keeps the whole prefix of such layers"
)
NO_REMEDY = "run this model without kvtier"

REMEDIES = {"ChunkedLocalAttentionSpec": MERGE_REMEDY}
"""What helps with a kind that is refused; with others nothing does."""


def make_kv_groups(kv_cache_config: KVCacheConfig) -> tuple[KVGroup, ...]:
    """Return kvtier's view of each KV group, in vLLM's order. Pure.

    The scheduler's process and the workers' get equal ones.

    Raises:
        ModelError: a group cannot be offloaded; the message says which and what helps.
    """
    if not kv_cache_config.kv_cache_groups:
        raise ModelError("vLLM reports no KV cache group: a model without attention has nothing to offload")
    groups = tuple(_make_group(kv_cache_config, idx) for idx in range(len(kv_cache_config.kv_cache_groups)))
    if not can_recompute_from_block(groups) and not compat.HAS_FAILED_RECVING:
        # vLLM merges windows into full attention only where the model has some of that.
        is_mixed = any(group.kind is GroupKind.FULL for group in groups)
        raise ModelError(
            f"the model has KV groups {names_of_groups(groups)}, and vLLM {compat.release()} cannot be told that a "
            "load of anything but one full-attention group failed: use vLLM 0.30 or later"
            + (f", or {MERGE_REMEDY}" if is_mixed else "")
        )
    return groups


def can_recompute_from_block(groups: Sequence[KVGroup]) -> bool:
    """Return whether a request can go on from any block of its prefix. Pure.

    A window group lacks the blocks before a load's tail, and block numbers are unique within a group only, so with
    anything but one full-attention group a request whose load failed is computed from its first token.
    """
    return len(groups) == 1 and groups[0].kind is GroupKind.FULL


def page_bytes_of_layers(kv_cache_config: KVCacheConfig, group: KVCacheGroupSpec) -> dict[str, int]:
    """Return the bytes of one device block for each layer of a group, in the order of ``layer_names``. Pure.

    Raises:
        ModelError: a worker's specification of a layer contradicts what the scheduler's process will take it for.
    """
    first = first_spec(group)
    stored = compat.stored_page_bytes(kv_cache_config, group, first)
    pages = dict.fromkeys(group.layer_names, first.unpadded_page_size_bytes) if stored is None else stored
    for name, spec in _own_specs(group).items():
        own_bytes = spec.unpadded_page_size_bytes
        if own_bytes > pages[name] or (stored is None and own_bytes != pages[name]):
            raise ModelError(
                f"layer {name!r} has pages of {own_bytes} bytes, but vLLM {compat.release()} tells its scheduler of "
                f"{pages[name]}: {NO_REMEDY}, or use a later vLLM"
            )
    return {name: int(pages[name]) for name in group.layer_names}


def first_spec(group: KVCacheGroupSpec) -> KVCacheSpec:
    """Return what the scheduler's process is told of the whole group: the specification of its first layer. Pure."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec


def names_of_groups(groups: Sequence[KVGroup]) -> str:
    """Return one line that says what each group is. Pure."""
    return ", ".join(f"{group.kind.value} x{len(group.layer_names)}" for group in groups)


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
    )


def _kind_of(idx: int, spec: KVCacheSpec) -> tuple[GroupKind, int | None]:
    """Return what of a prefix a layer needs, or refuse a kind that kvtier has no rule for."""
    kind = KINDS.get(type(spec))
    name = type(spec).__name__
    if kind is None:
        raise ModelError(
            f"KV group {idx} is of kind {name}, whose block table does not say which bytes a content hash names: "
            f"{REMEDIES.get(name, NO_REMEDY)}"
        )
    if getattr(spec, "non_causal", False):
        raise ModelError(
            f"KV group {idx} attends to later tokens, so the hash of a prefix does not name its bytes: {NO_REMEDY}"
        )
    if kind is GroupKind.FULL:
        return kind, None
    # Retained tokens are not attended to at first, but drafting several tokens may go back to them.
    return kind, int(spec.sliding_window + spec.extra_retained_tokens)


def _own_specs(group: KVCacheGroupSpec) -> Mapping[str, KVCacheSpec]:
    """Return the specification of each layer, as far as this process is told one; workers are."""
    spec = group.kv_cache_spec
    return spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
