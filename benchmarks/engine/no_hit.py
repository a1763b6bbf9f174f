"""The cost of kvtier without hits: prompts that are never repeated, with kvtier and without, alternating.

Engines of the same model answer prompts in turns: one without kvtier, one with a host tier, one that also writes
through to an fs tier, and a second one without kvtier, which shows the error of the method. Each answer is paired with
the one without kvtier in the same round; the result is the ratio of each pair, and the upper end of the interval of
its median has the bar. All stores of a request happen while its answer is generated; a note gives the time that was
waited for the rest afterwards, untimed, before the next turn.
"""

import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM

from benchmarks.engine.models import BLOCK_SIZE_TOKENS, make_model, make_prompt
from benchmarks.harness.interval import lines_of
from benchmarks.harness.measurement import Measurement
from benchmarks.harness.rounds import Contestant, fixed, run_rounds, timed
from benchmarks.harness.suite import Options
from kvtier.engines.transformers import EngineConfig, KVTierEngine

PROMPT_TOKENS = 512
ANSWER_TOKENS = 8
"""Enough steps after the prompt's own for its stores to end before the answer does."""

NUM_PAIRS, NUM_QUICK_PAIRS = 100, 8
"""At least; rounded up so that each engine begins equally often."""

NUM_WARMUPS = 3
HOST_ROOM = "64MiB"
"""Holds eight prompts, so it evicts during most of the run."""

DISK_ROOM = "256MiB"
"""Holds 32 prompts, so the disk evicts too during most of the run."""

DRAIN_S = 120.0
PLAIN, CONTROL, HOST, FS = "plain", "none: the control", "host", "host and fs"
BARS = {CONTROL: None, HOST: 1.02, FS: 1.04}
ANSWER, REST = "answer", "rest"

Settings = dict[str, Any]  # Any: settings of tiers


def measure(options: Options) -> Iterator[Measurement]:
    """Yield the median ratio of times and the ends of its 95 % interval: control, host, written-through disks."""
    model = make_model()
    num_pairs = NUM_QUICK_PAIRS if options.is_quick else NUM_PAIRS
    numbers = count()
    with options.new_folder() as folder, ExitStack() as ends:
        contestants: dict[str, Contestant] = {
            name: partial(answer_next, ends.enter_context(open_engine(model, settings)), numbers)
            for name, settings in settings_of(folder).items()
        }
        seconds = run_rounds(contestants, fixed(num_pairs), num_warmups=NUM_WARMUPS)
    for name, bar in BARS.items():
        pairs = zip(seconds[ANSWER][name], seconds[ANSWER][PLAIN], strict=True)
        yield from lines_of(name, [with_s / without_s for with_s, without_s in pairs], bar)
    for name in (HOST, FS):
        rest_ms = 1e3 * statistics.median(seconds[REST][name])
        options.note(f"{name}: {rest_ms:.1f} ms of waiting between an answer and the next turn (median)")


def settings_of(folder: Path) -> Mapping[str, Settings | None]:
    """Return the settings of each engine; None: no kvtier. Pure."""
    host: Settings = {"cpu_bytes_to_use": HOST_ROOM}
    fs = {"type": "fs", "root_dir": str(folder / "blocks"), "capacity_bytes": DISK_ROOM}
    return {
        PLAIN: None,
        CONTROL: None,
        HOST: host,
        FS: host | {"secondary_tiers": [fs]},
    }


def answer_next(engine: KVTierEngine, numbers: Iterator[int]) -> Mapping[str, float]:
    """Return the seconds of an answer to a new prompt, and those until the rest of its work is done."""
    prompt = make_prompt(next(numbers), PROMPT_TOKENS)
    return {
        ANSWER: timed(lambda: answer(engine, prompt)),
        REST: timed(lambda: engine.drain(DRAIN_S)),
    }


def open_engine(model: LlamaForCausalLM, settings: Settings | None) -> KVTierEngine:
    """Return an engine with room for four requests on the device."""
    num_blocks = 4 * (PROMPT_TOKENS + ANSWER_TOKENS) // BLOCK_SIZE_TOKENS
    return KVTierEngine(
        model, EngineConfig(num_blocks, BLOCK_SIZE_TOKENS, settings, model_revision="benchmark")
    )


def answer(engine: KVTierEngine, prompt: list[int]) -> None:
    """Answer a prompt and assert that nothing of it was found."""
    result = engine.run(prompt, ANSWER_TOKENS)
    if set(result.sources) != {"computed"}:
        raise SystemExit(f"tokens of a new prompt came from {dict(result.sources)}")
