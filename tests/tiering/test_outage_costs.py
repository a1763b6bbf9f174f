"""What a place costs that hangs or refuses: a bounded wait, a miss, a bounded share of the primary, a clean end."""

import logging
import threading
import time
from collections.abc import Collection, Iterator, Sequence

import pytest

from kvtier.base import OffloadKey, ReqContext
from kvtier.errors import TierError
from kvtier.namespace import Namespace
from kvtier.testing.clock import ManualClock
from kvtier.testing.server_tier_suite import call_within
from kvtier.testing.tier_suite import HANG_GUARD_S, key_of, make_config
from kvtier.testing.tiering_driver import ROW_BYTES, ArrayRegion, TieringDriver
from kvtier.tiering.base import FAILURES_TO_OPEN, TierSettings
from kvtier.tiering.breaker import OPEN_S
from kvtier.tiering.kit.backend import BlockStore, Rows, rows_of
from kvtier.tiering.kit.io_pool import TransferOutcome
from kvtier.tiering.kit.threaded_tier import ThreadedTier, ThreadOptions
from kvtier.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

NUM_BLOCKS = 16
DEADLINE_S = 4.0
BUDGET_BLOCKS = 2
SHUTDOWN_S = 0.2
LAST_S = 0.25
"""The end of the deadline; a power of two, so that the clock adds up."""


