"""How far keys and values of one prompt are apart when it is computed alone, in a batch, and in chunks.

    python -m benchmarks.audit_tolerance

Random models compute random prompts with transformers on the CPU. Each row has the largest deviations of a model and a
dtype, in the two measures of ``kvtier.cpu.compare``; the tolerances there are about eight times the largest of a dtype.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kvtier.cpu.compare import Floats, Tolerance, measure
from kvtier.engines.transformers.model_adapter import find_cache_name

BLOCK_TOKENS = 16
PROMPT_TOKENS = 384
BATCH = 8
NUM_ALONE = 4
"""Prompts of the batch that are also computed alone."""

CHUNKS_TOKENS = (96, 17)
BATCH_CHUNK_TOKENS = 64
VOCAB_SIZE = 997
BIAS_OF_KEYS = 3.0
"""Spread of the keys' biases of Qwen2: large, as trained ones are."""

MODELS = (
    ("llama", 4, 256, 0.02),
    ("llama", 4, 256, 0.2),
    ("llama", 16, 256, 0.05),
    ("qwen2", 8, 256, 0.05),
    ("llama", 24, 512, 0.02),
)
"""Kind, layers, hidden size, spread of the weights."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def main() -> None:
    """Print a row for each model and dtype."""
    torch.set_num_threads(1)
    print("model   layers  hidden  weights  dtype            one number  all numbers")
    for (kind, layers, hidden, spread), dtype in product(MODELS, DTYPES):
        model = make_model(kind, layers, hidden, spread)
        torch.nn.Module.to(model, dtype)
        of_one, of_all = measure_model(model)
        print(
            f"{kind:7} {layers:6} {hidden:7} {spread:8} {dtype!s:16} {of_one:10.2e} {of_all:11.2e}",
            flush=True,
        )


def make_model(kind: str, layers: int, hidden: int, spread: float) -> PreTrainedModel:
    """Return a model with random weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {  # Any: arguments of transformers' configurations
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "initializer_range": spread,
    }
    if kind == "llama":
        llama: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**sizes))
        return llama
    model: PreTrainedModel = Qwen2ForCausalLM(Qwen2Config(**sizes))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=BIAS_OF_KEYS)
    return model


def measure_model(model: PreTrainedModel) -> tuple[float, float]:
    """Return the largest deviations in both measures over prompts, batches and chunks."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, VOCAB_SIZE, (BATCH, PROMPT_TOKENS), generator=generator)
    batches = [compute(model, prompts, chunk) for chunk in (PROMPT_TOKENS, BATCH_CHUNK_TOKENS)]
    of_one = of_all = 0.0
    for row in range(NUM_ALONE):
        alone = pages_of(compute(model, prompts[row : row + 1], PROMPT_TOKENS), 0)
        others = [pages_of(batch, row) for batch in batches]
        others += [pages_of(compute(model, prompts[row : row + 1], chunk), 0) for chunk in CHUNKS_TOKENS]
        for other in others:
            of_one = max(of_one, float(measure(alone, other, Tolerance(1.0, np.inf)).max()))
            of_all = max(of_all, float(measure(alone, other, Tolerance(np.inf, 1.0)).max()))
    return of_one, of_all


@torch.no_grad()
def compute(
    model: PreTrainedModel, prompts: torch.Tensor, chunk_tokens: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values of each layer, each of shape (prompts, heads, tokens, numbers)."""
    cache = DynamicCache(config=model.config)
    for first in range(0, prompts.shape[1], chunk_tokens):
        model(prompts[:, first : first + chunk_tokens], **{find_cache_name(model): cache}, use_cache=True)
    layers: list[Any] = list(cache.layers)  # Any: each kind of layer has other attributes
    return [(layer.keys, layer.values) for layer in layers]


def pages_of(layers: Sequence[tuple[torch.Tensor, torch.Tensor]], row: int) -> Floats:
    """Return the pages of one prompt, one for each layer and block: shape (pages, numbers)."""
    pages = []
    for keys, values in layers:
        halves = []
        for tensor in (keys[row].float(), values[row].float()):
            heads, tokens, numbers = tensor.shape
            blocks = tensor.reshape(heads, tokens // BLOCK_TOKENS, BLOCK_TOKENS, numbers).permute(1, 2, 0, 3)
            halves.append(blocks.reshape(tokens // BLOCK_TOKENS, -1))
        pages.append(torch.cat(halves, dim=1))
    found: Floats = torch.cat(pages).numpy()
    return found


if __name__ == "__main__":
    main()
