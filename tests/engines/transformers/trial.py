"""Tries whether a model is served correctly: computed, from the device, from host memory, from a disk after a restart.

Each answer is compared with the one of plain ``model.generate``, token by token. The prompt is random: a text would
repeat itself, and a model that looks at its last tokens alone would pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.engines.transformers.tiny_models import build_tiny_model
from transformers import GenerationConfig, PreTrainedModel

from kvtier.engines.transformers.config import BlockSizes, EngineConfig, choose_block_sizes
from kvtier.engines.transformers.engine import KVTierEngine
from kvtier.engines.transformers.model_adapter import KVShape, ModelAdapter
from kvtier.engines.transformers.result import COMPUTED, DEVICE, HOST
from kvtier.errors import KVTierError, ModelError

LIBRARY = f"transformers {transformers.__version__}"

DISK = "fs"
ORIGINS = (COMPUTED, DEVICE, HOST, DISK)
"""Where the prefix of the four answers comes from, in this order."""

NUM_NEW_TOKENS = 12
NUM_INTERVALS = 4
"""A prompt has so many intervals or blocks and a rest, so that a prefix is of several."""

NUM_REST_TOKENS = 11

TINY_BLOCK_TOKENS = 8
TINY_INTERVAL_TOKENS = 16
"""Small, so that a short prompt has several."""

FIRST_TOKEN_ID = 3
"""Ids before it are often special: padding, begin and end."""

WAIT_S = 60.0
"""Seconds in which stores must reach the disk."""


class Outcome(Enum):
    """How a trial ended."""

    SERVED = "served"
    DIFFERS = "differs"
    REFUSED = "refused"
    FAILED = "failed"
    NOT_BUILT = "not built"


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one model.

    Attributes:
        model_type: the architecture, by its name in transformers.
        outcome: how the trial ended.
        reason: why it is not served, or how answers differ; empty when all is well.
        found: for each origin tried, how many tokens of the prompt came from there.
        equal: for each origin tried, whether the answer was that of plain ``generate``.
        token_bytes: bytes of keys and values of one token.
        state_bytes: bytes of the recurrent states; 0 without any.
    """

    model_type: str
    outcome: Outcome
    reason: str = ""
    found: Mapping[str, int] = field(default_factory=dict)
    equal: Mapping[str, bool] = field(default_factory=dict)
    token_bytes: int = 0
    state_bytes: int = 0


def try_architecture(model_type: str, folder: Path) -> Trial:
    """Try a tiny model of an architecture.

    Args:
        model_type: the architecture by its name in transformers.
        folder: an empty folder, for the tier on a disk.
    """
    torch.set_num_threads(1)  # tiny matrices gain nothing from a second thread
    try:
        model = build_tiny_model(model_type)
    except ModelError as error:
        return Trial(model_type, Outcome.NOT_BUILT, str(error))
    row = try_model(model, folder, TINY_BLOCK_TOKENS, TINY_INTERVAL_TOKENS)
    return replace(row, model_type=model_type)


def try_model(
    model: PreTrainedModel,
    folder: Path,
    block_size_tokens: int | None = None,
    state_interval_tokens: int | None = None,
) -> Trial:
    """Serve one prompt four times and compare the answers with the model's own.

    Args:
        model: any model of transformers.
        folder: an empty folder, for the tier on a disk.
        block_size_tokens: of the engine; None takes the default.
        state_interval_tokens: of the engine, for a model with recurrent states; None takes the default.
    """
    model_type = model.config.model_type
    try:
        shape = ModelAdapter(model).shape
        interval = state_interval_tokens if shape.states else None
        config = EngineConfig(1, block_size_tokens, state_interval_tokens=interval)
        sizes = choose_block_sizes(config, shape)
        prompt = make_random_prompt(model, sizes)
        engine_config = _make_config(shape, sizes, len(prompt), folder)
        KVTierEngine(model, EngineConfig(1, block_size_tokens, state_interval_tokens=interval)).shutdown()
    except KVTierError as error:
        return Trial(model_type, Outcome.REFUSED, str(error))
    expected = generate_plainly(model, prompt)
    found, equal = _compare(model, engine_config, prompt, expected)
    reasons = [f"{origin}: {found[origin]} tokens found" for origin in ORIGINS if not found[origin]]
    reasons += [f"another answer from {origin}" for origin in ORIGINS if not equal[origin]]
    outcome = Outcome.DIFFERS if reasons else Outcome.SERVED
    return Trial(model_type, outcome, "; ".join(reasons), found, equal, shape.token_bytes, shape.state_bytes)


