"""Whether two runs say the same: how far apart their medians of ratios are, line by line.

It measures nothing and reads what a run has kept as JSON. Values of two runs are not compared, since the machine's
mood is in them; a ratio to the floor or to a peer of the same run is what must come again.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.table import MIN_WIDTH, format_label

ALLOWED = 0.15
"""By which the larger of two ratios may exceed the smaller and still agree with it."""

Document = Mapping[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True)
class RatioName:
    """Which ratio of which line of a suite.

    Attributes:
        suite: its name.
        labels: the line's, column by column.
        other: with whom ours is compared.
        occurrence: 0 for the first such line of the suite.
    """

    suite: str
    labels: tuple[tuple[str, str | int], ...]
    other: str
    occurrence: int

    def __str__(self) -> str:
        return f"{self.suite}: {' '.join(format_label(label) for _, label in self.labels)}, of {self.other}"


@dataclass(frozen=True, slots=True)
class Agreement:
    """One ratio in two runs.

    Attributes:
        name: which.
        first: its median in the first run, above zero.
        second: in the second run, above zero.
    """

    name: RatioName
    first: float
    second: float

    @property
    def apart(self) -> float:
        """By how much of the smaller one the larger exceeds it, 0 or more."""
        return max(self.first, self.second) / min(self.first, self.second) - 1.0

    @property
    def is_within(self) -> bool:
        """Whether the two agree."""
        return self.apart <= ALLOWED


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        agreements: ratios that both have, in the order of the first run.
        only_first: those that the second does not have.
        only_second: those that the first does not have.
    """

    agreements: tuple[Agreement, ...]
    only_first: tuple[RatioName, ...]
    only_second: tuple[RatioName, ...]

    @property
    def num_within(self) -> int:
        """Number of ratios that agree."""
        return sum(agreement.is_within for agreement in self.agreements)


def compare_folders(first: Path, second: Path) -> Comparison:
    """Compare the JSON files that two runs have kept.

    Raises:
        OSError: a folder or a file cannot be read.
        ValueError: a folder has no JSON file, or one that no benchmark has written.
    """
    return compare_runs(read_ratios(first), read_ratios(second))


def compare_runs(first: Mapping[RatioName, float], second: Mapping[RatioName, float]) -> Comparison:
    """Pair the ratios of two runs. Pure."""
    return Comparison(
        tuple(Agreement(name, ratio, second[name]) for name, ratio in first.items() if name in second),
        tuple(name for name in first if name not in second),
        tuple(name for name in second if name not in first),
    )


def read_ratios(folder: Path) -> dict[RatioName, float]:
    """Return the ratios of what each suite of a run has kept, suites by the names of their files.

    Raises:
        OSError: the folder or a file cannot be read.
        ValueError: there is no JSON file, or one that no benchmark has written.
    """
    paths = sorted(path for path in folder.iterdir() if path.suffix == ".json")
    if not paths:
        raise ValueError(f"{folder}: no JSON of a benchmark is in it: keep some with --out")
    ratios: dict[RatioName, float] = {}
    for path in paths:
        try:
            ratios |= ratios_of(path.stem, json.loads(path.read_text()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: no benchmark has written it ({error!r})") from error
    return ratios


def ratios_of(suite: str, document: Document) -> dict[RatioName, float]:
    """Return the medians of all ratios of a document. Pure.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: no benchmark has written it.
    """
    ratios: dict[RatioName, float] = {}
    seen: Counter[RatioName] = Counter()
    for measurement in document["measurements"]:
        labels = tuple(measurement["labels"].items())
        for other, spread in measurement["ratios"].items():
            first = RatioName(suite, labels, other, 0)
            median = float(spread["median"])
            if median <= 0:
                raise ValueError(f"a ratio of {median}: more than nothing was expected")
            ratios[replace(first, occurrence=seen[first])] = median
            seen[first] += 1
    return ratios


def lines_of(comparison: Comparison) -> Iterator[str]:
    """Yield a line for each ratio, and one that says how many agree. Pure."""
    width = max((len(str(agreement.name)) for agreement in comparison.agreements), default=0)
    if comparison.agreements:
        heads = (f"{head:>{MIN_WIDTH}}" for head in ("first", "second", "apart"))
        yield "  ".join([f"{'ours to the other':{width}}", *heads])
    for one in comparison.agreements:
        cells = (f"{one.first:.2f}", f"{one.second:.2f}", f"{one.apart:.0%}")
        line = "  ".join([f"{one.name!s:{width}}", *(f"{cell:>{MIN_WIDTH}}" for cell in cells)])
        yield line if one.is_within else line + "  too far"
    for run, names in (("first", comparison.only_first), ("second", comparison.only_second)):
        for name in names:
            yield f"only in the {run} run: {name}"
    yield f"{comparison.num_within} of {len(comparison.agreements)} ratios are within {ALLOWED:.0%} of each other"
