"""Turns and reports that were never served, for tests of what is made of them."""

from collections.abc import Mapping

from kvtier.cli.demo.conversation import Turn
from kvtier.cli.demo.report import Report, RunComparison, ServedTurn


def served_turn(
    conversation: int = 0,
    number: int = 1,
    sources: Mapping[str, int] | None = None,
    first_token_s: float = 1.0,
    token_ids: tuple[int, ...] = (1, 2),
    prompt: tuple[int, ...] = (5,) * 100,
) -> ServedTurn:
    """Return a served turn."""
    turn = Turn(f"{conversation + 1}.{number}", conversation, number, prompt, len(token_ids))
    return ServedTurn(turn, prompt, token_ids, sources or {"computed": len(prompt)}, first_token_s)


def comparison(
    number: int, sources: Mapping[str, int], with_s: float, without_s: float, answer: int = 1
) -> RunComparison:
    """Return a turn whose answers are equal when ``answer`` is 1."""
    return RunComparison(
        served_turn(0, number, sources, with_s, (answer,)), served_turn(0, number, None, without_s, (1,))
    )


def small_report(answer: int = 1, slow_down: float = 1.0) -> Report:
    """Return a report of two turns and a restart; the second turn's answer is right when ``answer`` is 1.

    The first turn, the same work in both runs, takes ``slow_down`` times as long without.
    """
    return Report(
        tier="fs",
        model="a model",
        turns=[
            comparison(1, {"computed": 100}, 2.0, 2.0 * slow_down),
            comparison(2, {"device": 10, "host": 20, "fs": 60, "computed": 10}, 0.5, 2.0, answer),
        ],
        restarted=[comparison(2, {"fs": 90, "computed": 10}, 0.25, 2.0)],
        settings={"turns": 2},
        wall_s=9.0,
    )
