"""Runs somebody's command as if this program were not there: signals go in, the exit status comes out.

It knows nothing of recording. A SIGKILL cannot be handed on: the kernel tells the command of this program's death then.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from kvtier.errors import ConfigError

FORWARDED = (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)

FROM_KEYBOARD = frozenset({signal.SIGINT, signal.SIGQUIT})
"""A terminal sends these to every process in its foreground, the command included."""

TERMINAL = Path("/dev/tty")

PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when its parent dies."""

KILLED_STATUS = 128
"""A shell's word for a command that a signal has ended: so much and the signal's number."""


class ForwardedSignals:
    """Hands signals to a command, those from before its start included. Main thread only."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []

    def begin(self, process: "subprocess.Popen[bytes]") -> None:
        """Send to ``process`` what has come and what comes."""
        self._process = process
        for number in self._early:
            process.send_signal(number)

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; what the keyboard sends to both is not sent twice."""
        del frame
        if number in FROM_KEYBOARD and _is_in_foreground():
            return
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(number)


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run ``command`` until it ends and return its exit status, as a shell would.

    Args:
        command: the program and its arguments.
        environment: its variables.

    Raises:
        ConfigError: it cannot be started.
    """
    signals = ForwardedSignals()
    with _handled_by(signals):
        try:
            # The only thread calls, and what runs before the command takes no lock of Python's libraries.
            process = subprocess.Popen(  # noqa: S603 - the user's own command
                command,
                env=environment,
                preexec_fn=_make_death_wish(),  # noqa: PLW1509
            )
        except OSError as error:
            raise ConfigError("COMMAND", command[0], f"cannot be started: {error.strerror}") from error
        signals.begin(process)
        status = process.wait()
    return status if status >= 0 else KILLED_STATUS - status


def _make_death_wish() -> Callable[[], None] | None:
    """Return what a new process does first, so that it is terminated when this one dies; None where none can."""
    if sys.platform != "linux":
        return None
    # Nothing is looked up or allocated between fork and exec that could wait for a lock.
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def wish() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before the wish
            os.kill(os.getpid(), signal.SIGTERM)

    return wish


@contextmanager
def _handled_by(signals: ForwardedSignals) -> Iterator[None]:
    """Let ``signals`` take what is not ignored: a command that shall outlive its terminal ignores it too."""
    taken = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, signals.take) for number in taken}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_in_foreground() -> bool:
    try:
        with TERMINAL.open("rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
