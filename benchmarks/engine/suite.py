"""The measurements of the embedded engine, one after another."""

from collections.abc import Iterator

from benchmarks.engine import first_token, no_hit, steps
from benchmarks.harness.measurement import Measurement
from benchmarks.harness.suite import Options


def measure(options: Options) -> Iterator[Measurement]:
    """Yield times to first token, ratios without hits, and times of a step."""
    yield from first_token.measure(options)
    yield from no_hit.measure(options)
    yield from steps.measure(options)
