"""The embedded engine leaves a disk alone that has become slow, and comes back to it when it has recovered.

On a clock of the test's own: a block comes at the disk's rate, and a prompt computes at another one.
"""

from collections.abc import Callable

import pytest
from tests.engines.transformers.test_load_if import ROW_BYTES, Bench
from transformers import LlamaForCausalLM

from kvtier.engines.transformers import KVTierEngine

MakeEngine = Callable[..., KVTierEngine]
PromptOf = Callable[[int, int], list[int]]

SLOW_BYTES_PER_S = 5e6
FAST_BYTES_PER_S = 2e9
READING_S = 2e-4
"""Computing a prompt in ten steps takes 8 ms of that clock. A load takes 4 ms besides what the disk needs for its nine
blocks: 40 microseconds, or 15 ms."""

PROMPT_TOKENS = 75
NUM_PROMPTS = 4
"""Host memory has room for one: the next hit of a prompt comes from the disk."""

MAX_REQUESTS = 200
WINDOW = 40
"""Requests of which the share that was loaded is taken."""


class Disk:
    """An engine with a disk, and what came from it."""

    def __init__(
        self, make_engine: MakeEngine, llama: LlamaForCausalLM, prompt_of: PromptOf, **settings: object
    ) -> None:
        self._bench = Bench(
            make_engine,
            llama,
            "faster",
            ROW_BYTES / FAST_BYTES_PER_S,
            reading_s=READING_S,
            waiting_s=1e-5,
            chunk_tokens=8,
            **settings,
        )
        self._prompts = [prompt_of(number, PROMPT_TOKENS) for number in range(NUM_PROMPTS)]
        self._num_requests = 0
        self._loaded: list[bool] = []

    def set_rate(self, bytes_per_s: float) -> None:
        """Let the disk deliver at another rate from now on."""
        self._bench.set_block_s(ROW_BYTES / bytes_per_s)
        self._loaded.clear()

    def serve_until(self, is_enough: Callable[[float], bool], max_requests: int) -> int:
        """Serve until the share of the last requests that was loaded is enough; return how many that took."""
        for number in range(1, max_requests + WINDOW + 1):
            self._num_requests += 1
            result = self._bench.run(self._prompts[self._num_requests % NUM_PROMPTS])
            self._loaded.append(result.sources.get("slow", 0) > 0)
            if number >= WINDOW and is_enough(sum(self._loaded[-WINDOW:]) / WINDOW):
                return number - WINDOW
        raise AssertionError(f"{sum(self._loaded[-WINDOW:])} of the last {WINDOW} requests were loaded")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_disk_of_5_mb_per_s_is_left_alone_and_used_again_when_it_has_recovered(
    make_engine: MakeEngine, llama: LlamaForCausalLM, prompt_of: PromptOf, seed: int
) -> None:
    disk = Disk(make_engine, llama, prompt_of, audit_ratio=1 / 50, audit_seed=seed)
    disk.serve_until(lambda share: share > 0.8, MAX_REQUESTS)

    disk.set_rate(SLOW_BYTES_PER_S)
    assert disk.serve_until(lambda share: share < 0.2, MAX_REQUESTS) <= MAX_REQUESTS

    disk.set_rate(FAST_BYTES_PER_S)
    assert disk.serve_until(lambda share: share > 0.8, MAX_REQUESTS) <= MAX_REQUESTS
