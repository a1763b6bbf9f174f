"""The engine and the memory that options of the command line describe, for each command that simulates.

``kvtier simulate`` compares several policies on them, ``kvtier why --simulate`` explains the misses of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvtier.cli.simulate import options
from kvtier.cli.simulate.options import (
    apply_tier_settings,
    host_blocks_of,
    make_engine,
    make_host,
    page_trace,
    parse_hints,
    parse_load_if,
    parse_tier,
    split_names,
)
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.trace import Trace


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options about the engine as they were given; the fields are parameters of ``kvtier simulate``."""

    device: str
    kv_bytes: str = options.DEFAULT_KV_BYTES
    max_running: int = options.DEFAULT_MAX_RUNNING
    prefill: float | None = None
    decode: float = options.DEFAULT_DECODE
    state_bytes: str | None = None
    state_interval: int | None = None


@dataclass(frozen=True, slots=True)
class HostOptions:
    """Options about host memory, tiers and clients as they were given; the fields are parameters as above."""

    host: str
    tier: Sequence[str] | None = None
    tier_setting: Sequence[str] | None = None
    policy: str = options.DEFAULT_POLICY
    store_threshold: int = 0
    load_if: str = options.DEFAULT_LOAD_IF
    hints: str = options.DEFAULT_HINTS
    hint_noise: str = ""

    @property
    def policies(self) -> list[str]:
        """The policies that are named."""
        return split_names(self.policy)


class Machine(NamedTuple):
    """What is simulated.

    Attributes:
        trace: the requests, in the engine's blocks.
        engine: the engine.
        host: its memory.
    """

    trace: Trace
    engine: EngineModel
    host: HostModel


def make_machine(trace: Trace, engine: EngineOptions, host: HostOptions) -> Machine:
    """Return the engine and its memory, with the first of the policies.

    Raises:
        ConfigError: a value is not valid.
        UnknownNameError: a policy, tier or setting does not exist.
        NamedClassError: the class that a policy names cannot be used.
    """
    trace = page_trace(trace, engine.kv_bytes, engine.state_bytes, engine.state_interval)
    model = make_engine(
        trace,
        device=engine.device,
        kv_size=engine.kv_bytes,
        max_running=engine.max_running,
        prefill=engine.prefill,
        decode=engine.decode,
        state_size=engine.state_bytes,
        state_interval=engine.state_interval,
    )
    parsed = [parse_tier(text, model.block_bytes) for text in host.tier or ()]
    tiers = apply_tier_settings(parsed, host.tier_setting or (), model.block_bytes)
    num_blocks = host_blocks_of(host.host, model.block_bytes, tiers)
    memory = make_host(host.policies, num_blocks, tiers, host.store_threshold, parse_load_if(host.load_if))
    client_hints, noise = parse_hints(host.hints, host.hint_noise)
    return Machine(trace, model, replace(memory, client_hints=client_hints, hint_noise=noise))
