"""What a comparison comes to, in one sentence: would it help, and by how much?"""

from dataclasses import asdict, dataclass
from typing import Any

from kvtier.cli.output import format_change
from kvtier.cli.simulate.comparison import Comparison
from kvtier.cli.simulate.options import format_size
from kvtier.sim.results import DEVICE, Simulation
from kvtier.sim.sweep import WITHOUT, Case, Size, Sweep, find_knee

NO_DIFFERENCE = 0.005
"""Half a percent of the tokens: less is not worth a sentence, and may be chance in the traffic."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The best case of a comparison and what it has over the engine without offloading.

    Attributes:
        text: the verdict.
        policy: of the best case; None when nothing was served.
        size: of the swept place, the knee of the curve or else the largest; None without a sweep.
        fewer_ratio: share of the tokens computed without offloading that need not be computed; negative when more are.
        saved_s: seconds that requests wait less for their first tokens, all of them together; None as below.
        median_first_token_s: without offloading and with it; None when the engine is saturated, with or without it: the
            times are those of a queue that grows for as long as the trace lasts.
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
    served = [pair for pair in _at(comparison, chosen_size(comparison)) if pair[1].total.num_requests]
    if not served:
        return Verdict("no request was served: each needs more device blocks than there are")
    case, best = max(served, key=lambda pair: pair[1].not_computed_ratio)  # the first of equal ones
    without = _without(comparison, case)
    fewer_ratio = _fewer_ratio(without, best)
    times_s = (without.total.first_token.p50_s, best.total.first_token.p50_s)
    is_saturated = any(one is without or one is best for one in comparison.saturated_cases)
    has_times = comparison.has_times and not is_saturated and case.policy != WITHOUT
    medians = times_s if has_times else None
    size = case.size.label if case.size else None
    text = _in_words(comparison, case, best, fewer_ratio, medians)
    saved_s = _saved_s(without, best) if has_times else None
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
    return [max(one.not_computed_ratio for _, one in _at(comparison, size)) for size in sweep.sizes]


def _is_flat(comparison: Comparison, sweep: Sweep) -> bool:
    ratios = _best_ratios(comparison, sweep)
    return max(ratios) - ratios[0] < NO_DIFFERENCE


def _at(comparison: Comparison, size: Size | None) -> list[tuple[Case, Simulation]]:
    """Return the cases of a size with offloading, or the one without where there is no host memory."""
    pairs = list(comparison.pairs(size))
    return [pair for pair in pairs if pair[0].policy != WITHOUT] or pairs


def _without(comparison: Comparison, case: Case) -> Simulation:
    return next(one for other, one in comparison.pairs(case.size) if other.policy == WITHOUT)


def _fewer_ratio(without: Simulation, best: Simulation) -> float:
    computed = 1 - without.not_computed_ratio
    return (best.not_computed_ratio - without.not_computed_ratio) / computed if computed else 0.0


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
    if case.policy == WITHOUT:
        return (
            f"{begin}without offloading {best.not_computed_ratio:.0%} of the prompt tokens are not computed"
        )
    if abs(fewer_ratio) < NO_DIFFERENCE:
        most = f"; not computed: at most {best.at_most_ratio:.0%}" if best.at_most_ratio is not None else ""
        if _is_curve_flat(comparison):
            begin = f"none of these sizes helps{_compare_with_device(comparison)}: "
        else:
            begin += "would not help: "
        return f"{begin}as many prompt tokens would be computed{most}"
    change = "fewer" if fewer_ratio > 0 else "more"
    times = f"; median first token {format_change(*medians)}" if medians else ""
    return f"{begin}would compute {abs(fewer_ratio):.0%} {change} prompt tokens{times}"


def _is_curve_flat(comparison: Comparison) -> bool:
    return comparison.sweep is not None and _is_flat(comparison, comparison.sweep)


def _compare_with_device(comparison: Comparison) -> str:
    """Return what the device holds where each size is no larger, or nothing. Pure."""
    sweep, engine = comparison.sweep, comparison.engine
    if sweep is None or sweep.place == DEVICE or sweep.sizes[-1].num_blocks > engine.num_device_blocks:
        return ""
    return f", the device holds {format_size(engine.num_device_blocks * engine.block_bytes)}"


def _place_on_curve(comparison: Comparison) -> str:
    if _is_curve_flat(comparison):
        return "more brings nothing"
    return (
        "hits still rise"
        if find_sweep_knee(comparison) is None
        else "the knee: from here on more brings less"
    )
