"""What a router that reads every event believes, next to what the manager and its tiers hold."""

import random
from collections.abc import Iterable

from kvtier.base import OffloadKey, ReqContext
from kvtier.testing.faults import Faults, FaultyTier
from kvtier.testing.indexer import BlockIndexer
from kvtier.testing.tier_suite import key_of, make_config
from kvtier.testing.tiering_driver import TieringDriver
from kvtier.tiering.announcements import make_event_names
from kvtier.tiering.base import FAILURES_TO_OPEN, JobMetadata, JobResult, SecondaryTierManager, TierSettings
from kvtier.tiering.breaker import OPEN_S
from kvtier.tiering.example import ExampleSecondaryTier

TELLING = TierSettings(max_in_flight_store_bytes=2**30, emit_events=True)


class RemoteTier(SecondaryTierManager):
    """A tier that does not know what it evicts, as one on a server; ``is_down`` makes its calls raise."""

    def __init__(self, view: memoryview) -> None:
        super().__init__(make_config(), view, TELLING)
        self.inner = ExampleSecondaryTier(make_config(), view)
        self.is_down = False

    @staticmethod
    def get_tier_type() -> str:
        return "remote"

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if self.is_down:
            raise ConnectionError("down on purpose")
        return self.inner.lookup(key, req_context)

    def submit_store(self, job: JobMetadata) -> None:
        if self.is_down:
            raise ConnectionError("down on purpose")
        self.inner.submit_store(job)

    def submit_load(self, job: JobMetadata) -> None:
        self.submit_store(job)

    def get_finished(self) -> Iterable[JobResult]:
        return self.inner.get_finished()

    def reset(self, epoch: bytes) -> None:
        self.inner.reset(epoch)


class Bench:
    """A manager over tiers, and a router."""

    def __init__(self, driver: TieringDriver) -> None:
        self.driver = driver
        self.router = BlockIndexer()

    def step(self, num_steps: int = 1) -> None:
        """End steps, of which the router reads the events."""
        for _ in range(num_steps):
            self.driver.step()
            self.read()

    def read(self) -> None:
        """Let the router read."""
        self.router.apply(self.driver.manager.take_events())

    def fail_lookups(self) -> None:
        """Look up what is nowhere until the breaker opens."""
        for number in range(FAILURES_TO_OPEN):
            self.driver.search([1000 + number], ReqContext("failing"))


def keys(*numbers: int) -> set[OffloadKey]:
    """Return the keys of blocks."""
    return {key_of(number) for number in numbers}


def make_example_bench(num_slots: int = 4, max_blocks: int = 100) -> tuple[Bench, ExampleSecondaryTier]:
    """Return a bench over one example tier."""
    made: list[ExampleSecondaryTier] = []

    def make_tiers(view: memoryview) -> list[SecondaryTierManager]:
        made.append(ExampleSecondaryTier(make_config(), view, max_blocks, settings=TELLING))
        return [*made]

    return Bench(TieringDriver(num_slots, make_tiers)), made[0]


def test_while_nothing_fails_a_router_believes_exactly_what_is_there() -> None:
    bench, tier = make_example_bench(num_slots=4, max_blocks=6)
    rng = random.Random(7)
    for _ in range(300):
        numbers = rng.sample(range(12), 3)
        request = ReqContext("a")
        if bench.driver.search_until_known(numbers, request) == 0:
            bench.driver.store(numbers[:2])
        bench.driver.manager.request_finished(request)
        bench.step(3)
        assert bench.router.held_in("example", "example") == set(tier.blocks)
    assert bench.router.num_repeated == 0


def test_a_block_that_is_evicted_in_the_step_of_its_store_is_never_announced() -> None:
    bench, tier = make_example_bench(max_blocks=1)
    bench.driver.store([1])
    bench.driver.store([2])
    for _ in range(3):
        bench.step()
        assert bench.router.held_in("example", "example") <= set(tier.blocks)
    bench.driver.store([3])
    bench.step(2)
    assert bench.router.held_in("example", "example") == keys(3) == set(tier.blocks)


def test_a_tier_behind_an_open_breaker_is_withdrawn_and_comes_back_with_what_it_holds() -> None:
    made: list[FaultyTier] = []

    def make_tiers(view: memoryview) -> list[SecondaryTierManager]:
        inner = ExampleSecondaryTier(make_config(), view, settings=TELLING)
        made.append(FaultyTier(inner, Faults(), random.Random(1)))
        return [*made]

    bench = Bench(TieringDriver(4, make_tiers))
    bench.driver.store([1, 2])
    bench.step(3)
    assert bench.router.held_in("faulty", "faulty") == keys(1, 2)
    made[0].faults.lookup_raise_ratio = 1.0
    bench.fail_lookups()
    bench.step()
    assert bench.router.held_in("faulty", "faulty") == set()
    assert bench.router.held_in("CPU") == keys(1, 2)
    made[0].faults.lookup_raise_ratio = 0.0
    bench.driver.clock.advance(OPEN_S)
    bench.driver.store([3])
    bench.step(3)
    assert bench.router.held_in("faulty", "faulty") == keys(1, 2, 3)


def test_a_tier_that_does_not_know_what_it_holds_shows_each_block_anew_after_an_outage() -> None:
    made: list[RemoteTier] = []

    def make_tiers(view: memoryview) -> list[SecondaryTierManager]:
        made.append(RemoteTier(view))
        return [*made]

    bench = Bench(TieringDriver(4, make_tiers))
    bench.driver.store([1, 2])
    bench.step(3)
    assert bench.router.held_in("remote", "remote") == keys(1, 2)
    made[0].is_down = True
    bench.fail_lookups()
    bench.step()
    assert bench.router.held_in("remote", "remote") == set()
    made[0].is_down = False
    bench.driver.clock.advance(OPEN_S)
    bench.driver.store([3])
    bench.step(3)
    assert bench.router.held_in("remote", "remote") == keys(3)
    bench.driver.evict_everything()
    assert bench.driver.search_until_known([1], ReqContext("b")) == 1
    bench.read()
    assert bench.router.held_in("remote", "remote") == keys(1, 3)


def test_blocks_of_two_tiers_of_one_type_are_told_apart() -> None:
    def make_tiers(view: memoryview) -> list[SecondaryTierManager]:
        sizes = (1, 100)
        return [ExampleSecondaryTier(make_config(), view, size, settings=TELLING) for size in sizes]

    bench = Bench(TieringDriver(4, make_tiers))
    bench.driver.store([1])
    bench.step(3)
    bench.driver.store([2])
    bench.step(3)
    assert bench.router.held_in("example", "example") == keys(2)
    assert bench.router.held_in("example", "example.1") == keys(1, 2)
    assert make_event_names([*bench.driver.tiers, *bench.driver.tiers])[:2] == ["example", "example.1"]


def test_an_engine_that_ends_withdraws_everything_once() -> None:
    bench, _ = make_example_bench()
    bench.driver.store([1, 2])
    bench.step(3)
    assert len(bench.router) == 4
    bench.driver.manager.shutdown()
    bench.read()
    assert len(bench.router) == 0
    bench.driver.manager.shutdown()
    assert list(bench.driver.manager.take_events()) == []


def test_a_tier_whose_settings_ask_for_no_events_has_none() -> None:
    bench = Bench(TieringDriver(4, lambda view: [ExampleSecondaryTier(make_config(), view)]))
    bench.driver.store([1])
    bench.step(3)
    assert bench.router.held_in("CPU") == keys(1)
    assert len(bench.router) == 1
