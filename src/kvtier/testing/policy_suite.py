"""The contract of an eviction policy as tests to inherit, and a fixed trace for golden hit counts.

A new policy's test is a class that inherits PolicySuite and makes the policy::

    class TestMine(PolicySuite):
        golden_hits: ClassVar[dict[int, int]] = {64: 1234}

        def make_policy(self, cache_capacity: int) -> CachePolicy:
            return MyPolicy(cache_capacity)
"""

import random
from collections.abc import Iterable, Sequence
from typing import ClassVar

from kvtier.base import OffloadKey, make_offload_key
from kvtier.cpu.policies.base import IN_FLIGHT, BlockStatus, CachePolicy, clear_policy

TRACE_LENGTH = 20_000
"""Accesses of the fixed trace. Fewer would not fill the larger capacities, more only take time."""


class PolicySuite:
    """The contract of every policy. Inherit it, implement make_policy, add golden hit counts."""

    golden_hits: ClassVar[dict[int, int]] = {}
    """Hits on ``make_trace(seed=1)`` for some capacities; they change only when the algorithm changes."""

    orders_by_use: ClassVar[bool] = True
    """Whether a touch of ready blocks reorders them at once; False if the order is that of insertion."""

    evicts_in_order: ClassVar[bool] = True
    """Whether the calls decide which blocks leave, and in which order. False for a policy that evicts the worst of a
    random sample: the suite then compares sets of blocks, and no golden hit counts."""

    def make_policy(self, cache_capacity: int) -> CachePolicy:
        """Return an empty policy for ``cache_capacity`` blocks."""
        raise NotImplementedError

    def test_holds_what_was_inserted(self) -> None:
        """An inserted block is found under its key and nothing else is."""
        policy = self.make_policy(4)
        block = BlockStatus(7)
        policy.insert(key_of(1), block)
        assert policy.get(key_of(1)) is block
        assert policy.get(key_of(2)) is None

    def test_insert_many_is_insert_in_order(self) -> None:
        """A batch evicts in the same order as the same blocks inserted singly."""
        single, batched = self.make_policy(4), self.make_policy(4)
        keys = [key_of(number) for number in range(4)]
        insert_ready(batched, keys)
        for key in keys:
            insert_ready(single, [key])
        assert self.order_of(evicted_keys(single, 4)) == self.order_of(evicted_keys(batched, 4))

    def test_what_would_leave_next_is_what_leaves(self) -> None:
        """A preview lists what evict then takes, in order, and changes nothing; busy blocks are not in it."""
        policy = self.make_policy(64)
        if policy.next_victims(0) is None:
            return
        trace = make_trace(seed=2, length=2_000)
        replay(policy, trace)
        held = [key for key in dict.fromkeys(trace) if policy.get(key) is not None]
        for key in held[::5]:
            block = policy.get(key)
            assert block is not None
            block.ref_cnt = 1
        preview = policy.next_victims(20)
        assert preview == policy.next_victims(20)
        assert preview == evicted_keys(policy, 20)
        assert len(policy.next_victims(1_000) or ()) == len(held) - len(held[::5]) - 20

    def test_getter_answers_like_get_for_the_policys_life(self) -> None:
        """The callable from getter() sees inserts, evictions and clear()."""
        policy = self.make_policy(2)
        getter = policy.getter()
        (block,) = insert_ready(policy, [key_of(1)])
        assert getter(key_of(1)) is block
        clear_policy(policy, 2)
        assert getter(key_of(1)) is None
        (block,) = insert_ready(policy, [key_of(1)])
        assert getter(key_of(1)) is block

    def test_a_run_is_held_as_its_blocks_are(self) -> None:
        """Blocks of a request that come in pieces leave in the order of the same blocks inserted at once."""
        pieces, whole = self.make_policy(4), self.make_policy(4)
        keys = [key_of(number) for number in range(4)]
        for part in (keys[:1], keys[1:]):
            blocks = [BlockStatus(slot) for slot in range(len(part))]
            pieces.extend("r", part, blocks)
            for block in blocks:
                block.ref_cnt = 0
        insert_ready(whole, keys)
        assert self.order_of(evicted_keys(pieces, 4)) == self.order_of(evicted_keys(whole, 4))

    def test_renewed_blocks_leave_last_and_the_first_of_them_after_the_others(self) -> None:
        """Renewing orders blocks as a touch does; a key that is not held is no error."""
        if not self.orders_by_use:
            return
        policy = self.make_policy(4)
        keys = [key_of(number) for number in range(4)]
        insert_ready(policy, keys)
        policy.renew([keys[0], key_of(9), keys[1]])
        assert self.order_of(evicted_keys(policy, 4)) == self.order_of([keys[2], keys[3], keys[1], keys[0]])

    def test_remove_forgets_a_key_and_ignores_unknown_ones(self) -> None:
        """A removed key is not held; removing it again is not an error."""
        policy = self.make_policy(4)
        insert_ready(policy, [key_of(1)])
        policy.remove(key_of(1))
        policy.remove(key_of(1))
        assert policy.get(key_of(1)) is None
        policy.check({})

    def test_evicts_exactly_n(self) -> None:
        """Returned blocks have left, all others stay."""
        policy = self.make_policy(4)
        keys = [key_of(number) for number in range(4)]
        blocks = dict(zip(keys, insert_ready(policy, keys), strict=True))
        victims = policy.evict(3, frozenset())
        assert victims is not None
        assert len({key for key, _ in victims}) == 3
        assert all(blocks[key] is block for key, block in victims)
        left = dict(victims)
        policy.check({key: block for key, block in blocks.items() if key not in left})

    def test_evicting_none_changes_nothing(self) -> None:
        """evict(0) is an empty list, also when nothing could leave."""
        policy = self.make_policy(2)
        insert_ready(policy, [key_of(1)])
        assert policy.evict(0, frozenset()) == []
        assert policy.evict(0, {key_of(1)}) == []

    def test_too_few_to_evict_is_none_and_changes_nothing(self) -> None:
        """One block short of n: no block is evicted, and the order is unchanged."""
        asked, reference = self.make_policy(4), self.make_policy(4)
        keys = [key_of(number) for number in range(4)]
        for policy in (asked, reference):
            insert_ready(policy, keys)
            policy.touch(keys[1:3])
        assert asked.evict(4, {keys[2]}) is None
        assert self.order_of(evicted_keys(asked, 4)) == self.order_of(evicted_keys(reference, 4))

    def test_pinned_and_in_flight_blocks_stay(self) -> None:
        """Only idle blocks are evicted, whatever their place in the order."""
        policy = self.make_policy(4)
        keys = [key_of(number) for number in range(4)]
        blocks = insert_ready(policy, keys)
        blocks[0].ref_cnt, blocks[2].ref_cnt = 1, IN_FLIGHT
        assert policy.evict(3, frozenset()) is None
        assert set(evicted_keys(policy, 2)) == {keys[1], keys[3]}

    def test_evicts_whenever_an_idle_block_exists(self) -> None:
        """Each single block can be evicted when the others are protected, touched or not."""
        for idle in range(4):
            policy = self.make_policy(4)
            keys = [key_of(number) for number in range(4)]
            insert_ready(policy, keys)
            policy.touch(keys[:2])
            assert evicted_keys(policy, 1, {key for key in keys if key != keys[idle]}) == [keys[idle]]

    def test_the_tail_of_a_stored_prefix_leaves_first(self) -> None:
        """A prefix that is touched once while its writes are in flight, as by a store, loses its end first."""
        policy = self.make_policy(4)
        keys = [key_of(number) for number in range(4)]
        blocks = [BlockStatus(number) for number in range(4)]
        policy.insert_many(keys, blocks)
        policy.touch(keys)
        for block in blocks:
            block.ref_cnt = 0
        assert self.order_of(evicted_keys(policy, 4)) == self.order_of(keys[::-1])

    def test_busy_blocks_are_victims_again_once_they_are_idle(self) -> None:
        """Evictions that skip pinned and protected blocks lose none of them: later all can be evicted."""
        policy = self.make_policy(8)
        keys = [key_of(number) for number in range(8)]
        blocks = insert_ready(policy, keys)
        policy.touch(keys[2:4])
        for block in blocks[:4]:
            block.ref_cnt = 1
        assert set(evicted_keys(policy, 2, {keys[4], keys[5]})) == {keys[6], keys[7]}
        assert policy.evict(1, {keys[4], keys[5]}) is None
        for block in blocks[:4]:
            block.ref_cnt = 0
        assert set(evicted_keys(policy, 6)) == set(keys[:6])
        policy.check({})

    def test_a_key_that_comes_back_is_a_block_like_any_other(self) -> None:
        """A policy's memory of evicted keys keeps no block from being held, removed or evicted."""
        policy = self.make_policy(4)
        held: dict[OffloadKey, BlockStatus] = {}
        for number in [*range(12), *range(12), *range(11, -1, -1)]:
            key = key_of(number)
            if key in held:
                continue
            if len(held) == 4:
                del held[evicted_keys(policy, 1, {key})[0]]
            (held[key],) = insert_ready(policy, [key])
            policy.touch([key])
            if number % 5 == 0:
                policy.remove(key)
                del held[key]
            policy.check(held)

    def test_the_tail_of_a_touched_prefix_leaves_first(self) -> None:
        """A touch makes the first key most recent, so that a prefix loses its end first."""
        if not self.orders_by_use:
            return
        policy = self.make_policy(4)
        keys = [key_of(number) for number in range(4)]
        insert_ready(policy, keys)
        policy.touch(keys)
        assert self.order_of(evicted_keys(policy, 4)) == self.order_of(keys[::-1])

    def test_touching_unknown_keys_holds_nothing(self) -> None:
        """A touch of keys that are not held is not an error and stores nothing."""
        policy = self.make_policy(2)
        policy.touch([key_of(1), key_of(2)])
        policy.check({})
        assert policy.evict(1, frozenset()) is None

    def test_clear_leaves_nothing_behind(self) -> None:
        """After clear() the policy behaves like a new one."""
        trace = make_trace(seed=2, length=2_000)
        used = self.make_policy(32)
        replay(used, trace)
        clear_policy(used, 32)
        used.check({})
        num_hits, expected = replay(used, trace), replay(self.make_policy(32), trace)
        assert not self.evicts_in_order or num_hits == expected

    def test_random_use_keeps_the_invariants(self) -> None:
        """Seeded random calls never make the policy differ from a plain dictionary."""
        draw = random.Random(3).random  # noqa: S311 - a workload, not a secret
        policy = self.make_policy(16)
        held: dict[OffloadKey, BlockStatus] = {}
        for step in range(2_000):
            key = key_of(int(48 * draw()))
            block = held.get(key)
            if block is None and len(held) < 16:
                held[key] = BlockStatus(step)
                policy.insert(key, held[key])
            elif block is not None and draw() < 0.5:
                block.ref_cnt = int(3 * draw()) - 1
            elif draw() < 0.7:
                policy.touch([key, key_of(int(48 * draw()))])
            else:
                idle = {key for key, block in held.items() if block.ref_cnt == 0} - {key}
                num = 1 + int(4 * draw())
                victims = policy.evict(num, {key})
                assert (victims is None) == (len(idle) < num)
                for victim, _ in victims or ():
                    assert victim in idle
                    del held[victim]
            policy.check(held)

    def test_golden_hit_counts(self) -> None:
        """The policy has exactly the recorded number of hits on the fixed trace."""
        if not self.evicts_in_order:
            return
        trace = make_trace(seed=1)
        found = {capacity: replay(self.make_policy(capacity), trace) for capacity in self.golden_hits}
        assert found == self.golden_hits

    def order_of(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return evicted keys as far as the policy decides their order: sorted where it draws them."""
        return keys if self.evicts_in_order else sorted(keys)


def key_of(number: int) -> OffloadKey:
    """Return a short, readable key. Pure."""
    return make_offload_key(number.to_bytes(8, "big"), 0)


def make_trace(seed: int, length: int = TRACE_LENGTH) -> list[OffloadKey]:
    """Return accesses with a few hot keys that drift, and long scans. Pure.

    Args:
        seed: equal seeds give equal traces; only ``random()`` is used, which Python keeps stable.
        length: accesses.
    """
    draw = random.Random(seed).random  # noqa: S311 - a workload, not a secret
    trace: list[OffloadKey] = []
    num_scanned = 0
    while len(trace) < length:
        if draw() < 0.01:
            first = 1_000_000 + num_scanned
            trace += [key_of(first + offset) for offset in range(100)]
            num_scanned += 100
        else:
            drift = len(trace) // 4_000 * 50
            trace.append(key_of(drift + int(600 * draw() ** 4)))
    return trace[:length]


def replay(policy: CachePolicy, trace: Iterable[OffloadKey]) -> int:
    """Run ``trace`` through ``policy`` one access at a time and return the number of hits.

    Effects: a miss touches the key, evicts one block when the policy is full, and inserts a ready block.
    """
    num_hits = num_held = 0
    for key in trace:
        policy.touch([key])
        if policy.get(key) is not None:
            num_hits += 1
            continue
        if num_held == policy.cache_capacity:
            assert policy.evict(1, frozenset()) is not None
        else:
            num_held += 1
        insert_ready(policy, [key])
    return num_hits


def insert_ready(policy: CachePolicy, keys: Sequence[OffloadKey]) -> list[BlockStatus]:
    """Insert idle blocks in slots from 0 and return them."""
    blocks = [BlockStatus(slot) for slot in range(len(keys))]
    policy.insert_many(keys, blocks)
    for block in blocks:
        block.ref_cnt = 0
    return blocks


def evicted_keys(
    policy: CachePolicy, n: int, protected: Iterable[OffloadKey] = frozenset()
) -> list[OffloadKey]:
    """Evict ``n`` blocks, which must be possible, and return their keys in order."""
    victims = policy.evict(n, set(protected))
    assert victims is not None, f"evict({n}) found too few idle blocks"
    return [key for key, _ in victims]
