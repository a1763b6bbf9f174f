"""Whatever a tier raises, its guard answers; a tier left out is not asked."""

from collections.abc import Collection, Iterable, Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from kvtier.base import JobId, OffloadKey, ReqContext
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import key_of, make_config, make_rows
from kvtier.tiering.base import FAILURES_TO_OPEN, JobMetadata, JobResult, SecondaryTierManager
from kvtier.tiering.breaker import MAX_WAITING_S, OPEN_S, BreakerState, Submission
from kvtier.tiering.departures import TierDeparture
from kvtier.tiering.guard import MAX_ASKED_AGAIN, MAX_UNANSWERED, GuardedTier


class BrokenTier(SecondaryTierManager):
    """Raises in every call that is switched on; counts what it is asked."""

    def __init__(self) -> None:
        super().__init__(make_config(), make_rows())
        self.raising: set[str] = set()
        self.calls: list[str] = []
        self.answer: bool | None = True
        self.answered: Collection[OffloadKey] | None = None
        self.queue_age_s = 0.0
        self.reports: Sequence[object] = ()
        self.odd_answer: object = None

    @staticmethod
    def get_tier_type() -> str:
        """Return "broken"."""
        return "broken"

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        if call in self.raising:
            raise RuntimeError(call)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        self._enter("lookup")
        return self.answer if self.odd_answer is None else cast("bool", self.odd_answer)

    def submit_store(self, job: JobMetadata) -> None:
        self._enter("submit")

    def submit_load(self, job: JobMetadata) -> None:
        self._enter("submit")

    def get_finished(self) -> Iterable[JobResult]:
        self._enter("get_finished")
        return cast("list[JobResult]", self.reports)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._enter("touch")

    def request_finished(self, req_context: ReqContext) -> None:
        self._enter("request_finished")

    def end_step(self) -> None:
        self._enter("end_step")

    def drain_answered(self) -> Collection[OffloadKey] | None:
        self._enter("drain_answered")
        return self.answered

    def stats(self) -> dict[str, float]:
        self._enter("stats")
        return {}

    def waiting_s(self) -> float:
        self._enter("waiting_s")
        return self.queue_age_s

    def reset(self, epoch: bytes) -> None:
        self._enter("reset")

    def drain(self, timeout_s: float) -> bool:
        self._enter("drain")
        return True

    def shutdown(self, timeout_s: float) -> bool:
        self._enter("shutdown")
        return True


def always(_key: OffloadKey) -> bool:
    """Somebody waits for every key."""
    return True


CALLS = {
    "lookup", "submit", "get_finished", "touch", "request_finished", "end_step", "drain_answered", "waiting_s",
    "reset", "drain", "shutdown", "stats",
}  # fmt: skip


def make_guard(tier: BrokenTier) -> GuardedTier:
    """A guard around ``tier``."""
    return GuardedTier(tier, primary_bytes=2**20, row_bytes=2**12, clock=ManualClock())


def make_job() -> JobMetadata:
    """A load of one block."""
    return JobMetadata(JobId(0), (key_of(1),), np.array([0]), True, ReqContext("a"))


def test_no_call_lets_a_raise_through() -> None:
    tier = BrokenTier()
    tier.raising = set(CALLS)
    request = ReqContext("a")
    guard = make_guard(tier)
    assert guard.lookup(key_of(1), request) is False
    assert guard.submit(make_job()) is Submission.FAILED
    assert guard.stats()["errors"] > 0
    assert guard.drain(1.0) is False
    guard.touch([key_of(1)], request)
    guard.request_finished(request)
    guard.end_step()
    assert list(guard.drain_answered(always)) == []
    assert guard.get_finished() == []
    assert guard.is_out_of_service
    guard.reset(b"")
    assert guard.shutdown(0.0) is False
    assert guard.num_errors >= 8


def test_a_tier_out_of_service_is_not_asked_any_more() -> None:
    tier = BrokenTier()
    guard = make_guard(tier)
    tier.raising = {"get_finished"}
    guard.get_finished()
    tier.calls.clear()
    request = ReqContext("a")
    assert guard.lookup(key_of(1), request) is False
    assert guard.submit(make_job()) is Submission.DECLINED
    guard.touch([], request)
    guard.request_finished(request)
    guard.end_step()
    assert guard.get_finished() == []
    assert guard.drain(1.0)
    assert tier.calls == []


def test_a_tier_that_cannot_reset_is_out_of_service() -> None:
    tier = BrokenTier()
    tier.raising = {"reset"}
    guard = make_guard(tier)
    guard.reset(b"")
    assert guard.is_out_of_service


def test_a_queue_that_waits_too_long_opens_the_breaker() -> None:
    tier, clock = BrokenTier(), ManualClock()
    guard = GuardedTier(tier, primary_bytes=2**20, row_bytes=2**12, clock=clock)
    guard.submit(make_job())
    started_s = clock()
    clock.advance(MAX_WAITING_S + 0.1)
    tier.queue_age_s = MAX_WAITING_S
    guard.check_age(started_s)
    assert guard.breaker.allows(None)
    tier.queue_age_s = MAX_WAITING_S + 0.1
    guard.check_age(started_s)
    assert guard.breaker.state is BreakerState.OPEN
    assert guard.lookup(key_of(1), ReqContext("a")) is False


