"""The derived rate of computing prompts follows the busiest stretch of a trace."""

import pytest

from kvtier.sim.model import BUSY_SHARE, BUSY_STRETCH_S, DEFAULT_PREFILL_TOKENS_PER_S, derive_prefill_rate
from kvtier.sim.trace import Trace, TraceRequest, make_trace


def steady(tokens_per_s: int, begin_s: int = 0, seconds: int = 1000) -> list[TraceRequest]:
    """Return a request each second."""
    return [TraceRequest(float(begin_s + second), tokens_per_s, 1, ()) for second in range(seconds)]


def trace_of(*parts: list[TraceRequest]) -> Trace:
    return make_trace([request for part in parts for request in part], 16)


def test_quiet_traffic_gets_the_default() -> None:
    assert derive_prefill_rate(trace_of(steady(10))) == DEFAULT_PREFILL_TOKENS_PER_S
    assert derive_prefill_rate(trace_of()) == DEFAULT_PREFILL_TOKENS_PER_S


def test_the_busiest_stretch_decides_and_the_rate_has_two_digits() -> None:
    rate = derive_prefill_rate(trace_of(steady(1_000), steady(50_000, 1000, 400), steady(1_000, 1400)))

    assert rate == pytest.approx(50_000 * (BUSY_STRETCH_S + 1) / BUSY_STRETCH_S / BUSY_SHARE, rel=0.02)
    assert rate == 72_000


def test_a_short_burst_counts_less_than_a_stretch() -> None:
    burst = derive_prefill_rate(trace_of(steady(1_000), steady(100_000, 1000, 30)))

    assert burst < 100_000 / BUSY_SHARE / 5
