"""A suite's table: what was measured, ours, the floor, the peers, ratios with quartiles, bars. Pure.

Lines are printed as they come, so a column's width follows its heading and first line.
"""

from collections.abc import Sequence

from benchmarks.harness.measurement import FLOOR, OURS, Measurement, Spread

MIN_WIDTH = 8
LABEL_SLACK = 6
"""How many characters longer a label may be than the first one of its column."""


class Table:
    """Lays out lines whose columns are those of the first one.

    Args:
        first: the line that determines columns and widths.
    """

    def __init__(self, first: Measurement) -> None:
        self._labels = tuple(first.labels)
        self._others = ([FLOOR] if FLOOR in first.values else []) + sorted(first.peers)
        cells = self._cells(first)
        self._widths = [
            max(MIN_WIDTH, len(head), len(cell)) + (LABEL_SLACK if number < len(self._labels) else 0)
            for number, (head, cell) in enumerate(zip(self._head(), cells, strict=True))
        ]

    def has_columns_for(self, measurement: Measurement) -> bool:
        """Return whether the columns fit ``measurement``; labels may come in another order."""
        others = set(measurement.values) - {OURS}
        return set(measurement.labels) == set(self._labels) and others <= set(self._others)

    def head(self) -> str:
        """Return the heading line."""
        return self._join(self._head())

    def line(self, measurement: Measurement) -> str:
        """Return one measurement's line; a contestant that did not take part is a dash."""
        return self._join(self._cells(measurement))

    def _head(self) -> list[str]:
        ratios = [text for other in self._others for text in (other, "ours/" + other)]
        return [*self._labels, OURS, *ratios, "unit", "bar"]

    def _cells(self, measurement: Measurement) -> list[str]:
        labels = [format_label(measurement.labels.get(name, "")) for name in self._labels]
        others = [
            text
            for other in self._others
            for text in (format_value(measurement.median(other)), format_spread(measurement.ratio(other)))
        ]
        return [
            *labels,
            format_value(measurement.median(OURS)),
            *others,
            measurement.unit,
            format_bar(measurement),
        ]

    def _join(self, cells: Sequence[str]) -> str:
        num_labels = len(self._labels)
        aligned = [
            cell.ljust(width) if number < num_labels or number >= len(cells) - 2 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(cells, self._widths, strict=True))
        ]
        return "  ".join(aligned).rstrip()


def format_label(label: str | int) -> str:
    """Return a label as a cell. Pure."""
    return f"{label:,}" if isinstance(label, int) else label


def format_value(value: float | None) -> str:
    """Return a value with about four digits. Pure."""
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def format_spread(ratio: Spread | None) -> str:
    """Return a ratio with its quartiles. Pure."""
    return "-" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def format_bar(measurement: Measurement) -> str:
    """Return the bar and whether it is reached. Pure."""
    bar = measurement.bar
    if bar is None:
        return ""
    aim = f"{bar.value:g}" + (f" of {bar.against}" if bar.against else f" {measurement.unit}")
    outcome = {True: "met", False: "NOT met", None: "not measured"}[measurement.is_met]
    return f"{aim}: {outcome}"
