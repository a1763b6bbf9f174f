"""How a command ends on a signal, and child processes of a command that end with it.

SIGTERM and SIGHUP end a command like Ctrl-C, so that its context managers run. An engine defers Ctrl-C while its tables
are half updated, so these signals use the handler of SIGINT.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command from outside: a supervisor, a closed terminal."""

STOP_S = 75.0
"""Seconds for a child to end. An interrupted engine drains its stores for at most ten; a server that is starting ends
when it is ready or has failed, within a minute. A child that is killed earlier would leave its server behind."""

SOURCE_FOLDER = Path(__file__).parents[2]
"""Where a child process finds this package, installed or not."""


@contextmanager
def ended_like_interrupted() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C inside the block. Main thread only."""
    previous = {number: signal.signal(number, _interrupt) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def running_module(
    module: str, *arguments: str, messages: IO[bytes], stop: Callable[[subprocess.Popen[str]], object]
) -> Iterator[subprocess.Popen[str]]:
    """Run a module of this package with pipes to its stdin and stdout; it has ended when the block has.

    Args:
        module: its dotted name.
        arguments: its command line.
        messages: the file that its stderr goes to.
        stop: asks the child to end, if it has not ended when the block ends.
    """
    search_path = os.pathsep.join(filter(None, [str(SOURCE_FOLDER), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(  # noqa: S603 - our own interpreter with arguments of our own
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=messages,
        text=True,
        env=os.environ | {"PYTHONPATH": search_path},
        # Ctrl-C reaches a whole process group; this process ends the child itself, in order.
        start_new_session=True,
    ) as child:
        try:
            yield child
        finally:
            if child.poll() is None:
                stop(child)
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()


def _interrupt(_number: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)
    # A shell starts background jobs with SIGINT ignored; SIGTERM must end those too.
    if not callable(handler):
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)
