"""Keeps Ctrl-C out of the few lines that must not be left half done.

It does not swallow an interrupt: whatever arrives inside is delivered at the end of the lines. Books that two
halves keep about one transfer would otherwise differ for ever, because KeyboardInterrupt may be raised between
any two instructions. Python delivers signals to the main thread alone, so elsewhere there is nothing to keep.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self


class DeferredInterrupt:
    """A block of code that SIGINT does not interrupt; it is delivered when the block ends."""

    def __init__(self) -> None:
        self._previous = signal.getsignal(signal.SIGINT)
        self._is_active = threading.current_thread() is threading.main_thread() and callable(self._previous)
        self._is_caught = False
        self._frame: FrameType | None = None

    def __enter__(self) -> Self:
        self._install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Let interrupts through for a while, one that is waiting first."""
        self._restore()
        try:
            yield
        finally:
            self._install()

    def _install(self) -> None:
        if self._is_active:
            signal.signal(signal.SIGINT, self._note)

    def _restore(self) -> None:
        if not self._is_active:
            return
        signal.signal(signal.SIGINT, self._previous)
        if self._is_caught and callable(self._previous):
            self._is_caught = False
            self._previous(signal.SIGINT, self._frame)

    def _note(self, _signum: int, frame: FrameType | None) -> None:
        self._is_caught = True
        self._frame = frame
