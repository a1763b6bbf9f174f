"""Keep calling ``model.generate`` yourself, and change one line: give it a KVTierCache.

python examples/transformers/cache.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.engines.transformers import EngineConfig, KVTierEngine


def main() -> None:
    """Ask the same question twice; the second time its prompt comes from host memory."""
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
    input_ids = torch.tensor([list(b"The quick brown fox jumps over the lazy dog. " * 4)])
    config = EngineConfig(num_device_blocks=64, extra_config={"cpu_bytes_to_use": "64MiB"})
    with KVTierEngine(model, config) as engine:
        for _ in range(2):
            cache = engine.cache_for(input_ids)
            output: torch.Tensor = model.generate(
                input_ids,
                cache=cache,  # before transformers 5.24: past_key_values
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=16,
                do_sample=False,
            )
            cache.commit(output)
            print(f"{output[0, -16:].tolist()} prompt from {dict(cache.sources)}")
            engine.drain(timeout_s=10)
            engine.drop_device_cache()


if __name__ == "__main__":
    main()
