"""The table fits a terminal and says in words what matters."""

import io

from rich.console import Console
from tests.cli.demo.served import small_report

from kvtier.cli.demo.table import print_report


def printed(answer: int = 1, slow_down: float = 1.0) -> str:
    """Return what a terminal of 80 columns shows."""
    output = io.StringIO()
    print_report(small_report(answer, slow_down), Console(file=output, width=80))
    return output.getvalue()


def test_a_row_shows_where_a_prompt_came_from_and_both_times() -> None:
    row = next(line for line in printed().splitlines() if line.split()[:2] == ["1.2", "100"])

    assert row.split() == ["1.2", "100", "10", "20", "60", "10", "0.500", "2.000", "4.0x", "yes"]


def test_nothing_is_cut_off_at_80_columns() -> None:
    assert "…" not in printed()


def test_the_summary_has_the_three_claims() -> None:
    text = printed()

    assert "turns after the first: 0.50 s to first token with kvtier, 2.00 s without: 4.0x" in text
    assert "after a restart in a new process: 90% of prompt tokens from fs" in text
    assert "tokens identical: yes" in text


def test_a_wrong_answer_stands_out() -> None:
    text = printed(answer=7)

    assert "NO" in text
    assert "tokens identical: no" in text


def test_it_says_what_without_means() -> None:
    assert "without: the same engine and device pool with its own prefix cache" in printed()


def test_a_busy_machine_is_called_one() -> None:
    assert "warning:" not in printed(slow_down=1.1)
    assert "another program used this machine" in printed(slow_down=1.5)
    assert "another program used this machine" in printed(slow_down=0.5)
