"""Totals follow from turns, and one wrong answer anywhere makes the tokens not identical."""

import json
from pathlib import Path

import pytest
from tests.cli.demo.served import served_turn, small_report

from kvtier.cli.demo.command import publish
from kvtier.cli.demo.report import compare, to_json


def test_totals_add_times_and_origins_of_their_turns() -> None:
    total = small_report().all_turns

    assert (total.num_turns, total.num_prompt_tokens) == (2, 200)
    assert total.sources == {"computed": 110, "device": 10, "host": 20, "fs": 60}
    assert (total.with_s, total.without_s, total.speed_up) == (2.5, 4.0, 1.6)


def test_later_turns_leave_out_each_conversations_first() -> None:
    later = small_report().later_turns

    assert (later.num_turns, later.speed_up) == (1, 4.0)


def test_the_restart_counts_what_came_from_the_tier() -> None:
    assert small_report().restart_ratio == pytest.approx(0.9)


def test_a_dash_prints_the_numbers_on_stdout_and_the_table_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    publish(small_report(), Path("-"), None)

    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads(json.dumps(to_json(small_report())))
    assert "fs" in printed.err


def test_one_other_answer_makes_the_tokens_not_identical() -> None:
    assert small_report(answer=1).is_identical
    assert not small_report(answer=7).is_identical


def test_an_equal_answer_to_another_prompt_is_not_identical() -> None:
    assert not served_turn(prompt=(1,)).has_same_answer(served_turn(prompt=(2,)))


def test_runs_of_different_length_are_not_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare([served_turn()], [])


def test_the_numbers_are_json_and_hold_each_turn_and_total() -> None:
    numbers = json.loads(json.dumps(to_json(small_report(answer=7))))

    assert numbers["identical"] is False
    assert [turn["identical"] for turn in numbers["turns"]] == [True, False]
    assert numbers["turns"][1]["sources"] == {"device": 10, "host": 20, "fs": 60, "computed": 10}
    assert numbers["later_turns"]["speed_up"] == 4.0
    assert numbers["restart"]["tier_ratio"] == pytest.approx(0.9)
    assert numbers["settings"] == {"turns": 2}


def test_a_wait_of_nothing_is_no_speed_up() -> None:
    report = small_report()

    assert compare([], []) == []
    assert report.after_restart.speed_up == 8.0
