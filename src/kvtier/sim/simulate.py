"""Simulates an engine that serves a trace. Deterministic: equal input gives equal results."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

from kvtier.errors import ConfigError
from kvtier.misses import RequestRecord
from kvtier.sim.bound import count_bound_tokens
from kvtier.sim.clients import Clients
from kvtier.sim.engine import SimulatedEngine
from kvtier.sim.history import HistoryRecorder, Reading
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.request import SimulatedRequest, make_hash, make_request
from kvtier.sim.results import (
    DEVICE,
    HOST,
    Simulation,
    TierTraffic,
    choose_period,
    name_places,
    quantiles_of,
    split_into_periods,
    summarise,
)
from kvtier.sim.states import MAX_OTHER_STATES
from kvtier.sim.trace import Trace

DEFAULT_PERIOD_S = 60.0
"""Length in seconds of a period of the result. Shorter ones have few requests each; longer ones hide a burst."""


YOUNG_GENERATION_OBJECTS = 20_000
"""New objects between two garbage collections of the youngest generation. A simulation makes no reference cycles; with
Python's default of 700, collecting takes a twentieth of the time."""


def simulate(
    trace: Trace,
    engine: EngineModel,
    host: HostModel | None,
    *,
    period_s: float = DEFAULT_PERIOD_S,
    on_request: Callable[[], object] | None = None,
    on_record: Callable[[RequestRecord], object] | None = None,
    finds_bound: bool = False,
) -> Simulation:
    """Serve ``trace`` on ``engine``.

    Args:
        trace: the requests.
        engine: the engine; its blocks must have the trace's length.
        host: host memory and the tiers behind it; None: an engine without offloading.
        period_s: length of the periods of the result; longer where there would be over MAX_PERIODS.
        on_request: called after each request, for a progress bar.
        on_record: called for each served request, in the order in which they end, with where its prompt came from; it
            is never called without ``host``.
        finds_bound: whether to compute the upper bound of hits; takes about a tenth longer.

    Raises:
        ConfigError: the blocks differ in length, or ``period_s`` is not above zero.

    Effects: while it runs the garbage collector skips all objects that existed before (``gc.freeze``).
    """
    if engine.block_tokens != trace.block_tokens:
        remedy = f"the trace has blocks of {trace.block_tokens} tokens: give the engine the same length"
        raise ConfigError("block_tokens", engine.block_tokens, remedy)
    if not period_s > 0:
        raise ConfigError("period_s", period_s, "must be above zero")
    served: list[SimulatedRequest] = []

    def note(request: SimulatedRequest) -> None:
        if request.block_ids:
            served.append(request)
        if on_request is not None:
            on_request()

    hash_of = cache(make_hash)
    requests = [
        make_request(number, one, trace.block_tokens, hash_of) for number, one in enumerate(trace.requests)
    ]
    if host is not None:
        clients = Clients(host.client_hints, trace, host.hint_noise)
        for number, (request, traced) in enumerate(zip(requests, trace.requests, strict=True)):
            request.kv_transfer_params = clients.hints_of(traced, number)
    num_unique = hash_of.cache_info().currsize
    begin_s = requests[0].arrival_s if requests else 0.0
    recorder = HistoryRecorder(begin_s, lambda: _read(simulated, host))
    num_keys = num_unique * (
        2 if engine.states else 1
    )  # a block of keys and values, and perhaps the state after it
    simulated = SimulatedEngine(
        _bound_device(engine, requests), host, note, num_keys, recorder.record_until, on_record
    )
    with _old_objects_frozen():
        simulated.run(requests)
    duration_s = simulated.timeline() - begin_s
    chosen_s = choose_period(served, period_s)
    return Simulation(
        total=summarise(served),
        periods=split_into_periods(served, chosen_s),
        period_s=chosen_s,
        num_rejected=simulated.num_rejected,
        duration_s=duration_s,
        tiers=_traffic_of(simulated, engine, host, num_unique, duration_s) if host else (),
        counters=name_places(simulated.stats())
        | ({"primary.capacity_blocks": float(host.num_blocks)} if host else {}),
        first_token_quantiles_s=quantiles_of(one.first_token_s - one.arrival_s for one in served),
        history=recorder.finish(simulated.timeline()),
        num_bound_tokens=count_bound_tokens(simulated.admitted, engine, host) if finds_bound else None,
    )


@contextmanager
def _old_objects_frozen() -> Iterator[None]:
    """Exclude the existing objects, such as a trace and its tables, from full garbage collections.

    Effects: the process collects less often. Does nothing if objects are frozen already, because the end would thaw
        those too.
    """
    if gc.get_freeze_count():
        yield
        return
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(max(YOUNG_GENERATION_OBJECTS, thresholds[0]) if thresholds[0] else 0, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _read(simulated: SimulatedEngine, host: HostModel | None) -> Reading:
    """Return how full each place is now, and what has been written to it."""
    held, written = {DEVICE: simulated.num_held_device_blocks}, {}
    if host is not None and simulated.spec is not None:
        primary = simulated.spec.get_manager().primary_tier.stats()
        held[HOST], written[HOST] = int(primary["primary.held_blocks"]), int(primary["primary.stored"])
        for model, tier in zip(host.tiers, simulated.spec.tiers, strict=True):
            held[model.name] = int(tier.stats()["held_blocks"])
            written[model.name] = tier.num_written_blocks
    return Reading(held, written)


def _bound_device(engine: EngineModel, requests: Sequence[SimulatedRequest]) -> EngineModel:
    """Return ``engine`` with no more device blocks than all requests together could use. Pure."""
    num_tokens = (request.num_prompt_tokens + request.num_output_tokens for request in requests)
    num_blocks = sum(-(-number // engine.block_tokens) for number in num_tokens)
    if engine.states is not None:
        num_blocks += sum(len(request.block_hashes) + MAX_OTHER_STATES for request in requests)
    return replace(engine, num_device_blocks=min(engine.num_device_blocks, max(1, num_blocks)))


def _traffic_of(
    simulated: SimulatedEngine, engine: EngineModel, host: HostModel, num_unique: int, duration_s: float
) -> tuple[TierTraffic, ...]:
    """Return the traffic of host memory and each tier behind it."""
    assert simulated.worker is not None and simulated.spec is not None, "there is a host"  # noqa: PT018
    counters = simulated.stats()
    to_device, to_host = simulated.worker.to_device.traffic, simulated.worker.to_host.traffic

    def traffic(
        name: str, num_blocks: int, num_written: int, num_read: int, busy_s: float, max_queued: int
    ) -> TierTraffic:
        return TierTraffic(
            name=name,
            capacity_blocks=num_blocks,
            num_written_blocks=num_written,
            written_bytes=num_written * engine.block_bytes,
            num_read_blocks=num_read,
            read_bytes=num_read * engine.block_bytes,
            writes_per_unique_block=num_written / num_unique if num_unique else 0.0,
            busy_ratio=busy_s / duration_s if duration_s else 0.0,
            max_queued_blocks=max_queued,
        )

    return (
        traffic(
            HOST,
            host.num_blocks,
            int(counters["primary.stored"]),
            to_device.read_bytes // engine.block_bytes,
            max(to_device.busy_s, to_host.busy_s),
            to_device.max_queued_parts + to_host.max_queued_parts,
        ),
        *(
            traffic(
                model.name,
                model.num_blocks,
                tier.num_written_blocks,
                tier.num_read_blocks,
                tier.link.traffic.busy_s,
                tier.link.traffic.max_queued_parts,
            )
            for model, tier in zip(host.tiers, simulated.spec.tiers, strict=True)
        ),
    )
