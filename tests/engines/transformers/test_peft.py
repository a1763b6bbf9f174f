"""The adapters of peft itself: what switches, scales, merges or loads one changes the model's name."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from kvtier.engines.transformers import KVTierEngine
from kvtier.errors import ModelError

peft = pytest.importorskip("peft", reason="peft is not installed")

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning")]
"""peft calls what transformers is about to rename, and warns of deep copies and rounding."""

NUM_NEW_TOKENS = 6
NUM_SHARED = 72
"""Tokens of the prompt's full blocks."""

MakeEngine = Callable[..., KVTierEngine]
Expected = tuple[list[int], torch.Tensor]
Plain = Callable[[PreTrainedModel, list[int], int], Expected]
AssertSame = Callable[[Any, Expected], None]  # Any: a result
Wrapped = Any  # Any: peft has no annotations


@pytest.fixture
def wrapped(llama: LlamaForCausalLM) -> Wrapped:
    """A model with two random adapters, of which the first is active."""
    torch.manual_seed(0)
    settings = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.1
    )
    wrapped = peft.get_peft_model(copy.deepcopy(llama), settings, "one")
    wrapped.add_adapter("two", settings)
    return wrapped


def lora_layers(wrapped: Wrapped) -> Iterator[Any]:  # Any: as above
    return (module for module in wrapped.modules() if isinstance(module, peft.tuners.lora.LoraLayer))


def scale(wrapped: Wrapped) -> None:
    for layer in lora_layers(wrapped):
        layer.scale_layer(0.25)


def load(wrapped: Wrapped) -> None:
    torch.manual_seed(1)
    settings = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.1
    )
    wrapped.add_adapter("three", settings)
    wrapped.set_adapter("three")


CHANGES: dict[str, Callable[[Wrapped], object]] = {
    "set_adapter": lambda wrapped: wrapped.set_adapter("two"),
    "adapters disabled": lambda wrapped: wrapped.base_model.disable_adapter_layers(),
    "scaled": scale,
    "added": load,
    "merged": lambda wrapped: wrapped.merge_adapter(["two"]),
    "merged and unloaded": lambda wrapped: (wrapped.set_adapter("two"), wrapped.merge_and_unload()),
    "deleted": lambda wrapped: wrapped.delete_adapter("one"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_adapter_answers_as_generate_and_leaves_the_blocks_of_before_alone(
    name: str,
    wrapped: Wrapped,
    prompt: list[int],
    plain: Plain,
    assert_same: AssertSame,
    make_engine: MakeEngine,
    tmp_path: Path,
) -> None:
    tier = {"type": "fs", "root_dir": str(tmp_path / "fs"), "capacity_bytes": "64MiB"}
    settings = {"cpu_bytes_to_use": "2MiB", "secondary_tiers": [tier]}
    model = wrapped.get_base_model()
    before = copy.deepcopy(model)
    engine = make_engine(model, extra_config=settings)
    engine.run(prompt, NUM_NEW_TOKENS)

    CHANGES[name](wrapped)
    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
    assert_same(result, plain(model, prompt, NUM_NEW_TOKENS))
    assert result.sources == {"computed": len(prompt)}
    assert engine.run(prompt, 1).sources == {"device": NUM_SHARED, "computed": 3}
    engine.shutdown()

    another = make_engine(before, extra_config=settings).run(prompt, NUM_NEW_TOKENS, return_logits=True)
    assert_same(another, plain(before, prompt, NUM_NEW_TOKENS))
    assert another.sources == {"fs": NUM_SHARED, "computed": 3}


def test_adapters_disabled_for_a_while_change_nothing_afterwards(
    wrapped: Wrapped, prompt: list[int], make_engine: MakeEngine
) -> None:
    engine = make_engine(wrapped.get_base_model(), extra_config={"cpu_bytes_to_use": "2MiB"})
    engine.run(prompt, 1)
    with wrapped.disable_adapter():
        pass
    assert engine.run(prompt, 1).sources == {"device": NUM_SHARED, "computed": 3}
    with wrapped.disable_adapter():
        assert engine.run(prompt, 1).sources == {"computed": len(prompt)}


def test_peft_s_own_model_is_refused_with_what_to_pass(wrapped: Wrapped, make_engine: MakeEngine) -> None:
    with pytest.raises(
        ModelError, match=r"PeftModel wraps a transformers model: pass its get_base_model\(\)"
    ):
        make_engine(wrapped)
