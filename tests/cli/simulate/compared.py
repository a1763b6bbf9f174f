"""A small comparison for the tests of tables, plots and the page."""

from collections.abc import Sequence

from kvtier.cli.simulate.comparison import Comparison
from kvtier.sim.link import LinkSpeed
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.sweep import Size, Sweep, plan_cases, run_cases
from kvtier.sim.tier import TierModel
from kvtier.sim.trace import TraceRequest, make_trace

BLOCK_BYTES = 2**20
ENGINE = EngineModel(10, BLOCK_BYTES, num_device_blocks=6, prefill_tokens_per_s=50, decode_tokens_per_s=50)
HOST = HostModel(4, tiers=(TierModel("disk", 40, LinkSpeed(1e9, 1e9)),))
SIZES = (Size(4, "4MiB"), Size(32, "32MiB"))


def compare(
    policies: Sequence[str] = ("lru", "arc"),
    sweep: Sweep | None = None,
    *,
    engine: EngineModel = ENGINE,
    host: HostModel = HOST,
    trace_name: str = "trace.jsonl",
) -> Comparison:
    """Simulate 30 turns of three chats that share a beginning."""
    trace = make_trace(
        [TraceRequest(20.0 * turn, 45, 5, (0, 1 + turn % 3, 10 + turn % 6, 20 + turn)) for turn in range(30)],
        10,
    )
    cases = plan_cases(engine, host, policies, sweep)
    found = run_cases(trace, cases)
    return Comparison(trace_name, trace, engine, host, sweep, tuple(cases), tuple(found))


def compare_host_sizes() -> Comparison:
    """Simulate host memory of 4 MiB and of 32 MiB."""
    return compare(sweep=Sweep("host", SIZES))
