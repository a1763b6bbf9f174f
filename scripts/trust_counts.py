"""Counts for ``scripts.trust_table`` what tests have tried: cases, jobs, blocks, and what was wrong with them.

It is a plugin of pytest (``-p scripts.trust_counts``) that stands around the drivers of ``kvtier.testing``. Each block
that a tier says it has loaded is compared with what belongs under its key, whether or not the test does that too. The
sums go as JSON into the file that ``KVTIER_TRUST_COUNTS`` names.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from kvtier.testing.tier_driver import TierDriver

FILE_VARIABLE = "KVTIER_TRUST_COUNTS"

COUNTS: Counter[str] = Counter()
"""Cases that passed, failed and were skipped; jobs and lost ones; lookups, and those without an answer; blocks that
were loaded and compared, and those with wrong bytes."""


def pytest_configure() -> None:
    """Stand around the drivers, which the tests' own settings of pytest must meet first."""
    from kvtier.testing.tier_driver import TierDriver
    from kvtier.testing.tiering_driver import TieringDriver

    around(TierDriver, "wait", counted("jobs", "lost"))
    around(TierDriver, "lookup", counted("lookups", "stuck"))
    around(TierDriver, "load", compared)
    around(TieringDriver, "search_until_known", counted("lookups", "stuck"))
    around(TieringDriver, "begin_load", counted("loads", "wrong"))
    around(TieringDriver, "settle", counted("waits", "lost"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count a case by its call, or by a start that failed."""
    if report.when == "call" or not report.passed:
        COUNTS[report.outcome] += 1


def pytest_sessionfinish() -> None:
    """Write the sums."""
    if FILE_VARIABLE in os.environ:
        Path(os.environ[FILE_VARIABLE]).write_text(json.dumps(COUNTS))


Method = Callable[..., Any]  # Any: the arguments and the result of whichever method it is


def around(driver: type, name: str, wrap: Callable[[Method], Method]) -> None:
    """Replace a method by one that counts."""
    setattr(driver, name, wraps(getattr(driver, name))(wrap(getattr(driver, name))))


def counted(what: str, failed: str) -> Callable[[Method], Method]:
    """Return what counts calls, and those that end with the driver's own complaint."""

    def wrap(method: Method) -> Method:
        def call(*arguments: object, **named: object) -> object:
            COUNTS[what] += 1
            try:
                return method(*arguments, **named)
            except AssertionError:
                COUNTS[failed] += 1
                raise

        return call

    return wrap


def compared(method: Method) -> Method:
    """Return a load that compares every block that has arrived."""
    from kvtier.testing.tier_driver import arrived_of, content_of

    def load(driver: "TierDriver", numbers: list[int], slots: Sequence[int] | None = None) -> object:
        result = method(driver, numbers, slots)
        places = range(len(numbers)) if slots is None else slots
        arrived = arrived_of(result, numbers)
        for number, slot in zip(numbers, places, strict=True):
            if number in arrived:
                COUNTS["blocks"] += 1
                is_right = np.array_equal(driver.rows[slot], content_of(number, driver.rows.shape[1]))
                COUNTS["wrong"] += not is_right
        return result

    return load
