"""Builds the demo's model and engines, and serves turns.

The model has random weights of the Llama architecture, or is a local one. Tokens are bytes, not those of the model's
tokenizer: the demo measures time and compares answers, it does not read them.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedModel

from kvtier.cli.demo.conversation import ServedTurn, Turn
from kvtier.engines.transformers import EngineConfig, GenerationResult
from kvtier.engines.transformers.local_model import NUM_BYTE_TOKENS, load_local_model, make_random_llama

NUM_LAYERS, HIDDEN_SIZE, SEED = 10, 1024, 0
"""Of the random model: 113 M parameters, 20 KiB of KV a token."""

NUM_ANSWER_TOKENS = 8
"""Tokens generated in each turn, at most. The time to the first token is shown; more tokens would only take time."""

BLOCK_TOKENS = 16
"""Tokens in a device block: the engine's default."""

SPARE_RATIO = 1.1
"""Pool over longest prompt. A pool for exactly one prompt never shows a hit on the device; a pool for several shows
little else."""

WARM_UP_TOKENS = tuple(range(8))
"""A prompt shorter than a block: the libraries allocate their buffers for it, and no cache keeps anything."""

LOOKUP_DEADLINE_S = 20.0
"""Seconds that a turn may wait for the tier. The demo shows what a tier brings, so a slow disk should show as a long
wait and not as a recomputed prefix. An engine in production uses less."""

STORES_IN_FLIGHT_RATIO = 0.75
"""Share of host memory that unfinished writes to the tier may hold. The default, an eighth, protects an engine with
gigabytes of host memory. Here an eighth is less than one step of prefill stores, so blocks would miss in the tier."""


@dataclass(frozen=True, slots=True)
class SetUp:
    """What both processes of the demo have in common; it crosses to the second one as JSON.

    Attributes:
        model: directory of a local model; None: a random one.
        num_device_blocks: blocks of the device pool, the same with kvtier and without.
        cpu_bytes: host memory behind it.
        tier: the secondary tier behind that, as ``type`` in a configuration names it.
        tier_settings: its settings, its location included.
    """

    model: str | None
    num_device_blocks: int
    cpu_bytes: int
    tier: str
    tier_settings: Mapping[str, Any]  # Any: JSON


class Engine(Protocol):
    """The part of ``KVTierEngine`` that serves a turn."""

    def run(
        self, token_ids: Sequence[int], max_new_tokens: int, *, do_sample: bool, eos_token_id: list[int]
    ) -> GenerationResult:
        """Generate every token and return the result."""


def choose_device_blocks(turns: Iterable[Turn]) -> int:
    """Return the size of a device pool that has room for the longest conversation and little more. Pure."""
    num_tokens: Counter[int] = Counter()
    for turn in turns:
        num_tokens[turn.conversation] += len(turn.token_ids) + NUM_ANSWER_TOKENS
    return int(-(-max(num_tokens.values()) // BLOCK_TOKENS) * SPARE_RATIO) + 1


def build_model(path: str | None) -> PreTrainedModel:
    """Return the local model in ``path``, or the random one: in evaluation mode, on the CPU, the same each time.

    Raises:
        ModelError: the path has no model of transformers, or the model has fewer tokens than there are bytes.
    """
    if path is None:
        return make_random_llama(NUM_LAYERS, HIDDEN_SIZE, SEED)
    return load_local_model(Path(path), min_vocabulary_size=NUM_BYTE_TOKENS)


def config_without(set_up: SetUp) -> EngineConfig:
    """Return the settings of an engine that has only its own prefix cache. Pure."""
    return EngineConfig(num_device_blocks=set_up.num_device_blocks)


def config_with(set_up: SetUp) -> EngineConfig:
    """Return the settings of the same engine with host memory and a tier behind it. Pure."""
    tier = {
        "type": set_up.tier,
        "required": True,  # a demo without its tier shows nothing
        "max_in_flight_store_bytes": max(1, int(set_up.cpu_bytes * STORES_IN_FLIGHT_RATIO)),
        **set_up.tier_settings,
    }
    return EngineConfig(
        num_device_blocks=set_up.num_device_blocks,
        extra_config={
            "cpu_bytes_to_use": set_up.cpu_bytes,
            "lookup_deadline_s": LOOKUP_DEADLINE_S,
            "secondary_tiers": [tier],
        },
    )


def serve_turns(
    engine: Engine, turns: Iterable[Turn], on_served: Callable[[ServedTurn], object]
) -> list[ServedTurn]:
    """Serve ``turns`` one after another; each prompt is its conversation so far, answers included.

    Args:
        engine: serves the turns, after a first forward pass whose one-time costs are not measured.
        turns: in the order in which they are served.
        on_served: called after each.
    """
    engine.run(WARM_UP_TOKENS, 1, do_sample=False, eos_token_id=[])
    histories: dict[int, list[int]] = defaultdict(list)
    served = []
    for turn in turns:
        history = histories[turn.conversation]
        history.extend(turn.token_ids)
        # Whatever the model's generation_config says: answers of the same length, which can be compared.
        result = engine.run(history, NUM_ANSWER_TOKENS, do_sample=False, eos_token_id=[])
        answer, sources = tuple(result.tokens), dict(result.sources)
        served.append(ServedTurn(turn, tuple(history), answer, sources, result.time_to_first_token_s))
        history.extend(answer)
        on_served(served[-1])
    return served
