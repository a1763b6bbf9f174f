"""Serve a small model from a tiered KV cache: run it, and see where each prompt token came from.

python examples/transformers/engine.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.engines.transformers import EngineConfig, KVTierEngine

NUM_TURNS = 3


def main() -> None:
    """Hold two conversations on a device pool that has room for one."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            initializer_range=0.2,
        )
    )
    config = EngineConfig(num_device_blocks=14, extra_config={"cpu_bytes_to_use": "64MiB"})
    conversations = {
        name: list(text * 6)
        for name, text in (("ann", b"Once upon a time. "), ("bob", b"It was a dark night."))
    }
    with KVTierEngine(model, config) as engine:
        for _ in range(NUM_TURNS):
            for name, token_ids in conversations.items():
                stream = engine.generate([*token_ids, *b" And then?"], max_new_tokens=16)
                answer = list(stream)
                conversations[name] = [*token_ids, *b" And then?", *answer]
                print(f"{name}: {len(answer)} tokens, prompt from {dict(stream.result.sources)}")


if __name__ == "__main__":
    main()
