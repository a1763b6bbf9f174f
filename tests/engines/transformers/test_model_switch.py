"""A model that changes under a living engine answers as ``generate`` does, and its blocks stay apart from before."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.transformers import adapters
from transformers import LlamaForCausalLM, PreTrainedModel

from kvtier.engines.transformers import KVTierCache, KVTierEngine
from kvtier.engines.transformers.model_adapter import find_cache_name

WAIT_S = 30.0
NUM_NEW_TOKENS = 6
NUM_SHARED = 72
"""Tokens of the prompt's full blocks."""

MakeEngine = Callable[..., KVTierEngine]
Expected = tuple[list[int], torch.Tensor]
Plain = Callable[[PreTrainedModel, list[int], int], Expected]
AssertSame = Callable[[Any, Expected], None]  # Any: a result
Change = Callable[[PreTrainedModel], object]
Settings = dict[str, Any]  # Any: what a user writes as JSON


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    tier = {"type": "fs", "root_dir": str(tmp_path / "fs"), "capacity_bytes": "64MiB"}
    return {"cpu_bytes_to_use": "2MiB", "secondary_tiers": [tier]}


@pytest.fixture
def model(llama: LlamaForCausalLM) -> LlamaForCausalLM:
    """A model with two adapters, of which the first is active."""
    model = copy.deepcopy(llama)
    for name, seed in (("a", 1), ("b", 2)):
        adapters.add_adapter(model, name, seed)
    return model


def layer_of(model: PreTrainedModel, name: str) -> Any:  # noqa: ANN401  # Any: a module has any attributes
    return model.get_submodule(f"model.layers.0.{name}")


@torch.no_grad()
def scale_in_place(model: PreTrainedModel) -> None:
    layer_of(model, "mlp.down_proj").weight.mul_(1.5)


def step_optimizer(model: PreTrainedModel) -> None:
    weight = layer_of(model, "mlp.up_proj").weight
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.1).step()


def load_other_weights(model: PreTrainedModel) -> None:
    model.load_state_dict({name: tensor * 1.1 for name, tensor in model.state_dict().items()})


def replace_parameter(model: PreTrainedModel) -> None:
    norm = layer_of(model, "input_layernorm")
    norm.weight = torch.nn.Parameter(norm.weight.detach() * 1.5)


def replace_module(model: PreTrainedModel) -> None:
    layer_of(model, "mlp").act_fn = torch.nn.GELU()


def replace_twice(model: PreTrainedModel) -> None:
    for factor in (2.0, 1.5):
        replace = torch.nn.Parameter(layer_of(model, "input_layernorm").weight.detach() * factor)
        layer_of(model, "input_layernorm").weight = replace


def change_buffer(model: PreTrainedModel) -> None:
    model.get_buffer("model.rotary_emb.inv_freq").mul_(0.5)


def change_attribute(model: PreTrainedModel) -> None:
    layer_of(model, "self_attn").scaling *= 2


def remove_rounding(model: PreTrainedModel) -> None:
    """Round every weight by way of a smaller type: the objects and the type stay, and the memory may."""
    torch.nn.Module.to(model, torch.bfloat16)
    torch.nn.Module.to(model, torch.float32)


