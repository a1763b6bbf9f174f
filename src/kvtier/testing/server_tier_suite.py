"""A guard around a call that may not return: the test fails instead of hanging."""

import itertools
import random
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
import pytest

from kvtier.base import OffloadKey, ReqContext, overrides
from kvtier.config import OffloadingConfig
from kvtier.errors import TierError
from kvtier.testing.tier_driver import NUM_ROWS, TierDriver, arrived_of, key_of, make_config, make_rows
from kvtier.testing.tier_server import NUM_CHAOS_BLOCKS, Outage, TierServer, churn, churn_through
from kvtier.testing.tier_suite import FOREIGN, SPOILT, TierSuite
from kvtier.testing.tiering_driver import ROW_BYTES as ENGINE_ROW_BYTES
from kvtier.testing.tiering_driver import TieringDriver
from kvtier.tiering.base import SecondaryTierManager, TierFailure

T = TypeVar("T")


def call_within(limit_s: float, what: str, call: Callable[[], T]) -> T:
    """Return what ``call`` returns, from a thread of its own; the caller waits for it.

    Args:
        limit_s: seconds of wall clock after which it has hung; far more than it should take.
        what: the call, in words, for the message.
        call: what to do; one that has hung goes on and its outcome is dropped.

    Raises:
        AssertionError: it has not returned in time.
        BaseException: what ``call`` raised.
    """
    outcomes: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcomes.append(call())
        except BaseException as error:  # noqa: BLE001  # thread top
            errors.append(error)

    thread = threading.Thread(target=run, name="kvtier-call-guard", daemon=True)
    thread.start()
    thread.join(limit_s)
    assert not thread.is_alive(), f"{what} has not returned after {limit_s} s"
    if errors:
        raise errors[0]
    return outcomes[0]


OUTAGES = pytest.mark.parametrize("outage", Outage, ids=lambda outage: outage.value)

NUM_BUSY_ROWS = 32
"""Slots of jobs under way: half for loads, half for stores, one job each."""

MAX_BLOCKS_TO_FILL = 4096
"""Blocks of 8 KiB after which a small server must have been full."""

NUM_HUNG_STEPS = 200
"""Steps in which a tier is asked while its server hangs; one that waits in each of them outlasts the guard."""

DEADLINE_S = 4.0  # on the manual clock
ENDING_S = 0.2
"""Seconds that the manager gives a tier to end while its server is away."""

EPOCH = bytes(range(16))

DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "a flipped bit": lambda own, _: own[:-1] + bytes([own[-1] ^ 1]),
    "cut short": lambda own, _: own[:-1],
    "of another block": lambda _, other: other,
}
"""What becomes of a block's value: own and another block's value in, what is then found out."""


