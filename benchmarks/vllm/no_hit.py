"""What kvtier costs when it never helps: prompts that nobody repeats, with it and without, in turns.

It finds nothing and shows no gain. One engine answers each pair of prompts, one of them with its connector taken
out, the order changing from pair to pair, and the ratio of a pair is what counts. All that a request makes kvtier
store happens while its answer is generated, or is waited for, untimed, before the next turn. A pair of turns
without the connector shows what the method itself sees. Two engines would not do: as processes of one program
without kvtier they differ by up to a tenth.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.vllm.checkpoints import WIDE, save_llama
from benchmarks.vllm.engine import EngineOptions, Served
from benchmarks.vllm.engine_process import EngineProcess
from benchmarks.vllm.first_token import make_prompt

PROMPT_TOKENS = 3000
ANSWER_TOKENS = 8
"""Enough steps after the prompt's own for its stores to end before the answer does."""

NUM_PAIRS, NUM_QUICK_PAIRS = 120, 6
NUM_WARM_PAIRS = 4
NUM_RESAMPLES = 10_000
"""Bootstrap samples: the ends of the interval then move by less than 0.001."""

HOST_ROOM = "1GiB"
"""Holds eleven prompts: it evicts during most of the run."""

FS_ROOM = "2GiB"

DECLINED = (".declined_cascades", "primary.refused")
"""How the counters of blocks that were not stored end."""

Settings = dict[str, object]


@dataclass(frozen=True, slots=True)
class NoHit:
    """Ratios of the time with kvtier to the time without.

    Attributes:
        name: what kvtier was given.
        ratios: one for each pair.
        median: of the ratios.
        low: lower end of the 95 % bootstrap interval of the median.
        high: its upper end.
        bar: what ``high`` may be; None for the control.
        plain_s: median time of a request without kvtier.
        num_unfinished: pairs in which stores were open when the answer came.
        num_declined: blocks that were not stored, or not in every tier: each one would make the ratios better.
    """

    name: str
    ratios: tuple[float, ...]
    median: float
    low: float
    high: float
    bar: float | None
    plain_s: float
    num_unfinished: int
    num_declined: int


class Turns:
    """Turns of one engine, without its connector and with it.

    Args:
        engine: what answers.
        is_control: whether every turn goes without.
    """

    def __init__(self, engine: EngineProcess, *, is_control: bool) -> None:
        self._engine = engine
        self._is_control = is_control

    def serve_pair(self, number: int) -> tuple[Served, Served]:
        """Answer two new prompts, one without the connector; odd pairs begin with the other one."""
        served = {turn: self._serve(turn, 2 * number + turn) for turn in ((1, 0) if number % 2 else (0, 1))}
        return served[0], served[1]

    def _serve(self, turn: int, number: int) -> Served:
        prompts = [make_prompt(number, PROMPT_TOKENS)]
        is_plain = turn == 0 or self._is_control
        serve = self._engine.serve_without if is_plain else self._engine.serve
        served = serve(prompts, ANSWER_TOKENS)
        if served.answers[0].num_cached_tokens:
            raise SystemExit(f"{served.answers[0].num_cached_tokens} tokens of a new prompt were found")
        return served


def measure(folder: Path, *, is_quick: bool) -> list[NoHit]:
    """Measure and print control, host tier, and fs tier with write-through."""
    num_pairs = NUM_QUICK_PAIRS if is_quick else NUM_PAIRS
    model = str(save_llama(folder / "model", WIDE))
    tier = {"type": "fs", "root_dir": str(folder / "blocks"), "capacity_bytes": FS_ROOM}
    host: Settings = {"cpu_bytes_to_use": HOST_ROOM}
    cases: list[tuple[str, Settings, float | None]] = [
        ("control", host, None),
        ("host", host, 1.02),
        ("fs", host | {"secondary_tiers": [tier]}, 1.04),
    ]
    print(
        f"no hit: {num_pairs} pairs, {PROMPT_TOKENS} tokens and {ANSWER_TOKENS} answered, time ratios to no kvtier"
    )
    header = ("with", "median", "low", "high", "bar", "plain ms", "unfinished", "declined")
    print(" ".join(f"{name:>10}" for name in header))
    results = []
    for name, settings, bar in cases:
        results.append(measure_case(name, model, settings, bar, num_pairs))
        print_result(results[-1])
    return results


def measure_case(name: str, model: str, settings: Settings, bar: float | None, num_pairs: int) -> NoHit:
    """Drive an engine with these settings; without a bar it is the control."""
    with EngineProcess(EngineOptions(model, settings)) as engine:
        turns = Turns(engine, is_control=bar is None)
        for number in range(NUM_WARM_PAIRS):
            turns.serve_pair(number)
        pairs = [turns.serve_pair(NUM_WARM_PAIRS + number) for number in range(num_pairs)]
        stats = engine.stats()
    ratios = np.array([served.time_s / without.time_s for without, served in pairs])
    low, high = median_interval(ratios)
    return NoHit(
        name=name,
        ratios=tuple(ratios.tolist()),
        median=float(np.median(ratios)),
        low=low,
        high=high,
        bar=bar,
        plain_s=float(np.median([without.time_s for without, _ in pairs])),
        num_unfinished=sum(served.num_open_jobs > 0 for _, served in pairs),
        num_declined=int(sum(value for key, value in stats.items() if key.endswith(DECLINED))),
    )


def median_interval(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median, percentile method, with a fixed seed."""
    drawn = np.random.default_rng(0).integers(0, len(values), (NUM_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[drawn], axis=1), (2.5, 97.5))
    return float(low), float(high)


def print_result(result: NoHit) -> None:
    """Print one line."""
    verdict = "" if result.bar is None else "met" if result.high <= result.bar else "NOT met"
    bar = "-" if result.bar is None else f"{result.bar:.2f}"
    print(
        f"{result.name:>10} {result.median:10.3f} {result.low:10.3f} {result.high:10.3f} {bar:>10} "
        f"{1e3 * result.plain_s:10.1f} {result.num_unfinished:10d} {result.num_declined:10d}   {verdict}",
        flush=True,
    )
