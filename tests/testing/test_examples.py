"""The loaded profile says how many examples are drawn, and that of the tests whether they are the same each time."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from kvtier.testing.examples import num_examples

SAY_PROFILE = """
from tests import conftest
from kvtier.testing.examples import num_examples
from hypothesis import settings
chosen = settings(max_examples=num_examples(40))
print(chosen.max_examples, chosen.derandomize, chosen.deadline)
"""


@pytest.fixture
def restored_profile() -> Iterator[None]:
    """Whatever the test loads, the run's own profile comes back."""
    name = settings.get_current_profile_name()
    yield
    settings.load_profile(name)


@pytest.mark.parametrize(
    ("of_the_profile", "usual", "expected"), [(100, 40, 40), (1_000, 40, 400), (50, 30, 15), (10, 5, 1)]
)
@pytest.mark.usefixtures("restored_profile")
def test_a_test_draws_its_share_of_the_profiles_examples(
    of_the_profile: int, usual: int, expected: int
) -> None:
    settings.register_profile("test_examples", max_examples=of_the_profile)
    settings.load_profile("test_examples")

    assert num_examples(usual) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "40 False None"),
        ({"CI": "1"}, "40 True None"),
        ({"KVTIER_EXAMPLES": "12"}, "480 False None"),
        ({"CI": "1", "KVTIER_EXAMPLES": "2"}, "80 False None"),
    ],
)
def test_ci_draws_the_same_examples_each_time_and_a_fuzz_run_more_and_others(
    environment: dict[str, str], expected: str
) -> None:
    root = Path(__file__).parents[2]
    inherited = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{root / 'src'}:{root}"}

    said = subprocess.run(
        [sys.executable, "-c", SAY_PROFILE],
        env=inherited | environment,
        check=True,
        capture_output=True,
        text=True,
    )

    assert said.stdout.strip() == expected
