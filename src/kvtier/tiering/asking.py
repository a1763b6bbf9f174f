"""The thread that asks where blocks are: one call to the place for the questions that wait.

It remembers no verdict and knows no tier. Batches of questions come in the order of the steps. Those that wait while
a call is under way are asked together in the next one: to a server that is away each call fails only after a while,
and a queue of calls would make the last request wait for all of them.
"""

import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import NewType

from kvtier.base import OffloadKey

logger = logging.getLogger(__name__)

Ask = Callable[[Sequence[OffloadKey]], Collection[OffloadKey]]
"""Returns which of the keys are held. Runs on the asking thread and may block and raise."""

Era = NewType("Era", int)
"""The time between two resets: what was asked or seen in one says nothing about another."""

MAX_MERGED_KEYS = 4096
"""Keys up to which batches are asked together: those of a thousand requests that are new in a step. More keep the first
of them waiting longer at a place that answers each key for itself, two thousand a second; fewer are more calls."""


@dataclass(eq=False, slots=True)
class Question:
    """The questions of one step.

    Attributes:
        era: in which they were asked.
        keys: what they are about, each once.
        asked_s: the clock's reading when they were handed over; infinite before.
    """

    era: Era
    keys: list[OffloadKey] = field(default_factory=list)
    asked_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Answer:
    """What another thread has found out.

    Attributes:
        era: what it is true of.
        keys: what it is about.
        held: which of them are held.
        questions: those that it answers, oldest first; none when nobody has asked.
    """

    era: Era
    keys: Collection[OffloadKey]
    held: Collection[OffloadKey]
    questions: Sequence[Question] = ()


class AskingThread:
    """The thread, and what it has been handed; it is started by the first question.

    Questions reach it through a queue, answers leave it through ``answers``; neither needs a lock.

    Args:
        name: of the tier, for the thread and messages.
        ask: which of these keys are held.
        answers: where each question's answer is put, in the order in which they were handed over.

    Attributes:
        era: the present one; questions of another are answered without being asked. Set by the owner of the questions.
        num_failed_keys: keys that could not be asked for.
    """

    def __init__(self, name: str, ask: Ask, answers: deque[Answer]) -> None:
        self.era = Era(0)
        self.num_failed_keys = 0
        self._name = name
        self._ask = ask
        self._answers = answers
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def hand_over(self, question: Question) -> None:
        """Ask as soon as the thread is free; when the system has no thread to give, nothing is held."""
        if self._thread is None and not self._is_started(len(question.keys)):
            self._answers.append(Answer(question.era, question.keys, (), [question]))
        else:
            self._questions.put(question)

    def end(self, timeout_s: float) -> bool:
        """End the thread after what it has been handed; False when it had not ended after ``timeout_s``."""
        self._questions.put(None)
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _is_started(self, num_keys: int) -> bool:
        thread = threading.Thread(target=self._work, name=f"kvtier-{self._name}-lookup", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("tier %s: no thread for lookups, %d are misses: %s", self._name, num_keys, error)
            self.num_failed_keys += num_keys
            return False
        self._thread = thread
        return True

    def _work(self) -> None:
        waiting: deque[Question | None] = deque()
        while True:
            if not waiting:
                waiting.append(self._questions.get())
            with suppress(queue.Empty):
                while True:
                    waiting.append(self._questions.get_nowait())
            questions = take_mergeable(waiting)
            if not questions:
                return
            era, keys = questions[0].era, keys_of(questions)
            held = self._find(keys) if era == self.era else ()
            self._answers.append(Answer(era, keys, held, questions))

    def _find(self, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        try:
            return frozenset(self._ask(keys))
        except Exception:  # thread top
            self.num_failed_keys += len(keys)
            logger.exception("tier %s: asking for %d keys failed", self._name, len(keys))
            return ()


def take_mergeable(waiting: deque[Question | None]) -> list[Question]:
    """Take from the front what can be asked in one call: one question, and those of its era that fit beside it.

    Returns:
        Them, in their order; empty when the first that waits is None, which ends the thread.
    """
    first = waiting.popleft()
    if first is None:
        return []
    taken, num_keys = [first], len(first.keys)
    while waiting and (following := waiting[0]) is not None and following.era == first.era:
        num_keys += len(following.keys)
        if num_keys > MAX_MERGED_KEYS:
            break
        taken.append(following)
        waiting.popleft()
    return taken


def keys_of(questions: Iterable[Question]) -> list[OffloadKey]:
    """Return the keys of the questions in their order, each once. Pure."""
    return list(dict.fromkeys(chain.from_iterable(question.keys for question in questions)))
