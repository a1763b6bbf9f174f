"""Time to first token of vLLM by where the prompt comes from, against a plain copy and a plain read of its bytes.

It measures one request at a time. Three prompts are cycled through a device pool that holds one of them: each is
served twice in a row, first from the tier, then from the device, and a prompt that was never seen is computed in
each round. Host memory holds every prompt, or, for the fs tier, hardly more than one. How many tokens came from where
is checked for each request.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.vllm.checkpoints import NARROW, VOCAB_SIZE, WIDE, LlamaShape, save_llama
from benchmarks.vllm.engine import EngineOptions
from benchmarks.vllm.engine_process import EngineProcess
from benchmarks.vllm.floor import Floor

PROMPT_TOKENS = 3000
BLOCK_TOKENS = 128
NUM_BLOCKS = (PROMPT_TOKENS - 1) // BLOCK_TOKENS
"""Blocks of a prompt that can be found again: whole ones, and a token must be left to compute."""

NUM_PROMPTS = 3
NUM_ROUNDS, NUM_QUICK_ROUNDS = 10, 2

COPY_FACTOR = 1.5
HOST_SLACK_S = 0.010
FS_SLACK_S = 0.020
NARROW_RATIO = 1.15
"""Bars: what a hit may cost beyond one on the device."""

HOST, FS = "CPU", "fs"
"""The tiers, as kvtier's counters name them."""

