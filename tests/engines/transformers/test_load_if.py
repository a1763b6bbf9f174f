"""The real connector leaves a slow tier alone where computing is faster, and the tokens are the same."""

import time
from collections.abc import Callable

import pytest
import torch
from tests.tiering.drivers import make_example
from transformers import LlamaForCausalLM, PreTrainedModel

from kvtier.base import OffloadingManager, OffloadingSpec
from kvtier.config import OffloadingConfig
from kvtier.cpu.manager import CPUPrimaryTierOffloadingManager
from kvtier.engines.transformers import GenerationResult, KVTierEngine
from kvtier.testing.clock import ManualClock
from kvtier.testing.wrapped_tier import SlowTier
from kvtier.tiering.manager import TieringOffloadingManager
from kvtier.tiering.spec import TieringOffloadingSpec

MakeEngine = Callable[..., KVTierEngine]
PromptOf = Callable[[int, int], list[int]]
Expected = tuple[list[int], torch.Tensor]
Plain = Callable[[PreTrainedModel, list[int], int], Expected]
AssertSame = Callable[[GenerationResult, Expected], None]

ROW_BYTES = 8192
NUM_NEW_TOKENS = 6
READING_S = 1.0
"""Each time the engine looks at its clock so much has passed: a prompt takes a few of these."""

WAITING_S = 0.1
"""Each time the engine waits, so much."""

MAX_DRAINS = 10_000
"""Tries to end everything; against a hang only."""


class SlowSpec(TieringOffloadingSpec):
    """Host memory for one prompt, and behind it one tier that takes its time on the test's clock.

    Args:
        config: what the engine says of itself.
        clock: that clock.
        block_s: seconds that loading a block takes.

    Attributes:
        tiers: those that were built.
    """

    def __init__(self, config: OffloadingConfig, clock: ManualClock, block_s: float) -> None:
        super().__init__(config)
        self._clock = clock
        self._block_s = block_s
        self.tiers: list[SlowTier] = []

    def make_manager(self) -> OffloadingManager:
        """Build the primary tier."""
        region = self.make_region(rank=None)

        def build() -> TieringOffloadingManager:
            primary = CPUPrimaryTierOffloadingManager(self.num_blocks, region)
            slow = SlowTier(make_example(primary.get_kv_memoryview()), self._clock, self._block_s)
            self.tiers.append(slow)
            return TieringOffloadingManager(
                primary, [slow], lookup_deadline_s=1000.0, measures_loads=True, clock=self._clock
            )

        return self._keep(region, build)


class Bench:
    """An engine with a slow tier.

    Args:
        make_engine: makes an engine that ends with the test.
        llama: its model.
        load_if: the setting.
        block_s: seconds that loading a block takes.
        reading_s: seconds that pass when the engine looks at its clock.
        waiting_s: seconds that pass when it waits.
        chunk_tokens: tokens of a prompt that are computed in one step; fewer take more readings.
        settings: more settings.
    """

    def __init__(
        self,
        make_engine: MakeEngine,
        llama: LlamaForCausalLM,
        load_if: str,
        block_s: float,
        *,
        reading_s: float = READING_S,
        waiting_s: float = WAITING_S,
        chunk_tokens: int = 64,
        **settings: object,
    ) -> None:
        clock = ManualClock()
        self._specs: list[SlowSpec] = []

        def read() -> float:
            clock.advance(reading_s)
            return clock()

        def pause(seconds: float) -> None:
            clock.advance(waiting_s)
            time.sleep(seconds)  # as the engine does: the thread that copies has to run

        def make_spec(config: OffloadingConfig) -> OffloadingSpec:
            self._specs.append(spec := SlowSpec(config, clock, block_s))
            return spec

        own = {"cpu_bytes_to_use": 12 * ROW_BYTES, "secondary_tiers": [], "load_if": load_if}
        self.engine = make_engine(
            llama,
            extra_config=own | settings,
            prefill_chunk_tokens=chunk_tokens,
            make_spec=make_spec,
            clock=read,
            pause=pause,
        )

    def set_block_s(self, block_s: float) -> None:
        """Let blocks take so many seconds from now on."""
        for spec in self._specs:
            for tier in spec.tiers:
                tier.block_s = block_s

    def run(self, prompt: list[int]) -> GenerationResult:
        """Answer a prompt of which the device holds nothing."""
        self.engine.drop_device_cache()
        result = self.engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
        # The tier does not wait for a load that is under way; each try lets some time pass.
        assert any(self.engine.drain(1e6) for _ in range(MAX_DRAINS))
        return result


@pytest.mark.parametrize(
    ("load_if", "block_s", "expected"),
    [
        ("faster", 2.0, {"computed": 75}),
        ("always", 2.0, {"slow": 72, "computed": 3}),
        ("faster", 0.0001, {"slow": 72, "computed": 3}),
    ],
)
def test_a_tier_is_loaded_from_where_that_is_faster_and_tokens_are_the_same(
    make_engine: MakeEngine,
    llama: LlamaForCausalLM,
    prompt: list[int],
    prompt_of: PromptOf,
    plain: Plain,
    assert_same: AssertSame,
    load_if: str,
    block_s: float,
    expected: dict[str, int],
) -> None:
    answer = plain(llama, prompt, NUM_NEW_TOKENS)
    bench = Bench(make_engine, llama, load_if, block_s)
    bench.run(prompt)
    for seed in range(1, 4):
        bench.run(prompt_of(seed, 75))

    first = bench.run(prompt)
    bench.run(prompt_of(4, 75))
    bench.run(prompt_of(5, 75))
    second = bench.run(prompt)

    assert first.sources == {"slow": 72, "computed": 3}
    assert second.sources == expected
    assert_same(first, answer)
    assert_same(second, answer)
    not_loaded = bench.engine.stats().get("connector.not_loaded_tokens.slow", 0.0)
    assert not_loaded == (72 if expected == {"computed": 75} else 0)
