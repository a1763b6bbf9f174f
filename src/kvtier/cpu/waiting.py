"""Which requests wait for blocks, what they hold meanwhile, and until when.

A request waits from its first None to its prepare_load, its request_finished or its deadline. While it waits, the
blocks that it has found are held against eviction, one count for each key and request, and it searches again only when
something that it waits for has changed.

A deadline always ends the holds. A request that still waited for a block then expires: what is not ready is absent for
it from then on. A request whose blocks had all arrived was kept in its engine's queue: it may wait once more.
"""

import bisect
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from kvtier.base import OffloadKey, ReqContext

MAX_REMEMBERED = 65_536
"""Requests that are remembered beyond their wait: those that have expired, and those that may wait again.
An engine ends its requests, so this bounds only an engine that does not; the oldest is forgotten first."""


class Holder(Protocol):
    """What keeps blocks from being evicted while a request waits: the primary tier's block table."""

    def hold(self, key: OffloadKey) -> None:
        """Keep ``key`` from eviction, from the moment it is ready, until one release more."""

    def release_each(self, keys: Collection[OffloadKey]) -> None:
        """Take back one hold of each of ``keys``, which are distinct."""


@dataclass(eq=False, slots=True)
class Waiter:
    """A request that was answered None.

    Attributes:
        req_context: the request.
        deadline_s: the clock's reading after which it waits no longer.
        search_step: the step in which its present search began.
        has_changed: True when searching again may give another answer.
        is_expired: True once it may wait no longer: what is not ready is then absent for it.
        is_second_wait: True when its first deadline passed while it waited for nothing.
        holds: keys it has a hold of.
        awaited: keys that it waits for.
        promoted: keys that a tier has promoted while it waited for them, each with the tier's type.
        overdue: keys that it still waited for when its deadline passed.
    """

    req_context: ReqContext
    deadline_s: float
    search_step: int
    has_changed: bool = False
    is_expired: bool = False
    is_second_wait: bool = False
    holds: set[OffloadKey] = field(default_factory=set)
    awaited: set[OffloadKey] = field(default_factory=set)
    promoted: dict[OffloadKey, str] = field(default_factory=dict)
    overdue: frozenset[OffloadKey] = frozenset()


