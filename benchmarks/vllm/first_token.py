"""Time to first token of vLLM by the origin of the prompt, against a plain copy and a plain read of its bytes.

One request is measured at a time. Three prompts alternate in a device pool that holds one of them: each is served twice
in a row, first from the tier, then from the device, and a new prompt is computed in each round. Host memory holds every
prompt, or, for the fs tier, little more than one. The origin of the tokens is checked for each request. The floor is a
hit on the device plus the plain movement of the bytes; "allowed" is the bar.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness.measurement import FLOOR, OURS, Bar, Better, Measurement
from benchmarks.harness.suite import Options
from benchmarks.vllm.checkpoints import NARROW, VOCAB_SIZE, WIDE, LlamaShape, save_llama
from benchmarks.vllm.engine import EngineOptions
from benchmarks.vllm.engine_process import EngineProcess
from benchmarks.vllm.floor import Floor

PROMPT_TOKENS = 3000
BLOCK_TOKENS = 128
NUM_BLOCKS = (PROMPT_TOKENS - 1) // BLOCK_TOKENS
"""Blocks of a prompt that can be found again: only whole ones, and a token must be left to compute."""

NUM_PROMPTS = 3
NUM_ROUNDS, NUM_QUICK_ROUNDS = 10, 2

COPY_FACTOR = 1.5
HOST_SLACK_S = 0.010
FS_SLACK_S = 0.020
NARROW_RATIO = 1.15
"""Bars: the cost of a hit beyond that of one on the device."""

HOST, FS = "CPU", "fs"
"""The tiers' names in kvtier's counters."""

COMPUTED, DEVICE, ALLOWED = "computed", "device", "allowed"


@dataclass(frozen=True, slots=True)
class Case:
    """A measured case.

    Attributes:
        shape: the model.
        source: the tier that the prompt is loaded from.
    """

    shape: LlamaShape
    source: str

    @property
    def row_bytes(self) -> int:
        """Bytes of a block in host memory."""
        return self.shape.token_bytes * BLOCK_TOKENS

    def allowed_s(self, device_s: float, moved_s: float) -> float:
        """Return the allowed time of a hit, given one on the device and the plain movement of its bytes."""
        if self.source == FS:
            return device_s + COPY_FACTOR * moved_s + FS_SLACK_S
        if self.shape == NARROW:
            return NARROW_RATIO * device_s
        return device_s + COPY_FACTOR * moved_s + HOST_SLACK_S

    def settings(self, folder: Path) -> dict[str, object]:
        """Return kvtier's settings: host memory for every prompt, or for little more than one with files behind it."""
        if self.source == HOST:
            return {"cpu_bytes_to_use": (NUM_PROMPTS + 2) * NUM_BLOCKS * self.row_bytes}
        tier = {
            "type": FS,
            "root_dir": str(folder),
            "capacity_bytes": "16GiB",
            # Large on purpose: a declined cascade would be computed later and spoil the run.
            "max_in_flight_store_bytes": "16GiB",
            # The bar is for a warm page cache, which direct I/O bypasses.
            "direct_io": False,
        }
        return {"cpu_bytes_to_use": (NUM_BLOCKS + 8) * self.row_bytes, "secondary_tiers": [tier]}


def measure(options: Options, folder: Path) -> Iterator[Measurement]:
    """Yield the times of a hit by the size of a token's KV and the tier it is loaded from."""
    num_rounds = NUM_QUICK_ROUNDS if options.is_quick else NUM_ROUNDS
    for number, case in enumerate(Case(shape, source) for shape in (WIDE, NARROW) for source in (HOST, FS)):
        place = folder / str(number)
        place.mkdir()
        yield measure_case(case, place, num_rounds)


def measure_case(case: Case, folder: Path, num_rounds: int) -> Measurement:
    """Measure one case with its own engine."""
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
        rounds = [
            measure_round(engine, case, prompts, make_prompt(NUM_PROMPTS + number), floor)
            for number in range(num_rounds + 1)
        ]
    # The first round warms caches and threads.
    return summarize(case, rounds[1:])


def measure_round(
    engine: EngineProcess, case: Case, prompts: Sequence[Sequence[int]], unseen: Sequence[int], floor: Floor
) -> dict[str, float]:
    """Serve a new prompt, then each of the others from the tier and again from the device.

    Returns:
        Seconds by origin, medians of the prompts, and those of a plain copy and a plain read of the same bytes.
    """
    computed_s = time_first_token(engine, unseen, {})
    num_tokens = NUM_BLOCKS * BLOCK_TOKENS
    hits_s, device_s = [], []
    for prompt in prompts:
        hits_s.append(time_first_token(engine, prompt, {case.source: num_tokens}))
        device_s.append(time_first_token(engine, prompt, {DEVICE: num_tokens}))
    return {
        COMPUTED: computed_s,
        OURS: statistics.median(hits_s),
        DEVICE: statistics.median(device_s),
        "copy": statistics.median(floor.copy_s() for _ in prompts),
        "read": statistics.median(floor.read_s() for _ in prompts),
    }


def time_first_token(engine: EngineProcess, prompt: Sequence[int], expected: Mapping[str, int]) -> float:
    """Generate one token.

    Raises:
        SystemExit: the prompt's tokens did not come from the expected origins.
    """
    served = engine.serve(prompt, 1)
    sources = dict(served.loaded_tokens)
    num_device_tokens = served.num_cached_tokens - sum(sources.values())
    if num_device_tokens:
        sources["device"] = num_device_tokens
    if sources != expected:
        raise SystemExit(f"the prompt came from {sources}, not from {dict(expected)}")
    return served.time_s


def summarize(case: Case, rounds: Sequence[Mapping[str, float]]) -> Measurement:
    """Compare a case's times with the floor and the allowed time, round by round. Pure."""
    values: dict[str, list[float]] = {name: [] for name in (OURS, FLOOR, ALLOWED, DEVICE, COMPUTED)}
    for one in rounds:
        moved_s = one["copy"] + (one["read"] if case.source == FS else 0.0)
        values[FLOOR].append(one[DEVICE] + moved_s)
        values[ALLOWED].append(case.allowed_s(one[DEVICE], moved_s))
        for name in (OURS, DEVICE, COMPUTED):
            values[name].append(one[name])
    labels: dict[str, str | int] = {
        "prompt from": "host" if case.source == HOST else case.source,
        "tokens": NUM_BLOCKS * BLOCK_TOKENS,
        "KV a token": f"{case.shape.token_bytes // 1024} KiB",
    }
    in_ms = {name: tuple(1e3 * seconds for seconds in times) for name, times in values.items()}
    return Measurement(labels, "ms", Better.LOWER, in_ms, Bar(ALLOWED, 1.0))


def make_prompt(seed: int, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    """Return random tokens; different seeds share no block."""
    tokens: list[int] = np.random.default_rng(seed).integers(1, VOCAB_SIZE, num_tokens).tolist()
    return tokens
