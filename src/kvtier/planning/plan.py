"""A plan: what a trace needs, what each medium can do for it, and the cheapest mix that reaches a goal.

Every shown result of a mix is from a simulation on simulated time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvtier.cost_model import LinkRate, PrefillRate, break_even_tokens, compute_s, load_s
from kvtier.planning.capacity_curve import CurvePoint, draw_curve
from kvtier.planning.evaluator import MixEvaluator, ScreeningEvaluator, TimedEvaluator
from kvtier.planning.model_shape import ModelShape
from kvtier.planning.planner import MixCandidate, Row, Search, list_kinds, search
from kvtier.planning.prices import GB, HOST, SECONDS_PER_MONTH, Medium, PriceList
from kvtier.planning.tier_mix import Goal, Mix, MixOutcome
from kvtier.planning.working_set import ReuseGaps, WorkingSet, measure_reuse_gaps, measure_working_sets
from kvtier.sim.model import EngineModel
from kvtier.sim.states import list_pages
from kvtier.sim.trace import Trace

EXAMPLE_TOKENS = 8192
"""Example length beside the break-even length: a long document or a dozen turns of a chat."""

Progress = Callable[[str], Callable[[], object]]
"""Called with the name of each replay before it begins; returns a function to call after each request."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The inputs of a plan.

    Attributes:
        trace: the traffic, in the engine's blocks.
        shape: the model's keys and values.
        engine: the engine that serves the traffic.
        prices: prices of the media.
        host: capacities of host memory to try.
        tiers: capacities of each tier to try.
        cache_policy: registered name of the policy of host memory.
        goal: the goal; None: no search.
        max_tiers: tiers behind host memory, at most.
        num_gpus: GPUs that compute the prompts together.
        max_shown: mixes to show, at most.
    """

    trace: Trace
    shape: ModelShape
    engine: EngineModel
    prices: PriceList
    host: Row
    tiers: tuple[Row, ...]
    cache_policy: str = "lru"
    goal: Goal | None = None
    max_tiers: int = 1
    num_gpus: int = 1
    max_shown: int = 5


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The prefix length from which loading is faster than computing.

    Attributes:
        medium: the medium that is loaded from, through host memory.
        tokens: longer prefixes are faster to load; 0: any length, None: no length.
        example_s: seconds to load EXAMPLE_TOKENS.
        example_compute_s: seconds to compute them.
    """

    medium: str
    tokens: int | None
    example_s: float
    example_compute_s: float


@dataclass(frozen=True, slots=True)
class ShownMix:
    """A mix in the result.

    Attributes:
        candidate: the mix, from the search.
        timed: its results on simulated time.
        saved_gpu_hours_per_month: GPU time that its loads save.
        saved_usd_per_month: the price of that GPU time.
    """

    candidate: MixCandidate
    timed: MixOutcome
    saved_gpu_hours_per_month: float
    saved_usd_per_month: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The results of a plan.

    Attributes:
        bytes_per_token: bytes of a token's keys and values.
        unique_bytes: bytes of all distinct blocks of the trace, and of all kept states.
        working_sets: blocks in use within windows.
        reuse_gaps: times between two uses of a block.
        curve: hits of host memory alone.
        break_evens: host memory first, then each tier.
        without: the engine with its device cache alone; None without a goal.
        search: result of the search; None without a goal, or when the device cache alone reaches it.
        shown: the cheapest mix of each kind; the closest one when none reaches the goal.
        is_reached: whether the goal is reached; None without one.
    """

    bytes_per_token: int
    unique_bytes: int
    working_sets: tuple[WorkingSet, ...]
    reuse_gaps: ReuseGaps
    curve: tuple[CurvePoint, ...]
    break_evens: tuple[BreakEven, ...]
    without: MixOutcome | None = None
    search: Search | None = None
    shown: tuple[ShownMix, ...] = ()
    is_reached: bool | None = None

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """Return the values as JSON objects; null for infinity, such as the life of an unused disk."""
        return {name: _to_finite(value) for name, value in asdict(self).items()}


def make_plan(request: PlanRequest, begin: Progress | None = None) -> Plan:
    """Return the plan for ``request``.

    Args:
        request: the inputs.
        begin: called before each replay, for a progress bar.

    Raises:
        ConfigError: the trace has no duration.
        UnknownNameError: the policy does not exist.
    """
    begin = begin or _ignore_progress
    goal, states = request.goal, request.engine.states
    curve = draw_curve(
        request.trace, request.cache_policy, on_request=begin("hits against capacity"), states=states
    )
    pages = list_pages(request.trace, states)
    measured = Plan(
        bytes_per_token=request.shape.attention_bytes_per_token,
        unique_bytes=pages.num_unique_blocks * request.engine.block_bytes,
        working_sets=measure_working_sets(pages),
        reuse_gaps=measure_reuse_gaps(pages),
        curve=curve,
        break_evens=list_break_evens(request),
    )
    return measured if goal is None else _plan_purchase(request, goal, measured, begin)


def list_break_evens(request: PlanRequest) -> tuple[BreakEven, ...]:
    """Return the break-even length of host memory and of each tier. Pure."""
    media = [request.host.medium, *(row.medium for row in request.tiers)]
    return tuple(_break_even(medium, request) for medium in media)


def links_of(medium: Medium, request: PlanRequest) -> list[LinkRate]:
    """Return the links between a medium and the device: its own, and that of host memory. Pure.

    Each load brings one recurrent state, where the model keeps any: its time is part of a link's latency.
    """
    host = request.host.medium
    device_link = LinkRate(host.read_gb_s * GB, host.latency_ms / 1000)
    links = [*([] if medium.name == HOST else [medium.read_rate(request.engine.block_bytes)]), device_link]
    num_bytes = request.shape.state_bytes
    return [replace(one, latency_s=one.latency_s + num_bytes / one.bytes_per_s) for one in links]


def prefill_rate_of(request: PlanRequest) -> PrefillRate:
    """Return what computing a token costs on the engine of ``request``. Pure."""
    return PrefillRate(1 / request.engine.prefill_tokens_per_s)


def describe(mix: Mix, block_bytes: int) -> str:
    """Return a mix as a short text such as "host 64 GiB + nvme 7.0 TiB". Pure."""
    parts = (f"{one.medium.name} {format_bytes(one.num_blocks * block_bytes)}" for one in mix.shares)
    return " + ".join(parts) or "without"


def format_bytes(num_bytes: float) -> str:
    """Return a size in the largest binary unit of which there is at least one. Pure."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.{int(num_bytes < 100 and num_bytes != int(num_bytes))}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} PiB"


