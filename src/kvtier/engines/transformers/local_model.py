"""Local models for demos and benchmarks: a random Llama, and one loaded from a directory.

Random weights of the usual small scale make a model whose answer hardly depends on its prompt. Here they are large
enough for attention to choose between tokens, so a wrong byte in the KV cache changes the answer. Its tokens are bytes.
Loading downloads nothing and runs no code that came with the model.
"""

from pathlib import Path

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, set_seed
from transformers.utils import logging as transformers_logging

from kvtier.errors import ConfigError, ModelError

NUM_BYTE_TOKENS = 256

HEAD_SIZE = 64
"""Width of one attention head, as in most models of this size."""

HEADS_PER_KV_HEAD = 4
"""Query heads that share keys and values, as in current models. Fewer make the KV cache larger for each token."""

FEED_FORWARD_RATIO = 2.75
"""Width of the feed-forward layers over the hidden size, as in Llama."""

INITIALIZER_RANGE_AT_1024 = 0.05
"""Standard deviation of the weights at hidden size 1024; it falls with the root of the width, so that attention scores
have the same spread at any width. With a third of it attention is an average that hardly depends on the prompt; with
several times as much, the rounding of float32 decides between tokens."""

MAX_PROMPT_TOKENS = 131_072
"""Positions of the model. Rotary positions cost nothing, so it only has to exceed any prompt."""


def make_random_llama(num_layers: int, hidden_size: int, seed: int) -> PreTrainedModel:
    """Return a model in evaluation mode, float32, on the CPU; equal arguments give equal weights.

    Raises:
        ConfigError: ``hidden_size`` is not a multiple of the width of four heads.
    """
    if hidden_size < 1 or hidden_size % (HEAD_SIZE * HEADS_PER_KV_HEAD):
        remedy = f"must be a multiple of {HEAD_SIZE * HEADS_PER_KV_HEAD}"
        raise ConfigError("hidden_size", hidden_size, remedy)
    num_heads = hidden_size // HEAD_SIZE
    config = LlamaConfig(
        vocab_size=NUM_BYTE_TOKENS,
        hidden_size=hidden_size,
        intermediate_size=int(hidden_size * FEED_FORWARD_RATIO),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // HEADS_PER_KV_HEAD,
        head_dim=HEAD_SIZE,
        initializer_range=INITIALIZER_RANGE_AT_1024 * (1024 / hidden_size) ** 0.5,
        max_position_embeddings=MAX_PROMPT_TOKENS,
        bos_token_id=None,
        eos_token_id=None,
    )
    set_seed(seed)
    model: PreTrainedModel = LlamaForCausalLM(config)
    model.train(mode=False)
    return model


def load_local_model(path: Path, min_vocabulary_size: int = 1) -> PreTrainedModel:
    """Return the model under ``path``, in evaluation mode on the CPU.

    Raises:
        ModelError: there is no causal language model that transformers can load, or its vocabulary is smaller than
            ``min_vocabulary_size``.
    """
    # transformers' progress bars would print into the tables of the command line.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers is partly typed
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(f"{path} holds no causal model that transformers can load: {first_line}") from error
    if model.config.vocab_size < min_vocabulary_size:
        raise ModelError(
            f"the model in {path} has a vocabulary of {model.config.vocab_size} tokens: "
            f"{min_vocabulary_size} are needed"
        )
    model.train(mode=False)
    return model
