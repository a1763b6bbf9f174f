"""What kvtier costs when it never helps: prompts that nobody repeats, with it and without, in turns.

Two engines of the same model answer each pair of prompts, one of them without kvtier, the order changing from pair to
pair; the ratio of a pair is what counts, and the upper end of the interval of its median has the bar. All that a
request makes kvtier store happens while its answer is generated, or is waited for, untimed, before the next turn. A
pair of engines without kvtier shows what the method itself sees.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM

from benchmarks.engine.models import BLOCK_SIZE_TOKENS, make_model, make_prompt
from benchmarks.harness.interval import lines_of
from benchmarks.harness.measurement import Measurement
from benchmarks.harness.rounds import timed
from benchmarks.harness.suite import Options
from kvtier.engines.transformers import EngineConfig, KVTierEngine

PROMPT_TOKENS = 512
ANSWER_TOKENS = 16
"""Enough steps after the prompt's own for its stores to end before the answer does."""

NUM_PAIRS, NUM_QUICK_PAIRS = 100, 6
NUM_WARM_PAIRS = 3
HOST_ROOM = "64MiB"
"""Holds eight prompts: it evicts during most of the run."""

FS_ROOM = "256MiB"
DRAIN_S = 120.0

Settings = dict[str, Any]  # Any: settings of tiers


def measure(options: Options) -> Iterator[Measurement]:
    """Yield the median ratio of times and the upper end of its 95 % interval: control, host, and fs write-through."""
    model = make_model()
    num_pairs = NUM_QUICK_PAIRS if options.is_quick else NUM_PAIRS
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=options.folder) as folder:
        tier = {"type": "fs", "root_dir": str(Path(folder, "blocks")), "capacity_bytes": FS_ROOM}
        host: Settings = {"cpu_bytes_to_use": HOST_ROOM}
        cases: tuple[tuple[str, Settings | None, float | None], ...] = (
            ("none: the control", None, None),
            ("host", host, 1.02),
            ("host and fs", host | {"secondary_tiers": [tier]}, 1.04),
        )
        for name, settings, bar in cases:
            ratios = run_pairs(model, settings, num_pairs)
            yield from lines_of(name, ratios, bar)


def run_pairs(model: LlamaForCausalLM, settings: Settings | None, num_pairs: int) -> list[float]:
    """Return the ratio of the time with ``settings`` to the time without, pair by pair."""
    ratios = []
    with open_engine(model, None) as plain, open_engine(model, settings) as tiered:
        for number in range(NUM_WARM_PAIRS + num_pairs):
            turns = ((plain, 2 * number), (tiered, 2 * number + 1))
            seconds = {}
            for engine, seed in turns if number % 2 else turns[::-1]:
                prompt = make_prompt(seed, PROMPT_TOKENS)
                seconds[engine] = timed(lambda engine=engine, prompt=prompt: answer(engine, prompt))  # type: ignore[misc]
                engine.drain(DRAIN_S)
            if number >= NUM_WARM_PAIRS:
                ratios.append(seconds[tiered] / seconds[plain])
    return ratios


def open_engine(model: LlamaForCausalLM, settings: Settings | None) -> KVTierEngine:
    """Return an engine with room for four requests on the device."""
    num_blocks = 4 * (PROMPT_TOKENS + ANSWER_TOKENS) // BLOCK_SIZE_TOKENS
    return KVTierEngine(
        model, EngineConfig(num_blocks, BLOCK_SIZE_TOKENS, settings, model_revision="benchmark")
    )


def answer(engine: KVTierEngine, prompt: list[int]) -> None:
    """Answer a prompt of which nothing may be found."""
    result = engine.run(prompt, ANSWER_TOKENS)
    if set(result.sources) != {"computed"}:
        raise SystemExit(f"tokens of a new prompt came from {dict(result.sources)}")
