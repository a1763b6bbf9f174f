"""Answers to "does the tier hold this block?", fetched in batches by a thread and cached.

States of a key, as the scheduler's thread sees them: unknown -> COLLECTED for this step's batch -> IN FLIGHT, sent with
the batch at the end of the step -> RESOLVED, cached -> expired, which is unknown again. Each lookup before RESOLVED
returns None. A batch that stays in flight for too long resolves to "not held".

Batches that wait while a call is under way are merged into the next call: when a server is away each call fails only
after a while, and a queue of calls would make the last request wait for all of them.
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
from kvtier.errors import format_foreign
from kvtier.histogram import LATENCY_BOUNDS_S, Histogram, HistogramSnapshot

logger = logging.getLogger(__name__)

MAX_MERGED_KEYS = 4096
"""Keys up to which batches are merged: those of a thousand requests that are new in a step. More keep the first of them
waiting longer at a backend that answers for each key by itself, two thousand a second; fewer are more calls."""

DEFAULT_MAX_ANSWERS = 65_536
"""Answers cached, about 200 bytes each. Fewer look up the tail of a long prefix again."""

DEFAULT_MAX_OUTSTANDING_KEYS = 65_536
"""Keys without an answer yet. Fewer would answer False for the tail of a long prefix."""

DEFAULT_LOOKUP_TIMEOUT_S = 10.0
"""Seconds after which a batch in flight counts as answered False. Shorter loses hits of a slow tier; a longer wait than
computing the blocks is of no use, and requests have a deadline of their own."""

ContainsBatch = Callable[[Sequence[OffloadKey]], Collection[OffloadKey]]
"""Returns which of the keys are held. Runs on the lookup's thread and may block and raise."""

Generation = NewType("Generation", int)
"""The time between two resets: what was found out in one says nothing about another."""


@dataclass(eq=False, slots=True)
class LookupBatch:
    """The keys that were looked up in one step and are not cached.

    Attributes:
        generation: in which they were looked up.
        keys: each once.
        sent_s: the clock's reading when the thread got them; infinite before.
    """

    generation: Generation
    keys: list[OffloadKey] = field(default_factory=list)
    sent_s: float = math.inf


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """What another thread has found out.

    Attributes:
        generation: what it is true of.
        keys: what it is about.
        held: which of them are held.
        batches: those that it answers, oldest first; none when it was learned from a transfer.
        answered_s: the clock's reading when the backend had answered.
    """

    generation: Generation
    keys: Collection[OffloadKey]
    held: Collection[OffloadKey]
    batches: Sequence[LookupBatch] = ()
    answered_s: float = 0.0


class _CachedAnswer(NamedTuple):
    """An answer, one object for all the keys of a batch that have it.

    Attributes:
        is_held: the answer.
        expires_s: the clock's reading until which it is valid.
        once_read: what takes its place once it was read, which expires earlier; None: it was read.
    """

    is_held: bool
    expires_s: float
    once_read: Optional["_CachedAnswer"]


