"""The assumptions behind a plan, in sentences, so that a reader can evaluator its numbers."""

from collections.abc import Iterator

from kvtier.planning.plan import PlanRequest
from kvtier.planning.prices import HOURS_PER_MONTH, Medium

DAY_S = 86_400
"""A trace shorter than a day does not show nights."""


def list_assumptions(request: PlanRequest) -> tuple[str, ...]:
    """Return the assumptions behind the plan for ``request``, those about the model first. Pure."""
    return (
        *_about_model(request),
        *_about_traffic(request),
        *(_about_purchase(request) if request.goal is not None else ()),
        *_about_prices(request),
    )


def _about_model(request: PlanRequest) -> Iterator[str]:
    shape, engine = request.shape, request.engine
    num_bytes = f"{shape.attention_bytes_per_token:,} bytes ({shape.kv_dtype})"
    yield f"A token takes {num_bytes}, all layers and tensor-parallel workers together."
    for line in shape.assumptions:
        yield f"{line[0].upper()}{line[1:]}."
    if shape.bounded_bytes:
        yield (
            f"Of that, {shape.growing_bytes_per_token:,} bytes grow with the prompt; window layers need "
            f"{shape.bounded_bytes:,} bytes for any long prompt. Loads are simulated as if all blocks of window layers "
            "were loaded, so times and break-even lengths are upper bounds."
        )
    if shape.states is not None:
        interval = engine.states.interval_tokens if engine.states else None
        where = f"each block of {engine.block_tokens:,}" if interval is None else f"each {interval:,}"
        yield (
            f"Planned with a state of {shape.state_bytes:,} bytes after {where} tokens, and after the last whole block "
            "of each prompt; a prefix counts up to the last one that is held."
        )
        yield (
            f"Pages have {engine.block_bytes:,} bytes: the keys and values of {engine.block_tokens:,} tokens, or one "
            "state; of a loaded prefix one state is loaded."
        )
    yield (
        f"Prompts are computed at {engine.prefill_tokens_per_s:,.0f} tokens a second in all, at any position in the "
        "prompt. In reality long prompts take longer, so loading is better than shown."
    )


def _about_traffic(request: PlanRequest) -> Iterator[str]:
    trace = request.trace
    yield (
        f"Blocks are those of the trace, {trace.block_tokens} tokens; an engine with smaller blocks finds slightly "
        "more. A tier keeps its bandwidth whatever its capacity."
    )
    yield f"The curve is of host memory alone under {request.cache_policy}, without a device cache and without time."
    if 0 < trace.duration_s < DAY_S:
        yield (
            f"The trace lasts {trace.duration_s:,.0f} s and begins with empty caches; a month is {HOURS_PER_MONTH:.0f} "
            "hours of the same traffic. If the trace is of a busy hour, traffic, wear and savings are overstated."
        )


def _about_purchase(request: PlanRequest) -> Iterator[str]:
    yield (
        "Hits are prompt tokens that need not be computed, those of the device cache included, with transfers that "
        "take time."
    )
    yield (
        "More capacity on the same media is assumed to be never worse and to write no more. The cheapest mix is "
        "assumed to lie where a little less capacity misses the goal."
    )
    yield (
        "A purchase is spread over its months, or over the time until it is worn out if that is shorter. Power, racks "
        "and labour are not counted."
    )
    yield (
        f"Saved GPU time is loaded tokens at the rate above on {request.num_gpus} GPU(s), at "
        f"${request.prices.gpu_usd_per_hour:.2f} an hour each: {request.prices.gpu_source}."
    )
    if any(row.medium.drive_writes_per_day for row in request.tiers):
        yield (
            "A disk lasts capacity as sold x drive writes a day x years of warranty / bytes written at the rate of the "
            "trace; kvtier writes whole large blocks, and no write amplification is added."
        )


def _about_prices(request: PlanRequest) -> tuple[str, ...]:
    media = [request.host.medium, *(row.medium for row in request.tiers)]
    return tuple(_source_of(medium) for medium in media)


def _source_of(medium: Medium) -> str:
    return f"{medium.name} ({medium.tier}), {medium.date}: {medium.source}."