def double_output(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def add_hook(model: PreTrainedModel) -> None:
    layer_of(model, "mlp").register_forward_hook(double_output)


def replace_forward(model: PreTrainedModel) -> None:
    mlp = layer_of(model, "mlp")
    stock = mlp.forward
    mlp.forward = lambda hidden: stock(hidden) * 2


def merge_active(model: PreTrainedModel) -> None:
    adapters.merge_adapter(model, "b")


def add_active(model: PreTrainedModel, name: str) -> None:
    adapters.add_adapter(model, name, 3)
    adapters.set_adapter(model, name)


CHANGES: dict[str, Change] = {
    "weights in place": scale_in_place,
    "optimizer": step_optimizer,
    "load_state_dict": load_other_weights,
    "another parameter": replace_parameter,
    "another parameter twice": replace_twice,
    "another module": replace_module,
    "buffer in place": change_buffer,
    "plain attribute": change_attribute,
    "rounded in place": remove_rounding,
    "forward hook": add_hook,
    "another forward": replace_forward,
    "another adapter": lambda model: adapters.set_adapter(model, "b"),
    "adapters disabled": adapters.disable_adapters,
    "adapter's scale": lambda model: adapters.set_scale(model, "a", 0.5),
    "adapter added": lambda model: add_active(model, "c"),
    "adapter merged": merge_active,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_answers_as_generate_and_leaves_the_blocks_of_before_alone(
    name: str,
    model: LlamaForCausalLM,
    prompt: list[int],
    plain: Plain,
    assert_same: AssertSame,
    make_engine: MakeEngine,
    settings: Settings,
) -> None:
    before = copy.deepcopy(model)
    expected_before = plain(before, prompt, NUM_NEW_TOKENS)
    engine = make_engine(model, extra_config=settings)
    engine.run(prompt, NUM_NEW_TOKENS)

    CHANGES[name](model)
    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
    expected = plain(model, prompt, NUM_NEW_TOKENS)
    assert not torch.allclose(expected[1], expected_before[1], atol=1e-3)
    assert_same(result, expected)
    assert result.sources == {"computed": len(prompt)}
    assert engine.run(prompt, 1).sources == {"device": NUM_SHARED, "computed": 3}
    engine.shutdown()

    # Another process with the weights of before: what it finds is of before.
    another = make_engine(before, extra_config=settings).run(prompt, NUM_NEW_TOKENS, return_logits=True)
    assert_same(another, expected_before)
    assert another.sources == {"fs": NUM_SHARED, "computed": 3}


@torch.no_grad()
def scale_by(model: PreTrainedModel, power_of_two: float) -> None:
    """Multiply without rounding."""
    layer_of(model, "mlp.down_proj").weight.mul_(power_of_two)


BACK: dict[str, tuple[Change, Change]] = {
    "adapter": (lambda m: adapters.set_adapter(m, "b"), lambda m: adapters.set_adapter(m, "a")),
    "disabled": (adapters.disable_adapters, lambda m: adapters.disable_adapters(m, is_disabled=False)),
    "scale": (lambda m: adapters.set_scale(m, "a", 1.0), lambda m: adapters.set_scale(m, "a", 2.0)),
    "weights": (lambda m: scale_by(m, 2.0), lambda m: scale_by(m, 0.5)),
}


@pytest.mark.parametrize("name", BACK)
def test_a_model_that_is_what_it_was_finds_its_blocks_of_before(
    name: str,
    model: LlamaForCausalLM,
    prompt: list[int],
    plain: Plain,
    assert_same: AssertSame,
    make_engine: MakeEngine,
    settings: Settings,
) -> None:
    change, change_back = BACK[name]
    expected = plain(model, prompt, NUM_NEW_TOKENS)
    engine = make_engine(model, extra_config=settings)
    engine.run(prompt, 1)
    change(model)
    engine.run(prompt, 1)
    change_back(model)
    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
    assert_same(result, expected)
    assert result.sources == {"fs": NUM_SHARED, "computed": 3}


def test_an_unmerged_adapter_leaves_weights_that_are_read_again(
    model: LlamaForCausalLM,
    prompt: list[int],
    plain: Plain,
    assert_same: AssertSame,
    make_engine: MakeEngine,
    settings: Settings,
) -> None:
    engine = make_engine(model, extra_config=settings)
    engine.run(prompt, 1)
    before = copy.deepcopy(model)
    adapters.merge_adapter(model, "a")
    engine.run(prompt, 1)
    adapters.unmerge_adapter(model, "a")
    # The weights are those of before but for rounding, so their blocks are not.
    assert any((a != b).any() for a, b in zip(model.parameters(), before.parameters(), strict=True))
    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
    assert_same(result, plain(model, prompt, NUM_NEW_TOKENS))
    assert result.sources == {"computed": len(prompt)}


SAME: dict[str, Change] = {
    "the same weights loaded": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())),
    "weights moved": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
    "the same adapter": lambda model: adapters.set_adapter(model, "a"),
    "gradients": lambda model: model.requires_grad_(requires_grad=False),
    "training mode": lambda model: model.train(),
    "use_cache": lambda model: setattr(model.config, "use_cache", False),
    "generation": lambda model: setattr(model.generation_config, "temperature", 0.5),
    "its name": lambda model: setattr(model.config, "name_or_path", "/elsewhere"),
}


@pytest.mark.parametrize("name", SAME)
def test_what_changes_no_answer_keeps_every_block(
    name: str, model: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine, settings: Settings
) -> None:
    engine = make_engine(model, extra_config=settings)
    engine.run(prompt, 1)
    SAME[name](model)
    assert engine.run(prompt, 1).sources == {"device": NUM_SHARED, "computed": 3}


