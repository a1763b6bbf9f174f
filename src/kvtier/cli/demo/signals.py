"""Makes SIGTERM and SIGHUP end a demo like Ctrl-C, so that its context managers run.

An engine defers Ctrl-C while its tables are half updated, so these signals use the handler of SIGINT.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a demo from outside: a supervisor, a closed terminal."""


@contextmanager
def ended_like_interrupted() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C inside the block. Main thread only."""
    previous = {number: signal.signal(number, _interrupt) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(_number: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)
    # A shell starts background jobs with SIGINT ignored; SIGTERM must end those too.
    if not callable(handler):
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)
