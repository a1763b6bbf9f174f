"""Audit many blocks of a real engine and say whether one was called wrong: no false alarm, whatever the batch.

    python -m scripts.audit_run --engine vllm --blocks 100000               needs vLLM; 8 requests a batch, in chunks
    python -m scripts.audit_run --engine transformers --dtype bfloat16      chunks of different lengths

Every request is audited: its prompt is computed again in another batch, and each block is compared. Exit status 1 when
a block was wrong.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.e2e.vllm.checkpoints import save_llama
from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.prompts import make_cycle

NUM_PROMPTS = 24
SETTINGS = {"cpu_bytes_to_use": "1GiB", "audit_ratio": 1.0, "audit_limit": 10**9}
CHUNKS_TOKENS = (64, 96, 160, 1024)
"""Lengths of the parts in which the transformers engine computes prompts, one after another."""


def main() -> int:
    """Run one engine; return 1 when a block was called wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks to compare")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtier-") as folder:
        run = run_vllm if arguments.engine == "vllm" else run_transformers
        return int(run(Path(folder), arguments.dtype, arguments.blocks))


def run_vllm(folder: Path, dtype: str, num_blocks: int) -> bool:
    """Compute prompts alone, then again and again in batches of 8; return whether a block was wrong."""
    options = EngineOptions(
        str(save_llama(folder)),
        SETTINGS,
        num_device_blocks=400,
        engine_arguments={"dtype": dtype, "max_num_batched_tokens": 384},
    )
    sampling, prompts = {"temperature": 0.0, "max_tokens": 2}, make_cycle(NUM_PROMPTS)
    with EngineProcess(options) as engine:
        engine.call("generate_in_turn", prompts, sampling)
        engine.call("settle")
        while True:
            engine.call("forget_device")
            prompts = prompts[7:] + prompts[:7]  # other batches, since 7 is no part of 8
            engine.call("generate", prompts, sampling)
            engine.call("settle")
            stats: Mapping[str, float] = engine.call("stats")
            if report(stats) >= num_blocks:
                return bool(stats["audit.wrong_blocks"])


def run_transformers(folder: Path, dtype: str, num_blocks: int) -> bool:
    """Compute prompts in parts of several lengths; return whether a block was wrong."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvtier.engines.transformers import EngineConfig, KVTierEngine

    # So small a model gains nothing from a second thread, which waits wherever others want its core.
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(save_llama(folder), dtype=getattr(torch, dtype))
    prompts, num_done, is_wrong = make_cycle(NUM_PROMPTS), 0.0, False
    # Engines find each other's blocks in the directory: the first one's are compared with what the others compute.
    tiers = [{"type": "fs", "root_dir": str(folder / "fs"), "capacity_bytes": "2GiB"}]
    for number in range(10**6):
        chunk_tokens = CHUNKS_TOKENS[number % len(CHUNKS_TOKENS)]
        settings = {**SETTINGS, "secondary_tiers": tiers, "lookup_deadline_s": 60.0}
        config = EngineConfig(400, 32, settings, prefill_chunk_tokens=chunk_tokens)
        with KVTierEngine(model, config) as engine:
            for prompt in prompts:
                engine.run(prompt, 2)
            engine.drain(60.0)
            stats = engine.stats()
        num_done += report(stats)
        is_wrong |= stats["audit.wrong_blocks"] > 0
        if num_done >= num_blocks:
            break
    return is_wrong


def report(stats: Mapping[str, float]) -> float:
    """Print what was compared; return how many blocks."""
    kinds = ("equal", "close", "wrong", "lost")
    counts = {kind: stats[f"audit.{kind}_blocks"] for kind in kinds}
    print(counts, f"largest deviation {stats['audit.largest_deviation']:.3g} tolerances", flush=True)
    return sum(counts.values()) - counts["lost"]


if __name__ == "__main__":
    sys.exit(main())
