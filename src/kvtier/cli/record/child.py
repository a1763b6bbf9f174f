"""Runs the user's command transparently: signals are forwarded to it, and its exit status is returned.

SIGKILL cannot be forwarded. The kernel then sends the command SIGTERM, because its parent died.
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
"""A terminal sends these to every process in its foreground, so the command receives them anyway."""

TERMINAL = Path("/dev/tty")

PR_SET_PDEATHSIG = 1
"""Linux: set the signal that a process receives when its parent dies."""

KILLED_STATUS = 128
"""A shell's status for a command that a signal ended is this plus the signal's number."""


class ForwardedSignals:
    """Forwards signals to a command, also those that arrived before its start. Main thread only."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []

    def begin(self, process: "subprocess.Popen[bytes]") -> None:
        """Forward the signals that have arrived to ``process``, and from now on every further one."""
        self._process = process
        for number in self._early:
            process.send_signal(number)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; signals from the keyboard, which the command receives anyway, are not sent twice."""
        del frame
        if number in FROM_KEYBOARD and _is_in_foreground():
            return
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(number)


def run_command(command: Sequence[str], environment: Mapping[str, str], stdout: int | None = None) -> int:
    """Run ``command`` until it ends and return its exit status, as a shell would.

    Args:
        command: the program and its arguments.
        environment: its environment variables.
        stdout: the descriptor that its output goes to; None: this process's stdout.

    Raises:
        ConfigError: it cannot be started.
    """
    signals = ForwardedSignals()
    with _handled_by(signals):
        try:
            # This thread is the only one, and the hook takes no lock of Python's libraries.
            process = subprocess.Popen(  # noqa: S603 - the user's own command
                command,
                env=environment,
                stdout=stdout,
                preexec_fn=_make_parent_death_hook(),  # noqa: PLW1509
            )
        except OSError as error:
            raise ConfigError("COMMAND", command[0], f"cannot be started: {error.strerror}") from error
        signals.begin(process)
        status = process.wait()
    return status if status >= 0 else KILLED_STATUS - status


def _make_parent_death_hook() -> Callable[[], None] | None:
    """Return a function for the new process that makes the kernel end it when this one dies; None outside Linux."""
    if sys.platform != "linux":
        return None
    # Everything is looked up now: between fork and exec nothing may wait for a lock.
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def end_with_parent() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call
            os.kill(os.getpid(), signal.SIGTERM)

    return end_with_parent


@contextmanager
def _handled_by(signals: ForwardedSignals) -> Iterator[None]:
    """Install ``signals`` for all that are not ignored: a command that outlives its terminal must ignore them too."""
    taken = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, signals.handle) for number in taken}
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
