"""A child process with one engine, driven by a test."""

import multiprocessing
from multiprocessing.context import ForkServerContext, SpawnContext
from types import TracebackType
from typing import Any

from tests.e2e.vllm.engine_host import ENGINE_IMPORTS, EngineOptions, run_engine

START_TIMEOUT_S = 240.0
"""Guard against a hang; the first start takes ten to forty seconds."""

CALL_TIMEOUT_S = 240.0
"""Guard against a hang; the longest call takes about half a minute."""

END_TIMEOUT_S = 60.0


class EngineFailedError(AssertionError):
    """The child could not start, or a call raised; the message is the child's traceback."""


class EngineProcess:
    """Starts an engine when entered and ends it when left.

    Args:
        options: how to start it.
        is_new_interpreter: start Python anew, as a restarted server does; else the child is forked from a process
            that has imported vLLM and nothing more, and has the hash seed of all engines forked there.
    """

    def __init__(self, options: EngineOptions, *, is_new_interpreter: bool = False) -> None:
        self._options = options
        self._context: SpawnContext | ForkServerContext
        if is_new_interpreter:
            self._context = multiprocessing.get_context("spawn")
        else:
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload([ENGINE_IMPORTS])

    def __enter__(self) -> "EngineProcess":
        self._connection, theirs = self._context.Pipe()
        self._process = self._context.Process(target=run_engine, args=(self._options, theirs))
        self._process.start()
        theirs.close()
        try:
            self._receive(START_TIMEOUT_S)
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.end()
        except (EngineFailedError, OSError):
            if error is None:
                raise

    def end(self) -> None:
        """End the engine as it ends of itself, and kill it if it does not.

        Raises:
            EngineFailedError: its end failed.
        """
        try:
            if self._process.is_alive():
                self._connection.send(None)
                self._receive(END_TIMEOUT_S)
                self._process.join(END_TIMEOUT_S)
        finally:
            self._kill()

    def kill(self) -> None:
        """Kill the engine as the kernel does when memory runs out."""
        self._kill()

    def call(self, method: str, *arguments: Any) -> Any:  # Any: whatever the host's method takes and returns
        """Call a method of the engine's host.

        Raises:
            EngineFailedError: it raised, or the process died.
        """
        self._connection.send((method, arguments))
        return self._receive(CALL_TIMEOUT_S)

    @property
    def pid(self) -> int:
        """The child's process id."""
        assert self._process.pid is not None
        return self._process.pid

    def _receive(self, timeout_s: float) -> Any:  # Any: whatever the host's method returns
        if not self._connection.poll(timeout_s):
            raise EngineFailedError(f"no answer within {timeout_s} s")
        try:
            is_good, result = self._connection.recv()
        except EOFError as error:
            self._process.join(END_TIMEOUT_S)
            raise EngineFailedError(f"the engine's process died: {self._process.exitcode}") from error
        if not is_good:
            raise EngineFailedError(result)
        return result

    def _kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._connection.close()