class GatedStore(BlockStore[str]):
    """Keeps blocks in a dictionary; its calls stand still while it is hung, and raise while it is away.

    Args:
        rows: the primary's.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._blocks: dict[tuple[str, OffloadKey], bytes] = {}
        self._is_well = threading.Event()
        self._is_well.set()
        self._entered = threading.Semaphore(0)
        self._are_questions_answered = False
        self.is_away = False
        self.num_calls = 0

    def hang(self, *, are_questions_answered: bool = False) -> None:
        """Let no call return from now on, or none that moves a block."""
        self._are_questions_answered = are_questions_answered
        self._is_well.clear()

    def recover(self) -> None:
        """Let every call go on."""
        self.is_away = False
        self._is_well.set()

    def refuse(self) -> None:
        """Let the calls that stand still end, and the next ones raise."""
        self.is_away = True
        self._is_well.set()

    def await_hung_call(self) -> None:
        """Block until one more call stands still."""
        assert self._entered.acquire(timeout=HANG_GUARD_S)

    def open_namespace(self, identity: Namespace, *, is_new: bool) -> str:
        return identity.name

    def contains_batch(self, namespace: str, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        self._enter(is_question=True)
        return [key for key in keys if (namespace, key) in self._blocks]

    def store(self, namespace: str, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        self._enter()
        for key, slot in zip(keys, slots, strict=True):
            self._blocks[namespace, key] = bytes(self._rows.row(slot))
        return TransferOutcome(keys)

    def load(self, namespace: str, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        self._enter()
        for key, slot in zip(keys, slots, strict=True):
            self._rows.row(slot)[:] = self._blocks[namespace, key]
        return TransferOutcome(keys)

    def _enter(self, *, is_question: bool = False) -> None:
        self.num_calls += 1
        if self.is_away:
            raise TierError("gated", "the place refuses")
        if not self._is_well.is_set() and not (is_question and self._are_questions_answered):
            self._entered.release()
            assert self._is_well.wait(HANG_GUARD_S)


class GatedTier(ThreadedTier[str]):
    """A tier over such a place, whose answers expire as soon as they are read."""

    def __init__(self, rows: memoryview) -> None:
        self.clock = ManualClock()
        self.place = GatedStore(rows_of(rows))
        options = ThreadOptions(num_threads=2, max_task_blocks=4, positive_ttl_s=0.0)
        settings = TierSettings(max_in_flight_store_bytes=BUDGET_BLOCKS * ROW_BYTES)
        config = make_config(row_bytes=ROW_BYTES)
        super().__init__(config, rows, settings, block_store=self.place, options=options, clock=self.clock)

    @staticmethod
    def get_tier_type() -> str:
        return "gated"


class Engine:
    """A manager over a gated tier, both on one clock."""

    def __init__(self) -> None:
        self.driver = TieringDriver(NUM_BLOCKS, lambda view: [GatedTier(view)], lookup_deadline_s=DEADLINE_S)
        (tier,) = self.driver.tiers
        assert isinstance(tier, GatedTier)
        self.tier = tier
        self.place = tier.place

    def advance(self, seconds: float) -> None:
        """Move the clock of manager and tier."""
        self.driver.clock.advance(seconds)
        self.tier.clock.advance(seconds)

    def search(self, numbers: Sequence[int], request: ReqContext | None = None) -> int | None:
        """Search in a step of its own, on behalf of a new request if none is given."""
        num_hits = self.driver.search(numbers, request or ReqContext("new"))
        self.driver.step()
        return num_hits

    def answer(self, numbers: Sequence[int]) -> int:
        """Search for a new request, step after step until the threads have answered; the clock stands still."""
        request = ReqContext("answered")
        end_s = time.monotonic() + HANG_GUARD_S
        while (num_hits := self.search(numbers, request)) is None:
            assert time.monotonic() < end_s, f"the search for {numbers} was never answered"
            self.tier.drain(HANG_GUARD_S)
        return num_hits

    def await_news(self, requests: Collection[ReqContext]) -> None:
        """Run steps until none of the requests waits; the clock stands still."""
        end_s = time.monotonic() + HANG_GUARD_S
        while any(map(self.driver.manager.is_waiting, requests)):
            assert time.monotonic() < end_s, "the requests were never answered"
            self.driver.step()

    def search_until_loading(self, numbers: Sequence[int], request: ReqContext) -> None:
        """Search step after step until the tier loads what the search has found below."""
        end_s = time.monotonic() + HANG_GUARD_S
        while not self.driver.manager.stats()["open_jobs"]:
            assert time.monotonic() < end_s, f"the search for {numbers} has led to no load"
            assert self.search(numbers, request) is None
        self.place.await_hung_call()

    def put_below(self, numbers: Sequence[int]) -> None:
        """Store blocks and leave them in the tier only."""
        for number in numbers:
            self.driver.store([number])
            self.settle()
        self.driver.evict_everything()

    def settle(self) -> None:
        """Let the tier's jobs end, and the manager hear of it; the poll of this step may have been before."""
        assert self.tier.drain(HANG_GUARD_S)
        for _ in range(2):
            self.driver.step()

    def open_breaker(self) -> None:
        """Let as many requests pass their deadline as it takes."""
        for number in range(FAILURES_TO_OPEN):
            assert self.search([1000 + number]) is None
        self.advance(DEADLINE_S)

    def stat(self, name: str) -> float:
        """Return one of the tier's numbers."""
        return self.driver.manager.stats()[f"tier.0.gated.{name}"]


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine whose place is well, at first and at last."""
    engine = Engine()
    yield engine
    engine.place.recover()
    assert engine.tier.shutdown(HANG_GUARD_S)


def test_a_question_that_hangs_costs_a_request_its_deadline_and_leaves_it_the_ready_prefix(
    engine: Engine,
) -> None:
    engine.driver.store([1, 2])
    engine.place.hang()
    request = ReqContext("a")
    assert engine.search([1, 2, 3], request) is None
    engine.advance(DEADLINE_S - LAST_S)
    assert engine.search([1, 2, 3], request) is None
    assert engine.driver.manager.is_waiting(request)
    engine.driver.step()
    engine.advance(LAST_S)
    assert not engine.driver.manager.is_waiting(request)
    assert engine.search([1, 2, 3], request) == 2
    engine.driver.load([1, 2], request)


def test_a_load_that_hangs_costs_a_request_its_deadline_and_leaves_it_the_ready_prefix(
    engine: Engine,
) -> None:
    engine.put_below([3])
    engine.driver.store([1, 2])
    engine.settle()
    request = ReqContext("a")
    engine.place.hang(are_questions_answered=True)
    engine.search_until_loading([1, 2, 3], request)
    engine.advance(DEADLINE_S - LAST_S)
    assert engine.search([1, 2, 3], request) is None
    engine.advance(LAST_S)
    assert engine.search([1, 2, 3], request) == 2
    engine.driver.load([1, 2], request)


def test_a_place_that_refuses_costs_a_miss_and_no_time(engine: Engine) -> None:
    engine.driver.store([1, 2])
    engine.place.is_away = True
    assert engine.answer([1, 2, 3]) == 2
    assert engine.driver.clock() == 0.0


def test_requests_that_wait_behind_a_hung_call_are_refused_in_one_call_that_counts_once(
    engine: Engine,
) -> None:
    engine.place.hang()
    requests = {number: ReqContext(str(number)) for number in range(2 * FAILURES_TO_OPEN)}
    assert engine.search([0], requests[0]) is None
    engine.place.await_hung_call()
    for number in range(1, len(requests)):
        assert engine.search([number], requests[number]) is None
    engine.place.refuse()
    engine.await_news(requests.values())
    assert [engine.search([number], request) for number, request in requests.items()] == [0] * len(requests)
    assert engine.place.num_calls == 2
    assert engine.search([100]) is None  # one refusal leaves no place out


def test_after_enough_refusals_nobody_waits_and_the_place_is_not_called(engine: Engine) -> None:
    engine.place.is_away = True
    for number in range(FAILURES_TO_OPEN):
        assert engine.answer([number]) == 0
    num_calls = engine.place.num_calls
    assert num_calls == FAILURES_TO_OPEN
    assert [engine.search([number]) for number in range(100, 110)] == [0] * 10
    assert engine.place.num_calls == num_calls


def test_fewer_requests_that_waited_in_vain_do_not_leave_the_place_out(engine: Engine) -> None:
    engine.place.hang()
    for number in range(FAILURES_TO_OPEN - 1):
        assert engine.search([number]) is None
    engine.advance(DEADLINE_S)
    assert engine.search([100]) is None


def test_after_enough_requests_that_waited_in_vain_the_next_do_not_wait(engine: Engine) -> None:
    engine.place.hang()
    engine.open_breaker()
    assert [engine.search([number]) for number in range(100, 110)] == [0] * 10
    assert engine.stat("breaker_openings") == 1
    assert engine.stat("overdue_requests") == FAILURES_TO_OPEN


@pytest.mark.parametrize("is_hung", [True, False], ids=["hung", "refusing"])
def test_a_place_that_is_back_is_used_again_after_the_pause(engine: Engine, is_hung: bool) -> None:
    engine.put_below([1, 2])
    if is_hung:
        engine.place.hang()
        engine.open_breaker()
    else:
        engine.place.is_away = True
        assert [engine.answer([number]) for number in range(100, 100 + FAILURES_TO_OPEN)] == [
            0
        ] * FAILURES_TO_OPEN
    engine.place.recover()
    assert engine.search([1]) == 0
    engine.advance(OPEN_S)
    for number in (1, 2):  # the probe, and one after it
        assert engine.answer([number]) == 1
        engine.driver.load([number], ReqContext("load"))
    assert engine.stat("breaker_openings") == 1


def test_a_place_that_is_tried_again_keeps_one_request_waiting_and_no_other(engine: Engine) -> None:
    engine.place.hang()
    engine.open_breaker()
    engine.driver.step()
    engine.advance(OPEN_S)
    assert engine.search([1]) is None
    assert [engine.search([number]) for number in range(2, 12)] == [0] * 10


def test_a_place_that_still_hangs_after_the_pause_is_left_out_by_the_first_request_it_fails(
    engine: Engine,
) -> None:
    engine.place.hang()
    engine.open_breaker()
    engine.driver.step()
    engine.advance(OPEN_S)
    assert engine.search([2000]) is None
    engine.advance(DEADLINE_S)
    assert engine.search([2001]) == 0


def test_stores_to_a_hung_place_hold_their_budget_and_no_more_of_the_primary(engine: Engine) -> None:
    engine.place.hang()
    for number in range(NUM_BLOCKS):
        engine.driver.store([number])
        engine.driver.step()
    assert engine.stat("in_flight_store_bytes") == BUDGET_BLOCKS * ROW_BYTES
    assert engine.stat("pending_blocks") == NUM_BLOCKS - BUDGET_BLOCKS
    num_free = NUM_BLOCKS - BUDGET_BLOCKS
    assert engine.driver.begin_store(range(100, 101 + num_free), ReqContext("too many")) is None
    engine.driver.store(range(100, 100 + num_free))


def test_stores_to_a_place_that_is_back_go_on(engine: Engine) -> None:
    engine.place.hang()
    engine.driver.store([1, 2])
    engine.driver.store([3, 4])
    engine.place.recover()
    for _ in range(2):
        engine.settle()
    assert engine.stat("in_flight_store_bytes") == engine.stat("pending_blocks") == 0
    engine.driver.evict_everything()
    assert engine.answer([1, 2, 3, 4]) == 4


class Ending:
    """A manager on the real clock with a hung tier, to be shut down."""

    def __init__(self) -> None:
        primary = CPUPrimaryTierOffloadingManager(NUM_BLOCKS, ArrayRegion(NUM_BLOCKS))
        self.tier = GatedTier(primary.get_kv_memoryview())
        self.manager = TieringOffloadingManager(primary, [self.tier], shutdown_timeout_s=SHUTDOWN_S)
        self.tier.place.hang()

    def store(self, number: int) -> None:
        """Store a block and wait until its cascade hangs."""
        request = ReqContext("store")
        self.manager.prepare_store([key_of(number)], request)
        self.manager.complete_store([key_of(number)], request)
        self.tier.place.await_hung_call()

    def ask(self, number: int) -> None:
        """Ask for a block and wait until the question hangs."""
        assert self.manager.lookup(key_of(number), ReqContext("ask")) is None
        self.manager.end_step()
        self.tier.place.await_hung_call()

    def shut_down(self) -> None:
        """Shut down; one that waits for the hung call never ends, and fails the test."""
        call_within(HANG_GUARD_S, "shutdown", self.manager.shutdown)


@pytest.fixture
def ending() -> Iterator[Ending]:
    """Something to shut down, whose threads end with the test."""
    ending = Ending()
    yield ending
    ending.tier.place.recover()
    assert ending.tier.shutdown(HANG_GUARD_S)


def test_a_shutdown_with_a_hung_store_ends_in_time_and_says_that_rows_stay_mapped(
    ending: Ending, caplog: pytest.LogCaptureFixture
) -> None:
    ending.store(1)
    with caplog.at_level(logging.WARNING):
        ending.shut_down()
    assert ["rows stay mapped" in record.getMessage() for record in caplog.records] == [True]
    assert ending.tier.primary_kv_view.nbytes == NUM_BLOCKS * ROW_BYTES


def test_a_shutdown_with_a_hung_question_ends_in_time_and_gives_the_rows_back(
    ending: Ending, caplog: pytest.LogCaptureFixture
) -> None:
    ending.ask(1)
    with caplog.at_level(logging.WARNING):
        ending.shut_down()
    assert not caplog.records
    with pytest.raises(ValueError, match="released"):
        len(ending.tier.primary_kv_view)
