"""The llama-server that the front has started: its end is logged, and it is started again."""

import asyncio
import ctypes
import logging
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvtier.errors import LlamaServerError

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
"""Of Linux's ``prctl``."""

FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0
"""Pauses before a server is started again, doubled while it ends at once."""

STEADY_S = 60.0
"""A server that has run for so long begins with the first pause again."""

END_S = 10.0
"""Seconds that a server has to end by itself; then it is killed."""


class ServerProcess:
    """A child process that is started again when it ends. Used from one event loop.

    Args:
        arguments: program and arguments.
        on_start: called each time it has been started.
        was_ready: returns whether its model has ever been loaded; a server that ends before that is wrong, not unlucky.
        clock: seconds, monotonic.

    Attributes:
        num_starts: how often it was started.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        on_start: Callable[[], None],
        was_ready: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arguments = arguments
        self._on_start = on_start
        self._was_ready = was_ready
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self.num_starts = 0

    async def run(self) -> None:
        """Start the server, and again whenever it ends, until cancelled.

        Raises:
            LlamaServerError: the program cannot be started, or ends before its model is loaded.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            began_s = self._clock()
            try:
                # A session of its own: an interrupt at the terminal must not end it before the last saves.
                self._process = await asyncio.create_subprocess_exec(
                    *self._arguments, start_new_session=True, preexec_fn=_end_with_parent
                )
            except OSError as error:
                raise LlamaServerError(f"{self._arguments[0]} cannot be started: {error}") from error
            self.num_starts += 1
            self._on_start()
            status = await self._process.wait()
            if not self._was_ready():
                raise LlamaServerError(
                    f"llama-server has ended with status {status} before its model was loaded"
                )
            pause_s = FIRST_PAUSE_S if self._clock() - began_s > STEADY_S else pause_s
            logger.warning(
                "llama-server has ended with status %d: it is started again in %g s", status, pause_s
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def close(self) -> None:
        """End the server."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _end_with_parent() -> None:
    """Have the kernel end this child with its parent, be that by a kill."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
