"""Which requests may promote blocks under vLLM's own manager, so that those which are let in fit into host memory.

vLLM's manager answers a hit for which host memory has no slot as a miss, and the request computes what a tier holds. It
asks a tier again in each step while the tier answers RETRY. So the queue here keeps a request at RETRY until the
requests before it have been scheduled, first come first served:

- *waiting*: it lacks slots. It promotes nothing, so no two requests wait for each other. A request that was let in
  before others came and lacks a part of its blocks keeps the others: it is the first.
- *inside*: its blocks and those of the others inside fit. They count until vLLM schedules it, which is when its load
  has ended, or until it ends.
- *given up*: it is longer than host memory, or has waited for ``wait_s``. It loads what fits and waits no more, and no
  block of it is promoted more than twice. So one whose blocks are evicted as fast as they arrive is answered too.

After ``wait_s`` the blocks of a request do not count any more: vLLM may have no device memory for it for long.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvtier.base import OffloadKey


@dataclass(slots=True)
class Visit:
    """A request that needs slots, from its first hit until it is scheduled or ends.

    Attributes:
        deadline_s: the clock's reading after which it waits no more, and its blocks do not count.
        granted: the blocks that it may promote, or has promoted.
        retried: those that it has promoted once more since it gave up.
        lacking: the blocks that it was refused in ``step``.
        step: the step of its last lookup.
        is_searching: whether a lookup of that step has no answer yet.
        is_waiting: whether it waits for slots.
        has_given_up: whether it waits no more.
        is_counted: whether the granted blocks count.
    """

    deadline_s: float
    granted: set[OffloadKey] = field(default_factory=set)
    retried: set[OffloadKey] = field(default_factory=set)
    lacking: set[OffloadKey] = field(default_factory=set)
    step: int = -1
    is_searching: bool = False
    is_waiting: bool = False
    has_given_up: bool = False
    is_counted: bool = True


class RoomQueue:
    """The requests that promote blocks into one primary tier, first come first. Used from the scheduler's thread.

    Args:
        num_slots: of the primary tier.
        wait_s: seconds that a request may wait for room, and that its blocks count once it is let in; 0: none waits.
        clock: seconds, monotonic.

    Attributes:
        num_waited: requests that have waited.
        num_given_up: requests that have stopped to wait without getting all of their blocks.
    """

    def __init__(self, num_slots: int, wait_s: float, clock: Callable[[], float]) -> None:
        self._num_slots = num_slots
        self._wait_s = wait_s
        self._clock = clock
        self._visits: dict[str, Visit] = {}
        self._storing: dict[int, int] = {}
        self._num_used = 0
        self._num_waiting = 0
        self._step = 0
        self.num_waited = 0
        self.num_given_up = 0

    def note_search(self, req_id: str) -> None:
        """Note that a lookup of a request has no answer yet: what it lacks is not known before."""
        if visit := self._visits.get(req_id):
            self._begin_step(visit)
            visit.is_searching = True

    def answer(self, key: OffloadKey, req_id: str) -> bool | None:
        """Return whether the request may promote a block that a tier holds: True, None while it waits, False."""
        if self._wait_s <= 0:
            return True
        visit = self._visits.get(req_id)
        if visit is None:
            visit = self._visits[req_id] = Visit(self._clock() + self._wait_s)
        if visit.has_given_up:
            return self._grant_once(key, visit)
        if key in visit.granted or (self._num_waiting == 0 and self._grant(key, visit)):
            return True
        self._begin_step(visit)
        visit.lacking.add(key)
        if not visit.is_waiting:
            visit.is_waiting = True
            self._num_waiting += 1
            self.num_waited += 1
        return None

    def end_step(self, scheduled: Iterable[str], tier: int, num_storing: int) -> None:
        """Let those go that vLLM has scheduled, and those in whose blocks fit.

        Args:
            scheduled: requests that vLLM has scheduled for the first time.
            tier: which tier calls; several share a primary.
            num_storing: slots that the tier's unfinished stores pin.
        """
        self._storing[tier] = num_storing
        if not self._visits:
            return
        for req_id in scheduled:
            self.leave(req_id)
        self._expire()
        if self._num_waiting:
            self._let_in()
        self._step += 1

    def leave(self, req_id: str) -> None:
        """Forget a request: it has loaded its blocks, or has ended."""
        if visit := self._visits.pop(req_id, None):
            self._num_waiting -= visit.is_waiting
            if visit.is_counted:
                self._num_used -= len(visit.granted)

    def clear(self) -> None:
        """Forget every request."""
        self._visits.clear()
        self._num_used = self._num_waiting = 0

    @property
    def _num_free(self) -> int:
        # Stores of several tiers pin the same blocks.
        return self._num_slots - self._num_used - max(self._storing.values(), default=0)

    def _grant(self, key: OffloadKey, visit: Visit) -> bool:
        if self._num_free < (1 if visit.is_counted else len(visit.granted) + 1):
            return False
        visit.granted.add(key)
        self._num_used += visit.is_counted
        return True

    def _grant_once(self, key: OffloadKey, visit: Visit) -> bool:
        """Grant a block of a request that has given up: for the first time, or once more."""
        if key not in visit.granted:
            return self._grant(key, visit)
        is_first = key not in visit.retried
        visit.retried.add(key)
        return is_first

    def _begin_step(self, visit: Visit) -> None:
        if visit.step != self._step:
            visit.step, visit.is_searching = self._step, False
            visit.lacking.clear()

    def _expire(self) -> None:
        now_s = self._clock()
        for visit in self._visits.values():
            if visit.is_counted and visit.deadline_s <= now_s:
                self._give_up(visit)
                self._num_used -= len(visit.granted)
                visit.is_counted = False

    def _give_up(self, visit: Visit) -> None:
        self.num_given_up += visit.is_waiting
        self._num_waiting -= visit.is_waiting
        visit.has_given_up, visit.is_waiting = True, False

    def _let_in(self) -> None:
        """Let those in whose blocks fit, first come first; the first that does not fit keeps the others waiting."""
        for visit in [one for one in self._visits.values() if one.is_waiting]:
            if visit.step != self._step or visit.is_searching:
                continue  # vLLM has not asked for it in this step, or not all of it is answered
            if len(visit.lacking) > self._num_free:
                if self._num_used > len(visit.granted) or any(self._storing.values()):
                    return
                # Nothing that ends would free a slot: it is longer than host memory.
                self._give_up(visit)
                visit.deadline_s = self._clock() + self._wait_s
                return
            visit.granted |= visit.lacking
            self._num_used += len(visit.lacking)
            visit.deadline_s = self._clock() + self._wait_s
            visit.is_waiting = False
            self._num_waiting -= 1