class AsyncLookup:
    """Cached answers about keys, fetched by a thread of its own.

    Mutable are the cache and the batches; they belong to the scheduler's thread, the only caller of ``lookup``,
    ``flush`` and ``clear``. Answers reach it through a deque and batches leave it through a queue; neither needs a
    lock. An answer that has not been read yet stays valid past its TTL, so that a request that waits sees it.

    Args:
        name: of the tier, for the thread and messages.
        contains_batch: which of these keys are held.
        clock: seconds, monotonic.
        positive_ttl_s: seconds for which "held" is believed.
        negative_ttl_s: seconds for which "not held" is believed.
        max_answers: answers cached; the oldest is dropped first.
        max_outstanding_keys: keys without an answer, overdue ones included; beyond it the answer is False.
        timeout_s: seconds after which a batch in flight is answered False.

    Attributes:
        generation: the time since the last ``clear``, for ``report``.
        collected: what was looked up since the last ``flush`` and needs a call; None when there is nothing.
        answers: what other threads have found out and the cache does not have yet.
    """

    def __init__(
        self,
        name: str,
        contains_batch: ContainsBatch,
        *,
        clock: Callable[[], float],
        positive_ttl_s: float,
        negative_ttl_s: float,
        max_answers: int = DEFAULT_MAX_ANSWERS,
        max_outstanding_keys: int = DEFAULT_MAX_OUTSTANDING_KEYS,
        timeout_s: float = DEFAULT_LOOKUP_TIMEOUT_S,
    ) -> None:
        self.generation = Generation(0)
        self._clock = clock
        self._positive_ttl_s = positive_ttl_s
        self._negative_ttl_s = negative_ttl_s
        self._max_answers = max_answers
        self._max_outstanding_keys = max_outstanding_keys
        self._timeout_s = timeout_s
        self._cached: OrderedDict[OffloadKey, _CachedAnswer] = OrderedDict()
        self._batch_of: dict[OffloadKey, LookupBatch] = {}
        self.collected: LookupBatch | None = None
        # INVARIANT: oldest first; what was sent and is neither answered nor overdue.
        self._in_flight: deque[LookupBatch] = deque()
        self._num_outstanding = 0
        self._answered: set[OffloadKey] | None = set()
        self.answers: deque[LookupAnswer] = deque()
        self._worker = LookupWorker(name, contains_batch, self.answers, clock)
        self._latency = Histogram(LATENCY_BOUNDS_S)
        self._is_closed = False
        self._num_sent_keys = 0
        self._num_overflow_keys = 0
        self._num_overdue_keys = 0

    def lookup(self, key: OffloadKey) -> bool | None:
        """Return whether ``key`` is held, or None while the answer is fetched: look it up again in a later step."""
        # One frame for the usual cases: the scheduler calls this for each block of each waiting request.
        if self.answers:
            self._take_answers()
        now_s = self._clock()
        answer = self._cached.get(key)
        if answer is not None and now_s < answer.expires_s:
            if answer.once_read is not None:
                self._cached[key] = answer.once_read
            return answer.is_held
        batch = self._batch_of.get(key)
        if batch is not None:
            if now_s - batch.sent_s < self._timeout_s:
                return None
            self._resolve_overdue(now_s)
            return self.lookup(key)  # answered False by now, and read
        if self._is_closed or self._num_outstanding >= self._max_outstanding_keys:
            self._num_overflow_keys += 1
            return False
        if self.collected is None:
            self.collected = LookupBatch(self.generation)
        self._num_outstanding += 1
        self._batch_of[key] = self.collected
        self.collected.keys.append(key)
        return None

    def drain_answered(self) -> Collection[OffloadKey] | None:
        """Return the keys that have an answer since the last call, None when there were too many to record."""
        self._resolve()
        answered, self._answered = self._answered, set()
        return answered

    def flush(self) -> None:
        """Send what was collected in this step to the thread, as one batch."""
        self._resolve()
        batch, self.collected = self.collected, None
        if batch is not None:
            self._num_sent_keys += len(batch.keys)
            batch.sent_s = self._clock()
            self._in_flight.append(batch)
            self._worker.send(batch)

    def report(self, keys: Collection[OffloadKey], *, is_held: bool, generation: Generation) -> None:
        """Cache what a transfer has found out, by a failed load for example. Thread: any.

        Args:
            keys: the blocks.
            is_held: whether they are held.
            generation: the lookup's when the transfer began; what began in another one is ignored.
        """
        known = frozenset(keys)  # the thread that takes the answer looks each key up in it
        self.answers.append(LookupAnswer(generation, known, known if is_held else ()))

    def clear(self) -> None:
        """Drop cached answers and batches; answers still to come to them are ignored."""
        self.generation = self._worker.generation = Generation(self.generation + 1)
        if self.collected is not None:
            self._num_outstanding -= len(self.collected.keys)
            self.collected = None
        self._cached.clear()
        self._batch_of.clear()
        self._in_flight.clear()

    def stats(self) -> dict[str, float]:
        """Return counts of keys by the outcome of their lookups."""
        return {
            "sent": self._num_sent_keys,
            "outstanding": len(self._batch_of),
            "failed": self._worker.num_failed_keys,
            "overflow": self._num_overflow_keys,
            "overdue": self._num_overdue_keys,
        }

    def latency(self) -> HistogramSnapshot:
        """Return, for each batch that was sent, the seconds until the backend had answered."""
        return self._latency.snapshot()

    def shutdown(self, timeout_s: float) -> bool:
        """Answer False from now on and end the thread; False when it had not ended after ``timeout_s``."""
        self._is_closed = True
        self.clear()
        return self._worker.end(timeout_s)

    def _resolve(self) -> None:
        """Take the answers that have come, and answer False what is overdue."""
        if self.answers:
            self._take_answers()
        if self._in_flight:
            self._resolve_overdue(self._clock())

    def _take_answers(self) -> None:
        fresh = self._fresh_answers()
        while self.answers:
            answer = self.answers.popleft()
            for batch in answer.batches:
                self._num_outstanding -= len(batch.keys)
                self._latency.observe(max(0.0, answer.answered_s - batch.sent_s))
                # Batches are answered in their order, so one that is still in flight is the oldest.
                if self._in_flight and self._in_flight[0] is batch:
                    self._in_flight.popleft()
            if answer.generation == self.generation:
                self._cache(answer.keys, answer.held, fresh)

    def _resolve_overdue(self, now_s: float) -> None:
        while self._in_flight and now_s - self._in_flight[0].sent_s >= self._timeout_s:
            batch = self._in_flight.popleft()
            overdue = [key for key in batch.keys if self._batch_of.get(key) is batch]
            self._num_overdue_keys += len(overdue)
            self._cache(overdue, (), self._fresh_answers())

    def _fresh_answers(self) -> tuple[_CachedAnswer, _CachedAnswer]:
        """Return what is cached now for a key that is held, and for one that is not."""
        now_s = self._clock()
        held_until_s, absent_until_s = now_s + self._positive_ttl_s, now_s + self._negative_ttl_s
        held = _CachedAnswer(is_held=True, expires_s=held_until_s, once_read=None)
        absent = _CachedAnswer(is_held=False, expires_s=absent_until_s, once_read=None)
        return (
            _CachedAnswer(is_held=True, expires_s=held_until_s + self._timeout_s, once_read=held),
            _CachedAnswer(is_held=False, expires_s=absent_until_s + self._timeout_s, once_read=absent),
        )

    def _cache(
        self,
        keys: Collection[OffloadKey],
        held: Collection[OffloadKey],
        fresh: tuple[_CachedAnswer, _CachedAnswer],
    ) -> None:
        positive, negative = fresh
        batch_of, cached = self._batch_of, self._cached
        for key in keys:
            batch_of.pop(key, None)
            cached[key] = positive if key in held else negative
            cached.move_to_end(key)
        while len(cached) > self._max_answers:
            cached.popitem(last=False)
        if self._answered is not None:
            self._answered.update(keys)
            if len(self._answered) > self._max_outstanding_keys:
                self._answered = None  # it is drained never, or too seldom to record it all


