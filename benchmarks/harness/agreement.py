"""Whether two runs agree: how far apart their medians of ratios are, line by line.

It reads the JSON files of two runs. Values are not compared, because the machine's speed differs from run to run;
ratios within a run must be reproducible: to the floor, to a peer, or a value that is itself a ratio. Each line also
has the smaller number of rounds and the wider spread of the two runs, so that a weak median is visible; neither
excuses it.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.measurement import OURS, RATIO_UNITS, Spread, spread_of
from benchmarks.harness.table import MIN_WIDTH, format_label

ALLOWED = 0.15
"""How much the larger of two ratios may exceed the smaller and still agree with it, as a share."""

Document = Mapping[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True)
class RatioName:
    """A ratio of one line of a suite.

    Attributes:
        suite: the suite's name.
        labels: the line's labels, column by column.
        other: the contestant in the denominator; None for a value that is itself a ratio.
        occurrence: 0 for the first such line of the suite.
    """

    suite: str
    labels: tuple[tuple[str, str | int], ...]
    other: str | None
    occurrence: int

    def __str__(self) -> str:
        line = f"{self.suite}: {' '.join(format_label(label) for _, label in self.labels)}"
        return line if self.other is None else f"{line}, of {self.other}"

    def to_json(self) -> dict[str, object]:
        """Return suite, labels and contestant."""
        return {"suite": self.suite, "labels": dict(self.labels), "of": self.other}


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio in one run.

    Attributes:
        median: over the rounds, above zero.
        spread: distance of the quartiles, as a share of the median; 0 with one round.
        num_rounds: number of rounds.
    """

    median: float
    spread: float
    num_rounds: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """A ratio in two runs.

    Attributes:
        name: the ratio.
        first: in the first run.
        second: in the second run.
    """

    name: RatioName
    first: Ratio
    second: Ratio

    @property
    def apart(self) -> float:
        """How much the larger median exceeds the smaller, as a share of the smaller."""
        medians = (self.first.median, self.second.median)
        return max(medians) / min(medians) - 1.0

    @property
    def is_within(self) -> bool:
        """Whether the two agree."""
        return self.apart <= ALLOWED

    def to_json(self) -> dict[str, object]:
        """Return name, both ratios and how far apart they are."""
        return {
            **self.name.to_json(),
            "first": asdict(self.first),
            "second": asdict(self.second),
            "apart": self.apart,
            "is_within": self.is_within,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        agreements: ratios in both runs, in the order of the first.
        only_first: ratios that only the first run has.
        only_second: ratios that only the second run has.
    """

    agreements: tuple[Agreement, ...]
    only_first: tuple[RatioName, ...]
    only_second: tuple[RatioName, ...]

    @property
    def num_within(self) -> int:
        """Number of ratios that agree."""
        return sum(agreement.is_within for agreement in self.agreements)

    def to_json(self) -> dict[str, object]:
        """Return both runs' ratios, and the names of those that only one of them has."""
        return {
            "allowed": ALLOWED,
            "ratios": [one.to_json() for one in self.agreements],
            "only_first": [name.to_json() for name in self.only_first],
            "only_second": [name.to_json() for name in self.only_second],
        }


def compare_folders(first: Path, second: Path) -> Comparison:
    """Compare the JSON files of two runs.

    Raises:
        OSError: a folder or a file cannot be read.
        ValueError: a folder has no JSON file, or one that is not a benchmark's.
    """
    return compare_runs(read_ratios(first), read_ratios(second))


def compare_runs(first: Mapping[RatioName, Ratio], second: Mapping[RatioName, Ratio]) -> Comparison:
    """Pair the ratios of two runs. Pure."""
    return Comparison(
        tuple(Agreement(name, ratio, second[name]) for name, ratio in first.items() if name in second),
        tuple(name for name in first if name not in second),
        tuple(name for name in second if name not in first),
    )


def read_ratios(folder: Path) -> dict[RatioName, Ratio]:
    """Return the ratios of each suite of a run; suites are named after their files.

    Raises:
        OSError: the folder or a file cannot be read.
        ValueError: there is no JSON file, or one that is not a benchmark's.
    """
    paths = sorted(path for path in folder.iterdir() if path.suffix == ".json")
    if not paths:
        raise ValueError(f"{folder}: has no JSON file of a benchmark: save some with --out")
    ratios: dict[RatioName, Ratio] = {}
    for path in paths:
        try:
            ratios |= ratios_of(path.stem, json.loads(path.read_text()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: is not a benchmark's file ({error!r})") from error
    return ratios


def ratios_of(suite: str, document: Document) -> dict[RatioName, Ratio]:
    """Return all ratios of a document. Pure.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is not a benchmark's.
    """
    ratios: dict[RatioName, Ratio] = {}
    seen: Counter[RatioName] = Counter()
    for measurement in document["measurements"]:
        labels = tuple(measurement["labels"].items())
        for other, ratio in _ratios_of_line(measurement):
            first = RatioName(suite, labels, other, 0)
            ratios[replace(first, occurrence=seen[first])] = ratio
            seen[first] += 1
    return ratios


def lines_of(comparison: Comparison) -> Iterator[str]:
    """Yield a line for each ratio, and one with the number of ratios that agree. Pure."""
    width = max((len(str(agreement.name)) for agreement in comparison.agreements), default=0)
    if comparison.agreements:
        heads = (f"{head:>{MIN_WIDTH}}" for head in ("first", "second", "apart", "spread", "rounds"))
        yield "  ".join([f"{'ours to the other':{width}}", *heads])
    for one in comparison.agreements:
        cells = (
            f"{one.first.median:.2f}",
            f"{one.second.median:.2f}",
            f"{one.apart:.0%}",
            f"{max(one.first.spread, one.second.spread):.0%}",
            f"{min(one.first.num_rounds, one.second.num_rounds)}",
        )
        line = "  ".join([f"{one.name!s:{width}}", *(f"{cell:>{MIN_WIDTH}}" for cell in cells)])
        yield line if one.is_within else line + "  too far"
    for run, names in (("first", comparison.only_first), ("second", comparison.only_second)):
        for name in names:
            yield f"only in the {run} run: {name}"
    yield f"{comparison.num_within} of {len(comparison.agreements)} ratios are within {ALLOWED:.0%} of each other"


def _ratios_of_line(measurement: Document) -> Iterator[tuple[str | None, Ratio]]:
    ours = [float(value) for value in measurement["values"][OURS]]
    for other, kept in measurement["ratios"].items():
        spread = Spread(float(kept["median"]), float(kept["low"]), float(kept["high"]))
        yield other, _ratio_of(spread, len(ours))
    if measurement["unit"] in RATIO_UNITS and not measurement["ratios"]:
        yield None, _ratio_of(spread_of(ours), len(ours))


def _ratio_of(spread: Spread, num_rounds: int) -> Ratio:
    if spread.median <= 0:
        raise ValueError(f"a ratio is {spread.median}, but must be above zero")
    return Ratio(spread.median, (spread.high - spread.low) / spread.median, num_rounds)
