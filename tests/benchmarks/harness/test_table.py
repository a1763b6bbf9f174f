"""A line of the table has a cell for each column, a dash for whoever is absent, and nobody is left out unseen."""

import re
from dataclasses import replace

import pytest
from tests.benchmarks.fake_suite import FAST, SLOW

from benchmarks.harness.measurement import FLOOR, OURS, Bar, Better, Measurement, Spread
from benchmarks.harness.table import Table, format_bar, format_spread, format_value


def cells_of(line: str) -> list[str]:
    """Return the cells of a line, which two spaces or more part."""
    return re.split(r" {2,}", line.strip())


def test_a_line_has_labels_medians_ratios_with_quartiles_unit_and_bar() -> None:
    table = Table(FAST)

    assert cells_of(table.head()) == [
        *("operation", "blocks", "ours", "floor", "ours/floor", "peer", "ours/peer", "unit", "bar")
    ]
    assert cells_of(table.line(FAST)) == [
        *("put", "16", "20.00", "20.00", "1.00 (0.75-1.25)", "5.00", "4.00 (3.00-5.00)", "MiB/s"),
        "0.9 of floor: met",
    ]


def test_who_is_absent_is_a_dash_under_his_heading() -> None:
    table = Table(FAST)
    heads, line = table.head(), table.line(SLOW)

    assert cells_of(line) == ["get", "32", "2.00", "2.00", "1.00 (1.00-1.00)", "-", "-", "MiB/s"]
    dashes = [at for at, letter in enumerate(line) if line[at - 1 : at + 2].strip() == "-" and letter == "-"]
    ends = [heads.index(" peer") + len(" peer"), heads.index("ours/peer") + len("ours/peer")]
    assert [at + 1 for at in dashes] == ends


def test_columns_stay_where_the_first_line_put_them() -> None:
    table = Table(FAST)
    other = replace(FAST, labels={"operation": "get", "blocks": 1024}, values={OURS: (1.0,), FLOOR: (3.0,)})

    assert table.line(FAST).index("MiB/s") == table.line(other).index("MiB/s") == table.head().index("unit")


@pytest.mark.parametrize(
    ("measurement", "has_columns"),
    [
        (FAST, True),
        (SLOW, True),
        (replace(FAST, labels={"blocks": 1, "operation": "put"}), True),
        (replace(FAST, labels={"operation": "put"}), False),
        (replace(FAST, values={**FAST.values, "another peer": (1.0, 1.0, 1.0)}), False),
    ],
)
def test_a_table_knows_for_whom_it_has_no_column(measurement: Measurement, has_columns: bool) -> None:
    assert Table(FAST).has_columns_for(measurement) is has_columns


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.12345, "0.123"),
        (1.2345, "1.23"),
        (123.45, "123.5"),
        (12345.6, "12,346"),
        (0.0, "0.000"),
    ],
)
def test_values_have_about_four_digits(value: float | None, shown: str) -> None:
    assert format_value(value) == shown


def test_a_ratio_that_was_not_taken_is_a_dash() -> None:
    assert format_spread(None) == "-"
    assert format_spread(Spread(1.0, 0.5, 2.0)) == "1.00 (0.50-2.00)"


@pytest.mark.parametrize(
    ("bar", "shown"),
    [
        (None, ""),
        (Bar(None, 1.5), "1.5 ms: NOT met"),
        (Bar(None, 2), "2 ms: met"),
        (Bar(FLOOR, 0.8), "0.8 of floor: NOT met"),
        (Bar("vllm", 5), "5 of vllm: not measured"),
    ],
)
def test_a_bar_is_told_with_its_outcome(bar: Bar | None, shown: str) -> None:
    values = {OURS: (2.0,), FLOOR: (1.0,)}

    assert format_bar(Measurement({}, "ms", Better.LOWER, values, bar)) == shown
