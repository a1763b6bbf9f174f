"""A pinned block is not evicted while its lease lasts, and may be afterwards; no slot leaks by it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.base import OffloadKey, ReqContext, make_offload_key
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies.registry import CACHE_POLICIES
from kvtier.errors import InvariantError, PinLimitError, UnknownNameError
from kvtier.operating import PinnedBlocks
from kvtier.testing.clock import ManualClock
from kvtier.testing.examples import num_examples

CONTEXT = ReqContext("request")
NUM_SLOTS = 40


def key(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(8, "big"), 0)


def keys(*numbers: int) -> list[OffloadKey]:
    return [key(number) for number in numbers]


def store(manager: CPUOffloadingManager, *numbers: int) -> bool:
    """Store blocks; False when there was no room."""
    output = manager.prepare_store(keys(*numbers), CONTEXT)
    manager.complete_store(keys(*numbers), CONTEXT)
    return output is not None


def is_held(manager: CPUOffloadingManager, number: int) -> bool:
    return manager.lookup(key(number), CONTEXT) is True


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def manager(clock: ManualClock) -> CPUOffloadingManager:
    return CPUOffloadingManager(NUM_SLOTS, clock=clock)


def fill(manager: CPUOffloadingManager, first: int) -> None:
    """Store as many other blocks as there are slots, one after another."""
    for number in range(first, first + NUM_SLOTS):
        store(manager, number)
        manager.end_step()
        manager.check()


@pytest.mark.parametrize("policy", CACHE_POLICIES.names())
def test_a_pinned_block_outlives_any_pressure_and_may_leave_after_its_lease(
    clock: ManualClock, policy: str
) -> None:
    manager = CPUOffloadingManager(NUM_SLOTS, policy, clock=clock)
    store(manager, 1, 2, 3)
    assert manager.pin(keys(1, 2), 60.0) == PinnedBlocks(2, 2, 2, 4)
    for round_ in range(1, 6):
        fill(manager, 1000 * round_)

    assert (is_held(manager, 1), is_held(manager, 2), is_held(manager, 3)) == (True, True, False)
    clock.advance(60.0)
    manager.end_step()
    assert manager.stats()["primary.leased_blocks"] == 0.0
    assert manager.num_evictable == NUM_SLOTS


def test_a_block_may_be_pinned_before_it_comes(manager: CPUOffloadingManager) -> None:
    assert manager.pin(keys(1), 60.0) == PinnedBlocks(1, 0, 1, 4)
    store(manager, 1)
    fill(manager, 1000)

    assert is_held(manager, 1)


def test_a_longer_lease_counts_whichever_comes_first(
    manager: CPUOffloadingManager, clock: ManualClock
) -> None:
    store(manager, 1, 2)
    manager.pin(keys(1), 60.0)
    manager.pin(keys(1), 10.0)
    manager.pin(keys(2), 10.0)
    manager.pin(keys(2), 60.0)
    clock.advance(30.0)
    manager.end_step()
    assert manager.stats()["primary.leased_blocks"] == 2.0
    clock.advance(30.0)
    manager.end_step()

    assert manager.stats()["primary.leased_blocks"] == 0.0
    assert manager.num_evictable == 2


def test_a_tenth_of_the_slots_may_be_pinned_and_one_more_changes_nothing(
    manager: CPUOffloadingManager,
) -> None:
    store(manager, *range(10))
    manager.pin(keys(0, 1, 2), 60.0)
    with pytest.raises(PinLimitError, match="2 blocks cannot be pinned: 3 of at most 4") as caught:
        manager.pin(keys(2, 3, 4), 60.0)

    assert (caught.value.num_new, caught.value.num_pinned, caught.value.limit) == (2, 3, 4)
    assert manager.num_evictable == 7
    manager.pin(keys(0, 3), 60.0)


def test_a_lease_that_is_over_makes_room_for_another_at_once(
    manager: CPUOffloadingManager, clock: ManualClock
) -> None:
    manager.pin(keys(1, 2, 3, 4), 10.0)
    clock.advance(10.0)

    assert manager.pin(keys(5, 6, 7, 8), 10.0).num_pinned == 4


def test_unpinning_ends_leases_early(manager: CPUOffloadingManager) -> None:
    store(manager, 1, 2, 3)
    manager.pin(keys(1, 2, 3), 60.0)

    assert manager.unpin(keys(1, 1, 9)) == 1
    assert manager.num_evictable == 1
    assert manager.unpin(None) == 2
    assert manager.unpin(None) == 0
    assert manager.num_evictable == 3


def test_a_block_in_use_stays_pinned_by_its_load_when_its_lease_ends(manager: CPUOffloadingManager) -> None:
    store(manager, 1)
    manager.pin(keys(1), 60.0)
    manager.prepare_load(keys(1), CONTEXT)
    manager.unpin(None)
    assert manager.num_evictable == 0
    manager.complete_load(keys(1), CONTEXT)

    assert manager.num_evictable == 1


def test_a_pinned_block_whose_store_fails_is_pinned_when_it_comes_again(
    manager: CPUOffloadingManager,
) -> None:
    manager.pin(keys(1), 60.0)
    manager.prepare_store(keys(1), CONTEXT)
    manager.complete_store(keys(1), CONTEXT, success=False)
    manager.check()
    store(manager, 1)

    assert manager.num_evictable == 0


def test_a_reset_ends_every_lease(manager: CPUOffloadingManager) -> None:
    store(manager, 1, 2)
    manager.pin(keys(1, 7), 60.0)
    manager.reset()
    manager.check()
    store(manager, 1)

    assert manager.num_evictable == 1
    assert manager.stats()["primary.orphaned_blocks"] == 0.0


@pytest.mark.parametrize("policy", CACHE_POLICIES.names())
def test_a_purge_forgets_all_but_what_is_in_use(clock: ManualClock, policy: str) -> None:
    manager = CPUOffloadingManager(NUM_SLOTS, policy, enable_events=True, clock=clock)
    store(manager, *range(10))
    manager.pin(keys(1), 60.0)
    manager.prepare_load(keys(2), CONTEXT)
    manager.take_events()
    purged = manager.purge(None).result
    assert purged is not None
    manager.check()

    assert (purged.num_purged, purged.num_in_use, purged.unable) == ({"host": 9}, {"host": 1}, {})
    assert [is_held(manager, number) for number in range(4)] == [False, False, True, False]
    (event,) = manager.take_events()
    assert event.removed
    assert sorted(event.keys) == sorted(keys(0, 1, *range(3, 10)))
    manager.complete_load(keys(2), CONTEXT)
    assert num_purged(manager) == {"host": 1}
    assert num_purged(manager) == {"host": 0}


def num_purged(manager: CPUOffloadingManager) -> dict[str, int]:
    purged = manager.purge(["host"]).result
    assert purged is not None
    return purged.num_purged


def test_a_purge_of_an_unknown_tier_changes_nothing(manager: CPUOffloadingManager) -> None:
    store(manager, 1)
    with pytest.raises(UnknownNameError, match="unknown tier 'fs'"):
        manager.purge(["host", "fs"])

    assert is_held(manager, 1)


def test_a_lease_without_its_hold_is_found(manager: CPUOffloadingManager) -> None:
    manager.pin(keys(1), 60.0)
    manager.table.release_each(keys(1))

    with pytest.raises(InvariantError, match="has a lease but no hold"):
        manager.check()


class PinnedCache(RuleBasedStateMachine):
    """Pins, stores, loads, resets and purges in any order: law 3 holds after each, and a lease keeps its blocks."""

    @initialize(policy=st.sampled_from(CACHE_POLICIES.names()))
    def begin(self, policy: str) -> None:
        self.clock = ManualClock()
        self.manager = CPUOffloadingManager(20, policy, clock=self.clock)
        self.ends_s: dict[OffloadKey, float] = {}
        self.loading: list[list[OffloadKey]] = []

    numbers = st.lists(st.integers(0, 40), min_size=1, max_size=6)

    @rule(numbers=numbers, is_good=st.booleans())
    def store(self, numbers: list[int], is_good: bool) -> None:
        if self.manager.prepare_store(keys(*numbers), CONTEXT) is not None:
            self.manager.complete_store(keys(*numbers), CONTEXT, is_good)

    @rule(numbers=numbers)
    def load(self, numbers: list[int]) -> None:
        found = [key(number) for number in numbers if is_held(self.manager, number)]
        self.manager.prepare_load(found, CONTEXT)
        self.loading.append(found)

    @rule()
    def end_loads(self) -> None:
        for found in self.loading:
            for one in found:
                self.manager.complete_load([one], CONTEXT)
        self.loading.clear()

    @rule(numbers=st.lists(st.integers(0, 40), min_size=1, max_size=2), lease_s=st.sampled_from([1.0, 5.0]))
    def pin(self, numbers: list[int], lease_s: float) -> None:
        try:
            self.manager.pin(keys(*numbers), lease_s)
        except PinLimitError:
            return
        for one in keys(*numbers):
            end_s = self.clock() + lease_s
            self.ends_s[one] = max(end_s, self.ends_s.get(one, end_s))

    @rule(numbers=st.lists(st.integers(0, 40), min_size=1, max_size=4), lease_s=st.sampled_from([1.0, 5.0]))
    def pin_for_request(self, numbers: list[int], lease_s: float) -> None:
        before = self.manager.leases.client_ends_s.copy()
        self.manager.note_request([keys(*numbers)], ReqContext("pins", {"pin_s": lease_s}))
        for one, end_s in self.manager.leases.client_ends_s.items():
            if end_s != before.get(one):
                self.ends_s[one] = max(end_s, self.ends_s.get(one, end_s))

    @rule(numbers=numbers)
    def unpin(self, numbers: list[int]) -> None:
        self.manager.unpin(keys(*numbers))
        for one in keys(*numbers):
            self.ends_s.pop(one, None)

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def step(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.manager.end_step()
        self.ends_s = {one: end_s for one, end_s in self.ends_s.items() if end_s > self.clock()}

    @rule()
    def reset(self) -> None:
        self.end_loads()
        self.manager.reset()
        self.ends_s.clear()

    @rule()
    def purge(self) -> None:
        self.manager.purge(None)
        self.ends_s.clear()

    @rule(first=st.integers(100, 1000))
    def press(self, first: int) -> None:
        """Store more than fits: whatever is pinned and here must still be here."""
        here = [one for one in self.ends_s if self.manager.table.is_ready(one)]
        for number in range(first, first + 40):
            store(self.manager, number)
        assert all(self.manager.table.is_ready(one) for one in here)

    @invariant()
    def holds_are_leases(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check()
            self.manager.table.check_holds(dict.fromkeys(self.manager.leases.ends_s, 1))
            assert self.manager.leases.ends_s.keys() >= self.ends_s.keys()


TestPinnedCache = PinnedCache.TestCase
TestPinnedCache.settings = settings(max_examples=num_examples(40), stateful_step_count=40, deadline=None)
