"""Tables have the numbers of the results, exact behind what is shown, and escape what comes from outside."""

import dataclasses

from tests.cli.simulate.compared import compare, compare_host_sizes

from kvtier.cli.page.tables import Cell
from kvtier.cli.simulate.report.tables import (
    tabulate_misses,
    tabulate_results,
    tabulate_traffic,
    tabulate_watched,
)


def test_each_simulation_is_a_row_with_exact_values_behind_its_text() -> None:
    comparison = compare_host_sizes()

    table = tabulate_results(comparison)

    assert table.headings[:5] == ("host size", "policy", "device", "host", "disk")
    assert [(row[0].text, row[1].text) for row in table.rows] == [
        ("-", "without"),
        ("4MiB", "lru"),
        ("4MiB", "arc"),
        ("32MiB", "lru"),
        ("32MiB", "arc"),
    ]
    for row, one in zip(table.rows, comparison.found, strict=True):
        cells = dict(zip(table.headings, row, strict=True))
        assert cells["not computed"] == Cell(f"{one.not_computed_ratio:.1%}", one.not_computed_ratio)
        assert cells["at most"].value == one.at_most_ratio
        assert cells["p90 s"].value == one.total.first_token.p90_s
        assert cells["served"].value == 30


def test_when_nothing_was_served_nothing_was_measured() -> None:
    comparison = compare(engine=dataclasses.replace(compare().engine, num_device_blocks=2))

    (row, *_) = tabulate_results(comparison).rows

    assert {cell.text for cell in row[1:-2]} == {"-"}
    assert [cell.value for cell in row[-2:]] == [0, 30]


def test_traffic_is_a_row_for_each_policy_and_place() -> None:
    comparison = compare()

    table = tabulate_traffic(comparison)

    assert [(row[0].text, row[1].text) for row in table.rows] == [
        ("lru", "host"),
        ("lru", "disk"),
        ("arc", "host"),
        ("arc", "disk"),
    ]
    disk = comparison.found[1].tiers[1]
    assert table.rows[1][3].value == disk.written_bytes / 1e9
    assert table.rows[1][4].value == disk.writes_per_unique_block


def test_counters_are_shown_when_they_tell_of_work_left_out() -> None:
    comparison = compare(["lru"])
    without, lru = comparison.found
    calm = dataclasses.replace(comparison, found=(without, dataclasses.replace(lru, counters={})))
    counters = {"tier.0.disk.declined_cascades": 7.0, "tier.0.disk.errors": 0.0, "primary.stored": 9.0}
    counters |= {"tier.0.disk.refused_by_admission": 3.0, "connector.not_loaded_tokens.disk": 40.0}
    counters |= {"connector.loaded_tokens.errors": 8.0}
    busy = dataclasses.replace(calm, found=(without, dataclasses.replace(lru, counters=counters)))

    table = tabulate_watched(busy)

    assert tabulate_watched(calm) is None
    assert table is not None
    assert [[cell.text for cell in row[:3]] for row in table.rows] == [
        ["lru", "tier.0.disk.declined_cascades", "7"],
        ["lru", "tier.0.disk.refused_by_admission", "3"],
        ["lru", "connector.not_loaded_tokens.disk", "40"],
    ]


def test_causes_of_computed_tokens_are_shares_of_each_simulation_the_largest_first() -> None:
    comparison = compare(["lru", "arc"])
    without, lru, arc = comparison.found
    num_tokens = lru.total.num_prompt_tokens
    counted = {"connector.missed_tokens.never_seen": num_tokens * 0.25, "primary.stored": 9.0}
    evicted = {"connector.missed_tokens.evicted.host": num_tokens * 0.5}
    found = (
        dataclasses.replace(without, counters={}),
        dataclasses.replace(lru, counters=counted),
        dataclasses.replace(arc, counters=counted | evicted),
    )

    table = tabulate_misses(dataclasses.replace(comparison, found=found))

    assert tabulate_misses(dataclasses.replace(comparison, found=(without, without, without))) is None
    assert table is not None
    assert table.headings == ("cause", "lru", "arc")
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["evicted host", "0.0%", "50.0%"],
        ["never_seen", "25.0%", "25.0%"],
    ]
