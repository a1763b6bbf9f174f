"""An engine that shares its KV cache with engines on other hosts: run it on each, with the same tier.

python examples/cluster/engine.py '{"type": "valkey", "url": "redis://HOST:6379"}'
python examples/cluster/engine.py '{"type": "mooncake", "master": "HOST:50051", "segment_bytes": "256MiB",
                                    "local_host": "THIS_HOST", "allow_any_interface": true}'

The first computes the prompt and stores it, the others load it. Without a server it computes, and the log says why.
"""

import json
import logging
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.engines.transformers import EngineConfig, KVTierEngine

DEFAULT_TIER = '{"type": "valkey", "url": "redis://127.0.0.1:6379"}'
PROMPT = b"What one engine has computed another one need not compute again. " * 8
DRAIN_S = 30.0


def make_model() -> LlamaForCausalLM:
    """Make the same small random model on every host."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """Answer one prompt and say where its tokens came from."""
    logging.basicConfig(level=logging.WARNING)
    tier = json.loads(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_TIER)
    settings = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier]}
    config = EngineConfig(num_device_blocks=64, extra_config=settings)
    with KVTierEngine(make_model(), config) as engine:
        stream = engine.generate(list(PROMPT), max_new_tokens=8)
        print(f"answer {list(stream)}, prompt from {dict(stream.result.sources)}")
        engine.drain(DRAIN_S)
        print("stored: run me on another host, or here again")
        if tier["type"] == "mooncake":
            print("Enter ends this engine, and takes the memory that it lends")
            sys.stdin.readline()


if __name__ == "__main__":
    main()
