"""A place that did not answer is left alone for as long as was asked, and no longer."""

import pytest

from kvtier.errors import TierError
from kvtier.testing.clock import ManualClock
from kvtier.tiering.kit.health import QuietPeriod

AWAY = "nobody answers"


def test_a_place_that_never_failed_is_asked() -> None:
    QuietPeriod("somewhere", ManualClock(), 1.0).require_over()


def test_a_place_that_failed_is_left_alone_for_the_pause_and_then_asked_again() -> None:
    clock = ManualClock()
    pause = QuietPeriod("somewhere", clock, 1.0)
    pause.begin(AWAY)
    for _ in range(2):
        with pytest.raises(TierError, match="'somewhere': nobody answers"):
            pause.require_over()
        clock.advance(0.4)
    clock.advance(0.2)
    pause.require_over()


def test_a_later_failure_prolongs_the_pause() -> None:
    clock = ManualClock()
    pause = QuietPeriod("somewhere", clock, 1.0)
    pause.begin(AWAY)
    clock.advance(0.75)
    pause.begin("still nobody")
    clock.advance(0.75)
    with pytest.raises(TierError, match="still nobody"):
        pause.require_over()
    clock.advance(0.25)
    pause.require_over()
