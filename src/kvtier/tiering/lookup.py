"""Lookups that another thread answers: asked in one batch per step, remembered for a while.

It knows no tier: a function asks for a batch of keys and returns those that are held. The scheduler's thread
only reads verdicts from memory and hands over the keys of the step. A question that cannot be asked, fails or
takes too long is answered False: a tier that does not answer has nothing.

A verdict that nobody has heard yet outlives its normal term; otherwise a request that asks less often than
verdicts expire would wait for ever.
"""

import logging
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvtier.base import OffloadKey

logger = logging.getLogger(__name__)

Ask = Callable[[Sequence[OffloadKey]], Collection[OffloadKey]]
"""Returns which of the keys are held. Runs on the lookup's thread and may block and raise."""

DEFAULT_MAX_VERDICTS = 65_536
"""Answers remembered, about 200 bytes each. Fewer ask again for the tail of a long prefix."""

DEFAULT_MAX_PENDING_KEYS = 65_536
"""Questions without an answer yet. Fewer would answer False for the tail of a long prefix."""

DEFAULT_ASK_TIMEOUT_S = 10.0
"""Seconds after which a question counts as answered False. Shorter loses hits of a slow tier; a longer wait
than computing the blocks is of no use, and requests have a deadline of their own."""


@dataclass(slots=True)
class _Verdict:
    """An answer, and until when it holds: longer as long as nobody has heard it."""

    is_held: bool
    expires_s: float
    unheard_expires_s: float
    is_heard: bool = False


@dataclass(frozen=True, slots=True)
class _Answer:
    """What another thread found out, and about which era's key."""

    era: int
    key: OffloadKey
    is_held: bool
    is_to_question: bool


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
        self._name = name
        self._ask = ask
        self._clock = clock
        self._positive_ttl_s = positive_ttl_s
        self._negative_ttl_s = negative_ttl_s
        self._max_verdicts = max_verdicts
        self._max_pending_keys = max_pending_keys
        self._ask_timeout_s = ask_timeout_s
        self._verdicts: OrderedDict[OffloadKey, _Verdict] = OrderedDict()
        self._pending: dict[OffloadKey, float] = {}
        self._answered: set[OffloadKey] | None = set()
        self._num_unanswered = 0
        self._batch: list[OffloadKey] = []
        self._era = 0
        self._answers: deque[_Answer] = deque()
        self._batches: queue.SimpleQueue[tuple[int, list[OffloadKey]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._num_asked_keys = 0
        self._num_failed_keys = 0
        self._num_overflow_keys = 0
        self._num_overdue_keys = 0

    def lookup(self, key: OffloadKey) -> bool | None:
        """Return whether ``key`` is held, or None when that is being asked: ask again in a later step."""
        self._take_answers()
        verdict = self._verdicts.get(key)
        if verdict is not None and self._clock() < (
            verdict.expires_s if verdict.is_heard else verdict.unheard_expires_s
        ):
            verdict.is_heard = True
            return verdict.is_held
        if key in self._pending:
            return None
        if self._is_closed or self._num_unanswered >= self._max_pending_keys:
            self._num_overflow_keys += 1
            return False
        self._num_unanswered += 1
        self._pending[key] = self._clock()
        self._batch.append(key)
        return None

    def take_answered(self) -> Collection[OffloadKey] | None:
        """Return the keys that have an answer since the last call, None when there were too many to note."""
        self._take_answers()
        answered, self._answered = self._answered, set()
        return answered

    def flush(self) -> None:
        """Hand the questions of this step to the thread, as one batch."""
        self._take_answers()
        if not self._batch or self._is_closed:
            return
        if self._thread is None and not self._is_started():
            return
        self._num_asked_keys += len(self._batch)
        self._batches.put((self._era, self._batch))
        self._batch = []

    def tell(self, key: OffloadKey, *, is_held: bool) -> None:
        """Record what was learned otherwise, a failed load for example; any thread may call it."""
        self._answers.append(_Answer(self._era, key, is_held, is_to_question=False))

    def clear(self) -> None:
        """Forget verdicts and questions; answers still to come to them are ignored."""
        self._era += 1
        self._num_unanswered -= len(self._batch)
        self._verdicts.clear()
        self._pending.clear()
        self._batch.clear()

    def stats(self) -> dict[str, float]:
        """Return counts of keys by what became of their questions."""
        return {
            "asked": self._num_asked_keys,
            "pending": len(self._pending),
            "ask_failed": self._num_failed_keys,
            "ask_overflow": self._num_overflow_keys,
            "ask_overdue": self._num_overdue_keys,
        }

    def shutdown(self, timeout_s: float) -> bool:
        """Answer False from now on and end the thread; False when it had not ended after ``timeout_s``."""
        if not self._is_closed:
            self._is_closed = True
            self._batches.put(None)
        self.clear()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _is_started(self) -> bool:
        """Start the thread; when the system has none to give, this step's questions are answered False."""
        thread = threading.Thread(target=self._work, name=f"kvtier-{self._name}-lookup", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning(
                "tier %s: no thread for lookups, %d are misses: %s", self._name, len(self._batch), error
            )
            self._num_failed_keys += len(self._batch)
            self._answers.extend(
                _Answer(self._era, key, is_held=False, is_to_question=True) for key in self._batch
            )
            self._batch = []
            return False
        self._thread = thread
        return True

    def _take_answers(self) -> None:
        while self._answers:
            answer = self._answers.popleft()
            self._num_unanswered -= answer.is_to_question
            if answer.era == self._era:
                self._note(answer.key, is_held=answer.is_held)
        now_s = self._clock()
        while self._pending:
            key, asked_s = next(iter(self._pending.items()))
            if now_s - asked_s < self._ask_timeout_s:
                return
            self._num_overdue_keys += 1
            self._note(key, is_held=False)

    def _note(self, key: OffloadKey, *, is_held: bool) -> None:
        self._pending.pop(key, None)
        expires_s = self._clock() + (self._positive_ttl_s if is_held else self._negative_ttl_s)
        self._verdicts.pop(key, None)
        self._verdicts[key] = _Verdict(is_held, expires_s, expires_s + self._ask_timeout_s)
        if len(self._verdicts) > self._max_verdicts:
            self._verdicts.popitem(last=False)
        if self._answered is not None:
            self._answered.add(key)
            if len(self._answered) > self._max_pending_keys:
                self._answered = None  # nobody asks what was answered, or too seldom to remember it all

    def _work(self) -> None:
        while (question := self._batches.get()) is not None:
            era, batch = question
            held: Collection[OffloadKey] = ()
            try:
                held = frozenset(self._ask(batch))
            except Exception:  # thread top
                self._num_failed_keys += len(batch)
                logger.exception("tier %s: asking for %d keys failed", self._name, len(batch))
            self._answers.extend(_Answer(era, key, key in held, is_to_question=True) for key in batch)
