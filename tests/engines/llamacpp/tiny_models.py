"""Small random models as GGUF files: Llama, Gemma-3 with windows, LFM2 (a hybrid), Mamba, and an adapter for Llama.

Every text of ASCII has tokens. The same seed gives the same file.
"""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

VOCABULARY = [
    b"<unk>",
    b"<s>",
    b"</s>",
    *(f"<0x{byte:02X}>".encode() for byte in range(128)),
    "\u2581".encode(),
    *(f"~{number};".encode() for number in range(127)),
]
"""Bytes of ASCII, the sign for a space, and words: the server gives log-probabilities of text alone."""

TOKEN_TYPES = [2, 3, 3, *([6] * 128), *([1] * 128)]

WINDOW_TOKENS = 64

ALIGNMENT = 32

Value = str | bool | int | float | Sequence[object]


class GgufWriter:
    """Collects metadata and tensors, and writes them as GGUF version 3."""

    def __init__(self, architecture: str, seed: int) -> None:
        self._values: list[tuple[str, bytes]] = []
        self._tensors: list[tuple[str, npt.NDArray[np.float32]]] = []
        self._architecture = architecture
        self._random = np.random.default_rng(seed)
        self.set("general.architecture", architecture)

    def set(self, name: str, value: Value) -> None:
        name = name.replace("ARCH", self._architecture)
        self._values.append((name, _encode_typed(value)))

    def add(self, name: str, *shape: int, ones: bool = False, scale: float = 1.0) -> None:
        if ones or len(shape) == 1:
            data = np.ones(shape, np.float32)
        else:
            data = (self._random.standard_normal(shape) * scale / np.sqrt(shape[-1])).astype(np.float32)
        self._tensors.append((name, data))

    def add_data(self, name: str, data: npt.NDArray[np.floating]) -> None:
        self._tensors.append((name, data.astype(np.float32)))

    def write(self, path: Path) -> Path:
        head = struct.pack("<4sIQQ", b"GGUF", 3, len(self._tensors), len(self._values))
        for name, value in self._values:
            head += _text(name.encode()) + value
        offset = 0
        for name, data in self._tensors:
            head += _text(name.encode()) + struct.pack("<I", data.ndim)
            head += struct.pack(f"<{data.ndim}Q", *reversed(data.shape)) + struct.pack("<IQ", 0, offset)
            offset += _padded(data.nbytes)
        with path.open("wb") as file:
            file.write(head + bytes(_padded(len(head)) - len(head)))
            for _, data in self._tensors:
                file.write(data.tobytes() + bytes(_padded(data.nbytes) - data.nbytes))
        return path


