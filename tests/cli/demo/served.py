"""Turns and reports that were never served, for tests of what is made of them."""

from collections.abc import Mapping

from kvtier.cli.demo.conversation import ServedTurn, Turn
from kvtier.cli.demo.report import Report

PROMPT = (5,) * 100


def served_turn(
    conversation: int = 1,
    number: int = 1,
    sources: Mapping[str, int] | None = None,
    first_token_s: float = 1.0,
    answer: int = 1,
) -> ServedTurn:
    """Return a served turn of 100 tokens."""
    turn = Turn(conversation, number, PROMPT)
    return ServedTurn(turn, PROMPT, (answer,), sources or {"computed": 100}, first_token_s)


def small_report(answer: int = 1, answer_after_restart: int = 1, slow_down: float = 1.0) -> Report:
    """Return a report of three conversations of two turns, whose last turns save 0, 1.5 and 1.75 seconds.

    Args:
        answer: of the last turn with kvtier; 1 is right.
        answer_after_restart: of the last turn after the restart.
        slow_down: factor of the first turns' times without kvtier. They are the same work in both runs.
    """
    device, host = {"device": 90, "computed": 10}, {"host": 20, "fs": 60, "computed": 20}
    tier = {"fs": 90, "computed": 10}
    cold = [served_turn(number, 1, None, 2.0) for number in (1, 2, 3)]
    return Report(
        tier="fs",
        model="a model",
        options={"turns": 2},
        without=[
            *(served_turn(number, 1, None, 2.0 * slow_down) for number in (1, 2, 3)),
            served_turn(3, 2, device, 0.25),
            served_turn(2, 2, None, 2.0),
            served_turn(1, 2, None, 2.0),
        ],
        with_kvtier=[
            *cold,
            served_turn(3, 2, device, 0.25),
            served_turn(2, 2, host, 0.25),
            served_turn(1, 2, tier, 0.5, answer),
        ],
        restarted=[
            served_turn(1, 2, tier, 0.75, answer_after_restart),
            *(served_turn(number, 2, tier, 0.5) for number in (2, 3)),
        ],
        wall_s=9.0,
    )
