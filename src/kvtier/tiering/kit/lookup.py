"""The thread that asks where blocks are: one call to the place for the questions that wait.

It remembers no verdict and knows no tier. Batches of questions come in the order of the steps. Those that wait while
a call is under way are asked together in the next one: to a server that is away each call fails only after a while,
and a queue of calls would make the last request wait for all of them.
"""

import logging
import math
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, NewType, Optional

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
class LookupBatch:
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
class LookupAnswer:
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
    questions: Sequence[LookupBatch] = ()


class LookupWorker:
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

    def __init__(self, name: str, ask: Ask, answers: deque[LookupAnswer]) -> None:
        self.era = Era(0)
        self.num_failed_keys = 0
        self._name = name
        self._ask = ask
        self._answers = answers
        self._questions: queue.SimpleQueue[LookupBatch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def hand_over(self, question: LookupBatch) -> None:
        """Ask as soon as the thread is free; when the system has no thread to give, nothing is held."""
        if self._thread is None and not self._is_started(len(question.keys)):
            self._answers.append(LookupAnswer(question.era, question.keys, (), [question]))
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
        waiting: deque[LookupBatch | None] = deque()
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
            self._answers.append(LookupAnswer(era, keys, held, questions))

    def _find(self, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        try:
            return frozenset(self._ask(keys))
        except Exception:  # thread top
            self.num_failed_keys += len(keys)
            logger.exception("tier %s: asking for %d keys failed", self._name, len(keys))
            return ()


def take_mergeable(waiting: deque[LookupBatch | None]) -> list[LookupBatch]:
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


def keys_of(questions: Iterable[LookupBatch]) -> list[OffloadKey]:
    """Return the keys of the questions in their order, each once. Pure."""
    return list(dict.fromkeys(chain.from_iterable(question.keys for question in questions)))


DEFAULT_MAX_VERDICTS = 65_536
"""Answers remembered, about 200 bytes each. Fewer ask again for the tail of a long prefix."""

DEFAULT_MAX_PENDING_KEYS = 65_536
"""Questions without an answer yet. Fewer would answer False for the tail of a long prefix."""

DEFAULT_ASK_TIMEOUT_S = 10.0
"""Seconds after which a question counts as answered False. Shorter loses hits of a slow tier; a longer wait
than computing the blocks is of no use, and requests have a deadline of their own."""


class _CachedAnswer(NamedTuple):
    """An answer, one object for all the keys of a batch that have it.

    Attributes:
        is_held: the answer.
        expires_s: the clock's reading until which it holds.
        when_heard: what takes its place once somebody has heard it, which expires earlier.
    """

    is_held: bool
    expires_s: float
    when_heard: Optional["_CachedAnswer"]


class AsyncLookup:
    """Verdicts about keys, fetched by a thread of its own.

    Verdicts and open questions belong to the scheduler's thread, the only caller of ``lookup``, ``flush`` and
    ``clear``. Answers reach it through a deque, batches leave it through a queue; neither needs a lock.

    Args:
        name: of the tier, for the thread and messages.
        ask: which of these keys are held.
        clock: seconds, monotonic.
        positive_ttl_s: seconds for which "held" is believed.
        negative_ttl_s: seconds for which "not held" is believed.
        max_verdicts: answers remembered; the oldest is forgotten first.
        max_pending_keys: questions without an answer, overdue ones included; beyond it the answer is False.
        ask_timeout_s: seconds after which an open question is answered False.

    Attributes:
        era: the time since the last ``clear``, for ``tell``.
    """

    def __init__(
        self,
        name: str,
        ask: Ask,
        *,
        clock: Callable[[], float],
        positive_ttl_s: float,
        negative_ttl_s: float,
        max_verdicts: int = DEFAULT_MAX_VERDICTS,
        max_pending_keys: int = DEFAULT_MAX_PENDING_KEYS,
        ask_timeout_s: float = DEFAULT_ASK_TIMEOUT_S,
    ) -> None:
        self.era = Era(0)
        self._clock = clock
        self._positive_ttl_s = positive_ttl_s
        self._negative_ttl_s = negative_ttl_s
        self._max_verdicts = max_verdicts
        self._max_pending_keys = max_pending_keys
        self._ask_timeout_s = ask_timeout_s
        self._verdicts: OrderedDict[OffloadKey, _CachedAnswer] = OrderedDict()
        self._pending: dict[OffloadKey, LookupBatch] = {}
        self._unasked: LookupBatch | None = None
        # INVARIANT: oldest first; what was handed over and is neither answered nor overdue.
        self._open: deque[LookupBatch] = deque()
        self._num_unanswered = 0
        self._answered: set[OffloadKey] | None = set()
        self._answers: deque[LookupAnswer] = deque()
        self._asking = LookupWorker(name, ask, self._answers)
        self._is_closed = False
        self._num_asked_keys = 0
        self._num_overflow_keys = 0
        self._num_overdue_keys = 0

    def lookup(self, key: OffloadKey) -> bool | None:
        """Return whether ``key`` is held, or None when that is being asked: ask again in a later step."""
        self._take_answers()
        now_s = self._clock()
        verdict = self._verdicts.get(key)
        if verdict is not None and now_s < verdict.expires_s:
            if verdict.when_heard is not None:
                self._verdicts[key] = verdict.when_heard
            return verdict.is_held
        question = self._pending.get(key)
        if question is None:
            return self._begin_question(key)
        if now_s - question.asked_s < self._ask_timeout_s:
            return None
        self._give_up_overdue(now_s)
        return self.lookup(key)  # answered False by now, and heard

    def drain_answered(self) -> Collection[OffloadKey] | None:
        """Return the keys that have an answer since the last call, None when there were too many to note."""
        self._settle()
        answered, self._answered = self._answered, set()
        return answered

    def flush(self) -> None:
        """Hand the questions of this step to the thread, as one batch."""
        self._settle()
        question, self._unasked = self._unasked, None
        if question is not None:
            self._num_asked_keys += len(question.keys)
            question.asked_s = self._clock()
            self._open.append(question)
            self._asking.hand_over(question)

    def tell(self, keys: Collection[OffloadKey], *, is_held: bool, era: Era) -> None:
        """Record what was learned otherwise, by a failed load for example; any thread may call it.

        Args:
            keys: what was learned of.
            is_held: what was learned.
            era: the lookup's when the transfer was begun; what began in another is ignored.
        """
        known = frozenset(keys)  # each key is looked up in it by the thread that settles answers
        self._answers.append(LookupAnswer(era, known, known if is_held else ()))

    def clear(self) -> None:
        """Forget verdicts and questions; answers still to come to them are ignored."""
        self.era = self._asking.era = Era(self.era + 1)
        if self._unasked is not None:
            self._num_unanswered -= len(self._unasked.keys)
            self._unasked = None
        self._verdicts.clear()
        self._pending.clear()
        self._open.clear()

    def stats(self) -> dict[str, float]:
        """Return counts of keys by what became of their questions."""
        return {
            "asked": self._num_asked_keys,
            "pending": len(self._pending),
            "ask_failed": self._asking.num_failed_keys,
            "ask_overflow": self._num_overflow_keys,
            "ask_overdue": self._num_overdue_keys,
        }

    def shutdown(self, timeout_s: float) -> bool:
        """Answer False from now on and end the thread; False when it had not ended after ``timeout_s``."""
        self._is_closed = True
        self.clear()
        return self._asking.end(timeout_s)

    def _begin_question(self, key: OffloadKey) -> bool | None:
        if self._is_closed or self._num_unanswered >= self._max_pending_keys:
            self._num_overflow_keys += 1
            return False
        if self._unasked is None:
            self._unasked = LookupBatch(self.era)
        self._num_unanswered += 1
        self._pending[key] = self._unasked
        self._unasked.keys.append(key)
        return None

    def _settle(self) -> None:
        """Take the answers that have come, and answer False what has been asked for too long."""
        self._take_answers()
        if self._open:
            self._give_up_overdue(self._clock())

    def _take_answers(self) -> None:
        if not self._answers:
            return
        fresh = self._fresh_verdicts()
        while self._answers:
            answer = self._answers.popleft()
            for question in answer.questions:
                self._num_unanswered -= len(question.keys)
                # Questions are answered in their order, so one that is still open is the oldest.
                if self._open and self._open[0] is question:
                    self._open.popleft()
            if answer.era == self.era:
                self._note(answer.keys, answer.held, fresh)

    def _give_up_overdue(self, now_s: float) -> None:
        while self._open and now_s - self._open[0].asked_s >= self._ask_timeout_s:
            question = self._open.popleft()
            overdue = [key for key in question.keys if self._pending.get(key) is question]
            self._num_overdue_keys += len(overdue)
            self._note(overdue, (), self._fresh_verdicts())

    def _fresh_verdicts(self) -> tuple[_CachedAnswer, _CachedAnswer]:
        """Return what is noted now of a key that is held, and of one that is not."""
        now_s = self._clock()
        positive = _CachedAnswer(is_held=True, expires_s=now_s + self._positive_ttl_s, when_heard=None)
        negative = _CachedAnswer(is_held=False, expires_s=now_s + self._negative_ttl_s, when_heard=None)
        return self._unheard(positive), self._unheard(negative)

    def _unheard(self, verdict: _CachedAnswer) -> _CachedAnswer:
        return _CachedAnswer(verdict.is_held, verdict.expires_s + self._ask_timeout_s, verdict)

    def _note(
        self,
        keys: Collection[OffloadKey],
        held: Collection[OffloadKey],
        fresh: tuple[_CachedAnswer, _CachedAnswer],
    ) -> None:
        positive, negative = fresh
        pending, verdicts = self._pending, self._verdicts
        for key in keys:
            pending.pop(key, None)
            verdicts[key] = positive if key in held else negative
            verdicts.move_to_end(key)
        while len(verdicts) > self._max_verdicts:
            verdicts.popitem(last=False)
        if self._answered is not None:
            self._answered.update(keys)
            if len(self._answered) > self._max_pending_keys:
                self._answered = None  # nobody asks what was answered, or too seldom to remember it all
