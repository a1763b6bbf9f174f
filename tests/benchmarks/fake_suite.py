"""A benchmark that measures nothing: it yields what a test gives it."""

import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import pytest

from benchmarks.harness.measurement import FLOOR, OURS, Bar, Better, Measurement
from benchmarks.harness.suite import Options, Suite

MODULE = "tests.benchmarks.a_fake_benchmark"

FAST = Measurement(
    {"operation": "put", "blocks": 16},
    "MiB/s",
    Better.HIGHER,
    {OURS: (10.0, 20.0, 30.0), FLOOR: (20.0, 20.0, 20.0), "peer": (5.0, 5.0, 5.0)},
    Bar(FLOOR, 0.9),
)
SLOW = Measurement(
    {"operation": "get", "blocks": 32},
    "MiB/s",
    Better.HIGHER,
    {OURS: (1.0, 2.0, 3.0), FLOOR: (1.0, 2.0, 3.0)},
)

Measure = Callable[[Options], Iterator[Measurement]]


def install_suite(
    monkeypatch: pytest.MonkeyPatch, measure: Measure, name: str = "fake", x_label: str | None = None
) -> Suite:
    """Return a suite whose module has ``measure``."""
    module = ModuleType(f"{MODULE}_{name}")
    module.__dict__["measure"] = measure
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Suite(name, f"what {name} measures", module.__name__, x_label)


def yielding(measurements: Sequence[Measurement], *notes: str) -> Measure:
    """Return a measuring function that notes and yields what it is given."""

    def measure(options: Options) -> Iterator[Measurement]:
        for note in notes:
            options.note(note)
        yield from measurements

    return measure
