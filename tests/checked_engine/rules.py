"""How an engine goes about its steps, and what happens around a reset: values, and how chance draws them."""

import random
from dataclasses import dataclass
from enum import Enum


class ResetKind(Enum):
    """What happens around a reset of the connector."""

    AS_VLLM = "as vLLM"
    PREEMPTING = "pre-empting"
    KEEPING = "keeping"
    CONNECTOR = "connector"


@dataclass(frozen=True)
class EngineRules:
    """How an engine goes about its steps.

    Attributes:
        num_steps_ahead: steps that may be planned before the output of the one before was taken.
        names_resumed_as_new: a resumed request is announced like a new one, as newer runners of vLLM want it.
        has_region: nothing moves before the workers have reported the region that they have mapped.
        calls_preemption_hook: workers are told of a step before its loads begin, or by that alone.
        state_interval: tokens between two states that it keeps and names; None: it keeps each block's and names none. A
            layout without states makes no use of it.
    """

    num_steps_ahead: int = 0
    names_resumed_as_new: bool = False
    has_region: bool = False
    calls_preemption_hook: bool = True
    state_interval: int | None = None


def draw_rules(rng: random.Random) -> EngineRules:
    """Draw how an engine goes about its steps."""
    return EngineRules(
        num_steps_ahead=rng.randint(0, 1),
        names_resumed_as_new=rng.random() < 0.5,
        has_region=rng.random() < 0.3,
        calls_preemption_hook=rng.random() < 0.7,
        state_interval=rng.choice([None, None, 4, 8, 12, 16]),
    )