def test_a_tier_that_does_not_keep_track_is_asked_once_for_each_key() -> None:
    tier = BrokenTier()
    tier.answer = None
    guard = make_guard(tier)
    for name in "abc":
        guard.lookup(key_of(1), ReqContext(name))
    tier.calls.clear()
    assert set(guard.drain_answered(always)) == set()
    assert tier.calls.count("lookup") == 1
    tier.answer = False
    assert set(guard.drain_answered(always)) == {key_of(1)}
    assert set(guard.drain_answered(always)) == set()


@pytest.mark.parametrize("num_requests", [20, 200])
def test_what_a_step_asks_such_a_tier_does_not_grow_with_the_requests_that_wait(num_requests: int) -> None:
    tier = BrokenTier()
    tier.answer = None
    guard = make_guard(tier)
    keys = [key_of(number) for number in range(num_requests * 50)]
    for number, key in enumerate(keys):
        guard.lookup(key, ReqContext(f"{number // 50}"))
    tier.calls.clear()
    num_looked_at = 0

    def is_awaited(_key: OffloadKey) -> bool:
        nonlocal num_looked_at
        num_looked_at += 1
        return True

    assert list(guard.drain_answered(is_awaited)) == []
    assert (tier.calls.count("lookup"), num_looked_at) == (MAX_UNANSWERED, MAX_UNANSWERED)
    tier.answer = True
    tier.calls.clear()
    answered: list[OffloadKey] = []
    num_steps = 0
    while guard.open_lookups:
        answered += guard.drain_answered(always)
        num_steps += 1
        assert tier.calls.count("lookup") <= num_steps * MAX_ASKED_AGAIN
    assert num_steps == -(-len(keys) // MAX_ASKED_AGAIN)
    assert answered == keys[MAX_UNANSWERED:] + keys[:MAX_UNANSWERED]


def test_a_key_whose_answer_never_comes_keeps_no_other_from_being_asked_for() -> None:
    tier = BrokenTier()
    tier.answer = None
    guard = make_guard(tier)
    for number in range(10 * MAX_UNANSWERED):
        guard.lookup(key_of(number), ReqContext("a"))
    seen: list[OffloadKey] = []

    def note(key: OffloadKey) -> bool:
        seen.append(key)
        return True

    for _ in range(10):
        guard.drain_answered(note)
    assert sorted(seen) == sorted(key_of(number) for number in range(10 * MAX_UNANSWERED))


def test_a_key_that_nobody_waits_for_is_not_asked_for_again() -> None:
    tier = BrokenTier()
    tier.answer = None
    guard = make_guard(tier)
    guard.lookup(key_of(1), ReqContext("a"))
    guard.lookup(key_of(2), ReqContext("a"))
    tier.calls.clear()
    guard.drain_answered(lambda key: key == key_of(2))
    guard.drain_answered(always)
    assert tier.calls.count("lookup") == 2


def test_a_tier_that_can_tell_wakes_only_those() -> None:
    tier = BrokenTier()
    tier.answer = None
    guard = make_guard(tier)
    guard.lookup(key_of(1), ReqContext("a"))
    tier.answered = ()
    assert set(guard.drain_answered(always)) == set()
    tier.answered = [key_of(1)]
    assert set(guard.drain_answered(always)) == {key_of(1)}


def test_a_place_that_is_tried_again_is_free_for_the_next_once_one_key_of_the_first_is_answered() -> None:
    tier, clock = BrokenTier(), ManualClock()
    guard = GuardedTier(tier, primary_bytes=2**20, row_bytes=2**12, clock=clock)
    guard.breaker.trip()
    clock.advance(OPEN_S)
    tier.answer = None
    first, second = ReqContext("first"), ReqContext("second")
    assert [guard.lookup(key_of(number), first) for number in (1, 2)] == [None, None]
    assert guard.lookup(key_of(3), second) is False
    tier.answered = [key_of(9)]
    assert guard.drain_answered(always) == [key_of(9)]
    assert guard.lookup(key_of(3), second) is False
    tier.answered = [key_of(1), key_of(2)]
    assert guard.drain_answered(always) == [key_of(1), key_of(2)]
    assert guard.lookup(key_of(3), second) is None


def test_a_key_whose_load_failed_is_not_asked_for() -> None:
    tier = BrokenTier()
    guard = make_guard(tier)
    guard.backoff.record_failure(key_of(1))
    assert guard.lookup(key_of(1), ReqContext("a")) is False
    assert guard.lookup(key_of(2), ReqContext("a")) is True


@pytest.mark.parametrize("lost_by", ["a failed load", "wrong bytes"])
def test_after_a_reset_every_key_is_looked_up_again(lost_by: str) -> None:
    tier = BrokenTier()
    guard = make_guard(tier)
    if lost_by == "a failed load":
        guard.backoff.record_failure(key_of(1))
    else:
        guard.drop([key_of(1)])
    assert guard.lookup(key_of(1), ReqContext("a")) is False
    guard.reset(b"next")
    assert guard.lookup(key_of(1), ReqContext("a")) is True


def test_after_a_reset_no_lookup_of_before_is_open() -> None:
    tier = BrokenTier()
    tier.answer = None
    guard = make_guard(tier)
    guard.lookup(key_of(1), ReqContext("a"))
    guard.reset(b"next")
    tier.answer = True
    assert set(guard.drain_answered(always)) == set()


def test_after_a_reset_the_tier_has_lost_nothing() -> None:
    guard = make_guard(BrokenTier())
    guard.departed.add([key_of(1)], TierDeparture.PURGED)
    assert guard.explain(key_of(1), ReqContext("a")) is not None
    guard.reset(b"next")
    assert guard.explain(key_of(1), ReqContext("a")) is None


def test_unfinished_stores_leave_room_for_whole_rows_and_for_none_when_they_hold_too_much() -> None:
    tier = BrokenTier()
    guard = GuardedTier(tier, primary_bytes=8 * 100, row_bytes=30, clock=ManualClock())
    assert guard.num_storable_rows() == 3
    guard.in_flight_store_bytes += 90
    assert guard.num_storable_rows() == 0
    guard.in_flight_store_bytes -= 60
    assert guard.num_storable_rows() == 2
    guard.in_flight_store_bytes += 500
    assert guard.num_storable_rows() == 0


def test_the_budget_lets_one_row_through_however_small_it_is_and_none_out_of_service() -> None:
    tier = BrokenTier()
    guard = GuardedTier(tier, primary_bytes=8, row_bytes=30, clock=ManualClock())
    assert guard.num_storable_rows() == 1
    tier.raising = {"reset"}
    guard.reset(b"")
    assert guard.num_storable_rows() == 0


def test_how_fast_a_tier_loads_is_in_its_stats_only_where_it_is_measured() -> None:
    for measures_loads in (False, True):
        guard = GuardedTier(BrokenTier(), 2**20, 2**12, ManualClock(), measures_loads=measures_loads)
        assert ("load_bytes_per_s" in guard.stats()) is measures_loads
        assert ("load_latency_s" in guard.stats()) is measures_loads


def test_raising_lookups_open_the_breaker() -> None:
    tier = BrokenTier()
    tier.raising = {"lookup"}
    guard = make_guard(tier)
    for number in range(FAILURES_TO_OPEN):
        guard.lookup(key_of(number), ReqContext("a"))
    assert guard.breaker.state is BreakerState.OPEN


def test_requests_that_wait_in_vain_open_the_breaker() -> None:
    tier = BrokenTier()
    tier.answer = None
    guard = make_guard(tier)
    guard.lookup(key_of(1), ReqContext("a"))
    for _ in range(FAILURES_TO_OPEN):
        guard.record_overdue({key_of(2)}, is_loading=False)
    assert guard.breaker.allows(None)
    for _ in range(FAILURES_TO_OPEN):
        guard.record_overdue({key_of(1)}, is_loading=False)
    assert not guard.breaker.allows(None)


def test_a_job_that_outlives_its_time_out_opens_the_breaker() -> None:
    tier, clock = BrokenTier(), ManualClock()
    guard = GuardedTier(tier, primary_bytes=2**20, row_bytes=2**12, clock=clock)
    guard.submit(make_job())
    started_s = clock()
    clock.advance(tier.settings.job_timeout_s)
    guard.check_age(started_s)
    assert guard.breaker.allows(None)
    clock.advance(0.1)
    guard.check_age(started_s)
    assert not guard.breaker.allows(None)


@pytest.mark.parametrize(
    "report", [None, "done", 5, SimpleNamespace(job_id=[], success=True, successful_keys=None, is_fault=True)]
)
def test_a_report_that_is_none_puts_the_tier_out_of_service(report: object) -> None:
    tier = BrokenTier()
    tier.reports = [report]
    guard = make_guard(tier)
    assert guard.get_finished() == []
    assert guard.is_out_of_service


def test_a_report_is_given_the_types_it_should_have() -> None:
    tier = BrokenTier()
    tier.reports = [SimpleNamespace(job_id=0, success=True, successful_keys=[key_of(1)], is_fault=1)]
    (result,) = make_guard(tier).get_finished()
    assert result == JobResult(JobId(0), success=False, successful_keys=frozenset({key_of(1)}))


@pytest.mark.parametrize(("told_s", "took_s"), [(None, None), (1, 1.0), (-1.0, 0.0)])
def test_what_a_report_says_of_its_time_is_a_number_from_zero_or_nothing(
    told_s: float | None, took_s: float | None
) -> None:
    tier = BrokenTier()
    tier.reports = [JobResult(JobId(0), success=True, took_s=told_s)]
    (result,) = make_guard(tier).get_finished()
    assert result.took_s == took_s


@pytest.mark.parametrize("answer", [np.zeros(2), np.ones(3)])
def test_an_answer_that_is_neither_yes_nor_no_is_a_miss(answer: object) -> None:
    tier = BrokenTier()
    tier.odd_answer = answer
    assert make_guard(tier).lookup(key_of(1), ReqContext("a")) is False