def describe_failure(model_type: str, error: Exception) -> Trial:
    """Return the row of a model whose trial ended with an exception. Pure."""
    return Trial(model_type, Outcome.FAILED, f"{type(error).__name__}: {error}")


def make_random_prompt(model: PreTrainedModel, sizes: BlockSizes) -> list[int]:
    """Return a prompt of several intervals and a rest, of ordinary tokens; always the same."""
    num_tokens = (
        NUM_INTERVALS * (sizes.state_interval_tokens or 2 * sizes.block_size_tokens) + NUM_REST_TOKENS
    )
    adapter = ModelAdapter(model)
    limits = model.config.get_text_config(decoder=True)
    longest = getattr(limits, "max_position_embeddings", None)
    if isinstance(longest, int) and longest > NUM_NEW_TOKENS:
        num_tokens = min(num_tokens, longest - NUM_NEW_TOKENS)
    generator = torch.Generator().manual_seed(1)
    ids = [
        one for one in range(FIRST_TOKEN_ID, adapter.vocabulary_size) if one not in adapter.media_token_ids
    ]
    return [ids[at] for at in torch.randint(0, len(ids), (num_tokens,), generator=generator).tolist()]


def generate_plainly(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Return what ``model.generate`` answers without kvtier."""
    make_config: Any = GenerationConfig  # Any: the annotations of transformers do not fit its models
    generate: Any = model.generate  # Any: the same
    usual = model.generation_config
    try:
        model.generation_config = make_config()  # a checkpoint's may choose beams or another cache
        ids = torch.tensor([prompt], device=model.device)
        once = make_config(max_new_tokens=NUM_NEW_TOKENS, do_sample=False, pad_token_id=0)
        output = generate(ids, attention_mask=torch.ones_like(ids), generation_config=once)
    finally:
        model.generation_config = usual
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


def _make_config(shape: KVShape, sizes: BlockSizes, num_prompt_tokens: int, folder: Path) -> EngineConfig:
    num_blocks = 2 * (-(-(num_prompt_tokens + NUM_NEW_TOKENS) // sizes.block_size_tokens)) + NUM_INTERVALS + 2
    block_bytes = max(sizes.block_size_tokens * shape.token_bytes, shape.state_bytes)
    # Rows are rounded up to whole pages of memory.
    host_bytes = 2 * num_blocks * (block_bytes + 4096)
    disk = {"type": DISK, "root_dir": str(folder), "capacity_bytes": 2 * host_bytes}
    return EngineConfig(
        num_blocks,
        sizes.block_size_tokens,
        extra_config={"cpu_bytes_to_use": host_bytes, "secondary_tiers": [disk]},
        state_interval_tokens=sizes.state_interval_tokens,
    )


def _compare(
    model: PreTrainedModel, config: EngineConfig, prompt: list[int], expected: list[int]
) -> tuple[dict[str, int], dict[str, bool]]:
    found: dict[str, int] = {}
    equal: dict[str, bool] = {}

    def answer(engine: KVTierEngine, origin: str) -> None:
        result = engine.run(prompt, NUM_NEW_TOKENS, do_sample=False, eos_token_id=[])
        found[origin] = result.sources.get(origin, 0)
        equal[origin] = result.tokens == expected

    with KVTierEngine(model, config) as engine:
        answer(engine, COMPUTED)
        answer(engine, DEVICE)
        engine.drain(WAIT_S)
        engine.drop_device_cache()
        answer(engine, HOST)
    with KVTierEngine(model, config) as engine:
        answer(engine, DISK)
    return found, equal
