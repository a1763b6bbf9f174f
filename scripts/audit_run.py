"""Audit many blocks of a real engine and say whether one was called wrong: no false alarm, whatever the batch.

    python -m scripts.audit_run --engine vllm --dtype bfloat16 --blocks 50000           needs vLLM
    python -m scripts.audit_run --engine transformers --dtype bfloat16 --blocks 50000
    python -m scripts.audit_run --model qwen3-next --dtype bfloat16 --blocks 10000      recurrent states, needs vLLM

Every request is audited. A round computes new prompts once and stores them. Then it computes them again and again in
other ways, each block of which is compared with the one that is held: with vLLM in other batches of one to eight
requests, whose prompts share the tokens of a step, with transformers in parts of other lengths, and in each round with
another model. Exit status 1 when a block was wrong.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.e2e.vllm.checkpoints import SEED, save_llama, save_qwen3_next
from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.prompts import make_prompt
from tests.e2e.vllm.recurrent import ARGUMENTS as RECURRENT_ARGUMENTS

NUM_PROMPTS = 24
"""Prompts of a round."""

PROMPT_TOKENS = (200, 1500)
"""The shortest and the longest prompt: parts of a step begin and end anywhere."""

NUM_AGAIN = 8
"""How often a round of vLLM computes its prompts again. More compares more blocks for each that is stored, in batches
that are less and less new."""

MAX_BATCH = 8
STEP_TOKENS = 384
"""Tokens of a step of vLLM: a batch of long prompts takes many, each with parts of several."""

CHUNKS_TOKENS = (1536, 16, 48, 64, 96, 160, 240, 512)
"""Lengths of the parts in which the transformers engine computes prompts, the first for what is stored."""

BLOCK_TOKENS = 16
"""Of the transformers engine. vLLM's kernels for CPUs have 32."""

SETTINGS = {"cpu_bytes_to_use": "1GiB", "audit_ratio": 1.0, "audit_limit": 10**9}

MODELS: dict[str, Callable[[Path, int], Path]] = {"llama": save_llama, "qwen3-next": save_qwen3_next}
"""What saves a checkpoint in a folder, drawn with a seed."""

RECURRENT = "qwen3-next"

KINDS = ("equal", "close", "wrong", "lost")

Counts = Counter[str]


def main() -> int:
    """Run one engine; return 1 when a block was called wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--blocks", type=int, default=50_000, help="blocks to compare")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtier-") as folder:
        run = run_vllm if arguments.engine == "vllm" else run_transformers
        counts = run(Path(folder), arguments.model, arguments.dtype, arguments.blocks)
    return int(counts["wrong"] > 0)


def run_vllm(folder: Path, model: str, dtype: str, num_blocks: int) -> Counts:
    """Compute prompts alone, then again in batches of every size; return what was compared."""
    recurrent = RECURRENT_ARGUMENTS if model == RECURRENT else {}
    options = EngineOptions(
        str(MODELS[model](folder, SEED)),
        SETTINGS,
        num_device_blocks=400,
        max_num_seqs=MAX_BATCH,
        engine_arguments={**recurrent, "dtype": dtype, "max_num_batched_tokens": STEP_TOKENS},
    )
    sampling, counts = {"temperature": 0.0, "max_tokens": 2}, Counts()
    rng = random.Random(1)  # noqa: S311 - prompts, no secrets
    with EngineProcess(options) as engine:
        for number in range(10**6):
            prompts = make_prompts(rng, number)
            engine.call("generate_in_turn", prompts, sampling)
            engine.call("settle")
            for _ in range(NUM_AGAIN):
                engine.call("forget_device")
                left = rng.sample(prompts, len(prompts))
                while left:
                    size = rng.randint(1, MAX_BATCH)
                    engine.call("generate", left[:size], sampling)
                    del left[:size]
                engine.call("settle")
            stats: Mapping[str, float] = engine.call("stats")
            counts = count(stats)
            report(counts, stats["audit.largest_deviation"])
            if num_compared(counts) >= num_blocks:
                break
    return counts


def run_transformers(folder: Path, model: str, dtype: str, num_blocks: int) -> Counts:
    """Compute prompts of one model after another in parts of several lengths; return what was compared."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvtier.engines.transformers import EngineConfig, KVTierEngine

    # So small a model gains nothing from a second thread, which waits wherever others want its core.
    torch.set_num_threads(1)
    # Engines find each other's blocks in the directory: the first one's are compared with what the others compute.
    tiers = [{"type": "fs", "root_dir": str(folder / "fs"), "capacity_bytes": "2GiB"}]
    settings = {**SETTINGS, "secondary_tiers": tiers, "lookup_deadline_s": 60.0}
    counts, largest = Counts(), 0.0
    rng = random.Random(1)  # noqa: S311 - prompts, no secrets
    for number in range(10**6):
        checkpoint = MODELS[model](folder / "model", number)
        loaded = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
        prompts = make_prompts(rng, number)
        for chunk_tokens in CHUNKS_TOKENS:
            config = EngineConfig(400, BLOCK_TOKENS, settings, prefill_chunk_tokens=chunk_tokens)
            with KVTierEngine(loaded, config) as engine:
                for prompt in prompts:
                    engine.run(prompt, 2)
                engine.drain(60.0)
                stats = engine.stats()
            counts += count(stats)
            largest = max(largest, stats["audit.largest_deviation"])
            report(counts, largest)
            if num_compared(counts) >= num_blocks:
                return counts
    return counts


def make_prompts(rng: random.Random, number: int) -> list[list[int]]:
    """Return the prompts of a round."""
    first = number * NUM_PROMPTS
    return [make_prompt(first + place, rng.randint(*PROMPT_TOKENS)) for place in range(NUM_PROMPTS)]


def count(stats: Mapping[str, float]) -> Counts:
    """Return how many blocks an engine has compared, by what came of it. Pure."""
    return Counts({kind: int(stats[f"audit.{kind}_blocks"]) for kind in KINDS})


def num_compared(counts: Mapping[str, int]) -> int:
    """Return how many blocks were compared. Pure."""
    return sum(counts[kind] for kind in KINDS if kind != "lost")


def report(counts: Mapping[str, int], largest_deviation: float) -> None:
    """Print what was compared since the start; the last line has the result."""
    shown = {kind: counts[kind] for kind in KINDS}
    print(shown, f"largest deviation {largest_deviation:.3g} tolerances", flush=True)


if __name__ == "__main__":
    sys.exit(main())
