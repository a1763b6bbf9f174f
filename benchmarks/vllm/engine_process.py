"""A child process with one vLLM engine, driven over a pipe; it sleeps between calls."""

import multiprocessing
from collections.abc import Sequence
from types import TracebackType

from benchmarks.vllm.engine import EngineOptions, Served, run_engine

ANSWER_TIMEOUT_S = 600.0
"""Guard against a hang; the longest call takes seconds."""

END_TIMEOUT_S = 60.0


class EngineProcess:
    """Starts an engine when entered and ends it when left.

    Args:
        options: the engine's settings.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options

    def __enter__(self) -> "EngineProcess":
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=run_engine, args=(self._options, theirs), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._receive()
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
            if error is None:
                self._connection.send(None)
                self._receive()
                self._process.join(END_TIMEOUT_S)
        finally:
            self._kill()

    def serve(self, prompt: Sequence[int], num_answer_tokens: int) -> Served:
        """Answer the prompt, then wait until its stores have reached every tier."""
        served = self._call("serve", prompt, num_answer_tokens)
        assert isinstance(served, Served)
        self._call("settle")
        return served

    def serve_together(
        self, prompts: Sequence[Sequence[int]], at_once: int, num_answer_tokens: int
    ) -> list[tuple[float, int]]:
        """Answer the prompts, so many at a time; return seconds to first token and tokens found for each."""
        served = self._call("serve_together", prompts, at_once, num_answer_tokens)
        assert isinstance(served, list)
        return served

    def settle(self) -> None:
        """Wait until every store has reached every tier."""
        self._call("settle")

    def serve_without(self, prompt: Sequence[int], num_answer_tokens: int) -> Served:
        """Answer the prompt as if the engine had no kvtier."""
        served = self._call("serve_without", prompt, num_answer_tokens)
        assert isinstance(served, Served)
        return served

    def stats(self) -> dict[str, float]:
        """Return kvtier's counters and gauges; empty without kvtier."""
        stats = self._call("stats")
        assert isinstance(stats, dict)
        return stats

    def _call(self, method: str, *arguments: object) -> object:
        self._connection.send((method, arguments))
        return self._receive()

    def _receive(self) -> object:
        if not self._connection.poll(ANSWER_TIMEOUT_S):
            raise SystemExit(f"the engine has not answered within {ANSWER_TIMEOUT_S} s")
        try:
            result: object = self._connection.recv()
        except EOFError:
            self._process.join(END_TIMEOUT_S)
            raise SystemExit(f"the engine's process died, exit code {self._process.exitcode}") from None
        return result

    def _kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._connection.close()
