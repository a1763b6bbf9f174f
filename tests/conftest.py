"""What every test needs: shipped asserts that explain themselves, and how hard the tests of Hypothesis look."""

import os
import signal
from collections.abc import Iterator
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from tests.leftovers import pytest_runtest_makereport, pytest_runtest_protocol
from tests.marks import mark_by_fixtures
from tests.passed import leave_out_passed, pytest_addoption, pytest_configure
from tests.servers import describe_servers

from kvtier.log_limit import LIMIT

__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_report_header",
    "pytest_runtest_makereport",
    "pytest_runtest_protocol",
]
"""What pytest calls."""

pytest.register_assert_rewrite("kvtier.testing")

# The models of the tests are so small that a second thread gains nothing, and where another process wants its core,
# each of a forward pass's hundreds of barriers waits until the scheduler runs it again. Read when torch is imported,
# here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in its background has them ignore SIGINT, and so would the processes that they start,
# of which some are interrupted by a test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

EFFORT_VARIABLE = "KVTIER_EXAMPLES"
"""How many times the usual examples are drawn; unset, what each test says. More finds more and takes longer."""

USUAL = settings()
"""Hypothesis's own choice: under CI=1 the same examples in each run, elsewhere new ones."""


def make_profile(effort: int | None) -> settings:
    """Return what the tests of Hypothesis run under: no deadline, for a busy machine proves nothing.

    Args:
        effort: how many times the usual examples, each time others, under CI too; None leaves both as they are.
    """
    if effort is None:
        return settings(USUAL, deadline=None)
    return settings(
        USUAL, deadline=None, max_examples=USUAL.max_examples * effort, derandomize=False, print_blob=True
    )


settings.register_profile(
    "kvtier", make_profile(int(os.environ[EFFORT_VARIABLE]) if EFFORT_VARIABLE in os.environ else None)
)
settings.load_profile("kvtier")


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder() -> Iterator[None]:
    """Remember digests of weights for this run alone, in the processes that tests start too."""
    with TemporaryDirectory(prefix="kvtier-cache-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVTIER_CACHE_DIR", folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def own_runtime_folder() -> Iterator[None]:
    """Keep the control sockets of this run's engines away from those of the user, in child processes too."""
    with TemporaryDirectory(prefix="kvtier-run-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        yield


@pytest.fixture(autouse=True)
def own_log_limit() -> None:
    """Count the repeated log lines of each test for itself."""
    LIMIT.forget()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their fixtures, and leave out what another run has passed."""
    mark_by_fixtures(items)
    leave_out_passed(config, items)


def pytest_report_header() -> str:
    """Say at the head of a run which real servers it will start."""
    return describe_servers()