class ServerTierSuite(TierSuite):
    """TierSuite, and what a server's end may cost; see the head of the module for how to inherit it.

    Attributes:
        num_outages: random outages of one test; kills and hangs in turn.
    """

    num_outages: ClassVar[int] = 3

    @abstractmethod
    def get_server(self) -> TierServer:
        """Return the server of the tiers that ``make_tier`` builds; it runs when a test begins."""

    @abstractmethod
    def make_tier_on_small_server(
        self, config: OffloadingConfig, rows: memoryview, directory: Path
    ) -> SecondaryTierManager:
        """Build a tier on a server that refuses or evicts before it has 4096 blocks of 8 KiB; as ``make_tier``."""

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> bool:
        server = self.get_server()
        value = server.read_value(make_config(), key)
        assert value, "read_value finds nothing of a block that the tier has stored"
        server.write_value(make_config(), key, value[:-1] + bytes([value[-1] ^ 1]))
        return True

    @OUTAGES
    def test_a_server_that_is_away_costs_faults_that_are_said_and_is_used_again(
        self, driver: TierDriver, outage: Outage
    ) -> None:
        assert driver.store([1]).success
        with self.get_server().away(outage):
            _take_unanswered(driver)
            results = [driver.load([1]), driver.store([2])]
            assert not driver.lookup(3)
            assert _take_unanswered(driver) != 0, "the circuit breaker must hear of questions too"
            if overrides(driver.tier.check_reachable, SecondaryTierManager.check_reachable):
                with pytest.raises(TierError):
                    call_within(self.hang_guard_s, "check_reachable", driver.tier.check_reachable)
        assert [(result.success, result.successful_keys or None) for result in results] == [(False, None)] * 2
        assert all(result.is_fault for result in results), "the circuit breaker must hear of it"
        self._require_works(driver, 4)
        driver.tier.check_reachable()

    @OUTAGES
    def test_jobs_under_way_when_the_server_goes_are_reported_once_and_bring_only_right_bytes(
        self, tmp_path: Path, outage: Outage
    ) -> None:
        half = NUM_BUSY_ROWS // 2
        held, new = list(range(half)), list(range(half, NUM_BUSY_ROWS))
        with self.drive(tmp_path, num_rows=NUM_BUSY_ROWS) as driver:
            assert driver.store(held).success
            driver.rows[:] = SPOILT
            driver.place(new, new)
            before, after = held[::2] + new[::2], held[1::2] + new[1::2]
            jobs = _submit_each(driver, before, new)
            driver.poll_until(lambda: any(job in driver.results for job in jobs))
            with self.get_server().away(outage):
                jobs |= _submit_each(driver, after, new)
                driver.poll_until(lambda: jobs.keys() <= driver.results.keys())
                driver.poll()
            arrived = [number for job, number in jobs.items() if driver.results[job].success]
            driver.require_right((number, number) for number in {*arrived, *new})
            # Not only what was reported: the server may have taken a store whose answer came too late.
            driver.load_right([*held, *new])
            self._require_works(driver, NUM_BUSY_ROWS)

    def test_jobs_open_at_a_shutdown_while_the_server_hangs_are_reported_once(
        self, driver: TierDriver
    ) -> None:
        limit_s = self.hang_guard_s
        assert driver.store([0]).success
        driver.place(range(NUM_ROWS), range(NUM_ROWS))
        with self.get_server().away(Outage.HANG):
            jobs = [driver.submit([n], [n], is_promotion=n % 2 == 0) for n in range(NUM_ROWS)]
            assert call_within(limit_s, "shutdown", lambda: driver.tier.shutdown(limit_s))
        driver.poll()
        assert sorted(driver.results)[1:] == jobs
        driver.poll()

    def test_a_server_that_goes_on_writes_into_no_slot_of_a_job_that_has_ended(
        self, driver: TierDriver
    ) -> None:
        numbers = list(range(NUM_ROWS // 2))
        assert driver.store(numbers).success
        with self.get_server().away(Outage.HANG):
            assert driver.load_right(numbers) == set()
            driver.rows[:] = SPOILT
        # A block that comes and goes shows that the server is at work again.
        self._require_works(driver, NUM_ROWS, slot=NUM_ROWS - 1)
        assert np.all(driver.rows[: NUM_ROWS - 1] == SPOILT)
        num_damaged = driver.tier.stats().get(TierFailure.DAMAGED.value, 0)
        assert num_damaged == 0, "a late answer was taken for that of another question"

    def test_a_tier_that_is_built_and_asked_while_its_server_hangs_keeps_nobody_waiting(
        self, tmp_path: Path
    ) -> None:
        with ExitStack() as stack:
            with self.get_server().away(Outage.HANG):
                driver = call_within(
                    self.hang_guard_s, "a constructor", lambda: stack.enter_context(self.drive(tmp_path))
                )
                jobs = call_within(self.hang_guard_s, "the engine's steps", lambda: _ask_everything(driver))
            driver.poll_until(lambda: set(jobs) <= driver.results.keys())
            self._require_works(driver, NUM_ROWS)

    def test_random_outages_lose_no_job_and_bring_no_wrong_byte(self, driver: TierDriver) -> None:
        choose = random.Random(7)  # noqa: S311  # seeded, so that a failure can be repeated
        num_loaded = churn(driver, choose)
        for outage, _ in zip(itertools.cycle(Outage), range(self.num_outages), strict=False):
            num_loaded += churn_through(driver, self.get_server(), outage, choose)
        assert num_loaded > 0
        self._require_works(driver, NUM_CHAOS_BLOCKS)
        assert driver.tier.stats().get("open_jobs", 0) == 0

    def test_a_full_server_declines_or_evicts_and_serves_what_it_has(self, tmp_path: Path) -> None:
        rows = make_rows()
        with self.driving(self.make_tier_on_small_server(make_config(), rows, tmp_path), rows) as driver:
            stored = _fill(driver)
            more = range(MAX_BLOCKS_TO_FILL, MAX_BLOCKS_TO_FILL + NUM_ROWS)
            driver.place(more, range(NUM_ROWS))
            jobs = {driver.submit([n], [slot], is_promotion=False): n for slot, n in enumerate(more)}
            driver.poll_until(lambda: jobs.keys() <= driver.results.keys())
            stored += [number for job, number in jobs.items() if driver.results[job].success]
            num_misses = _num_misses(driver)
            loaded = set().union(*(driver.load_right(list(batch)) for batch in _batches(stored)))
            num_lost = len(stored) - len(loaded)
            assert loaded, "nothing is left of what the server has taken"
            assert num_lost or len(stored) < MAX_BLOCKS_TO_FILL, "the small server was never full"
            assert _num_misses(driver) - num_misses == num_lost, "a block that did not come is counted once"

    def test_engines_of_one_namespace_share_blocks(self, driver: TierDriver, tmp_path: Path) -> None:
        assert driver.store([1, 2]).success
        with self.drive(tmp_path) as other:
            assert other.lookup(1)
            assert other.load_right([2, 1], [5, 6]) == {1, 2}
            assert other.store([3]).success
        assert driver.load_right([3]) == {3}

    def test_an_epoch_is_seen_by_nobody_else(self, driver: TierDriver, tmp_path: Path) -> None:
        assert driver.store([1]).success
        driver.tier.reset(EPOCH)
        assert driver.store([2]).success
        with self.drive(tmp_path) as other:
            assert other.load_right([1, 2]) == {1}
            other.tier.reset(EPOCH[::-1])
            assert not other.lookup(2)
            assert other.load_right([1, 2]) == set()
        assert driver.load_right([1, 2]) == {2}

    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
    def test_a_damaged_value_is_a_counted_miss_and_makes_way(
        self, driver: TierDriver, damage: Callable[[bytes, bytes], bytes]
    ) -> None:
        assert driver.store([1, 2]).success
        server, config = self.get_server(), make_config()
        own, other = (server.read_value(config, key_of(number)) for number in (1, 2))
        assert own, "read_value finds nothing of a block that the tier has stored"
        assert other
        server.write_value(config, key_of(1), damage(own, other))
        assert driver.load_right([1, 2]) == {2}
        assert driver.tier.stats()[TierFailure.DAMAGED.value] == 1
        driver.poll_until(lambda: driver.store([1]).success and driver.load_right([1]) == {1})

    def test_a_value_of_another_namespace_is_a_counted_miss_and_left_alone(
        self, driver: TierDriver, tmp_path: Path
    ) -> None:
        assert driver.store([1, 2]).success
        server, config, foreign = self.get_server(), make_config(), FOREIGN["another model"]
        with self.drive(tmp_path, foreign) as other:
            assert other.store([1]).success
            value = server.read_value(foreign, key_of(1))
        assert value, "read_value finds nothing of a block that another engine has stored"
        server.write_value(config, key_of(1), value)
        assert driver.load_right([1, 2]) == {2}
        assert driver.tier.stats()[TierFailure.FOREIGN.value] == 1
        assert server.read_value(config, key_of(1)) == value

    @OUTAGES
    def test_behind_a_manager_a_server_that_is_away_costs_a_request_its_deadline_at_most(
        self, tmp_path: Path, outage: Outage
    ) -> None:
        with self._drive_engine(tmp_path) as engine:
            engine.store([3])
            engine.settle(self.hang_guard_s)
            engine.evict_everything()
            engine.store([1, 2])
            engine.settle(self.hang_guard_s)
            with self.get_server().away(outage):
                assert self._answer_at_deadline(engine, [1, 2, 3]) == 2, "it gets what is ready"
                call_within(self.hang_guard_s, "drain", lambda: engine.manager.drain(ENDING_S))
                call_within(self.hang_guard_s, "shutdown", engine.manager.shutdown)

    def _require_works(self, driver: TierDriver, number: int, slot: int = 0) -> None:
        """Store and load a new block as soon as the tier, which is not rebuilt, takes it."""
        driver.poll_until(lambda: driver.store([number], [slot]).success)
        driver.poll_until(lambda: driver.load_right([number], [slot]) == {number})
        driver.poll_until(lambda: driver.lookup(number))

    def _answer_at_deadline(self, engine: TieringDriver, numbers: list[int]) -> int | None:
        """Search, let the deadline pass on the manual clock, load what was found; return how much that is."""
        request = ReqContext("waits")
        for seconds in (0.0, DEADLINE_S):
            engine.clock.advance(seconds)
            num_hits = call_within(self.hang_guard_s, "a search", lambda: engine.search(numbers, request))
            if num_hits is not None:
                engine.load(numbers[:num_hits], request)
                return num_hits
            call_within(self.hang_guard_s, "a step of the engine", engine.step)
        return None

    @contextmanager
    def _drive_engine(self, directory: Path) -> Iterator[TieringDriver]:
        """Give a manager over the tier, and end the tier afterwards."""
        config = make_config(row_bytes=ENGINE_ROW_BYTES)
        engine = TieringDriver(
            NUM_ROWS,
            lambda view: [self.make_tier(config, view, directory)],
            lookup_deadline_s=DEADLINE_S,
            shutdown_timeout_s=ENDING_S,
        )
        (tier,) = engine.tiers
        try:
            yield engine
        finally:
            has_ended = tier.shutdown(self.hang_guard_s)
        assert has_ended, "the tier's threads did not end"


def _submit_each(driver: TierDriver, numbers: list[int], stored: list[int]) -> dict[int, int]:
    """Submit a job for each block, in the slot of its number; return the blocks by job."""
    return {driver.submit([n], [n], is_promotion=n not in stored): n for n in numbers}


def _ask_everything(driver: TierDriver) -> list[int]:
    """Call what an engine calls in its steps; return the jobs."""
    tier, jobs = driver.tier, []
    driver.place(range(NUM_ROWS), range(NUM_ROWS))
    for step in range(NUM_HUNG_STEPS):
        key = key_of(1000 + step)
        tier.lookup(key, driver.request)
        tier.touch([key], driver.request)
        if step < NUM_ROWS:
            jobs.append(driver.submit([step], [step], is_promotion=step % 2 == 0))
        tier.end_step()
        driver.poll()
        tier.waiting_s()
        tier.stats()
    tier.request_finished(driver.request)
    return jobs


def _fill(driver: TierDriver) -> list[int]:
    """Store blocks until one is declined; return those that were stored, by the tier's own word."""
    stored: list[int] = []
    for batch in _batches(range(MAX_BLOCKS_TO_FILL)):
        arrived = arrived_of(driver.store(list(batch)), batch)
        stored += sorted(arrived)
        if len(arrived) < len(batch):
            break
    return stored


def _take_unanswered(driver: TierDriver) -> int | None:
    """Return how many lookups got no reply since the last call; None when the tier does not say."""
    tier = driver.tier
    says = overrides(tier.drain_unanswered, SecondaryTierManager.drain_unanswered)
    return tier.drain_unanswered() if says else None


def _batches(numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    """Cut ``numbers`` into jobs that fit into the rows. Pure."""
    for begin in range(0, len(numbers), NUM_ROWS):
        yield numbers[begin : begin + NUM_ROWS]


def _num_misses(driver: TierDriver) -> float:
    """Return how many blocks the tier has not loaded, by its own count."""
    stats = driver.tier.stats()
    return sum(stats.get(reason.value, 0) for reason in TierFailure)
