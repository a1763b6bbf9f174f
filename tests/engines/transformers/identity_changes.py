"""What may differ between two embedded engines that share a tier, one row each.

A row has an engine that stores and one that looks, both real ones on a tiny model. Weights are copied from one model to
the other wherever their shapes allow it, so that only the change itself can tell the engines apart.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

BLOCK_TOKENS = 16
NUM_BLOCKS = 5
VOCABULARY = 97
ORIGINAL_LENGTH = 64
PROMPT = tuple((7 * n * n + 3 * n) % VOCABULARY for n in range(NUM_BLOCKS * BLOCK_TOKENS))

MODEL: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Ten times the usual: with that, attention is nearly uniform and a wrong block hardly matters.
    "initializer_range": 0.2,
}

UNCHANGED = "nothing"
"""Group of the changes after which all blocks must be found."""

Settings = Mapping[str, Any]  # Any: as a user writes them


@dataclass(frozen=True)
class Side:
    """One engine of a row.

    Attributes:
        model: its model.
        prompt: what it is asked.
        engine: settings of the engine beyond the usual.
        settings: kvtier's settings beyond the usual.
        layout_version: kvtier's version of a row's bytes; None for today's.
        is_reset: whether it resets its cache before it is asked.
    """

    model: PreTrainedModel
    prompt: Sequence[int] = PROMPT
    engine: Settings = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    layout_version: int | None = None
    is_reset: bool = False


@dataclass(frozen=True)
class Change:
    """One row.

    Attributes:
        group: heading of the table it belongs to.
        name: the change, in words.
        sides: makes the engine that stores and the one that looks.
        num_shared_blocks: blocks that both have in common whatever else differs; those that may be found.
    """

    group: str
    name: str
    sides: Callable[[], tuple[Side, Side]]
    num_shared_blocks: int = 0


def make_llama(**changes: object) -> LlamaForCausalLM:
    """Return the tiny model with some of its configuration changed; the weights are those of a fixed seed."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**cast("Any", MODEL | changes)))


def list_changes() -> list[Change]:
    """Return every row: changes of weights, configuration, numbers, settings, prompt, and what changes nothing."""
    return [
        *_weights(),
        *_configuration(),
        *_numbers(),
        *_settings(),
        *_prompts(),
        *_nothing(),
    ]


def _weights() -> list[Change]:
    def flip_bit(model: LlamaForCausalLM) -> None:
        weight = model.model.layers[-1].mlp.down_proj.weight
        weight.view(torch.int32)[0, 0] ^= 1

    def change_last_row(model: LlamaForCausalLM) -> None:
        model.model.embed_tokens.weight[-1] += 1

    def scale_norm(model: LlamaForCausalLM) -> None:
        model.model.layers[0].input_layernorm.weight[3] *= 2

    def turn_otherwise(model: LlamaForCausalLM) -> None:
        model.model.rotary_emb.inv_freq *= 1.5

    def add_adapter(model: LlamaForCausalLM) -> None:
        weight = model.model.layers[0].self_attn.k_proj.weight
        weight += 0.05 * torch.outer(torch.ones(weight.shape[0]), torch.linspace(-1, 1, weight.shape[1]))

    def round_weights(model: LlamaForCausalLM) -> None:
        for weight in model.parameters():
            step = weight.abs().max() / 127
            weight.copy_((weight / step).round() * step)

    def swap_layers(model: LlamaForCausalLM) -> None:
        first, second = (layer.state_dict() for layer in model.model.layers)
        kept = copy.deepcopy(first)
        model.model.layers[0].load_state_dict(second)
        model.model.layers[1].load_state_dict(kept)

    def draw_again(model: LlamaForCausalLM) -> None:
        torch.manual_seed(1)
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.2)

    edits = {
        "one bit of one weight in the last layer": flip_bit,
        "the last row of the embedding, as for a new special token": change_last_row,
        "one value of one norm": scale_norm,
        "the rope's frequencies in memory, which no checkpoint has": turn_otherwise,
        "an adapter merged into one projection": add_adapter,
        "all weights rounded to 8 bits": round_weights,
        "two layers swapped": swap_layers,
        "all weights, trained anew": draw_again,
    }
    return [Change("weights", name, _edited(edit)) for name, edit in edits.items()]


