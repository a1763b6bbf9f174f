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
Settings = Any  # Any: as above
Output = Any  # Any: what a model of transformers returns


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


@pytest.mark.parametrize("is_wrapped", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_adapter_answers_as_generate_and_leaves_the_blocks_of_before_alone(
    name: str,
    is_wrapped: bool,
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
    engine = make_engine(wrapped if is_wrapped else model, extra_config=settings)
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
    engine = make_engine(wrapped, extra_config={"cpu_bytes_to_use": "2MiB"})
    engine.run(prompt, 1)
    with wrapped.disable_adapter():
        pass
    assert engine.run(prompt, 1).sources == {"device": NUM_SHARED, "computed": 3}
    with wrapped.disable_adapter():
        assert engine.run(prompt, 1).sources == {"computed": len(prompt)}


def test_peft_s_own_model_answers_as_its_own_generate_does(
    wrapped: Wrapped, prompt: list[int], make_engine: MakeEngine
) -> None:
    engine = make_engine(wrapped, extra_config={"cpu_bytes_to_use": "2MiB"})
    answers = []
    for name in ("one", "two", "one"):
        wrapped.set_adapter(name)
        ids, mask = torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.long)
        output = wrapped.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=NUM_NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        result = engine.run(prompt, NUM_NEW_TOKENS)
        answers.append(result.tokens)
        assert result.tokens == output[0, len(prompt) :].tolist()
        assert result.sources == {"computed": len(prompt)}
    assert answers[0] == answers[2] != answers[1]


def test_the_wrapped_model_and_its_base_share_their_blocks(
    wrapped: Wrapped, prompt: list[int], make_engine: MakeEngine, tmp_path: Path
) -> None:
    tier = {"type": "fs", "root_dir": str(tmp_path / "fs"), "capacity_bytes": "64MiB"}
    settings = {"cpu_bytes_to_use": "2MiB", "secondary_tiers": [tier]}
    with make_engine(wrapped, extra_config=settings) as engine:
        engine.run(prompt, 1)
    result = make_engine(wrapped.get_base_model(), extra_config=settings).run(prompt, 1)
    assert result.sources == {"fs": NUM_SHARED, "computed": 3}


@pytest.mark.parametrize(
    "settings",
    [
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        peft.LoKrConfig(target_modules=["q_proj"], r=2),
        peft.LoraConfig(r=4, target_modules=["v_proj"], use_dora=True, init_lora_weights=False),
        peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False),
    ],
    ids=["IA3", "LoKr", "DoRA", "LoRA with a saved head"],
)
def test_adapters_of_other_kinds_whose_layers_do_everything_are_served(
    settings: Settings,
    llama: LlamaForCausalLM,
    prompt: list[int],
    plain: Plain,
    assert_same: AssertSame,
    make_engine: MakeEngine,
) -> None:
    wrapped = peft.get_peft_model(copy.deepcopy(llama), settings)
    engine = make_engine(wrapped, extra_config={"cpu_bytes_to_use": "2MiB"})
    for _ in range(2):
        result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
        assert_same(result, plain(wrapped.get_base_model(), prompt, NUM_NEW_TOKENS))
    assert result.sources == {"device": NUM_SHARED, "computed": 3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
            r"'default' \(PREFIX_TUNING\) learned a prompt",
        ),
        (
            peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
            r"\(PROMPT_TUNING\) learned a prompt",
        ),
        (
            peft.LoraConfig(
                task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], alora_invocation_tokens=[5, 6]
            ),
            "begins at its alora_invocation_tokens",
        ),
        (
            peft.PolyConfig(r=4, n_tasks=2, n_skills=2, n_splits=1, target_modules=["q_proj"]),
            r"'default' \(POLY\) wants the number of a task",
        ),
    ],
    ids=["prefix tuning", "prompt tuning", "activated LoRA", "Poly"],
)
def test_what_an_adapter_s_layers_do_not_compute_is_refused_by_name(
    settings: Settings,
    message: str,
    llama: LlamaForCausalLM,
    make_engine: MakeEngine,
) -> None:
    wrapped = peft.get_peft_model(copy.deepcopy(llama), settings)
    with pytest.raises(ModelError, match=message):
        make_engine(wrapped)


def test_a_mixture_of_adapters_that_reads_the_whole_prompt_is_refused(
    llama: LlamaForCausalLM, make_engine: MakeEngine
) -> None:
    model: Wrapped = copy.deepcopy(llama)
    model.config.use_cache = False
    model.peft_config = {"mixture": peft.XLoraConfig(hidden_size=48, adapters={})}
    with pytest.raises(ModelError, match=r"'mixture' \(XLORA\) weighs its adapters by all tokens"):
        make_engine(model)


def test_a_wrapper_that_computes_something_else_than_its_layers_is_refused(
    wrapped: Wrapped, make_engine: MakeEngine
) -> None:
    class Scaling(torch.nn.Module):
        """Stands for a wrapper with a pass of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = wrapped
            self.peft_config = {"one": peft.LoraConfig()}

        def get_base_model(self) -> PreTrainedModel:
            base: PreTrainedModel = self.inner.get_base_model()
            return base

        def forward(self, input_ids: torch.Tensor) -> Output:
            output = self.inner(input_ids=input_ids)
            output.logits = 2 * output.logits
            return output

    with pytest.raises(
        ModelError, match=r"Scaling with LORA computes more than its layers do.*merge_and_unload"
    ):
        make_engine(Scaling())


def test_an_adapter_that_cannot_be_served_is_refused_when_it_comes_and_the_engine_goes_on_without_it(
    wrapped: Wrapped, prompt: list[int], make_engine: MakeEngine
) -> None:
    engine = make_engine(wrapped, extra_config={"cpu_bytes_to_use": "2MiB"})
    tokens = engine.run(prompt, NUM_NEW_TOKENS).tokens
    late = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], alora_invocation_tokens=[5, 6]
    )
    wrapped.add_adapter("late", late)
    with pytest.raises(ModelError, match=r"'late' .*begins at its alora_invocation_tokens"):
        engine.run(prompt, 1)
    wrapped.delete_adapter("late")
    assert engine.run(prompt, NUM_NEW_TOKENS).tokens == tokens
