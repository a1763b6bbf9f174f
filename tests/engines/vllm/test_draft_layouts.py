"""The layers of a drafting model are kept with those of the model: EAGLE's and MTP's, grouped by vLLM itself.

Nothing drafts here. vLLM's own function makes groups and layout from the specifications that such layers have, and
kvtier must cover every byte of every layer, the draft's too: a block without them would look like a hit and draft from
other prompts' keys.
"""

import copy
from collections.abc import Mapping

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.engines.vllm.configs import cache_config, flattened, full, mla, window
from vllm.config import VllmConfig
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from kvtier.config import GroupKind
from kvtier.engines.vllm.groups import make_kv_groups

LLAMA = {f"model.layers.{number}.attn": full() for number in range(4)}
GEMMA = {f"model.layers.{number}.attn": full() if number == 5 else window(tokens=64) for number in range(6)}
DEEPSEEK = {f"model.layers.{number}.attn": mla() for number in range(3)}

LAYOUTS: dict[str, tuple[dict[str, KVCacheSpec], dict[str, KVCacheSpec]]] = {
    "EAGLE of a Llama": (LLAMA, {"model.layers.4.attn": full()}),
    "EAGLE with other heads": (LLAMA, {"model.layers.4.attn": full(heads=4)}),
    "EAGLE of a Gemma": (GEMMA, {"model.layers.6.attn": full()}),
    "MTP of a DeepSeek": (DEEPSEEK, {"model.layers.3.attn": mla()}),
    "two MTP layers of a DeepSeek": (DEEPSEEK, {f"model.layers.{n}.attn": mla() for n in (3, 4)}),
    "MTP with full attention behind windows": (
        {f"model.layers.{n}.attn": window(tokens=64) for n in range(2)} | {"model.layers.2.attn": full()},
        {"mtp.layers.0.attn": full()},
    ),
}


def arrange(vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec]) -> KVCacheConfig:
    """Return how vLLM groups these layers in an engine with one worker."""
    config = copy.deepcopy(vllm_config)
    if hasattr(
        config.cache_config, "kv_cache_layout"
    ):  # the engine core resolves it from the attention backend
        config.cache_config.kv_cache_layout = "LBNHC"
    return cache_config(*kv_cache_utils.get_kv_cache_groups(config, dict(specs)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layer_of_the_draft_is_in_a_group_with_all_of_its_bytes(
    vllm_config: VllmConfig, name: str
) -> None:
    target, draft = LAYOUTS[name]
    specs = target | draft
    config = arrange(vllm_config, specs)

    on_worker, on_scheduler = make_kv_groups(config), make_kv_groups(flattened(config))

    assert sorted(layer for group in on_worker for layer in group.layer_names) == sorted(specs)
    for group in on_worker:
        assert group.page_size_bytes == sum(
            specs[layer].unpadded_page_size_bytes for layer in group.layer_names
        )
    assert [group.page_size_bytes for group in on_scheduler] == [group.page_size_bytes for group in on_worker]
    assert GroupKind.FULL in {group.kind for group in on_worker}


def test_an_engine_that_drafts_does_not_find_the_blocks_of_one_that_does_not(vllm_config: VllmConfig) -> None:
    target, draft = LAYOUTS["EAGLE of a Llama"]
    alone, drafting = arrange(vllm_config, target), arrange(vllm_config, target | draft)

    assert [group.layer_names for group in make_kv_groups(alone)] != [
        group.layer_names for group in make_kv_groups(drafting)
    ]
