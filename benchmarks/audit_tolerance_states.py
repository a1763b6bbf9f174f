"""How far recurrent states of one prompt are apart when it is computed alone, in a batch, and in chunks.

    python -m benchmarks.audit_tolerance_states

As ``audit_tolerance`` for keys and values. Each row has the largest deviations of a model and a dtype, in the two
measures of ``kvtier.cpu.compare``: of keys and values, of convolutions, and of the states themselves; then the smallest
deviations of states of another prompt. The tolerances of models with states are five to eight times the largest where
each expert computes every token. Where a few of many experts do, rounding decides now and then which: those rows only
have to stay below the tolerance.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    DynamicCache,
    FalconH1Config,
    FalconH1ForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from benchmarks.audit_tolerance import (
    BATCH,
    BATCH_CHUNK_TOKENS,
    CHUNKS_TOKENS,
    DTYPES,
    NUM_ALONE,
    PROMPT_TOKENS,
    VOCAB_SIZE,
    pages_of,
)
from kvtier.cpu.compare import FLOOR_RATIO, STATE_FLOOR_RATIO, Floats, Tolerance, measure
from kvtier.engines.transformers.model_adapter import find_cache_name

HIDDEN = 256
SLOW_DECAY = 0.002
"""About how much of its state a layer forgets with each token; untrained models forget nearly all of it at once."""

FLOORS = {"keys": FLOOR_RATIO, "convolution": STATE_FLOOR_RATIO, "state": STATE_FLOOR_RATIO}
"""The kinds of numbers that are compared, with the smallest scale of one (``Tolerance``)."""

SIZES: dict[str, Any] = {  # Any: arguments of transformers' configurations
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": HIDDEN // 64,
    "num_key_value_heads": HIDDEN // 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

MAMBA: dict[str, Any] = {  # Any: as above
    "mamba_d_head": 32,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
}

LINEAR: dict[str, Any] = {  # Any: as above
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


@dataclass(frozen=True, slots=True)
class Computed:
    """What a batch of prompts leaves: by kind, arrays of shape (prompts, pages of a prompt, numbers)."""

    by_kind: dict[str, list[Floats]]


def main() -> None:
    """Print a row for each model and dtype."""
    torch.set_num_threads(1)
    names = [f"{kind} {measure_name}" for kind in FLOORS for measure_name in ("one", "all")]
    print(f"{'model':32} {'dtype':9}" + "".join(f"{name:>17}" for name in names) + "   of another prompt")
    for name, make in MODELS.items():
        model = make()
        for dtype in DTYPES:
            torch.nn.Module.to(model, dtype)
            model.train(mode=False)
            largest, of_other = measure_model(model)
            row = "".join(f"{number:17.2e}" for kind in FLOORS for number in largest[kind])
            print(
                f"{name:32} {str(dtype).removeprefix('torch.'):9}{row}   {of_other[0]:.2g} {of_other[1]:.2g}",
                flush=True,
            )


def make_qwen3_next(
    layers: int, spread: float, experts: int, per_token: int, *, decays_slowly: bool
) -> PreTrainedModel:
    """Return a model with gated delta nets in three of four layers."""
    torch.manual_seed(0)
    width = 128 if per_token == experts else 32
    model: PreTrainedModel = Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SIZES,
            **LINEAR,
            num_hidden_layers=layers,
            initializer_range=spread,
            num_experts=experts,
            num_experts_per_tok=per_token,
            moe_intermediate_size=width,
            shared_expert_intermediate_size=width,
        )
    )
    if decays_slowly:
        for layer in model.model.layers:
            if hasattr(layer, "linear_attn"):
                torch.nn.init.constant_(layer.linear_attn.A_log, math.log(SLOW_DECAY))
    return model


def make_falcon_h1(layers: int, spread: float) -> PreTrainedModel:
    """Return a model with attention and Mamba in each layer."""
    torch.manual_seed(0)
    mamba = MAMBA | {"mamba_d_ssm": HIDDEN, "mamba_n_heads": HIDDEN // 32}
    config = FalconH1Config(**SIZES, **mamba, num_hidden_layers=layers, initializer_range=spread)
    model: PreTrainedModel = FalconH1ForCausalLM(config)
    return model


def make_bamba(layers: int, spread: float) -> PreTrainedModel:
    """Return a model with attention in its last layer and Mamba in the others."""
    torch.manual_seed(0)
    config = BambaConfig(
        **SIZES,
        **MAMBA,
        mamba_n_heads=2 * HIDDEN // 32,
        attn_layer_indices=[layers - 1],
        num_hidden_layers=layers,
        initializer_range=spread,
    )
    model: PreTrainedModel = BambaForCausalLM(config)
    return model


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3-next 4 layers": lambda: make_qwen3_next(4, 0.05, 4, 4, decays_slowly=False),
    "qwen3-next 16 layers": lambda: make_qwen3_next(16, 0.05, 4, 4, decays_slowly=False),
    "qwen3-next 16 layers, slow": lambda: make_qwen3_next(16, 0.02, 4, 4, decays_slowly=True),
    "falcon-h1 8 layers": lambda: make_falcon_h1(8, 0.12),
    "bamba 4 layers": lambda: make_bamba(4, 0.05),
    "qwen3-next 8, 8 of 64 experts": lambda: make_qwen3_next(8, 0.05, 64, 8, decays_slowly=True),
    "qwen3-next 16, 10 of 128 experts": lambda: make_qwen3_next(16, 0.05, 128, 10, decays_slowly=False),
}
"""With layers, and the spread of the weights."""


def measure_model(model: PreTrainedModel) -> tuple[dict[str, tuple[float, float]], tuple[float, float]]:
    """Return the largest deviations of each kind, and the smallest of states of another prompt."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, VOCAB_SIZE, (BATCH, PROMPT_TOKENS), generator=generator)
    batches = [compute(model, prompts, chunk) for chunk in (PROMPT_TOKENS, BATCH_CHUNK_TOKENS)]
    largest = dict.fromkeys(FLOORS, (0.0, 0.0))
    alone = [compute(model, prompts[row : row + 1], PROMPT_TOKENS) for row in range(NUM_ALONE)]
    for row, one in enumerate(alone):
        others = [(batch, row) for batch in batches]
        others += [(compute(model, prompts[row : row + 1], chunk), 0) for chunk in CHUNKS_TOKENS]
        for other, place in others:
            for kind, of_one, of_all in deviations(one, 0, other, place):
                largest[kind] = max(largest[kind][0], of_one), max(largest[kind][1], of_all)
    of_states = [found[1:] for found in deviations(alone[0], 0, alone[1], 0) if found[0] == "state"]
    return largest, (min(one for one, _ in of_states), min(every for _, every in of_states))


