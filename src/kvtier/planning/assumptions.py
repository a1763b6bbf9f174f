"""What a plan takes for granted, in sentences. A number that rests on something unsaid is worth little."""

from collections.abc import Iterator

from kvtier.planning.plan import PlanRequest
from kvtier.planning.prices import HOURS_PER_MONTH, Medium

DAY_S = 86_400
"""Traces shorter than a day say nothing of nights."""


def list_assumptions(question: PlanRequest) -> tuple[str, ...]:
    """Return the assumptions behind the plan for ``question``, those about the model first. Pure."""
    return (
        *_about_model(question),
        *_about_traffic(question),
        *(_about_purchase(question) if question.goal is not None else ()),
        *_about_prices(question),
    )


def _about_model(question: PlanRequest) -> Iterator[str]:
    shape, engine = question.shape, question.engine
    yield (
        f"A token takes {shape.bytes_per_token:,} bytes ({shape.kv_dtype}), all layers and devices together; heads or "
        "latents that are copied to several tensor-parallel ranks count once."
    )
    for line in shape.assumptions:
        yield f"{line[0].upper()}{line[1:]}."
    if shape.bounded_bytes:
        yield (
            f"Of that, {shape.growing_bytes_per_token:,} bytes grow with the prompt; window layers need "
            f"{shape.bounded_bytes:,} bytes for any long prompt. Loads are simulated as if the windows' blocks were "
            "loaded whole, so times and break-even lengths are upper bounds."
        )
    yield (
        f"Prompts are computed at {engine.prefill_tokens_per_s:,.0f} tokens a second in all, wherever a token stands: "
        "long prompts take longer in truth, which makes loading better than shown."
    )


def _about_traffic(question: PlanRequest) -> Iterator[str]:
    trace = question.trace
    yield (
        f"Blocks are those of the trace, {trace.block_tokens} tokens; an engine with smaller blocks finds slightly "
        "more. A tier keeps its bandwidth whatever its capacity."
    )
    yield f"The curve is of host memory alone under {question.cache_policy}, without a device cache and without time."
    if 0 < trace.duration_s < DAY_S:
        yield (
            f"The trace lasts {trace.duration_s:,.0f} s and begins with empty caches; a month is {HOURS_PER_MONTH:.0f} "
            "hours of the same traffic. If it was a busy hour, traffic, wear and savings are overstated."
        )


def _about_purchase(question: PlanRequest) -> Iterator[str]:
    yield (
        "Hits are prompt tokens that need not be computed, those of the device cache among them, when transfers take "
        "their time."
    )
    yield (
        "More capacity on the same media is taken to be never worse and to write no more, and the cheapest mix to lie "
        "where a little less falls short."
    )
    yield (
        "A purchase is spread over its months, or over the time until it is worn out if that is shorter; power, racks "
        "and work are not counted."
    )
    yield (
        f"Saved GPU time is loaded tokens at the rate above on {question.num_gpus} GPU(s), at "
        f"${question.prices.gpu_usd_per_hour:.2f} an hour each: {question.prices.gpu_source}."
    )
    if any(row.medium.drive_writes_per_day for row in question.tiers):
        yield (
            "A disk lasts capacity as sold x drive writes a day x years of warranty / bytes written at the rate of the "
            "trace; kvtier writes whole large blocks, and no write amplification is added."
        )


def _about_prices(question: PlanRequest) -> tuple[str, ...]:
    media = [question.host.medium, *(row.medium for row in question.tiers)]
    return tuple(_source_of(medium) for medium in media)


def _source_of(medium: Medium) -> str:
    return f"{medium.name} ({medium.tier}), {medium.date}: {medium.source}."
