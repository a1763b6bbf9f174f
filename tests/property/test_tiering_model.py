"""Random operations on the tiering manager, with real bytes and failing tiers, never break its laws.

Blocks have the bytes that their key and the number of resets stand for. After every operation the invariants are
checked; every load compares bytes, and again when it ends; at the end each request has an answer and each slot is free.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, invariant, precondition, rule
from tests.property.miss_law import MissLaw
from tests.property.parking_policies import ARC_PARKING, LRU_PARKING
from tests.property.router_law import WatchedDriver, WatchedTier
from tests.property.state_rules import StateRules

from kvtier.base import ReqContext
from kvtier.connector.load_or_compute import list_unwanted
from kvtier.errors import BlockNotReadyError
from kvtier.misses import MissCause
from kvtier.testing.examples import num_examples
from kvtier.testing.faults import Faults
from kvtier.testing.indexer import BlockIndexer
from kvtier.testing.tier_suite import key_of, make_config
from kvtier.testing.tiering_driver import ROW_BYTES, DeviceStore
from kvtier.tiering.admission import TierAdmission
from kvtier.tiering.base import CascadeMode, SecondaryTierManager, TierSettings
from kvtier.tiering.breaker import OPEN_S
from kvtier.tiering.example import ExampleSecondaryTier

NUM_SLOTS = 4
DEADLINE_S = 5.0
RECOVERY_S = 120.0
"""Longer than any pause of a breaker, of a key whose load failed, or of a lost probe."""
NUMBERS = st.lists(st.integers(0, 7), min_size=1, max_size=5)
PREFIXES = st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True)
UNKNOWN = 8
"""A block that no request ever stores."""
PICKS = st.integers(0, 20)
FAULT_NAMES = [name for name in Faults.__slots__ if name.endswith("_ratio") and name != "poll_raise_ratio"]
"""Every fault but a poll that raises, which puts a tier out of service for the rest of the run."""
FAULTS = st.sampled_from(FAULT_NAMES)


@dataclass(eq=False)
class Request:
    """A request of the model: what it wants, and what it has found.

    Attributes:
        numbers: its prefix.
        context: what managers know it as.
        found: leading blocks found by its last search, good until the step ends.
    """

    numbers: list[int]
    context: ReqContext
    found: list[int] = field(default_factory=list)


@dataclass(eq=False)
class OpenLoad:
    """A load that has been prepared: its blocks are pinned, so their bytes may not change."""

    numbers: list[int]
    slots: list[int]
    generation: int
    context: ReqContext


POLICIES = ("lru", "arc", "hazard", LRU_PARKING, ARC_PARKING)
DEMANDING = TierAdmission(min_reuse_probability=0.7, horizon_s=10.0)
"""Lets through what is named again and again within ten seconds and refuses the rest."""

FIRST_TIERS = (
    TierSettings(),
    TierSettings(cascade=CascadeMode.ON_EVICT),
    TierSettings(cascade=CascadeMode.MUST_WRITE),
    TierSettings(store_threshold=2),
    TierSettings(fill=True),
    TierSettings(cascade=CascadeMode.ON_EVICT, store_threshold=2, fill=True),
    TierSettings(admission=DEMANDING),
    TierSettings(admission=DEMANDING, cascade=CascadeMode.ON_EVICT),
    TierSettings(admission=DEMANDING, store_threshold=2, fill=True, policy="hazard"),
)
"""What the first of several tiers wants; the others want every block at once."""


class TieringModel(StateRules):
    """An engine that does anything, over tiers that fail in any way."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        num_tiers=st.integers(1, 2),
        budget_rows=st.sampled_from([1, 3, 100]),
        first=st.sampled_from(FIRST_TIERS),
        seed=st.integers(0, 99),
    )
    def start(self, policy: str, num_tiers: int, budget_rows: int, first: TierSettings, seed: int) -> None:
        """Build a manager over one or two faulty tiers, of which the first may want less than everything."""
        router = BlockIndexer()

        def make_tiers(view: memoryview) -> list[SecondaryTierManager]:
            self.faulty: list[WatchedTier] = []
            for position in range(num_tiers):
                wanted = TierSettings() if position else first
                own = replace(wanted, max_in_flight_store_bytes=budget_rows * ROW_BYTES, emit_events=True)
                inner = ExampleSecondaryTier(make_config(), view, max_blocks=6 + position, settings=own)
                self.faulty.append(WatchedTier(inner, Faults(), random.Random(seed + position)))
            return [*self.faulty]

        def make_driver() -> WatchedDriver:
            return WatchedDriver(NUM_SLOTS, make_tiers, router, policy, DEADLINE_S)

        self.make_driver = make_driver
        self.num_steps = 0
        self.causes: set[MissCause] = set()
        self.start_engine()

    def start_engine(self) -> None:
        """Start an engine that holds nothing, and let it store eight blocks."""
        self.driver = self.make_driver()
        self.misses = MissLaw(self.driver, self.causes)
        self.requests: list[Request] = []
        self.stores: list[tuple[DeviceStore, int]] = []
        self.loads: list[OpenLoad] = []
        for number in range(8):
            self.driver.store([number])
            self.driver.step()

    @rule(tier=st.integers(0, 1), fault=FAULTS, ratio=st.sampled_from([0.0, 0.3, 1.0]))
    def set_fault(self, tier: int, fault: str, ratio: float) -> None:
        """Change how often one fault of one tier happens."""
        if tier < len(self.faulty):
            setattr(self.faulty[tier].faults, fault, ratio)

    @rule(tier=st.integers(0, 1))
    def repair(self, tier: int) -> None:
        """A tier works again."""
        if tier < len(self.faulty):
            self.faulty[tier].faults = Faults()

    @rule(tier=st.integers(0, 1))
    def wipe(self, tier: int) -> None:
        """Another program deletes all blocks of a tier."""
        for one in self.faulty[tier : tier + 1]:
            one.wipe()

    @rule(is_crash=st.booleans(), is_due=st.integers(0, 5).map(lambda chance: chance == 0))
    def restart(self, is_crash: bool, is_due: bool) -> None:
        """Now and then the engine ends, or dies; the router sees a new publisher then."""
        if not is_due:
            return
        self.num_steps += self.driver.num_steps
        if is_crash:
            self.driver.router.forget()
        else:
            self.driver.stop()
        self.start_engine()

    @rule(tier=st.integers(0, 1), is_due=st.integers(0, 5).map(lambda chance: chance == 0))
    def lose_tier(self, tier: int, is_due: bool) -> None:
        """Now and then a tier goes out of service, and the engine is started again."""
        if is_due and tier < len(self.faulty):
            self.end_everything()
            self.faulty[tier].faults.poll_raise_ratio = 1.0
            self.serve([tier])
            self.store([4, 5, 6, 7])
            self.step()
            self.restart(is_crash=False, is_due=True)

    @rule(numbers=NUMBERS)
    def store(self, numbers: list[int]) -> None:
        """Store blocks from the device, from beginning to end."""
        store = self.driver.begin_store(numbers, ReqContext("store"))
        if store is not None and not self.stores:
            self.driver.end_store(store)
        elif store is not None:
            self.stores.append((store, self.driver.generation))

    @rule(numbers=PREFIXES)
    def serve(self, numbers: list[int]) -> None:
        """Serve a request as an engine does: search once a step, load what there is."""
        state = self.misses.arrive(numbers)
        request = state.context
        num_hits = None
        for _ in range(6):
            num_hits = self.driver.search(numbers, request)
            if num_hits is not None:
                break
            self.step()
        if num_hits is not None:
            num_loaded = 0 if self.loads else num_hits
            self.misses.begin(state, num_hits, num_loaded)
            if num_loaded:
                self.driver.load(numbers[:num_loaded], request)
        self.driver.manager.request_finished(request)

    @rule(number=st.integers(0, 9))
    def explain(self, number: int) -> None:
        """A question for the cause of a block changes nothing, and what happened to the block allows the answer."""
        manager = self.driver.manager
        before = manager.stats()
        self.misses.explain(number)
        assert manager.stats() == before

    @rule(numbers=PREFIXES, num_wanted=st.integers(0, 6))
    def serve_a_part(self, numbers: list[int], num_wanted: int) -> None:
        """Serve a request that asks where its blocks are and wants some; the tiers of the rest are measured."""
        request = ReqContext("part")
        for _ in range(6):
            run = self.driver.locate(numbers, request)
            wanted = numbers[: min(num_wanted, len(run.places))] if run is not None else []
            num_hits = None if run is None else self.driver.search(wanted, request)
            if run is not None and num_hits is not None:
                if num_hits and not self.loads:
                    self.driver.load(wanted[:num_hits], request)
                for tier, blocks in list_unwanted(run.places, len(wanted)).items():
                    self.driver.probe(tier, [numbers[block] for block in blocks])
                break
            self.step()
        self.driver.manager.request_finished(request)

    @rule(numbers=NUMBERS)
    def begin_store(self, numbers: list[int]) -> None:
        """Start storing blocks from the device, some perhaps twice."""
        store = self.driver.begin_store(numbers, ReqContext("store"))
        if store is not None:
            assert len(set(store.numbers)) == len(store.numbers) == len(set(store.slots))
            self.stores.append((store, self.driver.generation))

    @precondition(lambda self: self.stores)
    @rule(success=st.booleans())
    def end_store(self, success: bool) -> None:
        """End the oldest store of a key: device transfers finish in submission order."""
        store, generation = self.stores.pop(0)
        for number, slot in zip(store.numbers, store.slots, strict=True):
            expected = self.content(number, generation)
            assert np.array_equal(self.driver.rows[slot], expected), (
                "a slot being stored was written by others"
            )
        self.driver.end_store(store, success=success)

    @rule(numbers=PREFIXES)
    def arrive(self, numbers: list[int]) -> None:
        """A request comes, and managers are told of it."""
        self.requests.append(Request(numbers, ReqContext(str(len(self.requests)))))
        self.tell(numbers, self.requests[-1].context)

    @rule(seed=st.integers(0, 9))
    def learn(self, seed: int) -> None:
        """Many requests come and go, so that whoever learns from them expects some blocks more than others."""
        rng = random.Random(seed)
        for number in range(60):
            self.driver.clock.advance(1.0)
            request = ReqContext(f"taught {number}")
            named = list(range(rng.choice([1, 2, 2, 8])))
            self.tell(named, request)
            self.driver.manager.request_finished(request)

    @precondition(lambda self: self.requests)
    @rule(pick=PICKS)
    def search(self, pick: int) -> None:
        """A request looks for its prefix."""
        request = self.requests[pick % len(self.requests)]
        num_hits = self.driver.search(request.numbers, request.context)
        request.found = request.numbers[: num_hits or 0]

    @precondition(lambda self: any(request.found for request in self.requests))
    @rule(pick=PICKS)
    def begin_load(self, pick: int) -> None:
        """A request loads what it has just found; an eviction in between is an error, not wrong bytes."""
        ready = [request for request in self.requests if request.found]
        request = ready[pick % len(ready)]
        try:
            slots = self.driver.begin_load(request.found, request.context)
        except BlockNotReadyError:
            self.driver.manager.check()
        else:
            load = OpenLoad(request.found, slots, self.driver.generation, request.context)
            self.loads.append(load)
        request.found = []

    @precondition(lambda self: self.loads)
    @rule()
    def end_load(self) -> None:
        """The oldest load ends."""
        load = self.loads.pop(0)
        for number, slot in zip(load.numbers, load.slots, strict=True):
            expected = self.content(number, load.generation)
            assert np.array_equal(self.driver.rows[slot], expected), "a pinned block has changed"
        self.driver.end_load(load.numbers, load.context)

    @precondition(lambda self: self.requests)
    @rule(pick=PICKS)
    def finish(self, pick: int) -> None:
        """A request ends or is aborted."""
        request = self.requests.pop(pick % len(self.requests))
        self.driver.manager.request_finished(request.context)

    @rule()
    def step(self) -> None:
        """A step ends; what was found in it is no longer sure."""
        self.driver.step()
        for request in self.requests:
            request.found = []

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        """Time goes by."""
        self.driver.clock.advance(seconds)

    @rule(numbers=NUMBERS)
    def touch(self, numbers: list[int]) -> None:
        """Somebody uses blocks."""
        self.driver.manager.touch([key_of(number) for number in numbers], ReqContext("touch"))

    @rule(is_due=st.integers(0, 5).map(lambda chance: chance == 0))
    def reset(self, is_due: bool) -> None:
        """Now and then the weights change: the same keys stand for other bytes."""
        if not is_due:
            return
        self.driver.reset()
        for request in self.requests:
            request.found = []

    @rule(numbers=PREFIXES, stored=NUMBERS)
    def reset_while_loading(self, numbers: list[int], stored: list[int]) -> None:
        """The weights change while promotions are under way, which write their slots only afterwards."""
        for tier in self.faulty:
            tier.faults = Faults(delay_ratio=1.0)
        request = ReqContext("reset")
        self.driver.search(numbers, request)
        self.step()
        self.reset(is_due=True)
        self.begin_store(stored)
        self.repair(0)
        self.repair(1)
        for _ in range(2):
            self.step()
        self.driver.manager.request_finished(request)
        while self.stores:
            self.end_store(success=True)
        self.serve(stored[:1])

    @rule(numbers=PREFIXES, fresh=st.integers(0, 7))
    def settle(self, numbers: list[int], fresh: int) -> None:
        """When every tier works again and nothing is under way, each block that is anywhere is served.

        A new store then reaches every tier, and a prefix longer than the primary is served as far as it fits.
        """
        self.recover()
        if not self.driver.primary.is_ready(key_of(fresh)):
            self.driver.store([fresh])
            for _ in range(NUM_SLOTS + 2):  # the tiers report at the next poll, and the backlog goes first
                self.driver.step()
            eager = [inner for inner in self.inner_tiers() if wants_everything(inner.settings)]
            assert all(key_of(fresh) in inner.blocks for inner in eager), "not cascaded"
        # What is in the primary alone may make room for the head of this very prefix before it is looked up.
        below = [any(key_of(number) in inner.blocks for inner in self.inner_tiers()) for number in numbers]
        num_below = [*below, False].index(False)
        request = ReqContext("settled")
        num_hits = self.driver.search_until_known(numbers, request, max_steps=6)
        assert num_hits >= min(num_below, NUM_SLOTS), "a block that is there was not found"
        self.driver.load(numbers[:num_hits], request)
        self.driver.manager.request_finished(request)

    @invariant()
    def the_invariants_hold(self) -> None:
        """The manager's own check, after every rule."""
        if hasattr(self, "driver"):
            self.driver.manager.check()

    def teardown(self) -> None:
        """Everything ends well: each request is answered, each job reported, each slot can be taken."""
        if not hasattr(self, "driver"):
            return
        requests, self.requests = self.requests, []
        self.end_everything()
        for tier in self.faulty:
            tier.faults = Faults(delay_ratio=1.0)
        for request in requests:
            answers = [self.search_past_a_deadline(request) for _ in range(3)]
            assert answers[-1] is not None, "waits past its second deadline"
            self.driver.manager.request_finished(request.context)
        for tier in self.faulty:
            tier.faults = Faults()
        for _ in range(NUM_SLOTS + 3):
            self.driver.step()
        assert self.driver.manager.stats()["open_jobs"] == 0, "a job was never settled"
        self.driver.clock.advance(OPEN_S)
        self.driver.evict_everything()
        assert self.driver.primary.table.slots.num_free == NUM_SLOTS, "a slot leaked"

    def tell(self, numbers: list[int], request: ReqContext) -> None:
        """Tell everybody of a request."""
        self.driver.manager.note_request([[key_of(number) for number in numbers]], request)

    def end_everything(self) -> None:
        """Repair every tier and end what is under way."""
        for tier in self.faulty:
            tier.faults = Faults()
        while self.stores:
            self.driver.end_store(self.stores.pop(0)[0], success=False)
        while self.loads:
            self.end_load()
        while self.requests:
            self.driver.manager.request_finished(self.requests.pop().context)

    def recover(self) -> None:
        """End what is under way, and let the pauses of tiers and keys pass."""
        self.end_everything()
        # What is still under way may fail yet and so open a breaker; recovery begins after that.
        for _ in range(NUM_SLOTS + 3):
            self.driver.step()
        self.driver.clock.advance(RECOVERY_S)
        for _ in range(NUM_SLOTS + 3):  # what a tier still gets may cost it the very block that is looked up
            self.driver.step()

    def search_past_a_deadline(self, request: Request) -> int | None:
        """Let a request search, and leave it alone until its present wait is over."""
        answer = self.driver.search(request.numbers, request.context)
        self.driver.step()
        self.driver.clock.advance(DEADLINE_S)
        return answer

    def inner_tiers(self) -> list[ExampleSecondaryTier]:
        """The tiers behind the faults."""
        return [tier.inner for tier in self.faulty if isinstance(tier.inner, ExampleSecondaryTier)]

    def content(self, number: int, generation: int) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
        """The bytes of a block before or after a reset."""
        present, self.driver.generation = self.driver.generation, generation
        content = self.driver.content(number)
        self.driver.generation = present
        return content


