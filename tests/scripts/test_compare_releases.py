"""What two releases of vLLM have to show before they share blocks."""

from pathlib import Path

import pytest

from scripts.compare_releases import DIFFERENT, Run, judge

ANSWERS = [[1, 2], [3]]
EQUAL = {"equal": 5, "close": 0, "wrong": 0}


def test_equal_pages_and_answers_are_the_same(tmp_path: Path) -> None:
    said = judge(Run(ANSWERS), Run(ANSWERS, 64), Run(ANSWERS, 32, EQUAL), tmp_path)
    assert said == "64 tokens loaded, 5 blocks equal, answers equal"


@pytest.mark.parametrize(
    ("loaded", "audited"),
    [
        (Run([[1, 2], [4]], 64), Run(ANSWERS, 32, EQUAL)),
        (Run(ANSWERS, 64), Run([[1, 2], [4]], 32, EQUAL)),
        (Run(ANSWERS, 64), Run(ANSWERS, 32, EQUAL | {"wrong": 1})),
        (Run(ANSWERS, 0), Run(ANSWERS, 0, EQUAL)),
    ],
)
def test_another_answer_a_wrong_block_or_no_hit_is_a_difference(
    loaded: Run, audited: Run, tmp_path: Path
) -> None:
    assert DIFFERENT in judge(Run(ANSWERS), loaded, audited, tmp_path)


def test_pages_that_no_audit_compared_are_said(tmp_path: Path) -> None:
    nothing = dict.fromkeys(EQUAL, 0)
    assert "no block compared" in judge(Run(ANSWERS), Run(ANSWERS, 64), Run(ANSWERS, 32, nothing), tmp_path)
