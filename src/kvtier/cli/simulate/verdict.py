"""What a comparison comes to, in one sentence: would it help, and by how much?"""

from dataclasses import asdict, dataclass
from typing import Any

from kvtier.cli.output import format_change
from kvtier.cli.simulate.comparison import Comparison
from kvtier.sim.results import Simulation
from kvtier.sim.sweep import WITHOUT, Case, Size, Sweep, find_knee

NO_DIFFERENCE = 0.005
"""Half a percent of the tokens: less is not worth a sentence, and may be chance in the traffic."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The best case of a comparison beside the engine without offloading.

    Attributes:
        text: the verdict.
        policy: of the best case; None when nothing was served.
        size: of the swept place, the knee of the curve or else the largest; None without a sweep.
        fewer_ratio: share of the tokens computed without offloading that need not be computed; negative when more are.
        saved_s: seconds that requests wait less for their first tokens, all of them together; None as below.
        median_first_token_s: without offloading and with it; None when the engine is saturated at the derived rate.
    """

    text: str
    policy: str | None = None
    size: str | None = None
    fewer_ratio: float = 0.0
    saved_s: float | None = None
    median_first_token_s: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """Return the values as JSON objects."""
        return asdict(self)


def make_verdict(comparison: Comparison) -> Verdict:
    """Return the verdict. Pure."""
    served = [pair for pair in _candidates(comparison) if pair[1].total.num_requests]
    if not served:
        return Verdict("no request was served: each needs more device blocks than there are")
    case, best = max(served, key=lambda pair: pair[1].saved_ratio)  # the first of equal ones
    without = _without(comparison, case)
    fewer_ratio = _fewer_ratio(without, best)
    times_s = (without.total.first_token.p50_s, best.total.first_token.p50_s)
    medians = times_s if comparison.has_times else None
    size = case.size.label if case.size else None
    text = _in_words(comparison, case, best, fewer_ratio, medians)
    saved_s = _saved_s(without, best) if comparison.has_times else None
    return Verdict(text, case.policy, size, fewer_ratio, saved_s, medians)


def find_sweep_knee(comparison: Comparison) -> int | None:
    """Return the index of the size from which on more brings less; None without one. Pure."""
    if comparison.sweep is None or _is_flat(comparison, comparison.sweep):
        return None
    return find_knee(_best_ratios(comparison, comparison.sweep))


def chosen_size(comparison: Comparison) -> Size | None:
    """Return the size that the verdict is about; None without a sweep. Pure.

    It is the knee, or the largest of a curve that still rises, or the smallest when more brings nothing.
    """
    if comparison.sweep is None:
        return None
    if _is_flat(comparison, comparison.sweep):
        return comparison.sweep.sizes[0]
    knee = find_sweep_knee(comparison)
    return comparison.sweep.sizes[-1 if knee is None else knee]


def _best_ratios(comparison: Comparison, sweep: Sweep) -> list[float]:
    return [
        max(one.saved_ratio for case, one in comparison.pairs(size) if case.policy != WITHOUT)
        for size in sweep.sizes
    ]


def _is_flat(comparison: Comparison, sweep: Sweep) -> bool:
    ratios = _best_ratios(comparison, sweep)
    return max(ratios) - ratios[0] < NO_DIFFERENCE


def _candidates(comparison: Comparison) -> list[tuple[Case, Simulation]]:
    return [pair for pair in comparison.pairs(chosen_size(comparison)) if pair[0].policy != WITHOUT]


def _without(comparison: Comparison, case: Case) -> Simulation:
    return next(one for other, one in comparison.pairs(case.size) if other.policy == WITHOUT)


def _fewer_ratio(without: Simulation, best: Simulation) -> float:
    computed = 1 - without.saved_ratio
    return (best.saved_ratio - without.saved_ratio) / computed if computed else 0.0


def _saved_s(without: Simulation, best: Simulation) -> float:
    before, after = without.total.first_token.mean_s, best.total.first_token.mean_s
    return (before - after) * best.total.num_requests


def _in_words(
    comparison: Comparison,
    case: Case,
    best: Simulation,
    fewer_ratio: float,
    medians: tuple[float, float] | None,
) -> str:
    condition = []
    if case.size is not None:
        condition.append(f"{case.size.label} of {comparison.swept_place} ({_place_on_curve(comparison)})")
    if len(comparison.policies) > 2:
        condition.append(case.policy)
    begin = f"{' and '.join(condition)}: " if condition else ""
    if abs(fewer_ratio) < NO_DIFFERENCE:
        most = f"; at most {best.bound_ratio:.0%} could be found" if best.bound_ratio is not None else ""
        return f"{begin}would not help: as many prompt tokens would be computed{most}"
    change = "fewer" if fewer_ratio > 0 else "more"
    times = f"; median first token {format_change(*medians)}" if medians else ""
    return f"{begin}would compute {abs(fewer_ratio):.0%} {change} prompt tokens{times}"


def _place_on_curve(comparison: Comparison) -> str:
    if comparison.sweep is not None and _is_flat(comparison, comparison.sweep):
        return "more brings nothing"
    return (
        "hits still rise"
        if find_sweep_knee(comparison) is None
        else "the knee: from here on more brings less"
    )
