"""Hints are read once, with types; what makes no sense is ignored, with one line that says what to do."""

import logging

import pytest

from kvtier.base import ReqContext
from kvtier.hints.values import (
    MAX_NAME_CHARS,
    MAX_PIN_S,
    MAX_RETURN_S,
    NO_HINTS,
    HintReader,
    RequestHints,
    parse_hints,
)
from kvtier.testing.clock import ManualClock


def test_all_hints_of_a_request_are_read() -> None:
    params = {
        "session": "a",
        "continues": True,
        "returns_in_s": 30,
        "pin_s": 600,
        "priority": 1,
        "tenant": "t",
    }
    assert parse_hints(params) == RequestHints("a", "t", True, 30, 600, 1)
    params = {"expected_stop": "tool_use", "expected_output_tokens": 5, "continues": False}
    assert parse_hints(params) == RequestHints(
        continues=False, expected_stop="tool_use", expected_output_tokens=5
    )


@pytest.mark.parametrize("params", [None, {}, {"skip_load": True}])
def test_a_request_without_hints_has_none(params: dict[str, object] | None) -> None:
    assert parse_hints(params) is NO_HINTS
    assert ReqContext("r", params).hints is NO_HINTS


def test_a_request_is_read_once() -> None:
    context = ReqContext("r", {"session": "a"})
    assert context.hints == RequestHints("a")
    assert context.hints is context.hints


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("session", ""),
        ("session", "x" * (MAX_NAME_CHARS + 1)),
        ("session", 17),
        ("tenant", {"a": 1}),
        ("continues", 1),
        ("continues", "yes"),
        ("returns_in_s", -1),
        ("returns_in_s", True),
        ("returns_in_s", "30"),
        ("returns_in_s", float("nan")),
        ("returns_in_s", float("inf")),
        ("returns_in_s", 10**400),
        ("returns_in_s", MAX_RETURN_S + 1),
        ("pin_s", MAX_PIN_S + 1),
        ("pin_s", []),
        ("priority", 2),
        ("priority", 1.0),
        ("priority", True),
        ("expected_stop", "stop"),
        ("expected_stop", ["tool_use"]),
        ("expected_output_tokens", -1),
        ("expected_output_tokens", 1.5),
        ("expected_output_tokens", True),
    ],
)
def test_what_makes_no_sense_is_ignored_with_a_line_that_names_it_and_the_remedy(
    name: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = HintReader(ManualClock()).read({name: value, "skip_load": False})
    assert found == NO_HINTS
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"{name}=" in line
    assert "give" in line
    assert len(line) < 250


@pytest.mark.parametrize("name", ["session", "tenant", "pin_s", "priority", "continues"])
def test_a_value_too_large_to_show_is_ignored_like_any_other(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert HintReader(ManualClock()).read({name: -(10**5_000)}) == NO_HINTS
    assert f"{name}=<int too large to show>" in caplog.text


def test_a_session_that_ends_does_not_return(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = HintReader(ManualClock()).read({"continues": False, "returns_in_s": 3})
    assert found == RequestHints(continues=False)
    assert "leave it out where continues is false" in caplog.text


def test_a_value_that_comes_again_is_logged_once_a_minute_with_a_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    reader = HintReader(clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(1_000):
            reader.read({"priority": 7, "pin_s": "x" * 10**6})
        assert len(caplog.records) == 2
        clock.advance(61)
        reader.read({"priority": 7})
    assert "priority=7" in caplog.records[2].getMessage()
    assert "999 more" in caplog.records[2].getMessage()
