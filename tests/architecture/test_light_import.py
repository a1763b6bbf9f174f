"""Importing kvtier costs numpy and nothing else, and the scheduler side never needs torch."""

import subprocess
import sys

import pytest

PRINT_OUTSIDERS = """
import importlib, site, sys
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(name for name in loaded if name not in sys.stdlib_module_names and name != "kvtier"))
"""

SCHEDULER_SIDE = [
    "kvtier.cpu.manager",
    "kvtier.cpu.common",
    "kvtier.cpu.policies.lru",
    "kvtier.cpu.policies.arc",
    "kvtier.cpu.policies.hazard.policy",
    "kvtier.tiering.base",
    "kvtier.tiering.manager",
    "kvtier.tiering.primary",
    "kvtier.tiering.factory",
    "kvtier.tiering.example",
    "kvtier.connector.common",
    "kvtier.connector.metrics",
    "kvtier.recording.recorder",
    "kvtier.connector.scheduler",
    "kvtier.sim.simulate",
    "kvtier.sim.host_replay",
    "kvtier.sim.formats.registry",
    "kvtier.worker.worker",
    "kvtier.cli.main",
]


def outsiders_of(*modules: str) -> set[str]:
    """Return the third-party packages that a fresh interpreter loads for ``modules``."""
    command = [sys.executable, "-c", PRINT_OUTSIDERS, *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


def test_import_kvtier_loads_no_third_party_module_but_numpy() -> None:
    assert outsiders_of("kvtier") <= {"numpy"}


def test_the_measurement_sees_a_third_party_module() -> None:
    assert "pytest" in outsiders_of("kvtier", "pytest")


@pytest.mark.parametrize("module", SCHEDULER_SIDE)
def test_the_scheduler_side_loads_no_third_party_module_but_numpy(module: str) -> None:
    assert outsiders_of(module) <= {"numpy"}
