"""Keeps Ctrl-C out of the few lines that must not be left half done.

It does not swallow an interrupt: whatever arrives inside is delivered at the end of the lines. Books that two
halves keep about one transfer would otherwise differ for ever, because KeyboardInterrupt may be raised between
any two instructions. Python delivers signals to the main thread alone, so elsewhere there is nothing to keep.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import ClassVar, Self


class DeferredInterrupt:
    """A block of code that SIGINT does not interrupt; it is delivered when the block ends.

    The outermost block puts a handler in the place of the one that was there, those within it only count themselves:
    with the processor's caches full of a model's weights, changing a handler takes a twentieth of a millisecond. Who
    puts another handler there meanwhile is interrupted as that one likes.
    """

    def __init__(self) -> None:
        self._gate: _Gate | None = None
        self._num_around = 0
        self._is_outermost = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._gate = _Gate.current
            if self._gate is None:
                self._install()
            else:
                self._num_around = self._gate.num_holding
                self._gate.num_holding += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._gate is None:
            return
        if self._is_outermost:
            _Gate.current = None
            signal.signal(signal.SIGINT, self._gate.previous)
        self._gate.open_to(self._num_around)

    def lifted(self) -> "LiftedDeferral":
        """Let interrupts through for a while, one that is waiting first; not those that an outer block keeps out."""
        return LiftedDeferral(self._gate)

    def _install(self) -> None:
        previous = signal.getsignal(signal.SIGINT)
        if callable(previous):
            self._is_outermost = True
            self._gate = _Gate(previous)
            signal.signal(signal.SIGINT, self._gate.note)
            _Gate.current = self._gate


class LiftedDeferral:
    """A part of such a block that may be interrupted. No generator: an interrupt could keep one from going on.

    Args:
        gate: the block's; None where there is nothing to keep out.
    """

    def __init__(self, gate: "_Gate | None") -> None:
        self._gate = gate
        self._num_holding = 0

    def __enter__(self) -> None:
        if self._gate is not None:
            self._num_holding = self._gate.num_holding
            try:
                self._gate.open_to(self._num_holding - 1)
            except BaseException:
                self._gate.num_holding = self._num_holding
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._gate is not None:
            self._gate.num_holding = self._num_holding


class _Gate:
    """The handler while blocks are open, of the main thread alone.

    Args:
        previous: the handler before, which gets what is delivered.

    Attributes:
        current: the one that is installed.
        num_holding: how many blocks keep interrupts out now.
    """

    current: ClassVar["_Gate | None"] = None

    def __init__(self, previous: Callable[[int, FrameType | None], object]) -> None:
        self.previous = previous
        self.num_holding = 1
        self._is_caught = False
        self._frame: FrameType | None = None

    def note(self, _signum: int, frame: FrameType | None) -> None:
        """Take an interrupt; hand it on unless a block keeps it out."""
        self._is_caught = True
        self._frame = frame
        self.open_to(self.num_holding)

    def open_to(self, num_holding: int) -> None:
        """Have so many blocks keep interrupts out, and hand on what was taken if there are none."""
        self.num_holding = num_holding
        if self._is_caught and num_holding == 0:
            self._is_caught = False
            frame, self._frame = self._frame, None
            self.previous(signal.SIGINT, frame)