def write_llama(path: Path, seed: int = 0, name: str = "tiny") -> Path:
    """Write a Llama of four layers."""
    layers, width, heads, kv_heads, ff = 4, 128, 4, 2, 256
    out = _model("llama", layers, width, ff, seed, name)
    out.set("ARCH.attention.head_count", heads)
    out.set("ARCH.attention.head_count_kv", kv_heads)
    out.set("ARCH.rope.dimension_count", width // heads)
    _embeddings(out, width, "output_norm.weight")
    for layer in range(layers):
        block = f"blk.{layer}."
        out.add(block + "attn_norm.weight", width)
        _attention(out, block, width, heads, kv_heads, width // heads)
        out.add(block + "ffn_norm.weight", width)
        _feed_forward(out, block, width, ff)
    return out.write(path)


def write_gemma(path: Path, seed: int = 0, name: str = "tiny") -> Path:
    """Write a Gemma-3 of six layers, of which the last attends to all tokens and the others to the last 64."""
    layers, width, heads, kv_heads, head, ff = 6, 128, 4, 2, 32, 256
    out = _model("gemma3", layers, width, ff, seed, name)
    out.set("ARCH.attention.head_count", heads)
    out.set("ARCH.attention.head_count_kv", kv_heads)
    out.set("ARCH.attention.key_length", head)
    out.set("ARCH.attention.value_length", head)
    out.set("ARCH.attention.sliding_window", WINDOW_TOKENS)
    _embeddings(out, width, "output_norm.weight")
    for layer in range(layers):
        block = f"blk.{layer}."
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            out.add(block + norm + ".weight", width)
        _attention(out, block, width, heads, kv_heads, head, has_norms=True)
        _feed_forward(out, block, width, ff)
    return out.write(path)


def write_lfm2(path: Path, seed: int = 0, name: str = "tiny", window_tokens: int = 0) -> Path:
    """Write an LFM2 of six layers, of which each third attends and the others have a short convolution."""
    layers, width, heads, kv_heads, ff = 6, 128, 4, 2, 256
    out = _model("lfm2", layers, width, ff, seed, name)
    out.set("ARCH.attention.head_count", heads)
    out.set("ARCH.attention.head_count_kv", [kv_heads if layer % 3 == 2 else 0 for layer in range(layers)])
    out.set("ARCH.shortconv.l_cache", 3)
    if window_tokens:
        out.set("ARCH.attention.sliding_window", window_tokens)
    _embeddings(out, width, "token_embd_norm.weight")
    for layer in range(layers):
        block = f"blk.{layer}."
        out.add(block + "attn_norm.weight", width)
        out.add(block + "ffn_norm.weight", width)
        if layer % 3 == 2:
            _attention(out, block, width, heads, kv_heads, width // heads, has_norms=True)
        else:
            out.add(block + "shortconv.conv.weight", width, 3)
            out.add(block + "shortconv.in_proj.weight", 3 * width, width)
            out.add(block + "shortconv.out_proj.weight", width, width)
        _feed_forward(out, block, width, ff)
    return out.write(path)


def write_mamba(path: Path, seed: int = 0, name: str = "tiny") -> Path:
    """Write a Mamba of three layers."""
    layers, width, inner, states, rank, conv = 3, 64, 128, 16, 8, 4
    out = _model("mamba", layers, width, 0, seed, name)
    out.set("ARCH.attention.head_count", 0)
    out.set("ARCH.ssm.conv_kernel", conv)
    out.set("ARCH.ssm.inner_size", inner)
    out.set("ARCH.ssm.state_size", states)
    out.set("ARCH.ssm.time_step_rank", rank)
    _embeddings(out, width, "output_norm.weight")
    for layer in range(layers):
        block = f"blk.{layer}."
        out.add(block + "attn_norm.weight", width)
        out.add(block + "ssm_in.weight", 2 * inner, width)
        out.add(block + "ssm_conv1d.weight", inner, conv)
        out.add(block + "ssm_conv1d.bias", inner)
        out.add(block + "ssm_x.weight", rank + 2 * states, inner)
        out.add(block + "ssm_dt.weight", inner, rank)
        out.add(block + "ssm_dt.bias", inner)
        decay = -np.tile(np.arange(1, states + 1, dtype=np.float32) / 8, (inner, 1))
        out.add_data(block + "ssm_a", decay)
        out.add(block + "ssm_d", inner)
        out.add(block + "ssm_out.weight", width, inner)
    return out.write(path)


def write_adapter(path: Path, seed: int = 7) -> Path:
    """Write a LoRA for ``write_llama``'s model."""
    out = GgufWriter("llama", seed)
    out.set("general.type", "adapter")
    out.set("adapter.type", "lora")
    out.set("adapter.lora.alpha", 8.0)
    for layer in range(4):
        for name in ("attn_q", "attn_output"):
            out.add(f"blk.{layer}.{name}.weight.lora_a", 8, 128)
            out.add(f"blk.{layer}.{name}.weight.lora_b", 128, 8)
    return out.write(path)


def _model(architecture: str, layers: int, width: int, ff: int, seed: int, name: str) -> GgufWriter:
    out = GgufWriter(architecture, seed)
    values: Mapping[str, Value] = {
        "general.name": name,
        "ARCH.context_length": 32768,
        "ARCH.embedding_length": width,
        "ARCH.block_count": layers,
        "ARCH.feed_forward_length": ff,
        "ARCH.attention.layer_norm_rms_epsilon": 1e-5,
        "ARCH.rope.freq_base": 10000.0,
        "ARCH.vocab_size": len(VOCABULARY),
        "general.file_type": 0,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": VOCABULARY,
        "tokenizer.ggml.scores": [0.0] * len(VOCABULARY),
        "tokenizer.ggml.token_type": TOKEN_TYPES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    for key, value in values.items():
        out.set(key, value)
    return out


def _embeddings(out: GgufWriter, width: int, norm: str) -> None:
    out.add("token_embd.weight", len(VOCABULARY), width, scale=3.0)
    out.add(norm, width)


def _attention(
    out: GgufWriter, block: str, width: int, heads: int, kv_heads: int, head: int, *, has_norms: bool = False
) -> None:
    out.add(block + "attn_q.weight", heads * head, width, scale=2.0)
    out.add(block + "attn_k.weight", kv_heads * head, width, scale=2.0)
    out.add(block + "attn_v.weight", kv_heads * head, width, scale=2.0)
    out.add(block + "attn_output.weight", width, heads * head, scale=2.0)
    if has_norms:
        out.add(block + "attn_q_norm.weight", head)
        out.add(block + "attn_k_norm.weight", head)


def _feed_forward(out: GgufWriter, block: str, width: int, ff: int) -> None:
    out.add(block + "ffn_gate.weight", ff, width)
    out.add(block + "ffn_up.weight", ff, width)
    out.add(block + "ffn_down.weight", width, ff)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _encode_typed(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value.encode())
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    first, count = value[0], len(value)
    if isinstance(first, bytes):
        return struct.pack("<IIQ", 9, 8, count) + b"".join(
            _text(one) for one in value if isinstance(one, bytes)
        )
    kind, form = (6, "f") if isinstance(first, float) else (5, "i")
    return struct.pack(f"<IIQ{count}{form}", 9, kind, count, *value)