def deviations(one: Computed, row: int, other: Computed, place: int) -> Iterator[tuple[str, float, float]]:
    """Yield kind and both deviations of each layer's part of a prompt."""
    for kind, floor in FLOORS.items():
        for found, held in zip(one.by_kind[kind], other.by_kind[kind], strict=True):
            pair = found[row], held[place]
            of_one = measure(*pair, Tolerance(1.0, np.inf, floor)).max()
            of_all = measure(*pair, Tolerance(np.inf, 1.0, floor)).max()
            yield kind, float(of_one), float(of_all)


@torch.no_grad()
def compute(model: PreTrainedModel, prompts: torch.Tensor, chunk_tokens: int) -> Computed:
    """Compute prompts in chunks."""
    cache = DynamicCache(config=model.config)
    for first in range(0, prompts.shape[1], chunk_tokens):
        part = prompts[:, first : first + chunk_tokens]
        positions = torch.arange(first, first + part.shape[1]).unsqueeze(0)
        model(part, position_ids=positions, use_cache=True, **{find_cache_name(model): cache})
    by_kind: dict[str, list[Floats]] = {kind: [] for kind in FLOORS}
    layers: list[Any] = list(cache.layers)  # Any: each kind of layer has other attributes
    for layer in layers:
        if getattr(layer, "keys", None) is not None:
            pages = [pages_of([(layer.keys, layer.values)], row) for row in range(len(prompts))]
            by_kind["keys"].append(np.stack(pages))
        for kind, name in (("convolution", "conv_states"), ("state", "recurrent_states")):
            for tensor in (getattr(layer, name, None) or {}).values():
                if tensor is not None:
                    by_kind[kind].append(tensor.float().reshape(len(prompts), 1, -1).numpy())
    return Computed(by_kind)


if __name__ == "__main__":
    main()
