"""Which requests wait for blocks on their way up, what they hold meanwhile, and until when.

It moves no block and asks no tier. A request waits from its first None to its prepare_load, its
request_finished or its deadline. While it waits, what it has found is held against eviction, one count per
key and request, and it is searched again only when something it waits for has changed.

A deadline ends the holds of everybody, but speaks only against a request for which something did not come. One whose
blocks had all come was kept by its engine, in a queue: it may wait once more when its engine asks again.
"""

import bisect
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol, TypeVar

from kvtier.base import OffloadKey, ReqContext

T = TypeVar("T")

MAX_REMEMBERED = 65_536
"""Requests that are remembered beyond their wait: those that have expired, and those that may wait again.
An engine ends its requests, so this only bounds one that does not; the oldest is forgotten first."""


class Holder(Protocol):
    """What keeps blocks from being evicted while a request waits: the primary tier."""

    def hold(self, key: OffloadKey) -> None:
        """Keep ``key`` from eviction, from the moment it is ready, until one release more."""

    def release(self, key: OffloadKey) -> None:
        """Take back one hold of ``key``."""


@dataclass(eq=False, slots=True)
class Waiter:
    """A request that was answered None.

    Attributes:
        req_context: the request.
        deadline_s: the clock's reading after which it waits no longer.
        search_step: the step in which its present search began.
        has_news: True when searching again may give another answer.
        is_expired: True once it may wait no longer: what is not ready is then absent for it.
        is_renewed: True in its second wait, when its first deadline passed while it waited for nothing.
        held: keys it holds.
        awaited: keys whose change is news for it.
        promoted: keys that a tier has brought up while it waited for them, each with the tier's type.
    """

    req_context: ReqContext
    deadline_s: float
    search_step: int
    has_news: bool = False
    is_expired: bool = False
    is_renewed: bool = False
    held: set[OffloadKey] = field(default_factory=set)
    awaited: set[OffloadKey] = field(default_factory=set)
    promoted: dict[OffloadKey, str] = field(default_factory=dict)


