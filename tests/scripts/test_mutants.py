"""The bugs that the storm must find can still be planted."""

from pathlib import Path

import pytest

from scripts.mutant_table import MUTANTS, Mutant
from scripts.mutants import count_places, plant

MIN_MUTANTS = 25


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutants_text_stands_in_the_code_exactly_once(mutant: Mutant) -> None:
    assert count_places(mutant) == 1
    assert mutant.old != mutant.new


def test_there_are_enough_of_them_and_none_twice() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= MIN_MUTANTS


def test_a_text_that_is_gone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("nothing of the kind\n", encoding="utf-8")
    with pytest.raises(ValueError, match="plant the bug anew"):
        plant(Mutant("gone", "file.py", "something", "else"), tmp_path)
