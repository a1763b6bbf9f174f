"""What is plotted are the numbers of the results, under the bound."""

import pytest
from tests.cli.simulate.compared import BLOCK_BYTES, SIZES, compare, compare_host_sizes

from kvtier.cli.simulate.report.plots import (
    BOUND,
    plot_first_token,
    plot_hits,
    plot_occupancy,
    plot_origins,
    plot_writes,
)
from kvtier.sim.sweep import Size, Sweep


def test_hits_are_one_line_for_each_policy_below_the_bound() -> None:
    comparison = compare_host_sizes()

    chart = plot_hits(comparison)

    assert chart is not None
    (panel,) = chart.panels
    lines = {line.name: line for line in panel.lines}
    assert list(lines) == ["without", "lru", "arc", BOUND]
    assert lines["lru"].x == (4.0 * BLOCK_BYTES, 32.0 * BLOCK_BYTES)
    assert lines["lru"].y == tuple(
        100 * comparison.by_label[f"lru at {size.label}"].not_computed_ratio for size in SIZES
    )
    assert len(set(lines["without"].y)) == 1
    for line in panel.lines:
        assert all(value <= bound for value, bound in zip(line.y, lines[BOUND].y, strict=True))
    assert [label for _, label in chart.x_ticks] == ["4MiB", "32MiB"]
    assert "lru" in chart.description


@pytest.mark.parametrize(("place", "is_flat"), [("device", False), ("disk", True)])
def test_the_engine_without_offloading_has_a_point_at_each_size(place: str, *, is_flat: bool) -> None:
    comparison = compare(sweep=Sweep(place, (Size(6, "6MiB"), Size(30, "30MiB"))))

    chart = plot_hits(comparison)

    assert chart is not None
    without = chart.panels[0].lines[0]
    assert (without.name, len(without.y)) == ("without", 2)
    assert (without.y[0] == without.y[1]) is is_flat


def test_without_a_sweep_there_is_no_line_over_capacity() -> None:
    assert plot_hits(compare()) is None


def test_the_segments_of_each_bar_make_up_all_tokens() -> None:
    chart = plot_origins(compare(), None)

    assert chart.bars == ("without", "lru", "arc")
    assert [segment.name for segment in chart.segments] == ["device", "host", "disk", "computed"]
    for number in range(3):
        assert sum(segment.widths[number] for segment in chart.segments) == pytest.approx(100)
        mark = chart.marks[number]
        assert mark is not None
        assert mark >= 100 - chart.segments[-1].widths[number]


def test_the_share_of_first_tokens_rises_from_none_to_all_at_the_times_of_the_result() -> None:
    comparison = compare()

    (panel,) = plot_first_token(comparison, None).panels

    for line, one in zip(panel.lines, comparison.found, strict=True):
        assert line.is_step
        assert (line.y[0], line.y[-1]) == (0.0, 100.0)
        assert line.x[-1] == one.total.first_token.max_s
        assert list(line.x) == sorted(line.x)
        half = next(x for x, y in zip(line.x, line.y, strict=True) if y >= 50)
        assert half == one.total.first_token.p50_s


def test_occupancy_is_a_panel_for_each_place_in_percent_of_its_capacity() -> None:
    chart = plot_occupancy(compare_host_sizes(), SIZES[0])

    assert [panel.title for panel in chart.panels] == ["device", "host", "disk"]
    assert [len(panel.lines) for panel in chart.panels] == [3, 2, 2]
    for panel in chart.panels:
        assert all(0 <= value <= 100 for line in panel.lines for value in line.y)
    assert max(chart.panels[1].lines[0].y) == 100.0
    assert chart.x_label == "s from the first request"


def test_a_place_of_the_size_that_was_swept_is_measured_by_that_size() -> None:
    small, large = (plot_occupancy(compare_host_sizes(), size).panels[1].lines[0] for size in SIZES)

    assert small.y[-1] == 100.0
    assert large.y[-1] == pytest.approx(100 * 32 / 32)
    assert large.y[2] < small.y[2]


def test_writes_grow_to_what_the_traffic_counts() -> None:
    comparison = compare()

    chart = plot_writes(comparison, None)

    assert [panel.title for panel in chart.panels] == ["host", "disk"]
    assert chart.y_label == "MB"
    for panel, tier in zip(chart.panels, comparison.found[1].tiers, strict=True):
        (lru, _) = panel.lines
        assert list(lru.y) == sorted(lru.y)
        assert lru.y[-1] == tier.written_bytes / 1e6


def test_a_policy_has_the_same_colour_on_each_plot() -> None:
    comparison = compare_host_sizes()
    charts = [plot_hits(comparison), *(plot_first_token(comparison, size) for size in SIZES)]

    colours = {
        (line.name, line.series)
        for chart in charts
        if chart is not None
        for panel in chart.panels
        for line in panel.lines
        if not line.is_bound
    }

    assert colours == {("without", 0), ("lru", 1), ("arc", 2)}
