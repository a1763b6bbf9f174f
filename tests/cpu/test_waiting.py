"""Who waits holds what it found, is woken by what it awaits, and waits no longer than its deadline."""

import random
from collections.abc import Collection

import pytest

from kvtier.base import OffloadKey, ReqContext
from kvtier.cpu.waiting import MAX_REMEMBERED, Waiter, WaitingRequests
from kvtier.testing.tier_suite import key_of

DEADLINE_S = 5.0


class CountingHolder:
    """Counts holds as the primary would."""

    def __init__(self) -> None:
        self.counts: dict[OffloadKey, int] = {}

    def hold(self, key: OffloadKey) -> None:
        """Count one more."""
        self.counts[key] = self.counts.get(key, 0) + 1

    def release_each(self, keys: Collection[OffloadKey]) -> None:
        """Count one less of each; more releases than holds fail the test."""
        for key in keys:
            assert self.counts[key] > 0
            self.counts[key] -= 1
            if not self.counts[key]:
                del self.counts[key]


@pytest.fixture
def holder() -> CountingHolder:
    """Where holds are counted."""
    return CountingHolder()


@pytest.fixture
def waiting(holder: CountingHolder) -> WaitingRequests:
    """No request waits yet."""
    return WaitingRequests(holder, DEADLINE_S)


def test_what_was_found_before_the_first_wait_is_held_from_then_on(
    waiting: WaitingRequests, holder: CountingHolder
) -> None:
    request = ReqContext("a")
    waiting.on_found(key_of(1), request)
    assert list(waiting.found_this_step[request]) == [key_of(1)]
    assert not holder.counts
    waiting.wait_for(key_of(2), request, now_s=0.0, step=0, has_slot=True)
    waiting.on_found(key_of(3), request)
    assert holder.counts == {key_of(1): 1, key_of(2): 1, key_of(3): 1}


def test_a_find_of_an_earlier_step_is_not_held(waiting: WaitingRequests, holder: CountingHolder) -> None:
    request = ReqContext("a")
    waiting.on_found(key_of(1), request)
    waiting.found_this_step.clear()
    waiting.wait_for(key_of(2), request, now_s=0.0, step=1, has_slot=True)
    assert holder.counts == {key_of(2): 1}


def test_what_has_no_slot_is_awaited_but_not_held(waiting: WaitingRequests, holder: CountingHolder) -> None:
    request = ReqContext("a")
    waiting.wait_for(key_of(1), request, now_s=0.0, step=0, has_slot=False)
    assert not holder.counts
    assert len(waiting) == 1


def test_two_waiters_hold_a_key_twice_and_release_it_each_for_itself(
    waiting: WaitingRequests, holder: CountingHolder
) -> None:
    first, second = ReqContext("same"), ReqContext("same")
    for request in (first, second):
        waiting.wait_for(key_of(1), request, now_s=0.0, step=0, has_slot=True)
        waiting.wait_for(key_of(1), request, now_s=0.0, step=0, has_slot=True)
    assert holder.counts == {key_of(1): 2} == waiting.count_holds()
    waiting.end_wait(first)
    assert holder.counts == {key_of(1): 1} == waiting.count_holds()
    waiting.end_wait(second)
    assert not holder.counts


def may_search(waiting: WaitingRequests, waiter: Waiter, step: int) -> bool:
    """Whether the request searches in this step, as the manager decides it."""
    return waiter.search_step == step or waiting.begin_search(waiter, step)


def test_a_request_searches_again_only_after_news_and_then_for_one_step(waiting: WaitingRequests) -> None:
    request = ReqContext("a")
    waiting.wait_for(key_of(1), request, now_s=0.0, step=0, has_slot=True)
    waiter = waiting.by_request.get(request)
    assert waiter is not None
    assert may_search(waiting, waiter, 0)
    assert not may_search(waiting, waiter, 1)
    waiting.notify([key_of(9)])
    assert not may_search(waiting, waiter, 2)
    waiting.notify([key_of(1)])
    assert may_search(waiting, waiter, 3)
    waiting.wait_for(key_of(2), request, now_s=1.0, step=3, has_slot=True)
    assert may_search(waiting, waiter, 3)
    assert not may_search(waiting, waiter, 4)


