"""Defers Ctrl-C around a few lines that must not be left half done.

KeyboardInterrupt may be raised between any two instructions, and would leave the records that two halves keep of one
transfer in disagreement. An interrupt that arrives inside is delivered at the end of the lines. Python delivers signals
to the main thread only, so in other threads this does nothing.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import ClassVar, Self


class DeferredInterrupt:
    """A block of code that SIGINT does not interrupt; the signal is delivered when the block ends.

    The outermost block replaces the signal handler and nested blocks only increment a counter, because changing a
    handler takes a twentieth of a millisecond while a model's weights fill the processor's caches. A handler that other
    code installs inside the block is used as it is.
    """

    def __init__(self) -> None:
        self._handler: _DeferringHandler | None = None
        self._num_outer = 0
        self._is_outermost = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handler = _DeferringHandler.current
            if self._handler is None:
                self._install()
            else:
                self._num_outer = self._handler.num_blocking
                self._handler.num_blocking += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is None:
            return
        if self._is_outermost:
            _DeferringHandler.current = None
            signal.signal(signal.SIGINT, self._handler.previous)
        self._handler.set_blocking(self._num_outer)

    def lifted(self) -> "LiftedDeferral":
        """Return a context that delivers interrupts, a pending one first, unless an outer block defers them."""
        return LiftedDeferral(self._handler)

    def _install(self) -> None:
        previous = signal.getsignal(signal.SIGINT)
        if callable(previous):
            self._is_outermost = True
            self._handler = _DeferringHandler(previous)
            signal.signal(signal.SIGINT, self._handler.handle)
            _DeferringHandler.current = self._handler


class LiftedDeferral:
    """A part of such a block that may be interrupted. Not a generator, which an interrupt could leave half done.

    Args:
        handler: the block's handler; None when the block defers nothing.
    """

    def __init__(self, handler: "_DeferringHandler | None") -> None:
        self._handler = handler
        self._num_holding = 0

    def __enter__(self) -> None:
        if self._handler is not None:
            self._num_holding = self._handler.num_blocking
            try:
                self._handler.set_blocking(self._num_holding - 1)
            except BaseException:
                self._handler.num_blocking = self._num_holding
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is not None:
            self._handler.num_blocking = self._num_holding


class _DeferringHandler:
    """The signal handler while blocks are open. Used from the main thread.

    Args:
        previous: the handler before, which receives the deferred signal.

    Attributes:
        current: the installed handler.
        num_blocking: how many open blocks defer interrupts.
    """

    current: ClassVar["_DeferringHandler | None"] = None

    def __init__(self, previous: Callable[[int, FrameType | None], object]) -> None:
        self.previous = previous
        self.num_blocking = 1
        self._is_caught = False
        self._frame: FrameType | None = None

    def handle(self, _signum: int, frame: FrameType | None) -> None:
        """Record a signal; deliver it unless a block defers it."""
        self._is_caught = True
        self._frame = frame
        self.set_blocking(self.num_blocking)

    def set_blocking(self, num_blocking: int) -> None:
        """Set how many blocks defer interrupts; at zero deliver the recorded one."""
        self.num_blocking = num_blocking
        if self._is_caught and num_blocking == 0:
            self._is_caught = False
            frame, self._frame = self._frame, None
            self.previous(signal.SIGINT, frame)
