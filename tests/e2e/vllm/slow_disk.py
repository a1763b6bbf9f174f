"""A vLLM engine whose hits come from a disk that slows down and recovers, as tests drive it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.e2e.vllm.engine_host import BLOCK_TOKENS, EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.prompts import make_prompt
from tests.e2e.vllm.throttled_tier import TIER_NAME

from kvtier.connector.control_arm import SavedInterval
from kvtier.observe.audit import read_saved

SLOW_BYTES_PER_S = 5e6
"""A prompt's two megabytes take 0.4 s from such a disk. Computing them takes a tenth of that."""

PROMPT_TOKENS = 516
HIT_TOKENS = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
NUM_PROMPTS = 4
"""Host memory has room for one: the next hit of a prompt comes from the disk."""

STEP_TOKENS = 64
"""Tokens of a step: nine steps to compute a prompt, one after a load."""

WINDOW = 20
"""Requests of which the share that was loaded is taken."""

ONE_TOKEN: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}  # Any: arguments of vLLM's SamplingParams


@dataclass(frozen=True, slots=True)
class Served:
    """One request, alone in the engine.

    Attributes:
        took_s: seconds until its only token.
        is_loaded: whether its prompt came from the disk.
    """

    took_s: float
    is_loaded: bool


def make_options(model: str, folder: Path, **settings: object) -> EngineOptions:
    """Return an engine with such a disk and room for one prompt in front of it."""
    tier = {"type": TIER_NAME, "root_dir": str(folder), "capacity_bytes": "256MiB"}
    return EngineOptions(
        model,
        {"cpu_bytes_to_use": "3MiB", "secondary_tiers": [tier], **settings},
        num_device_blocks=100,
        engine_arguments={"max_num_batched_tokens": STEP_TOKENS},
    )


class SlowDiskBench:
    """Serves the prompts in turn, one at a time.

    Args:
        engine: made with ``make_options``.
    """

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._prompts = [make_prompt(number, PROMPT_TOKENS) for number in range(NUM_PROMPTS)]
        self._num_requests = 0
        for _ in self._prompts:
            self.serve()

    def serve(self) -> Served:
        """Answer the next prompt, of which the device holds nothing."""
        prompt = self._prompts[self._num_requests % NUM_PROMPTS]
        self._num_requests += 1
        took_s, answer = self._engine.call("time_alone", prompt, ONE_TOKEN)
        return Served(took_s, answer.num_cached_tokens > 0)

    def serve_until(self, is_enough: Callable[[float], bool], max_requests: int) -> int:
        """Serve until the share of the last requests that was loaded is enough; return how many came before those."""
        loaded: list[bool] = []
        for number in range(1, max_requests + WINDOW + 1):
            loaded.append(self.serve().is_loaded)
            if number >= WINDOW and is_enough(fmean(loaded[-WINDOW:])):
                return number - WINDOW
        raise AssertionError(f"{sum(loaded[-WINDOW:])} of the last {WINDOW} requests were loaded")

    def set_rate(self, bytes_per_s: float) -> None:
        """Let the disk deliver at another rate from now on."""
        self._engine.call("set_disk_rate", bytes_per_s)

    def saved(self) -> SavedInterval:
        """Return what the engine says that a loaded token of the disk saves."""
        (found,) = (each for each in read_saved(self._engine.call("stats")) if each.tier == "fs")
        return found
