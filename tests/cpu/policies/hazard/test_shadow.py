"""Cohorts wait in the order in which they were named, and empty ones are dropped."""

from kvtier.cpu.policies.hazard.prefix_tree import Access, Cohort
from kvtier.cpu.policies.hazard.shadow import MIN_COHORTS, CohortTable


def add_cohorts(table: CohortTable, nums: dict[int, int], named_s: float) -> list[Cohort]:
    """Add one cohort of so many blocks for each class."""
    access = Access(named_s, 0, 0)
    cohorts = {code: Cohort(access, code) for code in nums}
    for code, num in nums.items():
        cohorts[code].num = num
    table.add(cohorts, named_s)
    return list(cohorts.values())


def test_cohorts_with_blocks_wait_since_they_were_named() -> None:
    table = CohortTable()
    add_cohorts(table, {7: 2, 3: 1}, 1.0)
    add_cohorts(table, {7: 4}, 5.5)

    waits = table.open_intervals(6.0)

    columns = [list(column) for column in waits]
    assert columns == [[7, 3, 7], [5.0, 5.0, 0.5], [2, 1, 4], [0, 0, 0]]


def test_cohorts_without_blocks_are_dropped_and_the_others_keep_their_order() -> None:
    table = CohortTable()
    first, second, _ = add_cohorts(table, {1: 1, 2: 1, 3: 1}, 0.0)
    first.num = 0
    add_cohorts(table, {4: 1}, 2.0)
    table.drop_empty()
    second.num = 0

    waits = table.open_intervals(3.0)

    assert list(waits.codes) == [3, 4]
    assert list(waits.ages_s) == [3.0, 1.0]
    assert len(table) == 2


def test_a_table_is_crowded_until_its_empty_cohorts_are_dropped() -> None:
    table = CohortTable()
    for number in range(MIN_COHORTS + 1):
        add_cohorts(table, {1: number % 2}, float(number))
    assert table.is_crowded

    table.drop_empty()

    assert not table.is_crowded
    assert len(table) == MIN_COHORTS // 2