def test_news_in_the_midst_of_a_search_are_not_forgotten_for_what_it_finds_next(
    waiting: WaitingRequests,
) -> None:
    request = ReqContext("a")
    waiting.wait_for(key_of(1), request, now_s=0.0, step=0, has_slot=True)
    waiting.notify([key_of(1)])
    waiting.wait_for(key_of(2), request, now_s=0.0, step=0, has_slot=True)
    waiter = waiting.by_request.get(request)
    assert waiter is not None
    assert not waiting.unchanged
    assert may_search(waiting, waiter, 1)


def test_a_search_that_found_nothing_to_wait_for_leaves_the_request_free(waiting: WaitingRequests) -> None:
    request = ReqContext("a")
    waiting.wait_for(key_of(1), request, now_s=0.0, step=0, has_slot=True)
    waiting.wait_for(key_of(2), request, now_s=0.0, step=0, has_slot=True)
    waiter = waiting.by_request.get(request)
    assert waiter is not None
    assert waiting.unchanged == {request}
    waiting.notify([key_of(1)])
    assert may_search(waiting, waiter, 1)
    assert not waiting.unchanged
    assert may_search(waiting, waiter, 2)
    waiting.notify([key_of(2)])
    assert not waiter.has_changed


def test_the_deadline_counts_from_the_first_wait(waiting: WaitingRequests, holder: CountingHolder) -> None:
    request = ReqContext("a")
    waiting.wait_for(key_of(1), request, now_s=10.0, step=0, has_slot=True)
    waiting.wait_for(key_of(2), request, now_s=14.0, step=1, has_slot=True)
    waiting.expire(14.9)
    waiter = waiting.by_request.get(request)
    assert waiter is not None
    assert not waiter.is_expired
    waiting.expire(15.0)
    assert waiting.by_request.get(request) is waiter
    assert waiter.is_expired
    assert not holder.counts
    assert len(waiting) == 0


def test_what_a_tier_has_brought_up_is_noted_for_each_request_that_holds_it_and_waits(
    waiting: WaitingRequests,
) -> None:
    first, second, asking = ReqContext("first"), ReqContext("second"), ReqContext("asking")
    for request in (first, second):
        waiting.wait_for(key_of(1), request, now_s=0.0, step=0, has_slot=True)
    waiting.wait_for(key_of(1), asking, now_s=0.0, step=0, has_slot=False)
    waiting.notify([key_of(1), key_of(2)], promoted_from="fs")
    waiters = [waiting.by_request.get(request) for request in (first, second, asking)]
    assert [waiter.promoted for waiter in waiters if waiter] == [{key_of(1): "fs"}, {key_of(1): "fs"}, {}]


def test_what_came_up_stays_noted_after_the_deadline(waiting: WaitingRequests) -> None:
    request = ReqContext("a")
    for number in (1, 2):
        waiting.wait_for(key_of(number), request, now_s=0.0, step=0, has_slot=True)
    waiting.notify([key_of(1)], promoted_from="fs")
    waiting.expire(DEADLINE_S)
    waiting.notify([key_of(2)], promoted_from="fs")
    waiter = waiting.by_request.get(request)
    assert waiter is not None
    assert waiter.promoted == {key_of(1): "fs"}


def test_an_expired_request_is_forgotten_when_it_ends(waiting: WaitingRequests) -> None:
    request = ReqContext("a")
    waiting.wait_for(key_of(1), request, now_s=0.0, step=0, has_slot=True)
    waiting.expire(DEADLINE_S)
    waiting.end_wait(request)
    assert waiting.by_request.get(request) is None


def test_the_end_of_a_wait_leaves_nothing_to_notify(waiting: WaitingRequests) -> None:
    request, other = ReqContext("a"), ReqContext("b")
    waiting.wait_for(key_of(1), request, now_s=0.0, step=0, has_slot=True)
    waiting.wait_for(key_of(1), other, now_s=0.0, step=0, has_slot=True)
    waiting.end_wait(request)
    waiter = waiting.by_request.get(other)
    assert waiter is not None
    waiting.notify([key_of(1)])
    assert waiter.has_changed
    waiting.end_wait(other)
    waiting.notify([key_of(1)])
    assert len(waiting) == 0


