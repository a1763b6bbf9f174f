"""Ctrl-C waits for the end of the lines that must not be left half done, and is never lost."""

import os
import signal
import threading
from collections.abc import Callable

import pytest

from kvtier.engines.transformers.interrupt import DeferredInterrupt


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def go_on(steps: list[str]) -> None:
    with DeferredInterrupt():
        interrupt()
        steps.append("went on")


def lift(steps: list[str]) -> None:
    with DeferredInterrupt() as deferred:
        interrupt()
        steps.append("before")
        with deferred.lifted():
            steps.append("never")


def interrupt_while_lifted(steps: list[str]) -> None:
    with DeferredInterrupt() as deferred:
        with deferred.lifted():
            steps.append("lifted")
            interrupt()
            steps.append("never")
        steps.append("never")


def nest_while_lifted(steps: list[str]) -> None:
    with DeferredInterrupt() as deferred, deferred.lifted():
        with DeferredInterrupt():
            interrupt()
            steps.append("inner went on")
        steps.append("never")


def interrupt_after_lifted(steps: list[str]) -> None:
    with DeferredInterrupt() as deferred:
        with deferred.lifted():
            pass
        interrupt()
        steps.append("went on")
    steps.append("never")


def nest(steps: list[str]) -> None:
    with DeferredInterrupt():
        with DeferredInterrupt():
            interrupt()
        steps.append("outer went on")


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (go_on, "went on"),
        (lift, "before"),
        (interrupt_while_lifted, "lifted"),
        (nest_while_lifted, "inner went on"),
        (interrupt_after_lifted, "went on"),
        (nest, "outer went on"),
    ],
)
def test_an_interrupt_is_delivered_where_it_may_be_and_not_before(
    block: Callable[[list[str]], None], expected: str
) -> None:
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        block(steps)
    assert steps == [expected]


def test_afterwards_everything_is_as_before() -> None:
    before = signal.getsignal(signal.SIGINT)
    with DeferredInterrupt():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_in_another_thread_nothing_is_touched() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def look() -> None:
        with DeferredInterrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]
