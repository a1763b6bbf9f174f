"""Running engines that tests borrow, and what is computed once for every process that runs tests.

An engine starts when a test first asks for its options. When the test gives it back it forgets all blocks and counts,
and the next test with equal options takes it. One that a test has broken ends with that test: it never comes back.
"""

import fcntl
import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.vllm.answers import Answer
from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess

MAX_ENGINES = 3
"""Engines that a process keeps: each holds up to half a gigabyte of host memory."""


class EnginePool:
    """The engines of one process that runs tests."""

    def __init__(self) -> None:
        self._idle: list[tuple[EngineOptions, EngineProcess]] = []

    @contextmanager
    def borrow(self, options: EngineOptions) -> Iterator[EngineProcess]:
        """Return an engine that is as good as new; more than one borrower of equal options get one each."""
        with ExitStack() as stack:
            engine = self._take(options)
            stack.push(engine)
            yield engine
            engine.call("start_over")
            stack.pop_all()
        self._idle.append((options, engine))

    def end(self, num_left: int = 0) -> None:
        """End engines that are not borrowed, until so many are left: those that were used last."""
        while len(self._idle) > num_left:
            _, engine = self._idle.pop(0)
            engine.end()

    def _take(self, options: EngineOptions) -> EngineProcess:
        for position, (held, engine) in enumerate(self._idle):
            if held == options:
                del self._idle[position]
                return engine
        self.end(MAX_ENGINES - 1)
        return EngineProcess(options).__enter__()


def make_once(path: Path, make: Callable[[Path], object]) -> Path:
    """Return ``path``, which the first process to ask for it makes while the others wait."""
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            begun = path.with_name(f"{path.name}.begun")
            make(begun)
            begun.rename(path)
    return path


class Alone:
    """Answers of vLLM without kvtier.

    Args:
        folder: where they are kept for every process that runs tests.
        engines: those that give them.
    """

    def __init__(self, folder: Path, engines: EnginePool) -> None:
        self._folder = folder
        self._engines = engines

    def answers(
        self,
        options: EngineOptions,
        method: str,
        prompts: Sequence[Sequence[int]],
        sampling: dict[str, Any],  # Any: arguments of vLLM's SamplingParams
    ) -> list[Answer]:
        """Return what a method of the engine's host answers, of an engine that is as good as new."""
        assert options.settings is None

        def compute(path: Path) -> None:
            with self._engines.borrow(options) as engine:
                path.write_bytes(pickle.dumps(engine.call(method, prompts, sampling)))

        name = repr((options.name, method, prompts, sorted(sampling.items())))
        path = self._folder / hashlib.sha256(name.encode()).hexdigest()
        answers: list[Answer] = pickle.loads(make_once(path, compute).read_bytes())  # noqa: S301 - our own
        return answers
