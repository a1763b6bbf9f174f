"""Simulated time moves from event to event, in order, and never back."""

import pytest

from kvtier.errors import InvariantError
from kvtier.sim.timeline import Timeline


def test_events_run_in_the_order_of_their_times_and_then_of_planning() -> None:
    timeline = Timeline()
    seen: list[tuple[float, str]] = []
    for when_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        timeline.at(when_s, lambda name=name: seen.append((timeline(), name)))  # type: ignore[misc]

    timeline.advance_to(5.0)

    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c")]
    assert (timeline(), timeline.next_s) == (5.0, None)


def test_an_event_may_plan_another_within_the_same_stretch() -> None:
    timeline = Timeline()
    seen: list[float] = []
    timeline.at(1.0, lambda: timeline.at(2.0, lambda: seen.append(timeline())))

    timeline.advance_to(2.0)

    assert seen == [2.0]


def test_what_is_planned_for_later_stays() -> None:
    timeline = Timeline()
    timeline.at(3.0, lambda: None)

    timeline.advance_to(2.5)

    assert (timeline(), timeline.next_s) == (2.5, 3.0)


def test_nothing_is_planned_for_the_past() -> None:
    timeline = Timeline()
    timeline.advance_to(2.0)

    with pytest.raises(InvariantError, match="time cannot run backwards"):
        timeline.at(1.0, lambda: None)


def test_what_was_cancelled_does_not_happen_and_is_not_next() -> None:
    timeline, seen = Timeline(), list[str]()
    first = timeline.at(1.0, lambda: seen.append("first"))
    second = timeline.at(2.0, lambda: seen.append("second"))
    timeline.at(3.0, lambda: seen.append("third"))

    timeline.cancel(second)
    timeline.cancel(first)

    assert timeline.next_s == 3.0
    timeline.advance_to(5.0)
    timeline.cancel(first)
    assert seen == ["third"]


def test_an_event_may_cancel_another_of_its_instant() -> None:
    timeline, seen = Timeline(), list[str]()
    numbers: list[int] = []
    timeline.at(1.0, lambda: timeline.cancel(numbers[0]))
    numbers.append(timeline.at(1.0, lambda: seen.append("cancelled")))
    timeline.at(2.0, lambda: seen.append("later"))

    timeline.advance_to(9.0)

    assert (seen, timeline()) == (["later"], 9.0)


def test_what_was_cancelled_is_not_planned() -> None:
    timeline = Timeline()
    timeline.at(1.0, lambda: None)
    timeline.cancel(timeline.at(30.0, lambda: None))

    timeline.advance_to(1.0)

    assert timeline.next_s is None
