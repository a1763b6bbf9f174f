"""What a failed test leaves behind is thrown away at once: a test after it fails for reasons of its own alone.

The traceback of a failure keeps the frames of its test alive, and with them sockets, files and threads that nobody
closed. They are freed in the middle of a later test, their warnings are errors there, and it fails for nothing it did.
"""

import gc
import sys
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

HAS_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note on a test that a part of it has failed."""
    report = yield
    if report.failed:
        item.stash[HAS_FAILED] = True
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test; throw away what it left if it has failed."""
    is_done = yield
    if item.stash.get(HAS_FAILED, False):
        throw_away()
    return is_done


def throw_away() -> None:
    """Free the last failure's frames and what only they held, without a word about it."""
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    with silence():
        gc.collect()


@contextmanager
def silence() -> Iterator[None]:
    """Drop warnings and what finalizers raise."""
    previous = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = previous
