"""Wrong bytes that can stand under a right key: what a model that differs in one thing would have stored, and damage.

Real models compute them. Each fault gives the bytes that stand in place of one block, so that a test can plant them in
the host memory of an engine with the right model and see whether its audit finds them.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvtier.engines.transformers.model_adapter import find_cache_name

Numbers = npt.NDArray[np.float32]
"""Keys and values, shape (layers, 2, heads, tokens, numbers of a head)."""

Bytes = npt.NDArray[np.uint8]
AXES = "lkhtd"
"""The axes of ``Numbers``, as a layout names them."""

Edit = Callable[[LlamaForCausalLM], None]


@dataclass(frozen=True)
class Layout:
    """How an engine writes the keys and values of a block in float32.

    Attributes:
        axes: the letters of AXES from the slowest to the fastest.
        sizes: of each axis.
        has_transposed_keys: whether keys have their tokens behind the numbers, as vLLM's kernels for CPUs want them.
    """

    axes: str
    sizes: Mapping[str, int]
    has_transposed_keys: bool = False

    def decode(self, row: Bytes) -> Numbers:
        """Return the numbers of the beginning of a row."""
        numbers = np.frombuffer(row.tobytes()[: self.num_bytes], np.float32)
        shaped = numbers.reshape([self.sizes[axis] for axis in self.axes])
        found = shaped.transpose([self.axes.index(axis) for axis in AXES]).copy()
        if self.has_transposed_keys:
            num_layers, _, num_heads, num_tokens, num_numbers = found.shape
            keys = found[:, 0].reshape(num_layers, num_heads, num_numbers, num_tokens)
            found[:, 0] = keys.swapaxes(2, 3)
        return found

    def encode(self, numbers: Numbers) -> Bytes:
        """Return the bytes of a block."""
        written = numbers.astype(np.float32)
        if self.has_transposed_keys:
            keys = written[:, 0].swapaxes(2, 3)
            written[:, 0] = keys.reshape(written[:, 0].shape)
        ordered = written.transpose([AXES.index(axis) for axis in self.axes])
        return np.frombuffer(ordered.tobytes(), np.uint8).copy()

    @property
    def num_bytes(self) -> int:
        """Bytes of a block."""
        return 4 * int(np.prod(list(self.sizes.values())))


@dataclass
class FaultyModels:
    """A model, and others that differ from it in one thing.

    Attributes:
        model: the right one.
        known: what was computed, by name of the fault and prompt.
    """

    model: LlamaForCausalLM
    known: dict[tuple[str, tuple[int, ...]], Numbers] = field(default_factory=dict)

    def compute(self, name: str, tokens: Sequence[int]) -> Numbers:
        """Return the keys and values of a prompt as the model of a fault computes them."""
        key = name, tuple(tokens)
        if key not in self.known:
            self.known[key] = keys_and_values(self._make(name), tokens)
        return self.known[key]

    def _make(self, name: str) -> LlamaForCausalLM:
        if name in CONFIGURATIONS:
            changes = CONFIGURATIONS[name]
            other = LlamaForCausalLM(LlamaConfig(**{**self.model.config.to_dict(), **changes}))
            other.load_state_dict(self.model.state_dict())
            return other
        other = copy.deepcopy(self.model)
        if name in EDITS:
            with torch.no_grad():
                EDITS[name](other)
        return other


@torch.no_grad()
def keys_and_values(model: LlamaForCausalLM, tokens: Sequence[int]) -> Numbers:
    """Return what a model caches for a prompt."""
    torch.nn.Module.eval(model)
    cache = DynamicCache(config=model.config)
    model(torch.tensor([list(tokens)]), use_cache=True, **{find_cache_name(model): cache})
    layers: list[Any] = list(cache.layers)  # Any: each kind of layer has other attributes
    pairs = [torch.stack([layer.keys[0], layer.values[0]]) for layer in layers]
    found: Numbers = torch.stack(pairs).float().numpy()
    return found


def _draw_again(model: LlamaForCausalLM) -> None:
    torch.manual_seed(99)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(std=float(weight.std()))


def _train_on(model: LlamaForCausalLM) -> None:
    torch.manual_seed(98)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(0.9).add_(0.2 * weight.std() * torch.randn(weight.shape))


def _adapt(projection: str) -> Edit:
    def edit(model: LlamaForCausalLM) -> None:
        torch.manual_seed(97)
        weight = getattr(model.model.layers[0].self_attn, projection).weight
        low_rank = torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1])
        weight += 0.3 * weight.std() * low_rank

    return edit


def _swap_layers(model: LlamaForCausalLM) -> None:
    first, second = (copy.deepcopy(layer.state_dict()) for layer in model.model.layers[:2])
    model.model.layers[0].load_state_dict(second)
    model.model.layers[1].load_state_dict(first)


def _round_weights(num_steps: int) -> Edit:
    def edit(model: LlamaForCausalLM) -> None:
        for weight in model.parameters():
            step = weight.abs().max() / num_steps
            weight.copy_((weight / step).round() * step)

    return edit


def _double_a_norm(model: LlamaForCausalLM) -> None:
    model.model.layers[0].input_layernorm.weight[3] *= 2


def _turn(factor: float) -> Edit:
    def edit(model: LlamaForCausalLM) -> None:
        model.model.rotary_emb.inv_freq *= factor

    return edit


def _compute_in(dtype: torch.dtype) -> Edit:
    return lambda model: _to(model, dtype)


def _to(model: torch.nn.Module, dtype: torch.dtype) -> None:
    model.to(dtype)


EDITS: dict[str, Edit] = {
    "other weights": _draw_again,
    "weights that were trained on": _train_on,
    "an adapter of the keys": _adapt("k_proj"),
    "an adapter of the values": _adapt("v_proj"),
    "layers of the model swapped": _swap_layers,
    "weights rounded to four bits": _round_weights(7),
    "weights rounded to eight bits": _round_weights(127),
    "one value of a norm": _double_a_norm,
    "no rope": _turn(0.0),
    "rope that turns faster": _turn(1.5),
    "computed in bfloat16": _compute_in(torch.bfloat16),
    "computed in float16": _compute_in(torch.float16),
}


def _rope(rope_type: str, theta: float = 10_000.0, **values: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **values}}


SHORT = {"original_max_position_embeddings": 64}
CONFIGURATIONS: dict[str, Mapping[str, object]] = {
    "rope: theta": _rope("default", 500_000.0),
    "rope: linear": _rope("linear", factor=2.0),
    "rope: YaRN": _rope("yarn", factor=4.0, **SHORT),
    "rope: YaRN with another factor of attention": _rope("yarn", factor=4.0, attention_factor=0.5, **SHORT),
    "rope: Llama 3": _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **SHORT),
    "epsilon of the norms": {"rms_norm_eps": 1e-3},
    "another activation": {"hidden_act": "gelu"},
}

PROMPTS: dict[str, Callable[[list[int]], list[int]]] = {
    "a prompt that differs in its first token": lambda tokens: [(tokens[0] + 1) % max(tokens), *tokens[1:]],
    "the prompt one place later": lambda tokens: [1, *tokens[:-1]],
    "the prompt in reverse": lambda tokens: tokens[::-1],
    "the prompt of another tenant": lambda tokens: [max(tokens) - token for token in tokens],
}

BLOCKS = {"the next block": 1, "the previous block": -1}


def _as_int4(x: Numbers) -> Numbers:
    step = np.abs(x).max() / 7
    rounded: Numbers = np.round(x / step) * step
    return rounded


def _as_bfloat16(x: Numbers) -> Numbers:
    rounded: Numbers = torch.from_numpy(np.ascontiguousarray(x)).bfloat16().float().numpy()
    return rounded


NUMBERS: dict[str, Callable[[Numbers], Numbers]] = {
    "layers in reverse": lambda x: x[::-1],
    "keys and values swapped": lambda x: x[:, ::-1],
    "heads swapped": lambda x: x[:, :, ::-1],
    "tokens in reverse": lambda x: x[:, :, :, ::-1],
    "tokens rolled by one": lambda x: np.roll(x, 1, axis=3),
    "numbers of heads in reverse": lambda x: x[..., ::-1],
    "heads before tokens": lambda x: x.swapaxes(2, 3).reshape(x.shape),
    "keys alone": lambda x: np.stack([x[:, 0], x[:, 0]], axis=1),
    "the first layer twice": lambda x: np.concatenate([x[:1], x[:1], x[2:]]),
    "the first head everywhere": lambda x: np.repeat(x[:, :, :1], x.shape[2], axis=2),
    "the last token missing": lambda x: x * (np.arange(x.shape[3]) < x.shape[3] - 1)[:, None],
    "values negated": lambda x: x * np.array([1, -1])[:, None, None, None],
    "a scale of two lost": lambda x: 2 * x,
    "quantised to four bits": _as_int4,
    "rounded to bfloat16": _as_bfloat16,
}


def _half(row: Bytes, which: int, fill: int) -> Bytes:
    row[which * len(row) // 2 : (which + 1) * len(row) // 2] = fill
    return row


def _flip(row: Bytes, byte: int, bit: int) -> Bytes:
    row[len(row) // 8 * 4 + byte] ^= 1 << bit
    return row


def _noise(row: Bytes) -> Bytes:
    return np.random.default_rng(1).integers(0, 256, len(row), np.uint8)


DAMAGE: dict[str, Callable[[Bytes], Bytes]] = {
    "zeros": np.zeros_like,
    "ones": lambda row: np.full_like(row, 255),
    "random bytes": _noise,
    "the first half zero": lambda row: _half(row, 0, 0),
    "the second half zero": lambda row: _half(row, 1, 0),
    "halves of two workers swapped": lambda row: np.roll(row, len(row) // 2),
    "shifted by a byte": lambda row: np.roll(row, 1),
    "shifted by 64 bytes": lambda row: np.roll(row, 64),
    "other byte order": lambda row: row.reshape(-1, 4)[:, ::-1].reshape(-1),
    "one bit of an exponent flipped": lambda row: _flip(row, 3, 3),
    "one sign flipped": lambda row: _flip(row, 3, 7),
}

FAULTS = [*EDITS, *CONFIGURATIONS, *PROMPTS, *BLOCKS, *NUMBERS, *DAMAGE]


def plant(name: str, models: FaultyModels, layout: Layout, tokens: list[int], block: int, row: Bytes) -> None:
    """Put what a fault makes in place of a block into its row.

    Args:
        name: one of FAULTS.
        models: the right model and wrong ones.
        layout: of the row.
        tokens: the block's prompt.
        block: its number.
        row: has the right bytes.
    """
    right = row[: layout.num_bytes]
    if name in DAMAGE:
        wrong = DAMAGE[name](right.copy())
    elif name in NUMBERS:
        wrong = layout.encode(NUMBERS[name](layout.decode(right)))
    else:
        num_tokens = layout.sizes["t"]
        num_blocks = len(tokens) // num_tokens
        prompt = PROMPTS.get(name, list)(tokens)
        first = (block + BLOCKS.get(name, 0)) % num_blocks * num_tokens
        computed = models.compute(name, prompt)
        wrong = layout.encode(computed[:, :, :, first : first + num_tokens])
    row[: layout.num_bytes] = wrong