def _break_even(medium: Medium, request: PlanRequest) -> BreakEven:
    rate, links = prefill_rate_of(request), links_of(medium, request)
    bytes_per_token = max(1, request.shape.attention_bytes_per_token)  # of states alone, none
    return BreakEven(
        medium.name,
        break_even_tokens(bytes_per_token, links, rate),
        load_s(EXAMPLE_TOKENS * bytes_per_token, links),
        compute_s(0, EXAMPLE_TOKENS, rate),
    )


def _plan_purchase(request: PlanRequest, goal: Goal, measured: Plan, begin: Progress) -> Plan:
    timed = TimedEvaluator(request.trace, request.engine, request.cache_policy)
    without = timed.evaluate(Mix(()), begin("without offloading"))
    found: Search | None = None
    shown: tuple[ShownMix, ...] = ()
    is_reached = goal.is_reached(without)
    if not is_reached:
        evaluator: MixEvaluator = timed
        if goal.hit_ratio is not None:
            evaluator = ScreeningEvaluator(timed, goal.hit_ratio, without.hit_ratio)
        found = search(
            list_kinds(request.host, request.tiers, request.max_tiers),
            goal,
            evaluator,
            block_bytes=request.engine.block_bytes,
            duration_s=request.trace.duration_s,
            on_mix=lambda mix: begin(describe(mix, request.engine.block_bytes)),
        )
        is_reached = bool(found.best)
        candidates = found.best[: request.max_shown] or ((found.closest,) if found.closest else ())
        shown = _show(request, candidates, timed, begin)
    return Plan(
        measured.bytes_per_token,
        measured.unique_bytes,
        measured.working_sets,
        measured.reuse_gaps,
        measured.curve,
        measured.break_evens,
        without,
        found,
        shown,
        is_reached,
    )


def _show(
    request: PlanRequest, candidates: Sequence[MixCandidate], timed: TimedEvaluator, begin: Progress
) -> tuple[ShownMix, ...]:
    """Evaluate on simulated time what was only tried without time, and compute the savings."""
    shown: list[ShownMix] = []
    for candidate in candidates:
        outcome = candidate.outcome
        if outcome.first_token is None:
            name = describe(candidate.mix, request.engine.block_bytes)
            outcome = timed.evaluate(candidate.mix, begin(f"{name}, timed"))
        saved_s = (outcome.num_saved_tokens or 0) / request.engine.prefill_tokens_per_s
        hours = saved_s / 3600 * request.num_gpus * SECONDS_PER_MONTH / request.trace.duration_s
        shown.append(ShownMix(candidate, outcome, hours, hours * request.prices.gpu_usd_per_hour))
    return tuple(shown)


def _to_finite(value: object) -> object:
    if isinstance(value, dict):
        return {str(name): _to_finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_to_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _ignore_progress(what: str) -> Callable[[], object]:
    del what
    return lambda: None