@pytest.mark.parametrize("offload", [None, {"cpu_bytes_to_use": "2MiB"}])
def test_a_change_empties_the_device_and_host_memory_without_a_tier_too(
    offload: Settings | None,
    model: LlamaForCausalLM,
    prompt: list[int],
    plain: Plain,
    assert_same: AssertSame,
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(model, extra_config=offload)
    engine.run(prompt, 1)
    adapters.set_adapter(model, "b")
    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
    assert_same(result, plain(model, prompt, NUM_NEW_TOKENS))
    assert result.sources == {"computed": len(prompt)}


def test_generate_s_own_cache_is_not_stored_when_the_model_changed_before_its_commit(
    model: LlamaForCausalLM,
    prompt: list[int],
    plain: Plain,
    assert_same: AssertSame,
    make_engine: MakeEngine,
    settings: Settings,
) -> None:
    engine = make_engine(model, extra_config=settings)
    cache = engine.cache_for(prompt)
    output = generate_with(model, prompt, cache)
    scale_in_place(model)
    assert cache.commit(output) == 0
    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
    assert_same(result, plain(model, prompt, NUM_NEW_TOKENS))
    assert result.sources == {"computed": len(prompt)}
    # A cache that was filled after the change is stored.
    later = engine.cache_for(prompt)
    assert later.sources == {"device": NUM_SHARED, "computed": 3}
    assert later.commit(generate_with(model, prompt, later)) == len(prompt) + 1


def generate_with(model: PreTrainedModel, prompt: list[int], cache: KVTierCache) -> torch.Tensor:
    """Return two more tokens than the prompt has."""
    generate: Any = model.generate  # Any: the annotations of transformers do not fit its models
    output: torch.Tensor = generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=2,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **{find_cache_name(model): cache},
    )
    return output


def test_a_reset_holds_also_after_a_change_and_back(
    model: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine, settings: Settings
) -> None:
    engine = make_engine(model, extra_config=settings)
    engine.run(prompt, 1)
    engine.drain(WAIT_S)
    engine.reset()
    adapters.set_adapter(model, "b")
    engine.run(prompt, 1)
    adapters.set_adapter(model, "a")
    assert engine.run(prompt, 1).sources == {"computed": len(prompt)}


def test_a_named_revision_covers_the_weights_of_the_start_and_no_later_ones(
    model: LlamaForCausalLM,
    prompt: list[int],
    plain: Plain,
    assert_same: AssertSame,
    make_engine: MakeEngine,
    settings: Settings,
) -> None:
    before = copy.deepcopy(model)
    engine = make_engine(model, extra_config=settings, model_revision="r1")
    scale_in_place(model)
    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
    assert_same(result, plain(model, prompt, NUM_NEW_TOKENS))
    engine.shutdown()
    another = make_engine(before, extra_config=settings, model_revision="r1")
    assert another.run(prompt, 1).sources == {"computed": len(prompt)}


def test_weights_that_leave_the_memory_are_named_by_nothing_and_reach_no_tier(
    model: LlamaForCausalLM,
    prompt: list[int],
    make_engine: MakeEngine,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(model, extra_config=settings)
    engine.run(prompt, 1)
    engine.drain(WAIT_S)
    stored = engine.stats()["tier.0.fs.stored_blocks"]
    # A part that no pass of the text uses.
    model.register_buffer("spare", torch.zeros(3, device="meta"), persistent=False)
    assert engine.run(prompt, 1).sources == {"computed": len(prompt)}
    engine.drain(WAIT_S)
    assert engine.stats()["tier.0.fs.stored_blocks"] == stored
    assert "the bytes of spare are not in memory" in caplog.text


STATES: dict[str, Change] = {name: CHANGES[name] for name in CHANGES if "adapter" in name} | {
    "plain attribute": change_attribute,
    "forward hook": add_hook,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("revision", [None, "r1"])
def test_a_new_process_whose_model_is_in_another_state_finds_none_of_the_blocks(
    name: str,
    revision: str | None,
    model: LlamaForCausalLM,
    prompt: list[int],
    plain: Plain,
    assert_same: AssertSame,
    make_engine: MakeEngine,
    settings: Settings,
) -> None:
    another = copy.deepcopy(model)
    STATES[name](another)
    for each, num_times in ((model, 1), (another, 2)):
        for time in range(num_times):
            engine = make_engine(each, extra_config=settings, model_revision=revision)
            result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
            assert_same(result, plain(each, prompt, NUM_NEW_TOKENS))
            assert result.sources == (
                {"fs": NUM_SHARED, "computed": 3} if time else {"computed": len(prompt)}
            )
            engine.shutdown()


def test_a_change_waits_until_a_tier_that_takes_one_block_at_a_time_has_those_of_before(
    model: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine, settings: Settings
) -> None:
    settings["secondary_tiers"][0]["max_in_flight_store_bytes"] = 4096
    engine = make_engine(model, extra_config=settings)
    engine.run(prompt, 1)
    adapters.set_adapter(model, "b")
    engine.run(prompt, 1)
    adapters.set_adapter(model, "a")
    assert engine.run(prompt, 1).sources == {"fs": NUM_SHARED, "computed": 3}