Times = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    Attributes:
        shape: the model.
        source: the tier that brings the prompt.
    """

    shape: LlamaShape
    source: str

    @property
    def row_bytes(self) -> int:
        """A block in host memory."""
        return self.shape.token_bytes * BLOCK_TOKENS

    def settings(self, folder: Path) -> dict[str, object]:
        """Return kvtier's settings: host memory for every prompt, or for little more than one and files behind it."""
        if self.source == HOST:
            return {"cpu_bytes_to_use": (NUM_PROMPTS + 2) * NUM_BLOCKS * self.row_bytes}
        tier = {
            "type": FS,
            "root_dir": str(folder),
            "capacity_bytes": "16GiB",
            # Roomy on purpose: a declined cascade would be computed later and spoil the run.
            "max_in_flight_store_bytes": "16GiB",
            # The bar is for a warm page cache, which direct I/O goes past.
            "direct_io": False,
        }
        return {"cpu_bytes_to_use": (NUM_BLOCKS + 8) * self.row_bytes, "secondary_tiers": [tier]}


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Medians of one case, in seconds.

    Attributes:
        token_bytes: KV of a token.
        source: the tier.
        loaded_tokens: tokens of each hit, all from the tier.
        loaded_bytes: their KV.
        computed_s: the whole prompt computed.
        device_s: the same tokens found on the device.
        hit_s: brought by the tier.
        copy_s: a plain copy of the bytes.
        read_s: a plain read of the bytes from the page cache.
        bar_s: what ``hit_s`` may be.
    """

    token_bytes: int
    source: str
    loaded_tokens: int
    loaded_bytes: int
    computed_s: float
    device_s: float
    hit_s: float
    copy_s: float
    read_s: float
    bar_s: float

    @property
    def is_met(self) -> bool:
        """Whether the bar is reached."""
        return self.hit_s <= self.bar_s


def measure(folder: Path, *, is_quick: bool) -> list[FirstToken]:
    """Measure and print each case."""
    num_rounds = NUM_QUICK_ROUNDS if is_quick else NUM_ROUNDS
    print(f"time to first token, {PROMPT_TOKENS} tokens, medians of {num_rounds} rounds, ms")
    header = ("KiB/token", "from", "tokens", "MB", "computed", "device", "hit", "bar", "copy", "read")
    print(" ".join(f"{name:>9}" for name in header))
    results = []
    for number, case in enumerate(Case(shape, source) for shape in (WIDE, NARROW) for source in (HOST, FS)):
        place = folder / str(number)
        place.mkdir()
        results.append(measure_case(case, place, num_rounds))
        print_result(results[-1])
    return results


def measure_case(case: Case, folder: Path, num_rounds: int) -> FirstToken:
    """Measure one case in an engine of its own."""
    (folder / "floor").mkdir()
    options = EngineOptions(
        model=str(save_llama(folder / "model", case.shape)),
        settings=case.settings(folder / "blocks"),
        block_tokens=BLOCK_TOKENS,
    )
    with Floor(NUM_BLOCKS, case.row_bytes, folder / "floor") as floor, EngineProcess(options) as engine:
        prompts = [make_prompt(number) for number in range(NUM_PROMPTS)]
        for prompt in prompts:
            time_first_token(engine, prompt, {})
        times: Times = {}
        for number in range(num_rounds + 1):
            in_round = measure_round(engine, case, prompts, make_prompt(NUM_PROMPTS + number), floor)
            # The first round warms caches and threads.
            for name, values in in_round.items() if number else ():
                times.setdefault(name, []).extend(values)
    return summarize(case, {name: statistics.median(values) for name, values in times.items()})


def measure_round(
    engine: EngineProcess, case: Case, prompts: Sequence[Sequence[int]], unseen: Sequence[int], floor: Floor
) -> Times:
    """Serve a prompt that was never seen, then each of the others from the tier and again from the device."""
    times: Times = {"computed": [time_first_token(engine, unseen, {})], "hit": [], "device": []}
    num_tokens = NUM_BLOCKS * BLOCK_TOKENS
    for prompt in prompts:
        times["hit"].append(time_first_token(engine, prompt, {case.source: num_tokens}))
        times["device"].append(time_first_token(engine, prompt, {"device": num_tokens}))
    return times | {"copy": [floor.copy_s() for _ in prompts], "read": [floor.read_s() for _ in prompts]}


def time_first_token(engine: EngineProcess, prompt: Sequence[int], expected: Mapping[str, int]) -> float:
    """Answer one token.

    Raises:
        SystemExit: the prompt's tokens did not come from where they were expected.
    """
    served = engine.serve([prompt], 1)
    sources = dict(served.loaded_tokens)
    num_device_tokens = served.answers[0].num_cached_tokens - sum(sources.values())
    if num_device_tokens:
        sources["device"] = num_device_tokens
    if sources != expected:
        raise SystemExit(f"the prompt came from {sources}, not from {dict(expected)}")
    return served.time_s


def summarize(case: Case, median_s: Mapping[str, float]) -> FirstToken:
    """Set a case's medians against its bar. Pure."""
    device_s, copy_s, read_s = median_s["device"], median_s["copy"], median_s["read"]
    if case.source == FS:
        bar_s = device_s + COPY_FACTOR * (copy_s + read_s) + FS_SLACK_S
    elif case.shape == NARROW:
        bar_s = NARROW_RATIO * device_s
    else:
        bar_s = device_s + COPY_FACTOR * copy_s + HOST_SLACK_S
    return FirstToken(
        token_bytes=case.shape.token_bytes,
        source=case.source,
        loaded_tokens=NUM_BLOCKS * BLOCK_TOKENS,
        loaded_bytes=NUM_BLOCKS * case.row_bytes,
        computed_s=median_s["computed"],
        device_s=device_s,
        hit_s=median_s["hit"],
        copy_s=copy_s,
        read_s=read_s,
        bar_s=bar_s,
    )


def make_prompt(seed: int, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    """Return random tokens; other seeds share no block."""
    tokens: list[int] = np.random.default_rng(seed).integers(1, VOCAB_SIZE, num_tokens).tolist()
    return tokens


def print_result(result: FirstToken) -> None:
    """Print one line."""
    seconds = (
        result.computed_s,
        result.device_s,
        result.hit_s,
        result.bar_s,
        result.copy_s,
        result.read_s,
    )
    cells = " ".join(f"{1e3 * value:9.1f}" for value in seconds)
    print(
        f"{result.token_bytes / 1024:9.0f} {result.source:>9} {result.loaded_tokens:9d} "
        f"{result.loaded_bytes / 1e6:9.1f} {cells}   {'met' if result.is_met else 'NOT met'}",
        flush=True,
    )