class WaitingRequests:
    """The waiting requests of a manager.

    Args:
        holder: where holds are counted.
        lookup_deadline_s: seconds from a request's first None to its deadline.

    Attributes:
        lookup_deadline_s: the same.
        by_request: the requests that wait and those that have expired.
        unchanged: the requests that wait for something that has not changed: searching again could not give another
            answer yet.
        by_key: the waiters of each key that is waited for. INVARIANT: the same object for the life of this one.
        by_deadline: the waiters, soonest deadline first. One that has ended stays until its deadline has passed.
        found_this_step: what requests that do not wait have found in the present step.
        num_expired: requests that have expired.
    """

    def __init__(self, holder: Holder, lookup_deadline_s: float) -> None:
        self._holder = holder
        self.lookup_deadline_s = lookup_deadline_s
        self.by_request: dict[ReqContext, Waiter] = {}
        self._expired: OrderedDict[ReqContext, Waiter] = OrderedDict()
        self._stopped: OrderedDict[ReqContext, Waiter] = OrderedDict()
        self.by_key: dict[OffloadKey, set[Waiter]] = {}
        self.found_this_step: dict[ReqContext, dict[OffloadKey, None]] = {}
        self.by_deadline: deque[Waiter] = deque()
        # A set: an engine looks up each of a thousand waiting requests in every step, for one membership test each.
        self.unchanged: set[ReqContext] = set()
        self.num_expired = 0

    def begin_search(self, waiter: Waiter, step: int) -> bool:
        """Begin the search of a request that waits; False when nothing that it waits for has changed.

        A request that waits for nothing may search too. What the new search does not wait for again is no longer
        awaited.
        """
        if waiter.req_context in self.unchanged:
            return False
        waiter.has_changed = False
        waiter.search_step = step
        if waiter.awaited:
            self._forget_awaited(waiter)
        return True

    def on_found(self, key: OffloadKey, req_context: ReqContext) -> None:
        """Record a ready key: held at once for a waiting request, remembered for one that may start to wait."""
        waiter = self.by_request.get(req_context)
        if waiter is None or waiter.is_expired:
            self.found_this_step.setdefault(req_context, {})[key] = None
        elif key not in waiter.holds:
            waiter.holds.add(key)
            self._holder.hold(key)

    def wait_for(
        self, key: OffloadKey, req_context: ReqContext, now_s: float, step: int, *, has_slot: bool
    ) -> None:
        """Make a request that has not expired wait for ``key``; its first wait holds what it has found so far.

        Args:
            key: what it waits for.
            req_context: the request.
            now_s: the clock's reading.
            step: the manager's present step.
            has_slot: whether the primary has a slot for the key, so that a hold of it can be counted there.
        """
        waiter = self.by_request.get(req_context)
        if waiter is None:
            waiter = self.by_request[req_context] = self._begin_wait(req_context, now_s, step)
            for found in self.found_this_step.pop(req_context, ()):
                waiter.holds.add(found)
                self._holder.hold(found)
        if has_slot and key not in waiter.holds:
            waiter.holds.add(key)
            self._holder.hold(key)
        waiter.awaited.add(key)
        waiters = self.by_key.get(key)
        if waiters is None:
            self.by_key[key] = {waiter}
        else:
            waiters.add(waiter)
        if not waiter.has_changed:
            self.unchanged.add(req_context)

    def answer_in_flight(self, key: OffloadKey, req_context: ReqContext, now_s: float) -> bool | None:
        """Return None, and let the request wait for ``key``, up to its deadline; then False. It holds nothing.

        For a manager whose every search starts anew, and that has no other use of the waits.
        """
        self.expire(now_s)
        waiter = self.by_request.get(req_context)
        if waiter is not None and waiter.is_expired:
            return False
        self.wait_for(key, req_context, now_s, 0, has_slot=False)
        return None

    def notify(self, keys: Iterable[OffloadKey], promoted_from: str | None = None) -> None:
        """Wake the requests that wait for one of ``keys``, which have changed.

        Args:
            keys: what has changed.
            promoted_from: type of the tier that has just promoted all of them; None for other changes.
        """
        by_key = self.by_key
        if not by_key:
            return
        for key in keys:
            for waiter in by_key.pop(key, ()):
                waiter.has_changed = True
                waiter.awaited.discard(key)
                self.unchanged.discard(waiter.req_context)
                # A key that is not held may leave again, and come back from elsewhere.
                if promoted_from is not None and key in waiter.holds:
                    waiter.promoted[key] = promoted_from

    def expire(self, now_s: float) -> list[frozenset[OffloadKey]]:
        """End the waits whose deadline has passed.

        A request expires, until it ends, if it waited for something, or waited for the second time.

        Returns:
            For each request that waited for something the keys that did not arrive.
        """
        overdue: list[frozenset[OffloadKey]] = []
        while self.by_deadline and self.by_deadline[0].deadline_s <= now_s:
            waiter = self.by_deadline.popleft()
            if self.by_request.get(waiter.req_context) is not waiter:
                continue
            if waiter.awaited:
                waiter.overdue = frozenset(waiter.awaited)
                overdue.append(waiter.overdue)
            is_last = bool(waiter.awaited) or waiter.is_second_wait
            self._stop(waiter)
            if is_last:
                self._expire(waiter)
            else:
                self._remember_stopped(waiter)
        return overdue

    def end_wait(self, req_context: ReqContext) -> None:
        """Forget the request and release what it holds."""
        waiter = self.by_request.get(req_context)
        if waiter is not None:
            self._stop(waiter)
        self._expired.pop(req_context, None)
        self._stopped.pop(req_context, None)
        self.found_this_step.pop(req_context, None)

    def interrupt(self) -> None:
        """End every wait and release every hold, as a reset does; deadlines stay what they were."""
        for waiter in list(self.by_request.values()):
            if not waiter.is_expired:
                self._stop(waiter)
                self._remember_stopped(waiter)
        self.by_deadline.clear()
        self.found_this_step.clear()

    def count_holds(self) -> dict[OffloadKey, int]:
        """Return how many waiting requests hold each key."""
        counts: dict[OffloadKey, int] = {}
        for waiter in self.by_request.values():
            for key in waiter.holds:
                counts[key] = counts.get(key, 0) + 1
        return counts

    def _begin_wait(self, req_context: ReqContext, now_s: float, step: int) -> Waiter:
        waiter = Waiter(req_context, now_s + self.lookup_deadline_s, step)
        earlier = self._stopped.pop(req_context, None) if self._stopped else None
        if earlier is not None and (earlier.is_second_wait or now_s < earlier.deadline_s):
            waiter.deadline_s, waiter.is_second_wait = earlier.deadline_s, earlier.is_second_wait
        elif earlier is not None:
            waiter.is_second_wait = True
        by_deadline = self.by_deadline
        if not by_deadline or by_deadline[-1].deadline_s <= waiter.deadline_s:
            by_deadline.append(waiter)
        else:  # it waits again after a reset and keeps an earlier deadline
            bisect.insort(by_deadline, waiter, key=attrgetter("deadline_s"))
        return waiter

    def _expire(self, waiter: Waiter) -> None:
        waiter.is_expired = True
        waiter.has_changed = True
        self.num_expired += 1
        self.by_request[waiter.req_context] = self._expired[waiter.req_context] = waiter
        if len(self._expired) > MAX_REMEMBERED:
            req_context, _ = self._expired.popitem(last=False)
            del self.by_request[req_context]

    def _remember_stopped(self, waiter: Waiter) -> None:
        self._stopped[waiter.req_context] = waiter
        if len(self._stopped) > MAX_REMEMBERED:
            self._stopped.popitem(last=False)

    def _stop(self, waiter: Waiter) -> None:
        del self.by_request[waiter.req_context]
        if waiter.holds:
            self._holder.release_each(waiter.holds)
            waiter.holds.clear()
        self.unchanged.discard(waiter.req_context)
        if waiter.awaited:
            self._forget_awaited(waiter)

    def _forget_awaited(self, waiter: Waiter) -> None:
        for key in waiter.awaited:
            waiters = self.by_key[key]
            if len(waiters) == 1:
                del self.by_key[key]
            else:
                waiters.discard(waiter)
        waiter.awaited.clear()

    def __len__(self) -> int:
        return len(self.by_request) - len(self._expired)
