"""Cycle three long prompts through a device pool that holds one: computed once, loaded from kvtier ever after.

python examples/vllm/offline.py                        a small random Llama, made on the spot
python examples/vllm/offline.py MODEL                  any model that vLLM runs, by name or folder
python examples/vllm/offline.py --disk /tmp/kvtier     keeps blocks on disk too: run it twice
"""

import argparse
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from vllm import LLM

NUM_PROMPTS = 3
NUM_ROUNDS = 2
PROMPT_TOKENS = 3000
BLOCK_TOKENS = 128
MAX_MODEL_TOKENS = 4096
NUM_DEVICE_BLOCKS = MAX_MODEL_TOKENS // BLOCK_TOKENS + 2
"""vLLM wants room for one request of the longest length; a prompt takes 24 blocks, so no second one fits beside it."""

SOURCES = {"device": "device", "host": "host", "disk": "disk"}
"""Names of ``vllm:prompt_tokens_cached_by_source``, from vLLM 0.32 on."""

COARSE_SOURCES = {"local_cache_hit": "device", "external_kv_transfer": "kvtier"}
"""Names of ``vllm:prompt_tokens_by_source``, which earlier releases have too."""


def main() -> None:
    """Make the model if none is given, then answer the prompts in turn, twice."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="name or folder of a model; none makes a small random one")
    parser.add_argument("--disk", type=Path, help="folder for blocks that outlive the engine")
    parser.add_argument("--save-model", type=Path, help="only save the small random model in this folder")
    options = parser.parse_args()
    if options.save_model is not None:
        save_random_llama(options.save_model)
        return
    with working_folder(options.disk) as folder:
        model = options.model
        if model is None:
            model = str(folder / "model")
            save_random_llama(folder / "model")
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
        blocks = None if options.disk is None else folder / "blocks"
        # CPUs without instructions for 16 bits take many times as long with them, which is what "auto" chooses.
        run(make_engine(model, blocks, "float32" if options.model is None else "auto"))


@contextmanager
def working_folder(disk: Path | None) -> Iterator[Path]:
    """Yield the folder that is kept, or one that is removed afterwards."""
    if disk is not None:
        # The model is in there too: its name is part of what blocks are found by.
        yield disk.absolute()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def save_random_llama(folder: Path) -> None:
    """Save a Llama of four layers whose weights are random and the same each time."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(7)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        initializer_range=0.12,
        max_position_embeddings=MAX_MODEL_TOKENS,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_engine(model: str, blocks: Path | None, dtype: Literal["auto", "float32"]) -> "LLM":
    """Start vLLM with kvtier behind its device cache."""
    # vLLM reads these once, when it is imported.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONHASHSEED", "0")
    from vllm import LLM

    tiers = [] if blocks is None else [{"type": "fs", "root_dir": str(blocks), "capacity_bytes": "4GiB"}]
    return LLM(
        model,
        dtype=dtype,
        kv_transfer_config={
            "kv_connector": "KVTierConnector",
            "kv_connector_module_path": "kvtier.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": "1GiB", "secondary_tiers": tiers},
        },
        num_gpu_blocks_override=NUM_DEVICE_BLOCKS,
        block_size=BLOCK_TOKENS,
        max_model_len=MAX_MODEL_TOKENS,
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=False,
    )


def run(llm: "LLM") -> None:
    """Answer the prompts in turn and print how long the first token took and what was not computed."""
    from vllm import SamplingParams

    rng = random.Random(0)  # noqa: S311 - a prompt is no secret
    vocab_size = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    prompts = [[rng.randrange(1, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    known = cached_tokens(llm)
    for turn in range(NUM_ROUNDS * NUM_PROMPTS):
        prompt = prompts[turn % NUM_PROMPTS]
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        now = cached_tokens(llm)
        found = {source: now[source] - known.get(source, 0) for source in now}
        found["computed"] = len(prompt) - sum(found.values())
        known = now
        sources = ", ".join(f"{count} {source}" for source, count in found.items() if count)
        print(
            f"round {turn // NUM_PROMPTS + 1}, prompt {turn % NUM_PROMPTS + 1}: first token after "
            f"{output.metrics.first_token_latency * 1000:.0f} ms, prompt tokens: {sources}, "
            f"answer {list(output.outputs[0].token_ids)}"
        )


def cached_tokens(llm: "LLM") -> dict[str, int]:
    """Return how many prompt tokens vLLM has found so far, by place."""
    by_name: dict[str, dict[str, int]] = {}
    for metric in llm.get_metrics():
        source = metric.labels.get("source")
        if source is not None:
            by_name.setdefault(metric.name, {})[source] = int(metric.value)
    found, names = by_name.get("vllm:prompt_tokens_cached_by_source"), SOURCES
    if found is None:
        found, names = by_name["vllm:prompt_tokens_by_source"], COARSE_SOURCES
    return {name: found.get(source, 0) for source, name in names.items()}


if __name__ == "__main__":
    main()
