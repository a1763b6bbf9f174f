"""Each eviction policy under random use; LRU and ARC with parked blocks evict what they evict without parking."""

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvtier.base import OffloadKey
from kvtier.cpu.policies import BlockStatus, CachePolicy, create_cache_policy
from kvtier.cpu.policies.arc import ARCCachePolicy
from kvtier.cpu.policies.hazard import HazardCachePolicy
from kvtier.cpu.policies.learning import ArrivedRequest
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.testing.examples import num_examples
from kvtier.testing.policy_machine import KEYS, PolicyMachine, key_lists


class Twins(CachePolicy):
    """Two policies that are told the same and must evict the same; the first of them answers."""

    def __init__(self, policy: CachePolicy, other: CachePolicy) -> None:
        super().__init__(policy.cache_capacity)
        self.policy, self.other = policy, other

    def get(self, key: OffloadKey) -> BlockStatus | None:
        return self.policy.get(key)

    def getter(self) -> Callable[[OffloadKey], BlockStatus | None]:
        return self.policy.getter()

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self.insert_many([key], [block])

    def insert_many(self, keys: Iterable[OffloadKey], blocks: Iterable[BlockStatus]) -> None:
        keys, blocks = list(keys), list(blocks)
        self.policy.insert_many(keys, blocks)
        self.other.insert_many(keys, blocks)

    def remove(self, key: OffloadKey) -> None:
        self.policy.remove(key)
        self.other.remove(key)

    def touch(self, keys: Collection[OffloadKey]) -> None:
        self.policy.touch(keys)
        self.other.touch(keys)

    def evict(self, n: int, protected: Collection[OffloadKey]) -> list[tuple[OffloadKey, BlockStatus]] | None:
        victims = self.policy.evict(n, protected)
        assert victims == self.other.evict(n, protected)
        return victims

    def next_victims(self, n: int) -> list[OffloadKey] | None:
        return self.policy.next_victims(n)

    def clear(self) -> None:
        self.policy.clear()
        self.other.clear()

    def check(self, held: Mapping[OffloadKey, BlockStatus]) -> None:
        self.policy.check(held)
        for key, block in held.items():
            assert self.other.get(key) is block


class ToldOfIdleBlocks(PolicyMachine):
    """A policy that is told which blocks become idle beside one that is not; the first parks every busy block."""

    policy_name: ClassVar[str]

    def make_policy(self, cache_capacity: int) -> CachePolicy:
        told = create_cache_policy(self.policy_name, cache_capacity)
        assert isinstance(told, LRUCachePolicy | ARCCachePolicy)
        self.told: LRUCachePolicy | ARCCachePolicy = told
        self.told.expect_idle()
        for parked in self.told.parked if isinstance(self.told, ARCCachePolicy) else (self.told.parked,):
            parked.min_busy_blocks = 1
        return Twins(self.told, create_cache_policy(self.policy_name, cache_capacity))

    @rule(keys=key_lists, success=st.sampled_from([True, False]))
    def finish_writes(self, keys: list[OffloadKey], success: bool) -> None:
        super().finish_writes(keys, success)
        self.told.on_idle(keys)

    @rule()
    def unpin(self) -> None:
        super().unpin()
        self.told.on_idle(self.held)

    @rule(key=st.sampled_from(KEYS))
    def unpin_one(self, key: OffloadKey) -> None:
        """Unpin one block."""
        if key in self.held:
            self.held[key].ref_cnt = min(self.held[key].ref_cnt, 0)
            self.told.on_idle([key])


class ToldLRUMachine(ToldOfIdleBlocks):
    """LRU."""

    policy_name = "lru"


class ToldARCMachine(ToldOfIdleBlocks):
    """ARC."""

    policy_name = "arc"


class LRUMachine(PolicyMachine):
    """LRU."""

    def make_policy(self, cache_capacity: int) -> CachePolicy:
        return create_cache_policy("lru", cache_capacity)


class ARCMachine(PolicyMachine):
    """ARC."""

    def make_policy(self, cache_capacity: int) -> CachePolicy:
        return create_cache_policy("arc", cache_capacity)


class HazardMachine(PolicyMachine):
    """Hazard, told of requests or not; 20 s pass with each, so that it learns and is not LRU for long."""

    def make_policy(self, cache_capacity: int) -> CachePolicy:
        self.hazard = HazardCachePolicy(cache_capacity)
        self.now_s = 0.0
        return self.hazard

    @rule(keys=key_lists, is_finished=st.booleans())
    def note_request(self, keys: list[OffloadKey], is_finished: bool) -> None:
        """A request arrives; its blocks may be no chain."""
        self.now_s += 20.0
        self.hazard.note_request(ArrivedRequest("r", (keys,), self.now_s))
        if is_finished:
            self.hazard.on_finished("r")

    @rule(num_blocks=st.integers(1, len(KEYS)))
    def note_prefix(self, num_blocks: int) -> None:
        """A request arrives that names a prefix, as requests do."""
        self.note_request(KEYS[:num_blocks], is_finished=False)

    @rule(keys=key_lists)
    def admit(self, keys: list[OffloadKey]) -> None:
        """What is admitted was asked for, in order."""
        admitted = list(self.hazard.admit(keys, "r"))
        remaining = iter(keys)
        assert all(key in remaining for key in admitted)


TestLRUMachine = pytest.mark.slow(LRUMachine.TestCase)
TestARCMachine = pytest.mark.slow(ARCMachine.TestCase)
TestHazardMachine = pytest.mark.slow(HazardMachine.TestCase)
MODEL_SETTINGS = settings(max_examples=num_examples(150), stateful_step_count=60, deadline=None)
TestLRUMachine.settings = TestARCMachine.settings = MODEL_SETTINGS
TestToldLRUMachine = pytest.mark.slow(ToldLRUMachine.TestCase)
TestToldARCMachine = pytest.mark.slow(ToldARCMachine.TestCase)
TestHazardMachine.settings = TestToldLRUMachine.settings = TestToldARCMachine.settings = MODEL_SETTINGS


@pytest.mark.parametrize(
    "machine",
    [
        LRUMachine,
        ToldLRUMachine,
        ARCMachine,
        ToldARCMachine,
        HazardMachine,
    ],
)
def test_a_long_walk(machine: type[PolicyMachine]) -> None:
    """Thousands of steps without a new beginning go where Hypothesis's short examples seldom come."""
    for seed in range(4):
        rng = random.Random(seed)
        model = machine()
        model.start(2 + 4 * seed)
        for _ in range(2_000):
            walk_one_step(model, rng)
            if isinstance(model, HazardMachine) and rng.random() < 0.3:
                model.note_request(KEYS[: rng.randint(1, 16)], is_finished=rng.random() < 0.5)
            model.the_policy_holds_what_is_held()


def walk_one_step(model: PolicyMachine, rng: random.Random) -> None:
    keys = rng.choices(KEYS, k=rng.randint(1, 4))
    choice = rng.random()
    if choice < 0.35:
        model.store(keys, is_touched=rng.random() < 0.5, stays_in_flight=rng.random() < 0.1)
    elif choice < 0.75:
        model.use_again(keys[0], rng.randint(1, 2))
    elif choice < 0.8:
        model.touch(keys)
    elif choice < 0.88:
        model.pin(keys[0], 1)
    elif choice < 0.95:
        model.evict(rng.randint(1, 2), keys[:1])
    elif choice < 0.96 and isinstance(model, ToldOfIdleBlocks):
        model.unpin_one(keys[0])
    elif choice < 0.98:
        model.unpin()
    else:
        model.finish_writes(KEYS, success=rng.random() < 0.5)
