"""Builds the demo's model and engine configurations, and serves turns.

The model has random weights of the Llama architecture, or is a local one. Tokens are bytes, not those of the model's
tokenizer: the demo measures time and compares answers, it does not read them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedModel

from kvtier.cli.demo.conversation import Turn
from kvtier.cli.demo.options import DevicePoolOptions, ModelOptions, SetUp
from kvtier.cli.demo.report import ServedTurn
from kvtier.engines.transformers import EngineConfig, GenerationResult
from kvtier.engines.transformers.local_model import NUM_BYTE_TOKENS, load_local_model, make_random_llama

WARM_UP_TOKENS = tuple(range(8))
"""A prompt shorter than a block: the libraries allocate their buffers for it, and no cache keeps anything."""

LOOKUP_DEADLINE_S = 20.0
"""Seconds that a turn may wait for the tier. The demo shows what a tier brings, so a slow disk should show as a long
wait and not as a recomputed prefix. An engine in production uses less."""

STORES_IN_FLIGHT_RATIO = 0.75
"""Share of host memory that unfinished writes to the tier may hold. The default, an eighth, protects an engine with
gigabytes of host memory. Here an eighth is less than one step of prefill stores, so blocks would miss in the tier."""


class Engine(Protocol):
    """The part of ``KVTierEngine`` that serves a turn."""

    def run(self, token_ids: Sequence[int], max_new_tokens: int) -> GenerationResult:
        """Generate every token and return the result."""


def build_model(options: ModelOptions) -> PreTrainedModel:
    """Return the model, in evaluation mode on the CPU; equal options give equal weights.

    Raises:
        ModelError: the path has no model of transformers, or the model has fewer tokens than there are bytes.
    """
    if options.path is None:
        return make_random_llama(options.num_layers, options.hidden_size, options.seed)
    return load_local_model(Path(options.path), min_vocabulary_size=NUM_BYTE_TOKENS)


def config_without(pools: DevicePoolOptions) -> EngineConfig:
    """Return the settings of an engine that has only its own prefix cache. Pure."""
    return EngineConfig(num_device_blocks=pools.num_device_blocks)


def config_with(set_up: SetUp) -> EngineConfig:
    """Return the settings of the same engine with host memory and a tier behind it. Pure."""
    tier = {
        "type": set_up.pools.tier,
        "required": True,  # a demo without its tier shows nothing
        "max_in_flight_store_bytes": max(1, int(set_up.pools.cpu_bytes * STORES_IN_FLIGHT_RATIO)),
        **set_up.tier_settings,
    }
    return EngineConfig(
        num_device_blocks=set_up.pools.num_device_blocks,
        extra_config={
            "cpu_bytes_to_use": set_up.pools.cpu_bytes,
            "lookup_deadline_s": LOOKUP_DEADLINE_S,
            "secondary_tiers": [tier],
        },
    )


def warm_up(engine: Engine) -> None:
    """Run a first forward pass, so that one-time costs of the libraries are not measured."""
    engine.run(WARM_UP_TOKENS, 1)


def serve_turns(engine: Engine, turns: Iterable[Turn], on_served: Callable[[], None]) -> list[ServedTurn]:
    """Serve ``turns`` one after another; each prompt is its conversation so far, answers included.

    Args:
        engine: serves the turns.
        turns: in the order in which they are served.
        on_served: called after each.
    """
    histories: dict[int, list[int]] = defaultdict(list)
    served = []
    for turn in turns:
        history = histories[turn.conversation]
        history.extend(turn.token_ids)
        served.append(serve_prompt(engine, turn, tuple(history)))
        history.extend(served[-1].token_ids)
        on_served()
    return served


def serve_prompt(engine: Engine, turn: Turn, prompt: tuple[int, ...]) -> ServedTurn:
    """Serve one prompt and return the result."""
    result = engine.run(prompt, turn.num_answer_tokens)
    return ServedTurn(
        turn=turn,
        prompt=prompt,
        token_ids=tuple(result.tokens),
        sources=dict(result.sources),
        first_token_s=result.time_to_first_token_s,
    )
