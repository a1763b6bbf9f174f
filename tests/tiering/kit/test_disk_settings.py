"""Threads and direct I/O of tiers on a disk: what was asked for, or what suits the rows."""

from dataclasses import dataclass, field

import pytest

from kvtier.errors import ConfigError
from kvtier.settings import parse_settings
from kvtier.tiering.kit.disk import (
    DEFAULT_NUM_THREADS,
    DIRECT_NUM_THREADS,
    LARGE_ROW_BYTES,
    MAX_THREADS,
    NUM_THREADS,
    parse_direct_io,
    plan_num_threads,
)


@dataclass(frozen=True, slots=True)
class Threads:
    """Settings with a number of threads only."""

    num_threads: int | None = field(default=None, metadata=NUM_THREADS)


def parse_num_threads(value: object) -> int | None:
    """Return what a tier reads."""
    return parse_settings(Threads, {"num_threads": value}).num_threads


@pytest.mark.parametrize("value", [None, 1, MAX_THREADS])
def test_a_number_of_threads_is_taken_as_it_is_given(value: int | None) -> None:
    assert parse_num_threads(value) == value


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (0, "at least 1"),
        (-1, "at least 1"),
        (MAX_THREADS + 1, "at most 128"),
        ("4", "whole"),
        (True, "whole"),
    ],
)
def test_a_number_of_threads_that_cannot_work_is_refused_with_a_remedy(value: object, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        parse_num_threads(value)
    assert caught.value.setting == "num_threads"


@pytest.mark.parametrize(
    ("num_threads", "row_bytes", "has_direct_io", "planned"),
    [
        (None, LARGE_ROW_BYTES, True, DIRECT_NUM_THREADS),
        (None, LARGE_ROW_BYTES - 4096, True, DEFAULT_NUM_THREADS),
        (None, LARGE_ROW_BYTES, False, DEFAULT_NUM_THREADS),
        (3, LARGE_ROW_BYTES, True, 3),
    ],
)
def test_large_rows_and_direct_io_take_more_threads_unless_a_number_is_given(
    num_threads: int | None, row_bytes: int, *, has_direct_io: bool, planned: int
) -> None:
    assert plan_num_threads(num_threads, row_bytes, has_direct_io=has_direct_io) == planned


@pytest.mark.parametrize(("value", "parsed"), [("auto", None), (True, True), (False, False)])
def test_direct_io_is_insisted_on_avoided_or_left_to_the_tier(value: object, *, parsed: bool | None) -> None:
    assert parse_direct_io("direct_io", value) is parsed


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_another_word_about_direct_io_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="auto") as caught:
        parse_direct_io("direct_io", value)
    assert caught.value.setting == "direct_io"