def wants_everything(settings: TierSettings) -> bool:
    """Return whether a tier with these settings gets each block as soon as it is stored."""
    is_choosy = settings.store_threshold > 0 or settings.admission is not None
    return settings.cascade is not CascadeMode.ON_EVICT and not is_choosy


TestTieringModel = pytest.mark.slow(TieringModel.TestCase)
TestTieringModel.settings = settings(
    max_examples=num_examples(100),
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)


def walk(seed: int, model: TieringModel | None = None) -> int:
    """Walk once; return after how many steps the router's view was checked."""
    rng = random.Random(seed)
    model = model or TieringModel()
    policy, num_tiers, budget_rows = rng.choice(POLICIES), rng.randint(1, 2), rng.choice([1, 3, 100])
    model.start(policy, num_tiers, budget_rows, FIRST_TIERS[seed % len(FIRST_TIERS)], seed)
    for _ in range(250):
        act_at_random(model, rng)
        model.driver.manager.check()
    model.teardown()
    return model.num_steps + model.driver.num_steps


def act_at_random(model: TieringModel, rng: random.Random) -> None:
    """Let one thing happen."""
    numbers = rng.sample(range(8), rng.randint(1, 6))
    pick = rng.randrange(100)
    acts: list[tuple[int, Callable[[], None]]] = [
        (8, lambda: model.serve(numbers)),
        (2, lambda: model.serve([*numbers[:2], UNKNOWN])),
        (2, lambda: model.explain(pick % 10)),
        (6, lambda: model.store(numbers[:4])),
        (11, lambda: model.act_with_states(rng)),
        (3, lambda: model.begin_store(numbers[:4] + numbers[:1])),
        (4, lambda: model.end_store(pick % 3 > 0) if model.stores else None),
        (4, lambda: model.arrive(numbers)),
        (8, lambda: model.search(pick) if model.requests else None),
        (6, lambda: model.begin_load(pick) if any(r.found for r in model.requests) else None),
        (4, lambda: model.end_load() if model.loads else None),
        (1, lambda: model.settle(numbers, pick % 8)),
        (1, lambda: model.reset_while_loading(numbers, numbers[:3])),
        (2, lambda: model.finish(pick) if model.requests else None),
        (10, model.step),
        (3, lambda: model.pass_time(rng.choice([0.1, 1.0, 6.0]))),
        (1, lambda: model.touch(numbers)),
        (1, lambda: model.learn(pick % 10)),
        (1, lambda: model.reset(is_due=pick % 4 == 0)),
        (2, lambda: model.set_fault(pick % 2, rng.choice(FAULT_NAMES), rng.choice([0.3, 1.0]))),
        (3, lambda: model.repair(pick % 2)),
        (1, lambda: model.wipe(pick % 2)),
        (1, lambda: model.restart(is_crash=pick % 2 == 0, is_due=pick % 10 == 0)),
        (1, lambda: model.lose_tier(pick % 2, is_due=pick % 10 == 0)),
    ]
    weights, choices = zip(*acts, strict=True)
    rng.choices(choices, weights)[0]()
