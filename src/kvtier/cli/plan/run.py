"""A plan with its inputs, and what it comes to in one sentence."""

from dataclasses import dataclass
from typing import Any

from kvtier.cli.output import format_change
from kvtier.cli.traces import describe_rate, inputs_to_json
from kvtier.planning.assumptions import list_assumptions
from kvtier.planning.capacity_curve import CurvePoint
from kvtier.planning.plan import Plan, PlanRequest, ShownMix, describe, format_bytes
from kvtier.planning.tier_mix import MixOutcome
from kvtier.sim.sweep import find_knee


@dataclass(frozen=True, slots=True)
class PlanRun:
    """One run of the command.

    Attributes:
        request: the inputs.
        plan: the results.
        trace_name: the trace's name for users.
        command: the words of the command line.
        is_rate_derived: whether the rate of computing prompts was derived from the trace.
    """

    request: PlanRequest
    plan: Plan
    trace_name: str
    command: tuple[str, ...]
    is_rate_derived: bool = False

    @property
    def knee(self) -> CurvePoint | None:
        """The capacity of host memory alone from which on more brings less; None without one."""
        curve = self.plan.curve
        found = find_knee([point.hit_ratio for point in curve])
        return None if found is None else curve[found]

    @property
    def verdict(self) -> str:
        """What to buy, in one sentence, or what host memory alone would bring."""
        goal, plan = self.request.goal, self.plan
        if goal is None or plan.without is None:
            return self._about_host()
        if plan.search is None:
            return "nothing to buy: the device cache alone reaches the goal"
        if not plan.shown:
            return "no mix was found"
        best = plan.shown[0]
        name = describe(best.candidate.mix, self.request.engine.block_bytes)
        price = f"${best.candidate.bill.usd_per_month:,.0f} a month"
        begin = f"buy {name}" if plan.is_reached else f"no mix reaches the goal; the closest, {name},"
        return f"{begin} at {price}: {_gain(plan.without, best)}"

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers assume, in sentences."""
        listed = list_assumptions(self.request)
        if not self.is_rate_derived:
            return listed
        rate = describe_rate(self.request.engine.prefill_tokens_per_s)
        return (f"Prompts are computed at {rate}.", *listed)

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """Return inputs and results as JSON objects."""
        request = self.request
        inputs = inputs_to_json(
            self.command, self.trace_name, request.trace, request.engine, is_rate_derived=self.is_rate_derived
        )
        return {
            **inputs,
            "verdict": self.verdict,
            **self.plan.to_json(),
            "knee_blocks": self.knee and self.knee.num_blocks,
            "assumptions": list(self.assumptions),
        }

    def _about_host(self) -> str:
        point, place = self.knee, "the knee: from here on more brings less"
        if point is None:
            point, place = self.plan.curve[-1], "hits rise to the end"
        num_bytes = point.num_blocks * self.request.engine.block_bytes
        usd = self.request.host.medium.capacity_usd_per_month(num_bytes)
        return (
            f"{format_bytes(num_bytes)} of host memory ({place}) would find {point.hit_ratio:.0%} of the blocks, for "
            f"${usd:,.0f} a month; --hit-ratio or --ttft-p90 finds the cheapest mix for a goal"
        )


def _gain(without: MixOutcome, best: ShownMix) -> str:
    computed = 1 - without.hit_ratio
    fewer_ratio = (best.timed.hit_ratio - without.hit_ratio) / computed if computed else 0.0
    gain = f"would compute {fewer_ratio:.0%} fewer prompt tokens"
    before, after = without.first_token, best.timed.first_token
    if before is None or after is None:
        return gain
    return f"{gain}; median first token {format_change(before.p50_s, after.p50_s)}"
