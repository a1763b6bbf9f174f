"""Simulations of one trace side by side, with their inputs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.results import Simulation
from kvtier.sim.sweep import Case, Size, Sweep
from kvtier.sim.trace import Trace


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
    """

    trace_name: str
    trace: Trace
    engine: EngineModel
    host: HostModel
    sweep: Sweep | None
    cases: tuple[Case, ...]
    found: tuple[Simulation, ...]

    @property
    def by_label(self) -> dict[str, Simulation]:
        """The results by the labels of their cases, in order."""
        return {case.label: one for case, one in zip(self.cases, self.found, strict=True)}

    @property
    def policies(self) -> list[str]:
        """The compared policies, the engine without offloading first."""
        return list(dict.fromkeys(case.policy for case in self.cases))

    def pairs(self, size: Size | None) -> Iterator[tuple[Case, Simulation]]:
        """Yield the cases of one size, and those that do not depend on the sweep, with their results."""
        for case, one in zip(self.cases, self.found, strict=True):
            if case.size is None or case.size == size:
                yield case, one

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """Return the results as JSON objects: by policy, or as a list of runs where one place was swept."""
        if self.sweep is None:
            return {label: one.to_json() for label, one in self.by_label.items()}
        runs = [
            {
                "policy": case.policy,
                "size": case.size.label if case.size else None,
                "num_blocks": case.size.num_blocks if case.size else None,
                "result": one.to_json(),
            }
            for case, one in zip(self.cases, self.found, strict=True)
        ]
        return {"sweep": self.sweep.place, "block_bytes": self.engine.block_bytes, "runs": runs}