def _configuration() -> list[Change]:
    def with_weights_of_base(**changes: object) -> Callable[[], tuple[Side, Side]]:
        def sides() -> tuple[Side, Side]:
            base, other = make_llama(), make_llama(**changes)
            other.load_state_dict(base.state_dict(), strict=False)
            return Side(base), Side(other)

        return sides

    def rope(rope_type: str, **values: object) -> dict[str, object]:
        return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **values}}

    original = {"original_max_position_embeddings": ORIGINAL_LENGTH}
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original}
    changes: dict[str, dict[str, object]] = {
        "rope: theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        "rope: linear": rope("linear", factor=2.0),
        "rope: dynamic NTK": rope("dynamic", factor=2.0) | {"max_position_embeddings": 128},
        "rope: YaRN": rope("yarn", factor=4.0, **original),
        "rope: YaRN with another factor of attention": rope(
            "yarn", factor=4.0, attention_factor=0.5, **original
        ),
        "rope: Llama 3": rope("llama3", **llama3),
        "longest sequence": {"max_position_embeddings": 1024},
        "epsilon of the norms": {"rms_norm_eps": 1e-3},
        "activation": {"hidden_act": "gelu"},
        "bias of attention": {"attention_bias": True},
        "half the heads, twice as wide, the same weights": {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
        "number of layers": {"num_hidden_layers": 1},
        "embeddings tied to the output": {"tie_word_embeddings": True},
        "a configuration of quantisation": {"quantization_config": {"quant_method": "awq", "bits": 4}},
        "dropout of attention, which evaluation leaves out": {"attention_dropout": 0.1},
    }

    def other_architecture(window: int | None) -> Callable[[], tuple[Side, Side]]:
        def sides() -> tuple[Side, Side]:
            base = make_llama()
            config = MistralConfig(**cast("Any", MODEL | {"sliding_window": window, "head_dim": 16}))
            other = MistralForCausalLM(config)
            other.load_state_dict(base.state_dict())
            return Side(base), Side(other)

        return sides

    return [
        *(Change("configuration", name, with_weights_of_base(**change)) for name, change in changes.items()),
        Change("configuration", "another architecture, the same weights", other_architecture(None)),
    ]


def _numbers() -> list[Change]:
    def as_dtype(dtype: torch.dtype) -> Callable[[], tuple[Side, Side]]:
        def sides() -> tuple[Side, Side]:
            other = make_llama()
            torch.nn.Module.to(other, dtype)
            return Side(make_llama()), Side(other)

        return sides

    def other_backend() -> tuple[Side, Side]:
        base, other = make_llama(), make_llama()
        base.set_attn_implementation("sdpa")
        other.set_attn_implementation("eager")
        return Side(base), Side(other)

    return [
        Change("numbers", "bfloat16", as_dtype(torch.bfloat16)),
        Change("numbers", "float16", as_dtype(torch.float16)),
        Change("numbers", "float64", as_dtype(torch.float64)),
        Change("numbers", "attention computed by another backend", other_backend),
    ]


def _settings() -> list[Change]:
    def pair(first: Settings, second: Settings, *, engine: bool = True) -> Callable[[], tuple[Side, Side]]:
        def sides() -> tuple[Side, Side]:
            if engine:
                return Side(make_llama(), engine=first), Side(make_llama(), engine=second)
            return Side(make_llama(), settings=first), Side(make_llama(), settings=second)

        return sides

    two_blocks = {"block_size": 2 * BLOCK_TOKENS}
    return [
        Change("settings", "revision that is named", pair({"model_revision": "a"}, {"model_revision": "b"})),
        Change("settings", "device block of 32 tokens", pair({}, {"block_size_tokens": 32})),
        Change("settings", "offloaded block of 32 tokens", pair({}, two_blocks, engine=False)),
        Change("settings", "salt of the hashes", pair({}, {"salt": "x"})),
        Change("settings", "tenant", pair({"tenant_salt": "a"}, {"tenant_salt": "b"}, engine=False)),
        Change("settings", "tenant, none before", pair({}, {"tenant_salt": "b"}, engine=False)),
        Change("settings", "after a reset", lambda: (Side(make_llama()), Side(make_llama(), is_reset=True))),
        Change(
            "settings",
            "kvtier's layout of rows",
            lambda: (Side(make_llama()), Side(make_llama(), layout_version=99)),
        ),
    ]


def _prompts() -> list[Change]:
    def asked(prompt: Sequence[int]) -> Callable[[], tuple[Side, Side]]:
        return lambda: (Side(make_llama()), Side(make_llama(), prompt=prompt))

    def beyond_the_original_length() -> tuple[Side, Side]:
        def model() -> LlamaForCausalLM:
            dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
            return make_llama(rope_parameters=dynamic, max_position_embeddings=ORIGINAL_LENGTH)

        short = Side(model(), prompt=PROMPT[: ORIGINAL_LENGTH - BLOCK_TOKENS])
        return short, Side(model(), prompt=PROMPT)

    other = (PROMPT[0] + 1) % VOCABULARY
    middle = 2 * BLOCK_TOKENS + 5
    changed = (*PROMPT[:middle], (PROMPT[middle] + 1) % VOCABULARY, *PROMPT[middle + 1 :])
    return [
        Change("prompt", "the first token", asked((other, *PROMPT[1:]))),
        Change("prompt", "a token of the third block", asked(changed), num_shared_blocks=2),
        Change(
            "prompt", "the same blocks in another order", asked((*PROMPT[16:32], *PROMPT[:16], *PROMPT[32:]))
        ),
        Change("prompt", "the same tokens one place later", asked((other, *PROMPT))),
        Change("prompt", "dynamic NTK: a length with another rope", beyond_the_original_length),
    ]


def _nothing() -> list[Change]:
    all_blocks = NUM_BLOCKS
    return [
        Change(UNCHANGED, "a new process with the same settings", _edited(lambda _: None), all_blocks),
        Change(
            UNCHANGED,
            "device memory, chunks and policy",
            lambda: (
                Side(make_llama()),
                Side(
                    make_llama(),
                    engine={"num_device_blocks": 99, "prefill_chunk_tokens": 48},
                    settings={"eviction_policy": "arc"},
                ),
            ),
            all_blocks,
        ),
        Change(
            UNCHANGED,
            "where the model was loaded from",
            lambda: (Side(make_llama()), Side(make_llama(_name_or_path="/elsewhere"))),
            all_blocks,
        ),
        Change(
            UNCHANGED,
            "the model's name",
            lambda: (Side(make_llama()), Side(make_llama(), engine={"model_name": "another"})),
            all_blocks,
        ),
    ]


def _edited(edit: Callable[[LlamaForCausalLM], None]) -> Callable[[], tuple[Side, Side]]:
    def sides() -> tuple[Side, Side]:
        base, other = make_llama(), make_llama()
        with torch.no_grad():
            edit(other)
        return Side(base), Side(other)

    return sides
