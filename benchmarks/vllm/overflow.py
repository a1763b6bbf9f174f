"""Sessions that return to an engine whose device and host memory hold some of them, and a restart.

Sixteen sessions of twelve blocks return in turn, eight at once, or in bursts of eight: the device's pool and host
memory hold four each, or host memory two, and the disk holds all. Contestants are vLLM's own connector with kvtier's fs
tier ("ours") and with its own, and kvtier's connector; each has an engine of its own in each round. Then the engine
ends, and another one serves every session, one at a time.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.measurement import OURS, Bar, Better, Measurement
from benchmarks.harness.suite import Options
from benchmarks.vllm.checkpoints import LlamaShape, save_llama
from benchmarks.vllm.engine import EngineOptions
from benchmarks.vllm.engine_process import EngineProcess
from benchmarks.vllm.first_token import BLOCK_TOKENS, make_prompt

SHAPE = LlamaShape(num_layers=4, hidden_size=512, num_kv_heads=8)
NUM_SESSIONS, SESSION_BLOCKS = 16, 12
PROMPT_TOKENS = SESSION_BLOCKS * BLOCK_TOKENS + 40
FOUND_TOKENS = SESSION_BLOCKS * BLOCK_TOKENS
AT_ONCE = 8
HELD_SESSIONS = 4
"""What the device's pool holds."""

NUM_RETURNS = 2
NUM_ANSWER_TOKENS = 8
NUM_ROUNDS, NUM_QUICK_ROUNDS = 3, 1

VLLM, OWN = "vllm fs", "own connector"
P50_RATIO, P95_RATIO = 0.5, 1 / 3
"""Bars: ours against vLLM's own tier."""

MAX_SLOWEST = 2.0
"""Bar: the slowest first token, in medians."""


@dataclass(frozen=True, slots=True)
class Case:
    """How the sessions return.

    Attributes:
        held: sessions that host memory holds.
        in_bursts: all of a burst end before the next one begins.
    """

    held: int
    in_bursts: bool

    @property
    def labels(self) -> dict[str, str | int]:
        """The case's columns in a table."""
        return {"host holds": self.held, "sessions return": "in bursts" if self.in_bursts else "in turn"}


@dataclass(frozen=True, slots=True)
class Returned:
    """What came of a contestant in a round.

    Attributes:
        first_tokens_s: of each returning session, sorted.
        computed_ratio: the share of the tokens that could be found and were computed.
        restarted_s: of each session after the restart, sorted.
        restarted_ratio: as ``computed_ratio``, after the restart.
    """

    first_tokens_s: Sequence[float]
    computed_ratio: float
    restarted_s: Sequence[float]
    restarted_ratio: float


def measure(options: Options, folder: Path) -> Iterator[Measurement]:
    """Yield first tokens, shares computed, and the same after a restart, case by case."""
    model = str(save_llama(folder / "model", SHAPE))
    cases = [Case(4, in_bursts=False), Case(4, in_bursts=True), Case(2, in_bursts=False)]
    for case in cases[:1] if options.is_quick else cases:
        rounds: list[Mapping[str, Returned]] = []
        for number in range(NUM_QUICK_ROUNDS if options.is_quick else NUM_ROUNDS):
            place = folder / f"{case.held}-{case.in_bursts}-{number}"
            rounds.append({one: run(one, case, model, place / one) for one in (OURS, VLLM, OWN)})
        yield from summarize(case, rounds)


def run(contestant: str, case: Case, model: str, folder: Path) -> Returned:
    """Let the sessions return to one contestant, restart it, and let them return once more."""
    options = make_options(contestant, case, model, folder)
    prompts = [make_prompt(number, PROMPT_TOKENS) for number in range(NUM_SESSIONS)]
    size = AT_ONCE if case.in_bursts else NUM_SESSIONS
    served: list[tuple[float, int]] = []
    with EngineProcess(options) as engine:
        engine.serve_together(prompts, 1, NUM_ANSWER_TOKENS)
        for _ in range(NUM_RETURNS):
            for first in range(0, NUM_SESSIONS, size):
                served += engine.serve_together(prompts[first : first + size], AT_ONCE, NUM_ANSWER_TOKENS)
        engine.settle()
    with EngineProcess(options) as engine:
        restarted = engine.serve_together(prompts, 1, NUM_ANSWER_TOKENS)
    return Returned(
        sorted(seconds for seconds, _ in served),
        computed_ratio(served),
        sorted(seconds for seconds, _ in restarted),
        computed_ratio(restarted),
    )


def make_options(contestant: str, case: Case, model: str, folder: Path) -> EngineOptions:
    """Return how a contestant's engine starts. Pure."""
    types = {OURS: "kvtier-fs", VLLM: "fs", OWN: "fs"}
    tier: dict[str, object] = {"type": types[contestant], "root_dir": str(folder)}
    if contestant != VLLM:
        tier["capacity_bytes"] = "4GiB"
    settings = {
        "cpu_bytes_to_use": case.held * SESSION_BLOCKS * BLOCK_TOKENS * SHAPE.token_bytes,
        "secondary_tiers": [tier],
    }
    return EngineOptions(
        model,
        settings,
        num_device_blocks=HELD_SESSIONS * (SESSION_BLOCKS + 1) + 1,
        block_tokens=BLOCK_TOKENS,
        max_model_tokens=2048,
        step_tokens=2048,
        is_stock=contestant != OWN,
    )


def computed_ratio(served: Sequence[tuple[float, int]]) -> float:
    """Return the share of the tokens that could be found and were computed. Pure."""
    found = sum(min(num_found, FOUND_TOKENS) for _, num_found in served)
    return 1 - found / (FOUND_TOKENS * len(served))


def summarize(case: Case, rounds: Sequence[Mapping[str, Returned]]) -> Iterator[Measurement]:
    """Yield what the rounds of a case say. Pure."""

    def values(of: str, factor: float = 1e3) -> dict[str, tuple[float, ...]]:
        return {
            one: tuple(factor * figures(round_[one])[of] for round_ in rounds) for one in (OURS, VLLM, OWN)
        }

    for name, bar in (("p50", P50_RATIO), ("p95", P95_RATIO)):
        labels = {**case.labels, "figure": f"first token, {name}"}
        yield Measurement(labels, "ms", Better.LOWER, values(name), Bar(VLLM, bar))
    labels = {**case.labels, "figure": "slowest first token, in medians"}
    yield Measurement(labels, "times", Better.LOWER, values("slowest", 1.0), Bar(None, MAX_SLOWEST))
    labels = {**case.labels, "figure": "share computed"}
    yield Measurement(labels, "ratio", Better.LOWER, values("computed", 1.0), Bar(None, 0.0))
    labels = {**case.labels, "figure": "first token after a restart, p50"}
    yield Measurement(labels, "ms", Better.LOWER, values("restarted"))
    labels = {**case.labels, "figure": "share computed after a restart"}
    yield Measurement(labels, "ratio", Better.LOWER, values("restarted computed", 1.0), Bar(None, 0.0))


def figures(returned: Returned) -> dict[str, float]:
    """Return a contestant's figures of one round, in seconds and shares. Pure."""
    times = returned.first_tokens_s
    median_s = statistics.median(times)
    return {
        "p50": median_s,
        "p95": times[min(len(times) - 1, int(0.95 * len(times)))],
        "slowest": times[-1] / median_s,
        "computed": returned.computed_ratio,
        "restarted": statistics.median(returned.restarted_s),
        "restarted computed": returned.restarted_ratio,
    }
