"""Models with full attention, sliding windows and recurrent states, and how their engines are started."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import vllm
from tests.e2e.vllm import recurrent
from tests.e2e.vllm.answers import Answer
from tests.e2e.vllm.conftest import CONTROL_POOL_BLOCKS
from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.engine_pool import Alone, EnginePool
from tests.e2e.vllm.prompts import GREEDY, WHOLE_TOKENS, make_cycle, make_prompt
from tests.e2e.vllm.recurrent import options_with

CYCLE = make_cycle(10)
FOUR = CYCLE[:4]

LONGER = {"temperature": 0.0, "max_tokens": 32}

needs_states = pytest.mark.skipif(
    vllm.__version_tuple__[:2] < (0, 32), reason="this vLLM does not say which blocks hold a recurrent state"
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A model and how its engines are started.

    Attributes:
        checkpoint: the fixture that returns its folder.
        prompts: what it is asked.
        found: of each prompt the tokens that are found again.
        sampling: how it answers.
        num_device_blocks: of an engine that is asked for all of them; without states it holds a part.
        num_copied_blocks: of an engine that is asked for ``copied``.
        copied: the prompts of tests about copies.
        is_asynchronous: whether two steps are under way.
    """

    checkpoint: str
    prompts: list[list[int]]
    found: list[int]
    sampling: dict[str, Any]  # Any: arguments of vLLM's SamplingParams
    num_device_blocks: int
    num_copied_blocks: int
    copied: int = 4
    is_asynchronous: bool = False

    @property
    def has_states(self) -> bool:
        return self.checkpoint == "qwen3_next"

    @property
    def others(self) -> list[list[int]]:
        """Prompts that push the others out of a pool that holds them all, as several requests with states take."""
        return [make_prompt(900 + seed, 1900) for seed in range(8)] if self.has_states else []


ATTENTION = (CYCLE, [WHOLE_TOKENS] * len(CYCLE), GREEDY)
STATES = (recurrent.PROMPTS, recurrent.FOUND, recurrent.GREEDY, recurrent.POOL_BLOCKS, recurrent.POOL_BLOCKS)
NUM_STATES_COPIED = len(recurrent.PROMPTS)

KINDS: Mapping[str, Kind] = {
    "Llama": Kind("llama", *ATTENTION, 270, 72),  # eight prompts and their answers, and two
    "Llama, two steps": Kind("llama", *ATTENTION, 270, 72, is_asynchronous=True),
    "Gemma": Kind("gemma", *ATTENTION, 400, 300),
    "Gemma, two steps": Kind("gemma", *ATTENTION, 400, 300, is_asynchronous=True),
    "Qwen": Kind("qwen3_next", *STATES, NUM_STATES_COPIED),
    "Qwen, two steps": Kind("qwen3_next", *STATES, NUM_STATES_COPIED, is_asynchronous=True),
}


@dataclass(frozen=True, slots=True)
class Bench:
    """What a test has of one kind.

    Attributes:
        kind: what it is.
        model: folder of its checkpoint.
        engines: those that it may borrow.
        alone: what vLLM answers without kvtier.
    """

    kind: Kind
    model: str
    engines: EnginePool
    alone: Alone

    def options(
        self,
        settings: dict[str, Any] | None,  # Any: a user's JSON
        num_device_blocks: int | None = None,
        **arguments: Any,  # Any: vLLM's own
    ) -> EngineOptions:
        """Return how to start an engine, with the kind's own pool unless a size is given."""
        blocks = self.kind.num_device_blocks if num_device_blocks is None else num_device_blocks
        is_asynchronous = self.kind.is_asynchronous and settings is not None
        if self.kind.has_states:
            return options_with(
                self.model, settings, blocks, is_asynchronous=is_asynchronous, engine_arguments=arguments
            )
        return EngineOptions(
            self.model, settings, blocks, engine_arguments=arguments, is_asynchronous=is_asynchronous
        )

    @property
    def on_host(self) -> EngineOptions:
        """Return how to start an engine with host memory for all prompts."""
        return self.options({"cpu_bytes_to_use": "256MiB" if self.kind.has_states else "512MiB"})

    def expected(self, num_prompts: int | None = None, method: str = "generate_in_turn") -> list[Answer]:
        """Return what vLLM answers without kvtier, one prompt at a time or all together."""
        blocks = recurrent.POOL_BLOCKS if self.kind.has_states else CONTROL_POOL_BLOCKS
        answers = self.alone.answers(
            self.options(None, blocks), method, self.kind.prompts, self.kind.sampling
        )
        return answers[:num_prompts]


def each(*names: str) -> pytest.MarkDecorator:
    """Run a test with these kinds."""
    marked = [pytest.param(name, marks=needs_states if KINDS[name].has_states else ()) for name in names]
    return pytest.mark.parametrize("bench", marked, indirect=True)
