"""The cost of kvtier without hits: prompts that are never repeated, with kvtier and without, alternating.

One engine answers each pair of prompts, one of them with its connector removed, in alternating order; the result is the
ratio of each pair. All stores of a request happen while its answer is generated, or are waited for, untimed, before the
next turn. A pair of turns without the connector shows the error of the method. Two engines would not do: processes of
one program without kvtier differ by up to a tenth.
"""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.interval import lines_of
from benchmarks.harness.measurement import Measurement
from benchmarks.harness.suite import Options
from benchmarks.vllm.checkpoints import WIDE, save_llama
from benchmarks.vllm.engine import EngineOptions, Served
from benchmarks.vllm.engine_process import EngineProcess
from benchmarks.vllm.first_token import make_prompt

PROMPT_TOKENS = 3000
ANSWER_TOKENS = 8
"""Enough steps after the prompt's own for its stores to end before the answer does."""

NUM_PAIRS, NUM_QUICK_PAIRS = 120, 6
NUM_WARM_PAIRS = 4
HOST_ROOM = "1GiB"
"""Holds eleven prompts, so it evicts during most of the run."""

FS_ROOM = "2GiB"

DECLINED = (".declined_cascades", "primary.refused")
"""Suffixes of the counters of blocks that were not stored."""

Settings = dict[str, object]


class Turns:
    """Turns of one engine, without its connector and with it.

    Args:
        engine: the engine.
        is_control: whether all turns are without the connector.
    """

    def __init__(self, engine: EngineProcess, *, is_control: bool) -> None:
        self._engine = engine
        self._is_control = is_control

    def serve_pair(self, number: int) -> tuple[Served, Served]:
        """Answer two new prompts, one without the connector; odd pairs begin with the other one."""
        served = {turn: self._serve(turn, 2 * number + turn) for turn in ((1, 0) if number % 2 else (0, 1))}
        return served[0], served[1]

    def _serve(self, turn: int, number: int) -> Served:
        is_plain = turn == 0 or self._is_control
        serve = self._engine.serve_without if is_plain else self._engine.serve
        served = serve(make_prompt(number, PROMPT_TOKENS), ANSWER_TOKENS)
        if served.num_cached_tokens:
            raise SystemExit(f"{served.num_cached_tokens} tokens of a new prompt were found")
        return served


def measure(options: Options, folder: Path) -> Iterator[Measurement]:
    """Yield the ratio of times: control, host tier, and fs tier with write-through; notes count what was not stored."""
    num_pairs = NUM_QUICK_PAIRS if options.is_quick else NUM_PAIRS
    model = str(save_llama(folder / "model", WIDE))
    tier = {"type": "fs", "root_dir": str(folder / "blocks"), "capacity_bytes": FS_ROOM}
    host: Settings = {"cpu_bytes_to_use": HOST_ROOM}
    cases: list[tuple[str, Settings, float | None]] = [
        ("none: the control", host, None),
        ("host", host, 1.02),
        ("host and fs", host | {"secondary_tiers": [tier]}, 1.04),
    ]
    for name, settings, bar in cases:
        with EngineProcess(EngineOptions(model, settings)) as engine:
            turns = Turns(engine, is_control=bar is None)
            for number in range(NUM_WARM_PAIRS):
                turns.serve_pair(number)
            pairs = [turns.serve_pair(NUM_WARM_PAIRS + number) for number in range(num_pairs)]
            stats = engine.stats()
        yield from lines_of(name, [served.time_s / without.time_s for without, served in pairs], bar)
        num_unfinished = sum(served.num_open_jobs > 0 for _, served in pairs)
        num_declined = int(sum(value for key, value in stats.items() if key.endswith(DECLINED)))
        if num_unfinished or num_declined:
            # Each of them would make the ratios look better.
            options.note(
                f"{name}: {num_unfinished} of {num_pairs} ended with open stores, {num_declined} declined"
            )
