"""Simulations of one trace side by side, with their inputs."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvtier import __version__
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.results import DEVICE, HOST, Simulation
from kvtier.sim.sweep import Case, Size, Sweep
from kvtier.sim.trace import Trace

SATURATION_FACTOR = 100
"""The engine is called saturated when the 90th percentile of queue times exceeds this many times the time to compute a
prompt. A busy hour of a chat service reaches 30, too little hardware many hundreds; a lower factor would warn of
bursts."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Inputs and results.

    Attributes:
        trace_name: the file as the user named it.
        trace: the replayed trace.
        engine: the engine, before the sweep.
        host: host memory and tiers, before the sweep; its policy is the first of those compared.
        sweep: the place with several capacities; None without a sweep.
        cases: the simulated cases, the smallest size first.
        found: the result of each case.
        command: the words of the command line.
        is_rate_derived: whether the rate of computing prompts was derived from the trace.
    """

    trace_name: str
    trace: Trace
    engine: EngineModel
    host: HostModel
    sweep: Sweep | None
    cases: tuple[Case, ...]
    found: tuple[Simulation, ...]
    command: tuple[str, ...] = ()
    is_rate_derived: bool = False

    @property
    def by_label(self) -> dict[str, Simulation]:
        """The results by the labels of their cases, in order."""
        return {case.label: one for case, one in zip(self.cases, self.found, strict=True)}

    @property
    def policies(self) -> list[str]:
        """The compared policies, the engine without offloading first."""
        return list(dict.fromkeys(case.policy for case in self.cases))

    @property
    def swept_place(self) -> str:
        """The swept place in words; "" without a sweep."""
        if self.sweep is None:
            return ""
        return f"{self.sweep.place} memory" if self.sweep.place in (DEVICE, HOST) else self.sweep.place

    def pairs(self, size: Size | None) -> Iterator[tuple[Case, Simulation]]:
        """Yield the cases of one size, and those that do not depend on the sweep, with their results."""
        for case, one in zip(self.cases, self.found, strict=True):
            if case.size is None or case.size == size:
                yield case, one

    @property
    def saturated(self) -> list[str]:
        """The labels of simulations in which requests queue far longer than a prompt takes."""
        return [label for label, one in self.by_label.items() if is_saturated(self.engine, one)]

    @property
    def saturated_cases(self) -> list[Simulation]:
        """The simulations in which requests queue far longer than a prompt takes."""
        return [one for one in self.found if is_saturated(self.engine, one)]

    @property
    def has_times(self) -> bool:
        """Whether times are shown: not those of a queue that a derived rate of computing prompts has made."""
        return not (self.is_rate_derived and self.saturated)

    def inputs_to_json(self) -> dict[str, Any]:  # Any: JSON
        """Return version, command, trace, capacities and engine as JSON objects."""
        trace, engine = self.trace, self.engine
        return {
            "kvtier": __version__,
            "command": shlex.join(self.command),
            "trace": {
                "name": self.trace_name,
                "num_requests": len(trace.requests),
                "duration_s": trace.duration_s,
                "block_tokens": trace.block_tokens,
                "num_accesses": trace.num_accesses,
                "num_unique_blocks": trace.num_unique_blocks,
            },
            "engine": {
                "block_bytes": engine.block_bytes,
                "device_blocks": engine.num_device_blocks,
                "prefill_tokens_per_s": engine.prefill_tokens_per_s,
                "is_prefill_derived": self.is_rate_derived,
                "decode_tokens_per_s": engine.decode_tokens_per_s,
                "max_running": engine.max_running,
            },
            "is_saturated": bool(self.saturated),
            "capacities": {
                "block_bytes": engine.block_bytes,
                "device_blocks": engine.num_device_blocks,
                "host_blocks": self.host.num_blocks,
                "tier_blocks": {tier.name: tier.num_blocks for tier in self.host.tiers},
            },
        }

    def results_to_json(self) -> dict[str, Any]:  # Any: JSON
        """Return the results as JSON objects: by policy, or as a list of runs where one place was swept."""
        if self.sweep is None:
            return {"results": {label: one.to_json() for label, one in self.by_label.items()}}
        runs = [
            {
                "policy": case.policy,
                "size": case.size.label if case.size else None,
                "num_blocks": case.size.num_blocks if case.size else None,
                "result": one.to_json(),
            }
            for case, one in zip(self.cases, self.found, strict=True)
        ]
        return {"sweep": self.sweep.place, "runs": runs}


def is_saturated(engine: EngineModel, one: Simulation) -> bool:
    """Return whether requests wait for device blocks far longer than a prompt takes to compute. Pure."""
    total = one.total
    prefill_s = total.num_prompt_tokens / max(1, total.num_requests) / engine.prefill_tokens_per_s
    return total.queue.p90_s > SATURATION_FACTOR * prefill_s
