"""The CPU manager against a plain dictionary, with bytes that really move, under random operations.

The model keeps its own record of every block and of every transfer in flight. A transfer touches "memory", a
dictionary from slot to bytes, only when it is reported, as a worker or tier may do at the last instant. Laws
of the design are checked after each step: a load reads the bytes that were stored under its key (law 1), and
the manager's recount finds each slot in exactly one place (law 3).
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.property.parking_policies import ARC_PARKING, LRU_PARKING

from kvtier.base import OffloadKey, ReqContext
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.errors import BlockNotReadyError
from kvtier.testing.examples import num_examples
from kvtier.testing.manager_suite import keys_of, slots_of

NUM_BLOCKS = 4
REQUESTS = [ReqContext(name) for name in ("a", "b")]
KEYS = keys_of(*range(7))

keys_lists = st.lists(st.sampled_from(KEYS), max_size=5)
requests = st.sampled_from(REQUESTS)
outcomes = st.sampled_from([True, True, False])


@dataclass(eq=False)
class Block:
    """What the model knows of a held block."""

    slot: int
    content: object
    is_ready: bool = False
    num_pins: int = 0


@dataclass(eq=False)
class Transfer:
    """A store or load in flight: its slots by key, and the bytes it writes or must find."""

    slots: dict[OffloadKey, int]
    contents: dict[OffloadKey, object]
    is_write: bool
    by_slot: bool
    is_before_reset: bool = False


@dataclass
class Model:
    """The plain dictionary, and what a worker would see."""

    held: OrderedDict[OffloadKey, Block] = field(default_factory=OrderedDict)
    memory: dict[int, object] = field(default_factory=dict)
    device_stores: list[Transfer] = field(default_factory=list)
    device_loads: list[Transfer] = field(default_factory=list)
    tier_jobs: list[Transfer] = field(default_factory=list)
    num_writes: int = 0

    def transfers(self) -> list[Transfer]:
        return self.device_stores + self.device_loads + self.tier_jobs

    def orphaned_slots(self) -> set[int]:
        return {slot for job in self.transfers() if job.is_before_reset for slot in job.slots.values()}

    def idle(self) -> set[OffloadKey]:
        return {key for key, block in self.held.items() if block.is_ready and block.num_pins == 0}


class CPUManagerMachine(RuleBasedStateMachine):
    """Random calls on one manager; subclasses choose the policy and the filter."""

    policy = "lru"
    store_threshold = 1

    @initialize()
    def start(self) -> None:
        self.model = Model()
        self.accesses: dict[OffloadKey, int] = {}
        self.observed: set[tuple[OffloadKey, ReqContext]] = set()
        self.announced: set[OffloadKey] = set()
        self.manager = CPUOffloadingManager(
            NUM_BLOCKS, self.policy, enable_events=True, store_threshold=self.store_threshold
        )

    @rule(key=st.sampled_from(KEYS), request=requests)
    def lookup(self, key: OffloadKey, request: ReqContext) -> None:
        block = self.model.held.get(key)
        expected = False if block is None else (True if block.is_ready else None)
        assert self.manager.lookup(key, request) is expected
        if (key, request) not in self.observed:
            self.observed.add((key, request))
            self.accesses[key] = self.accesses.get(key, 0) + 1

    @rule(keys=keys_lists, request=requests)
    def touch(self, keys: list[OffloadKey], request: ReqContext) -> None:
        self.manager.touch(keys, request)
        for key in reversed(keys):
            if key in self.model.held:
                self.model.held.move_to_end(key)

    @rule(keys=keys_lists, request=requests, by_slot=st.booleans())
    def prepare_store(self, keys: list[OffloadKey], request: ReqContext, by_slot: bool) -> None:
        output = self.manager.prepare_store(keys, request)
        admitted = keys
        if self.store_threshold >= 2:
            admitted = [key for key in keys if self.accesses.get(key, 0) >= self.store_threshold]
        missing = [key for key in dict.fromkeys(admitted) if key not in self.model.held]
        num_free = NUM_BLOCKS - len(self.model.held) - len(self.model.orphaned_slots())
        num_to_evict = max(0, len(missing) - num_free)
        evictable = self.model.idle() - set(keys)
        assert (output is None) == (num_to_evict > len(evictable))
        if output is None:
            return
        self.observed -= {(key, request) for key in keys}
        assert output.keys_to_store == missing
        self.forget_evicted(output.evicted_keys, evictable, num_to_evict)
        self.start_write(missing, slots_of(output.store_spec), by_slot=by_slot)

    def forget_evicted(self, evicted: list[OffloadKey], evictable: set[OffloadKey], num: int) -> None:
        assert len(evicted) == len(set(evicted)) == num
        assert set(evicted) <= evictable
        if self.policy in ("lru", LRU_PARKING):
            assert evicted == [key for key in self.model.held if key in evictable][:num]
        for key in evicted:
            del self.model.held[key]

    def start_write(self, keys: list[OffloadKey], slots: list[int], *, by_slot: bool) -> None:
        assert len(slots) == len(keys)
        taken = {block.slot for block in self.model.held.values()} | self.model.orphaned_slots()
        assert taken.isdisjoint(slots)
        contents: dict[OffloadKey, object] = {}
        for key, slot in zip(keys, slots, strict=True):
            self.model.num_writes += 1
            contents[key] = (key, self.model.num_writes)
            self.model.held[key] = Block(slot, contents[key])
        if keys:
            job = Transfer(dict(zip(keys, slots, strict=True)), contents, is_write=True, by_slot=by_slot)
            (self.model.tier_jobs if by_slot else self.model.device_stores).append(job)

    @precondition(lambda self: any(block.is_ready for block in self.model.held.values()))
    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=4), request=requests, by_slot=st.booleans())
    def prepare_load(self, picks: list[int], request: ReqContext, by_slot: bool) -> None:
        """Any ready blocks, repeats included."""
        ready = [key for key, block in self.model.held.items() if block.is_ready]
        keys = [ready[pick % len(ready)] for pick in picks]
        slots = slots_of(self.manager.prepare_load(keys, request))
        blocks = [self.model.held[key] for key in keys]
        assert slots == [block.slot for block in blocks]
        for block in set(blocks):
            block.num_pins += 1
        contents = {key: block.content for key, block in zip(keys, blocks, strict=True)}
        job = Transfer(dict(zip(keys, slots, strict=True)), contents, is_write=False, by_slot=by_slot)
        (self.model.tier_jobs if by_slot else self.model.device_loads).append(job)

    @rule(keys=keys_lists, request=requests)
    def refused_load(self, keys: list[OffloadKey], request: ReqContext) -> None:
        """A load that names a key which is not ready changes nothing."""
        blocks = [self.model.held.get(key) for key in keys]
        if not all(block is not None and block.is_ready for block in blocks):
            with pytest.raises(BlockNotReadyError):
                self.manager.prepare_load(keys, request)

    @precondition(lambda self: self.model.device_stores)
    @rule(request=requests, success=outcomes, extra=keys_lists)
    def device_store_ends(self, request: ReqContext, success: bool, extra: list[OffloadKey]) -> None:
        """The oldest one ends; the report may name other keys too, as long as nobody writes them."""
        job = self.model.device_stores.pop(0)
        self.write(job)
        busy = {key for other in self.model.transfers() if other.is_write for key in other.slots}
        named = [*job.slots, *(key for key in extra if key not in busy)]
        self.manager.complete_store(named, request, success=success)
        self.finish_write(job, success=success)

    @precondition(lambda self: self.model.device_loads)
    @rule(request=requests)
    def device_load_ends(self, request: ReqContext) -> None:
        """The oldest one ends."""
        job = self.model.device_loads.pop(0)
        self.read(job)
        self.manager.complete_load([*job.slots, *job.slots], request)
        self.finish_read(job)

    @precondition(lambda self: self.model.tier_jobs)
    @rule(which=st.integers(0, 99), success=outcomes)
    def tier_job_ends(self, which: int, success: bool) -> None:
        """Any one ends; it reports its held blocks in its own epoch and its slots after a reset."""
        job = self.model.tier_jobs.pop(which % len(self.model.tier_jobs))
        if job.is_write:
            self.write(job)
        else:
            self.read(job)
        if job.is_before_reset:
            self.manager.table.orphans.settle_slots(list(job.slots.values()), is_write=job.is_write)
        elif job.is_write:
            finished = self.manager.finish_writes(list(job.slots), success=success, is_promotion=True)
            assert finished == list(job.slots)
            self.finish_write(job, success=success)
        else:
            self.manager.table.unpin_each(job.slots)
            self.finish_read(job)

    def write(self, job: Transfer) -> None:
        for key, slot in job.slots.items():
            self.model.memory[slot] = job.contents[key]

    def read(self, job: Transfer) -> None:
        """Law 1: what is loaded under a key is what was stored under it."""
        for key, slot in job.slots.items():
            assert self.model.memory[slot] == job.contents[key]

    def finish_write(self, job: Transfer, *, success: bool) -> None:
        for key in () if job.is_before_reset else job.slots:
            if success:
                self.model.held[key].is_ready = True
            else:
                del self.model.held[key]

    def finish_read(self, job: Transfer) -> None:
        for key in () if job.is_before_reset else job.slots:
            self.model.held[key].num_pins -= 1

    @rule(key=st.sampled_from(KEYS), request=requests)
    def stray_reports(self, key: OffloadKey, request: ReqContext) -> None:
        """Reports for what is not in flight change nothing."""
        busy = {name for job in self.model.transfers() for name in job.slots}
        if key not in busy:
            self.manager.complete_store([key], request)
            self.manager.complete_store([key], request, success=False)
            self.manager.complete_load([key], request)

    @rule(request=requests)
    def request_finished(self, request: ReqContext) -> None:
        self.manager.request_finished(request)
        self.observed = {pair for pair in self.observed if pair[1] is not request}

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        for job in self.model.tier_jobs:
            if not job.is_before_reset:
                self.manager.table.orphans.claim(list(job.slots.values()), is_write=job.is_write)
        for job in self.model.transfers():
            job.is_before_reset = True
        self.model.held.clear()
        self.accesses.clear()
        self.observed.clear()

    @invariant()
    def books_are_right(self) -> None:
        """Law 3, the counters, the order, and each answer that a lookup could give."""
        self.manager.check()
        num_orphaned = len(self.model.orphaned_slots())
        assert self.manager.num_free == NUM_BLOCKS - len(self.model.held) - num_orphaned
        assert self.manager.num_evictable == len(self.model.idle())
        for key in KEYS:
            block, expected = self.manager.table.policy.get(key), self.model.held.get(key)
            assert (block is None) == (expected is None)
            if block is not None and expected is not None:
                assert (block.block_id, block.is_ready) == (expected.slot, expected.is_ready)
                assert max(block.ref_cnt, 0) == expected.num_pins
        policy = self.manager.table.policy
        if isinstance(policy, LRUCachePolicy):
            parked = policy.parked.places
            in_place = [key for key in policy.blocks if key not in parked]
            assert sorted(parked, key=parked.__getitem__) + in_place == list(self.model.held)
        if self.store_threshold >= 2:
            assert self.manager.counts == self.accesses

    @invariant()
    def events_tell_the_ready_blocks(self) -> None:
        """Whoever only reads events knows which blocks are ready."""
        for event in self.manager.take_events():
            if event.removed:
                assert self.announced.issuperset(event.keys)
                self.announced.difference_update(event.keys)
            else:
                assert self.announced.isdisjoint(event.keys)
                self.announced.update(event.keys)
        assert self.announced == {key for key, block in self.model.held.items() if block.is_ready}


class ARCMachine(CPUManagerMachine):
    """The same on ARC."""

    policy = "arc"


class ParkingLRUMachine(CPUManagerMachine):
    """The same on LRU with busy blocks out of the way."""

    policy = LRU_PARKING


class ParkingARCMachine(CPUManagerMachine):
    """The same on ARC with busy blocks out of the way."""

    policy = ARC_PARKING


class HazardMachine(CPUManagerMachine):
    """The same on hazard, which is told of no request and refuses nothing."""

    policy = "hazard"


class FilteredMachine(CPUManagerMachine):
    """The same with the reuse filter on."""

    store_threshold = 2


class FilteredARCMachine(ARCMachine):
    """Both."""

    store_threshold = 2


MODEL_SETTINGS = settings(
    max_examples=num_examples(100),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

TestLRUModel = pytest.mark.slow(CPUManagerMachine.TestCase)
TestARCModel = pytest.mark.slow(ARCMachine.TestCase)
TestHazardModel = pytest.mark.slow(HazardMachine.TestCase)
TestParkingLRUModel = pytest.mark.slow(ParkingLRUMachine.TestCase)
TestParkingARCModel = pytest.mark.slow(ParkingARCMachine.TestCase)
TestFilteredModel = pytest.mark.slow(FilteredMachine.TestCase)
TestFilteredARCModel = pytest.mark.slow(FilteredARCMachine.TestCase)
TestLRUModel.settings = TestARCModel.settings = TestHazardModel.settings = MODEL_SETTINGS
TestFilteredModel.settings = TestFilteredARCModel.settings = MODEL_SETTINGS
TestParkingLRUModel.settings = TestParkingARCModel.settings = MODEL_SETTINGS