def test_an_interruption_releases_every_hold(waiting: WaitingRequests, holder: CountingHolder) -> None:
    for number in range(5):
        waiting.wait_for(key_of(number // 2), ReqContext(str(number)), now_s=0.0, step=0, has_slot=True)
    waiting.interrupt()
    assert not holder.counts
    assert not waiting.count_holds()
    assert len(waiting) == 0


def test_an_interruption_does_not_move_the_deadline(waiting: WaitingRequests) -> None:
    request, later = ReqContext("a"), ReqContext("b")
    waiting.wait_for(key_of(1), request, now_s=0.0, step=0, has_slot=True)
    waiting.interrupt()
    waiting.wait_for(key_of(2), later, now_s=4.0, step=1, has_slot=True)
    waiting.wait_for(key_of(1), request, now_s=4.0, step=1, has_slot=True)
    assert waiting.expire(DEADLINE_S) == [frozenset({key_of(1)})]
    waiter = waiting.by_request.get(later)
    assert waiter is not None
    assert not waiter.is_expired


def begin_queueing(waiting: WaitingRequests, request: ReqContext) -> None:
    """All that the request waited for comes, and its engine does not ask again before the deadline."""
    waiting.wait_for(key_of(1), request, now_s=0.0, step=0, has_slot=True)
    waiting.notify([key_of(1)])
    assert waiting.expire(DEADLINE_S) == []


def test_a_request_that_its_engine_kept_has_not_expired(
    waiting: WaitingRequests, holder: CountingHolder
) -> None:
    request = ReqContext("a")
    begin_queueing(waiting, request)
    assert not holder.counts
    assert waiting.by_request.get(request) is None
    assert waiting.num_expired == 0


def test_a_request_that_its_engine_kept_waits_once_more_and_not_longer(waiting: WaitingRequests) -> None:
    request = ReqContext("a")
    begin_queueing(waiting, request)
    waiting.wait_for(key_of(1), request, now_s=60.0, step=1, has_slot=True)
    assert waiting.expire(60.0 + DEADLINE_S - 0.1) == []
    waiting.notify([key_of(1)])
    assert waiting.expire(60.0 + DEADLINE_S) == []
    waiter = waiting.by_request.get(request)
    assert waiter is not None
    assert waiter.is_expired
    assert waiting.num_expired == 1


def test_what_does_not_come_in_a_second_wait_is_overdue(waiting: WaitingRequests) -> None:
    request = ReqContext("a")
    begin_queueing(waiting, request)
    waiting.wait_for(key_of(2), request, now_s=60.0, step=1, has_slot=True)
    assert waiting.expire(60.0 + DEADLINE_S) == [frozenset({key_of(2)})]


@pytest.mark.parametrize("again_s", [2.0, 60.0])
def test_interruptions_do_not_make_a_second_wait_a_third(waiting: WaitingRequests, again_s: float) -> None:
    request = ReqContext("a")
    begin_queueing(waiting, request)
    waiting.wait_for(key_of(1), request, now_s=60.0, step=1, has_slot=True)
    waiting.interrupt()
    waiting.wait_for(key_of(1), request, now_s=60.0 + again_s, step=2, has_slot=True)
    waiting.expire(max(60.0 + again_s, 60.0 + DEADLINE_S))
    waiter = waiting.by_request.get(request)
    assert waiter is not None
    assert waiter.is_expired


def test_no_tier_is_blamed_for_a_request_that_did_not_ask_after_a_reset(waiting: WaitingRequests) -> None:
    request = ReqContext("a")
    waiting.wait_for(key_of(1), request, now_s=0.0, step=0, has_slot=True)
    waiting.interrupt()
    waiting.wait_for(key_of(1), request, now_s=60.0, step=1, has_slot=True)
    assert waiting.expire(60.0) == []


def test_a_request_that_ends_in_its_engines_queue_is_forgotten(waiting: WaitingRequests) -> None:
    request = ReqContext("a")
    begin_queueing(waiting, request)
    waiting.end_wait(request)
    waiting.wait_for(key_of(1), request, now_s=60.0, step=1, has_slot=True)
    waiting.notify([key_of(1)])
    waiting.expire(60.0 + DEADLINE_S)
    assert waiting.by_request.get(request) is None


@pytest.mark.slow
def test_deadlines_that_nobody_forgets_are_bounded(holder: CountingHolder) -> None:
    waiting = WaitingRequests(holder, DEADLINE_S)
    first = ReqContext("first")
    for number, request in enumerate([first, *(ReqContext("") for _ in range(MAX_REMEMBERED))]):
        waiting.wait_for(key_of(number % 7), request, now_s=0.0, step=0, has_slot=False)
    waiting.expire(DEADLINE_S)
    assert waiting.by_request.get(first) is None


class ExpectedWaits:
    """What is to be expected of requests that wait: the same rules, each request visited in turn."""

    def __init__(self) -> None:
        self.awaited: dict[ReqContext, set[OffloadKey]] = {}
        self.deadline_s: dict[ReqContext, float] = {}
        self._with_news: set[ReqContext] = set()
        self._renewed: set[ReqContext] = set()

    def wait_for(self, key: OffloadKey, request: ReqContext, now_s: float) -> None:
        """Wait for ``key`` and, in a new search, for nothing else."""
        self._with_news.discard(request)
        deadline_s = self.deadline_s.setdefault(request, now_s + DEADLINE_S)
        if request not in self.awaited and request not in self._renewed and now_s >= deadline_s:
            self.deadline_s[request] = now_s + DEADLINE_S
            self._renewed.add(request)
        self.awaited[request] = {key}

    def notify(self, key: OffloadKey) -> None:
        """Bring news of ``key``."""
        for request in [request for request, keys in self.awaited.items() if key in keys]:
            self.awaited[request].discard(key)
            self._with_news.add(request)

    def end_wait(self, request: ReqContext) -> None:
        """Forget the request."""
        self.deadline_s.pop(request, None)
        self.awaited.pop(request, None)
        self._with_news.discard(request)
        self._renewed.discard(request)

    def interrupt(self) -> None:
        """End every wait."""
        self.awaited.clear()
        self._with_news.clear()

    def due(self, now_s: float) -> list[ReqContext]:
        """Return whose deadline has passed."""
        return [request for request in self.awaited if self.deadline_s[request] <= now_s]

    def unchanged(self) -> set[ReqContext]:
        """Return who waits for something and has no news."""
        return {request for request, keys in self.awaited.items() if keys and request not in self._with_news}


@pytest.mark.parametrize("seed", range(20))
def test_for_whom_nothing_has_changed_and_whose_deadline_has_passed_is_told_to_the_moment(
    waiting: WaitingRequests, holder: CountingHolder, seed: int
) -> None:
    rng, expected, now_s = random.Random(seed), ExpectedWaits(), 0.0
    requests = [ReqContext(str(number)) for number in range(6)]
    for step in range(400):
        request, key = rng.choice(requests), key_of(rng.randrange(5))
        waiter = waiting.by_request.get(request)
        match rng.choices(["wait", "news", "end", "reset", "time"], [10, 4, 2, 1, 6])[0]:
            case "wait":
                if waiter is None or (not waiter.is_expired and may_search(waiting, waiter, step)):
                    waiting.wait_for(key, request, now_s, step, has_slot=rng.random() < 0.5)
                    expected.wait_for(key, request, now_s)
            case "news":
                waiting.notify([key])
                expected.notify(key)
            case "end":
                waiting.end_wait(request)
                expected.end_wait(request)
            case "reset":
                waiting.interrupt()
                expected.interrupt()
            case _:
                now_s += rng.choice([0.25, 1.0])
                due = expected.due(now_s)
                overdue = sorted(map(sorted, waiting.expire(now_s)))
                assert overdue == sorted(sorted(keys) for r in due if (keys := expected.awaited[r]))
                for ended in due:
                    waiting.end_wait(ended)
                    expected.end_wait(ended)
        assert waiting.unchanged == expected.unchanged()
        assert len(waiting) == len(expected.awaited)
        assert holder.counts == waiting.count_holds()