class WaitingRequests:
    """The waiting requests of a manager.

    Args:
        holder: where holds are counted.
        lookup_deadline_s: seconds from a request's first None to its deadline.

    Attributes:
        idle: the requests that wait for something and have no news: searching again could not change anything yet.
        num_expired: requests that have expired.
    """

    def __init__(self, holder: Holder, lookup_deadline_s: float) -> None:
        self._holder = holder
        self._lookup_deadline_s = lookup_deadline_s
        self._waiting: dict[ReqContext, Waiter] = {}
        self._expired: OrderedDict[ReqContext, Waiter] = OrderedDict()
        self._stopped: OrderedDict[ReqContext, Waiter] = OrderedDict()
        # INVARIANT: a waiter is in the set of each key that it awaits, and in no other.
        self._by_key: dict[OffloadKey, set[Waiter]] = {}
        self._found_this_step: dict[ReqContext, dict[OffloadKey, None]] = {}
        # INVARIANT: soonest first. A waiter that has ended stays in here until its deadline would have come.
        self._by_deadline: deque[Waiter] = deque()
        # A set, because an engine asks for each of a thousand requests in every step: one look is all that it costs.
        self.idle: set[ReqContext] = set()
        self.num_expired = 0

    def get(self, req_context: ReqContext) -> Waiter | None:
        """Return the request's state, None when it neither waits nor has passed its deadline."""
        return self._waiting.get(req_context) or self._expired.get(req_context)

    def begins_search(self, waiter: Waiter, step: int) -> bool:
        """Return whether the request may search in this step.

        News allow it, and so does a last search that left nothing to wait for. What the new search does not
        wait for again is no longer awaited.
        """
        if waiter.search_step != step and waiter.req_context not in self.idle:
            waiter.has_news = False
            waiter.search_step = step
            self._forget_awaited(waiter)
        return waiter.search_step == step

    def on_found(self, key: OffloadKey, req_context: ReqContext) -> None:
        """Note a ready key: held at once for a waiting request, remembered for one that may start to wait."""
        waiter = self._waiting.get(req_context)
        if waiter is None:
            self._found_this_step.setdefault(req_context, {})[key] = None
        else:
            self._hold(waiter, key)

    def found(self, req_context: ReqContext) -> Collection[OffloadKey]:
        """Return what a request that does not wait has found in this step; asking for one key is cheap."""
        return self._found_this_step.get(req_context, {})

    def wait_for(
        self, key: OffloadKey, req_context: ReqContext, now_s: float, step: int, *, is_held: bool
    ) -> None:
        """Make the request wait for ``key``; its first wait holds what it has found so far.

        Args:
            key: what it waits for.
            req_context: the request.
            now_s: the clock's reading.
            step: the manager's present step.
            is_held: whether the primary has a slot for the key, so that it can be held there.
        """
        waiter = self._waiting.get(req_context)
        if waiter is None:
            waiter = self._waiting[req_context] = self._begin_wait(req_context, now_s, step)
            insert_by_deadline(self._by_deadline, waiter)
            for found in self._found_this_step.pop(req_context, ()):
                self._hold(waiter, found)
        if is_held:
            self._hold(waiter, key)
        waiter.awaited.add(key)
        waiters = self._by_key.get(key)
        if waiters is None:
            self._by_key[key] = {waiter}
        else:
            waiters.add(waiter)
        if not waiter.has_news:
            self.idle.add(req_context)

    def notify(self, keys: Iterable[OffloadKey], promoted_from: str | None = None) -> None:
        """Tell whoever waits for one of ``keys`` that it has changed.

        Args:
            keys: what has changed.
            promoted_from: type of the tier that has just brought all of them up; None for other news.
        """
        by_key = self._by_key
        if not by_key:
            return
        for key in keys:
            for waiter in by_key.pop(key, ()):
                waiter.has_news = True
                waiter.awaited.discard(key)
                self.idle.discard(waiter.req_context)
                # A key that is not held may leave again, and come back from elsewhere.
                if promoted_from is not None and key in waiter.held:
                    waiter.promoted[key] = promoted_from

    def is_awaited(self, key: OffloadKey) -> bool:
        """Return whether somebody waits for ``key``."""
        return key in self._by_key

    def expire(self, now_s: float) -> list[frozenset[OffloadKey]]:
        """End the waits whose deadline has passed.

        A request expires, until it ends, if it waited for something, or waited for the second time.

        Returns:
            For each request that waited for something the keys that did not come.
        """
        overdue: list[frozenset[OffloadKey]] = []
        while self._by_deadline and self._by_deadline[0].deadline_s <= now_s:
            waiter = self._by_deadline.popleft()
            if self._waiting.get(waiter.req_context) is not waiter:
                continue
            if waiter.awaited:
                overdue.append(frozenset(waiter.awaited))
            is_last = bool(waiter.awaited) or waiter.is_renewed
            self._stop(waiter)
            if is_last:
                self._expire(waiter)
            else:
                self._remember_stopped(waiter)
        return overdue

    def end_wait(self, req_context: ReqContext) -> None:
        """Forget the request and release what it holds."""
        waiter = self._waiting.get(req_context)
        if waiter is not None:
            self._stop(waiter)
        self._expired.pop(req_context, None)
        self._stopped.pop(req_context, None)
        self._found_this_step.pop(req_context, None)

    def end_step(self) -> None:
        """Forget what requests that do not wait have found."""
        self._found_this_step.clear()

    def interrupt(self) -> None:
        """End every wait and release every hold, as a reset does; deadlines stay what they were."""
        for waiter in list(self._waiting.values()):
            self._stop(waiter)
            self._remember_stopped(waiter)
        self._by_deadline.clear()
        self._found_this_step.clear()

    def holds(self) -> dict[OffloadKey, int]:
        """Return how many waiting requests hold each key."""
        counts: dict[OffloadKey, int] = {}
        for waiter in self._waiting.values():
            for key in waiter.held:
                counts[key] = counts.get(key, 0) + 1
        return counts

    def _begin_wait(self, req_context: ReqContext, now_s: float, step: int) -> Waiter:
        deadline_s = now_s + self._lookup_deadline_s
        earlier = self._stopped.pop(req_context, None)
        if earlier is None:
            return Waiter(req_context, deadline_s, step)
        if earlier.is_renewed or now_s < earlier.deadline_s:
            return Waiter(req_context, earlier.deadline_s, step, is_renewed=earlier.is_renewed)
        return Waiter(req_context, deadline_s, step, is_renewed=True)

    def _expire(self, waiter: Waiter) -> None:
        waiter.is_expired = True
        waiter.has_news = True
        self.num_expired += 1
        self._expired[waiter.req_context] = waiter
        forget_oldest(self._expired)

    def _remember_stopped(self, waiter: Waiter) -> None:
        self._stopped[waiter.req_context] = waiter
        forget_oldest(self._stopped)

    def _hold(self, waiter: Waiter, key: OffloadKey) -> None:
        if key not in waiter.held:
            waiter.held.add(key)
            self._holder.hold(key)

    def _stop(self, waiter: Waiter) -> None:
        del self._waiting[waiter.req_context]
        for key in waiter.held:
            self._holder.release(key)
        waiter.held.clear()
        self._forget_awaited(waiter)

    def _forget_awaited(self, waiter: Waiter) -> None:
        self.idle.discard(waiter.req_context)
        for key in waiter.awaited:
            waiters = self._by_key[key]
            if len(waiters) == 1:
                del self._by_key[key]
            else:
                waiters.discard(waiter)
        waiter.awaited.clear()

    def __len__(self) -> int:
        return len(self._waiting)


def insert_by_deadline(waiters: deque[Waiter], waiter: Waiter) -> None:
    """Put ``waiter`` where its deadline belongs: last, unless it waits again after a reset and keeps an earlier one."""
    if not waiters or waiters[-1].deadline_s <= waiter.deadline_s:
        waiters.append(waiter)
    else:
        bisect.insort(waiters, waiter, key=attrgetter("deadline_s"))


def forget_oldest(remembered: OrderedDict[ReqContext, T]) -> None:
    """Keep ``remembered`` within its bound."""
    if len(remembered) > MAX_REMEMBERED:
        remembered.popitem(last=False)