class LookupWorker:
    """Background thread that merges waiting lookups into one call of the backend; the first batch starts it.

    Batches reach it through a queue, answers leave it through ``answers``; neither needs a lock.

    Args:
        name: of the tier, for the thread and messages.
        contains_batch: which of these keys are held.
        answers: where each batch's answer is put, in the order in which batches were sent.
        clock: seconds, monotonic.

    Attributes:
        generation: the present one, set by the sender; batches of another one are answered without a call.
        num_failed_keys: keys whose lookup failed.
    """

    def __init__(
        self,
        name: str,
        contains_batch: ContainsBatch,
        answers: deque[LookupAnswer],
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self.generation = Generation(0)
        self.num_failed_keys = 0
        self._name = name
        self._contains_batch = contains_batch
        self._answers = answers
        self._batches: queue.SimpleQueue[LookupBatch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, batch: LookupBatch) -> None:
        """Queue a batch; when the system has no thread to give, nothing of it is held."""
        if self._thread is None and not self._start(len(batch.keys)):
            self._answers.append(LookupAnswer(batch.generation, batch.keys, (), [batch], batch.sent_s))
        else:
            self._batches.put(batch)

    def end(self, timeout_s: float) -> bool:
        """End the thread after what was sent; False when it had not ended after ``timeout_s``."""
        self._batches.put(None)
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _start(self, num_keys: int) -> bool:
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
                waiting.append(self._batches.get())
            with suppress(queue.Empty):
                while True:
                    waiting.append(self._batches.get_nowait())
            batches = take_mergeable(waiting)
            if not batches:
                return
            generation, keys = batches[0].generation, keys_of(batches)
            held = self._call(keys) if generation == self.generation else ()
            self._answers.append(LookupAnswer(generation, keys, held, batches, self._clock()))

    def _call(self, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        try:
            return frozenset(self._contains_batch(keys))
        except Exception as error:  # noqa: BLE001  # thread top
            self.num_failed_keys += len(keys)
            # Not its text: a client's may quote a request, and a request may carry a secret.
            message = "tier %s: looking up %d keys failed\n%s"
            logger.error(message, self._name, len(keys), format_foreign(error))  # noqa: TRY400
            return ()


def take_mergeable(waiting: deque[LookupBatch | None]) -> list[LookupBatch]:
    """Take from the front what one call can answer: one batch, and those of its generation that fit beside it.

    Returns:
        Them, in their order; empty when the first that waits is None, which ends the thread.
    """
    first = waiting.popleft()
    if first is None:
        return []
    taken, num_keys = [first], len(first.keys)
    while waiting and (following := waiting[0]) is not None and following.generation == first.generation:
        num_keys += len(following.keys)
        if num_keys > MAX_MERGED_KEYS:
            break
        taken.append(following)
        waiting.popleft()
    return taken


def keys_of(batches: Iterable[LookupBatch]) -> list[OffloadKey]:
    """Return the keys of the batches in their order, each once. Pure."""
    return list(dict.fromkeys(chain.from_iterable(batch.keys for batch in batches)))
