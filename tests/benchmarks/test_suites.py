"""Every benchmark has a name of its own, can be found by it, and says what it lacks where it cannot be loaded."""

import importlib

import pytest

from benchmarks.suites import SUITES, find_suite
from benchmarks.tiers.suite import TIERS


def missing_library(module: str) -> str | None:
    """Return which library keeps ``module`` from being imported, None when nothing does."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error.name)
    return None


@pytest.mark.parametrize(
    "module", [suite.module for suite in SUITES] + [f"benchmarks.tiers.{tier}" for tier in TIERS]
)
def test_a_benchmark_can_be_loaded_or_names_the_library_that_is_missing(module: str) -> None:
    missing = missing_library(module)

    if missing is None:
        assert callable(importlib.import_module(module).measure)
    else:
        assert missing.partition(".")[0] not in {"benchmarks", "kvtier", "None"}


def test_names_are_found_and_belong_to_one_suite_each() -> None:
    assert len({suite.name for suite in SUITES}) == len(SUITES)
    assert [find_suite(suite.name) for suite in SUITES] == list(SUITES)
    assert all(suite.summary for suite in SUITES)


@pytest.mark.parametrize("name", ["no-such", "", "FS", "f"])
def test_a_name_that_is_none_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(KeyError) as refused:
        find_suite(name)

    message = str(refused.value.args[0])
    assert repr(name) in message
    assert all(suite.name in message for suite in SUITES)
