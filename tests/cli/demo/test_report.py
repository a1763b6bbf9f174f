"""One turn stands for what kvtier saves, and one wrong answer anywhere makes the tokens not identical."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from tests.cli.demo.served import small_report

from kvtier.cli.demo.report import Report, print_report, to_json


def printed(report: Report) -> str:
    """Return what a terminal of 80 columns shows."""
    output = io.StringIO()
    print_report(report, Console(file=output, width=80))
    return output.getvalue()


def test_the_table_shows_the_median_last_turn_as_each_process_served_it() -> None:
    lines = printed(small_report()).splitlines()

    assert "Turn 2 of conversation 1" in lines[0]
    rows = [line.split() for line in lines if line.endswith(" s  ")]
    assert rows == [
        ["without", "kvtier", "100", "0", "0", "0", "100", "2.00", "s"],
        ["with", "kvtier", "100", "0", "0", "90", "10", "0.50", "s"],
        ["after", "a", "restart", "100", "0", "0", "90", "10", "0.75", "s"],
    ]


def test_of_an_even_number_the_turn_that_saves_less_is_shown() -> None:
    report = small_report()
    two = replace(
        report,
        without=report.without[4:],
        with_kvtier=report.with_kvtier[4:],
        restarted=report.restarted[1::-1],
    )

    assert [served.turn.conversation for served in two.shown] == [1, 1, 1]


def test_nothing_is_cut_off_at_80_columns() -> None:
    assert "…" not in printed(small_report())


def test_the_summary_says_where_prompts_came_from_and_what_outlived_the_restart() -> None:
    text = printed(small_report())

    assert "prompt tokens of all 6 turns with kvtier: device 15%, host 3%, fs 25%, computed 57%" in text
    assert "after a restart in a new process: 90% of prompt tokens from fs" in text
    assert "tokens identical: yes" in text


@pytest.mark.parametrize(
    "report", [small_report(answer=7), small_report(answer_after_restart=7)], ids=["with", "restarted"]
)
def test_one_other_answer_makes_the_tokens_not_identical(report: Report) -> None:
    assert small_report().is_identical
    assert not report.is_identical
    assert "tokens identical: no" in printed(report)


def test_an_equal_answer_to_another_prompt_is_not_identical() -> None:
    one = small_report().without[0]

    assert one.has_same_answer(one)
    assert not one.has_same_answer(replace(one, prompt=(2,)))


def test_runs_of_different_length_are_not_compared() -> None:
    report = small_report()

    with pytest.raises(ValueError, match="zip"):
        assert replace(report, restarted=report.restarted[1:]).is_identical


def test_a_busy_machine_is_called_one() -> None:
    assert "warning:" not in printed(small_report(slow_down=1.1))
    assert "another program used this machine" in printed(small_report(slow_down=1.5))
    assert "another program used this machine" in printed(small_report(slow_down=0.5))


def test_the_json_has_what_the_table_shows() -> None:
    numbers = json.loads(json.dumps(to_json(small_report())))

    assert numbers["turn"] == {
        "without": {"prompt_tokens": 100, "sources": {"computed": 100}, "first_token_s": 2.0},
        "with": {"prompt_tokens": 100, "sources": {"fs": 90, "computed": 10}, "first_token_s": 0.5},
        "after_restart": {"prompt_tokens": 100, "sources": {"fs": 90, "computed": 10}, "first_token_s": 0.75},
    }
    assert numbers["sources"] == {"computed": 340, "device": 90, "host": 20, "fs": 150}
    assert numbers["restart"] == {"num_turns": 3, "tier_ratio": pytest.approx(0.9)}
    assert numbers["identical"] is True
    assert numbers["settings"] == {"turns": 2}
