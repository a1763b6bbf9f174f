"""Tries one hybrid family: whether vLLM runs it on a CPU, and whether kvtier's answers are those of vLLM alone.

Each prompt is computed, found in host memory after the device pool was pushed out, and found in files after a restart.
At last the states in host memory are zeroed: an answer that stays the same then would prove nothing before.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.vllm.answers import LOGPROB_TOLERANCE, Answer, largest_difference
from tests.e2e.vllm.engine_process import EngineFailedError, EngineProcess
from tests.e2e.vllm.families import FAMILIES, save_family
from tests.e2e.vllm.prompts import make_prompt
from tests.e2e.vllm.recurrent import GREEDY, found_of, options_with

COMPUTED, HOST, FS, TOGETHER = "computed", "host", "fs", "host all at a time"

LENGTHS = (1900, 1801, 1700, 1601, 1537, 1536, 1535, 1100)
PROMPTS = [make_prompt(500 + length, length) for length in LENGTHS]

BLOCK_TOKENS = 512
"""As many as a step computes. With a shorter block vLLM 0.32 exports a state from within the last step of a prompt. Its
Mamba2 kernel for CPUs cannot, and it ends with an IndexError, without kvtier too."""

LONG_BLOCKS = {"block_size": BLOCK_TOKENS}

POOL_BLOCKS = 20
"""Holds the longest prompt, and of eight prompts so few that each is gone before it comes again."""

ROOMY_POOL_BLOCKS = 200


@dataclass(frozen=True, slots=True)
class FamilyTrial:
    """What came of one family.

    Attributes:
        name: the family.
        reason: the error with which vLLM ended without kvtier; empty when it ran.
        block_tokens: tokens of a block.
        num_state_groups: KV groups that keep a state.
        found: for each origin, tokens of prompts that came from there.
        differences: for each origin, the largest difference of a log-probability from vLLM alone; infinite where
            tokens differ.
        batch_difference: the same between two runs of vLLM alone: one request at a time computed, and eight at a
            time, found on the device.
        zeroed_difference: the same for a prompt whose states in host memory were zeroed.
    """

    name: str
    reason: str = ""
    block_tokens: int = 0
    num_state_groups: int = 0
    found: Mapping[str, int] = field(default_factory=dict)
    differences: Mapping[str, float] = field(default_factory=dict)
    batch_difference: float = 0.0
    zeroed_difference: float = 0.0

    @property
    def findable_tokens(self) -> int:
        """Tokens of all prompts up to the last end of a block before their last token."""
        return sum((length - 1) // self.block_tokens * self.block_tokens for length in LENGTHS)

    @property
    def problems(self) -> list[str]:
        """What was not as it should be; empty for a family that is served, and for one that vLLM does not run."""
        if self.reason:
            return []
        found = [
            f"{origin}: {num_tokens} of {self.findable_tokens} tokens found"
            for origin, num_tokens in self.found.items()
            if num_tokens != (0 if origin == COMPUTED else self.findable_tokens)
        ]
        differing = [
            f"{origin}: another answer ({difference:.2g})"
            for origin, difference in self.differences.items()
            if difference > LOGPROB_TOLERANCE
            # Where vLLM alone answers a batch otherwise, so may it behind kvtier.
            and not (origin == TOGETHER and self.batch_difference > LOGPROB_TOLERANCE)
        ]
        is_blind = self.zeroed_difference <= 10 * LOGPROB_TOLERANCE
        return [*found, *differing, *(["a zeroed state changes no answer"] if is_blind else [])]


def try_family(name: str, folder: Path) -> FamilyTrial:
    """Try a family in an empty folder."""
    model = str(save_family(FAMILIES[name], folder / "model"))
    roomy = options_with(model, None, ROOMY_POOL_BLOCKS, engine_arguments=LONG_BLOCKS)
    try:
        with EngineProcess(roomy) as engine:
            expected = engine.call("generate_in_turn", PROMPTS, GREEDY)
            in_batches = engine.call("generate", PROMPTS, GREEDY)  # found on the device
    except EngineFailedError as error:
        return FamilyTrial(name, reason=find_reason(str(error)))
    return _try_offloaded(name, model, folder / "blocks", expected, largest_difference(in_batches, expected))


def _try_offloaded(
    name: str, model: str, blocks: Path, expected: Sequence[Answer], batch_difference: float
) -> FamilyTrial:
    tier = {"type": "fs", "root_dir": str(blocks), "capacity_bytes": "4GiB", "required": True}
    settings = {"cpu_bytes_to_use": "256MiB", "secondary_tiers": [tier]}
    found: dict[str, int] = {}
    differences: dict[str, float] = {}

    def compare(engine: EngineProcess, origin: str, method: str, medium: str) -> list[Answer]:
        before = engine.call("stats").get(medium, 0.0)
        answers: list[Answer] = engine.call(method, PROMPTS, GREEDY)
        found[origin] = int(engine.call("stats").get(medium, 0.0) - before)
        differences[origin] = largest_difference(answers, expected)
        return answers

    host, fs = "connector.loaded_tokens.CPU", "connector.loaded_tokens.fs"
    with EngineProcess(options_with(model, settings, POOL_BLOCKS, engine_arguments=LONG_BLOCKS)) as engine:
        compare(engine, COMPUTED, "generate_in_turn", host)
        compare(engine, HOST, "generate_in_turn", host)
        engine.call("settle")
        engine.call("check")
    with EngineProcess(
        options_with(model, settings, ROOMY_POOL_BLOCKS, engine_arguments=LONG_BLOCKS)
    ) as engine:
        compare(engine, FS, "generate_in_turn", fs)
        engine.call("forget_device")
        compare(engine, TOGETHER, "generate", host)
        engine.call("forget_device")
        states: dict[int, int] = engine.call("state_groups")
        block_tokens = next(iter(states.values()))
        for group, group_tokens in states.items():
            last = (LENGTHS[0] - 1) // group_tokens * group_tokens - 1
            engine.call("zero_held_block", PROMPTS[0], group, last)
        (zeroed,) = engine.call("generate", PROMPTS[:1], GREEDY)
        engine.call("check")
    assert found_of([zeroed]) == [(LENGTHS[0] - 1) // block_tokens * block_tokens]
    return FamilyTrial(
        name=name,
        block_tokens=block_tokens,
        num_state_groups=len(states),
        found=found,
        differences=differences,
        batch_difference=batch_difference,
        zeroed_difference=largest_difference([zeroed], expected[:1]),
    )


def find_reason(text: str) -> str:
    """Return what names the error at the end of a traceback, or what pydantic found in a configuration. Pure."""
    found = re.findall(r"^  Value error, (.*?)(?: \[type=.*)?$", text, re.MULTILINE)
    errors = re.findall(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception).*)$", text, re.MULTILINE)
    return str((found or errors or [text.strip().rsplit("\n", 1)[-1]])[-1])
