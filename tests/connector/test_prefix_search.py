"""The two searches, and the agreement of several groups on one end."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.connector.fakes import TableManager

from kvtier.base import OffloadKey, ReqContext
from kvtier.connector.groups import GroupLayout
from kvtier.connector.prefix_search import (
    find_loadable_end,
    maximal_prefix_lookup,
    sliding_window_lookup,
    split_by_need,
)

CONTEXT = ReqContext("r")
Answers = list[bool | None]


def table(answers: Sequence[bool | None]) -> tuple[TableManager, list[OffloadKey]]:
    """Return a manager that gives these answers, and the keys in their order."""
    keys = [OffloadKey(bytes([position])) for position in range(len(answers))]
    return TableManager(dict(zip(keys, answers, strict=True))), keys


@pytest.mark.parametrize(
    ("answers", "found", "num_asked"),
    [
        ([], 0, 0),
        ([False, True], 0, 1),
        ([True, True, False, True], 2, 3),
        ([True, True], 2, 2),
        ([None, True, False], None, 3),
        ([True, None], None, 2),
        ([False, None], 0, 1),
    ],
)
def test_prefix_lookup_counts_leading_hits_and_scans_past_what_is_in_flight(
    answers: Answers, found: int | None, num_asked: int
) -> None:
    manager, keys = table(answers)

    assert maximal_prefix_lookup(manager, keys, CONTEXT) == found
    assert manager.asked == keys[:num_asked]


@pytest.mark.parametrize(
    ("answers", "size", "found"),
    [
        ([], 2, 0),
        ([True, True, True], 2, 3),
        ([True, True, False, True, False], 2, 2),
        ([False, True, True, False], 2, 3),
        ([True, False, True, False], 2, 1),
        ([False, True, False], 2, 0),
        ([True, True, False, None], 2, None),
        ([None, True, True], 2, 3),
        ([None, False, True], 2, None),
        ([True, None, True], 3, None),
        ([True], 3, 1),
    ],
)
def test_window_lookup_finds_the_right_most_run_or_the_leading_one(
    answers: Answers, size: int, found: int | None
) -> None:
    manager, keys = table(answers)

    assert sliding_window_lookup(manager, keys, size, CONTEXT) == found


def test_window_lookup_does_not_ask_left_of_a_window_that_is_on_its_way() -> None:
    manager, keys = table([True, True, None, True])

    assert sliding_window_lookup(manager, keys, 2, CONTEXT) is None
    assert manager.asked == keys[:1:-1]


FULL = GroupLayout(0, 4, 1, 1, None)
WINDOW = GroupLayout(1, 4, 1, 1, num_tail_tokens=8)
WIDE = GroupLayout(1, 8, 1, 2, num_tail_tokens=8)


def search(
    layouts: Sequence[GroupLayout],
    held: Mapping[int, Sequence[bool | None]],
    num_local_tokens: int = 0,
    max_end_tokens: int = 1000,
) -> int | None:
    """Run the search on answers given by group."""
    keys = {idx: [OffloadKey(bytes([idx, n])) for n in range(len(found))] for idx, found in held.items()}
    answers = {key: found for idx, run in keys.items() for key, found in zip(run, held[idx], strict=True)}
    manager = TableManager(answers)
    num_tokens = min(len(run) * layouts[idx].block_tokens for idx, run in keys.items())
    found = find_loadable_end(
        split_by_need(layouts),
        manager,
        [keys[layout.idx] for layout in layouts],
        num_local_tokens,
        min(max_end_tokens, num_tokens),
        CONTEXT,
    )
    return None if found is None else found.end_token


def test_one_full_group_gives_its_leading_run_beyond_the_device() -> None:
    assert search([FULL], {0: [False, True, True, False]}, num_local_tokens=4) == 12


def test_a_device_prefix_that_ends_inside_a_block_is_searched_from_that_block() -> None:
    assert search([FULL], {0: [False, True, True]}, num_local_tokens=6) == 12


def test_nothing_beyond_the_device_is_the_device_prefix() -> None:
    assert search([FULL], {0: [True, False]}, num_local_tokens=6) == 6


def test_the_limit_is_rounded_down_to_whole_blocks() -> None:
    assert search([FULL], {0: [True, True, True]}, max_end_tokens=11) == 8


def test_a_window_group_lowers_the_end_to_its_right_most_window() -> None:
    held = {0: [True] * 6, 1: [False, True, True, False, True, False]}

    assert search([FULL, WINDOW], held) == 12


def test_a_window_group_needs_nothing_left_of_its_window() -> None:
    held = {0: [True] * 6, 1: [False, False, False, False, True, True]}

    assert search([FULL, WINDOW], held) == 24


def test_ends_are_aligned_to_whole_blocks_of_each_group_and_searched_again() -> None:
    held = {0: [True] * 5, 1: [True, True]}

    assert search([FULL, WIDE], held) == 16


def test_a_definite_miss_outweighs_what_is_in_flight() -> None:
    held: Mapping[int, Sequence[bool | None]] = {0: [None, True], 1: [False, False]}

    assert search([FULL, WINDOW], held) == 0


def test_anything_that_decides_and_is_in_flight_makes_the_answer_none() -> None:
    held: Mapping[int, Sequence[bool | None]] = {0: [True, True, True], 1: [False, None, True]}

    assert search([FULL, WINDOW], held) is None


@given(
    full=st.lists(st.booleans(), max_size=8),
    first=st.lists(st.booleans(), max_size=8),
    second=st.lists(st.booleans(), max_size=8),
)
def test_the_end_is_the_largest_that_every_group_can_go_on_from(
    full: list[bool], first: list[bool], second: list[bool]
) -> None:
    num_blocks = min(len(full), len(first), len(second))
    other = GroupLayout(2, 4, 1, 1, num_tail_tokens=5)

    def is_loadable(end: int) -> bool:
        tails = all(first[max(0, end - 2) : end]) and all(second[max(0, end - 2) : end])
        return all(full[:end]) and tails

    best = max(end for end in range(num_blocks + 1) if is_loadable(end))

    assert search([FULL, WINDOW, other], {0: full, 1: first, 2: second}) == best * 4
