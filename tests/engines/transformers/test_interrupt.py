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


def lift_the_inner_one(steps: list[str]) -> None:
    with DeferredInterrupt(), DeferredInterrupt() as inner, inner.lifted():
        interrupt()
        steps.append("outer kept it")
    steps.append("never")


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (go_on, "went on"),
        (lift, "before"),
        (interrupt_while_lifted, "lifted"),
        (nest_while_lifted, "inner went on"),
        (interrupt_after_lifted, "went on"),
        (nest, "outer went on"),
        (lift_the_inner_one, "outer kept it"),
    ],
)
def test_an_interrupt_is_delivered_where_it_may_be_and_not_before(
    block: Callable[[list[str]], None], expected: str
) -> None:
    steps: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        block(steps)
    assert steps == [expected]
    assert signal.getsignal(signal.SIGINT) is before


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


def test_another_thread_s_block_does_not_open_that_of_the_main_one() -> None:
    def pass_through() -> None:
        with DeferredInterrupt() as deferred, deferred.lifted():
            pass

    with pytest.raises(KeyboardInterrupt), DeferredInterrupt():  # noqa: PT012  # where it comes is what is tested
        thread = threading.Thread(target=pass_through)
        thread.start()
        thread.join()
        interrupt()
        is_kept_out = True
    assert is_kept_out


def test_a_handler_that_does_not_raise_is_told_once() -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: told.append(number))
    try:
        with DeferredInterrupt() as deferred:
            interrupt()
            assert not told
            with deferred.lifted():
                assert told == [signal.SIGINT]
                interrupt()
                assert told == [signal.SIGINT] * 2
        assert told == [signal.SIGINT] * 2
    finally:
        signal.signal(signal.SIGINT, before)
