"""Random use of an eviction policy against a plain dictionary, as a Hypothesis state machine to inherit.

It plays a manager that stores, fails, pins, protects and evicts. After each step it checks that the policy holds what
the dictionary holds, evicts no busy block, and previews its evictions correctly. A new policy's test is::

    class MyMachine(PolicyMachine):
        def make_policy(self, cache_capacity: int) -> CachePolicy:
            return MyPolicy(cache_capacity)

    TestMyMachine = MyMachine.TestCase
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import BlockStatus, CachePolicy, clear_policy
from kvtier.testing.policy_suite import key_of

KEYS = [key_of(number) for number in range(16)]
key_lists = st.lists(st.sampled_from(KEYS), max_size=6)
rarely = st.sampled_from([False, False, False, True])


class PolicyMachine(RuleBasedStateMachine):
    """Random calls on one policy. Inherit it and implement make_policy."""

    def make_policy(self, cache_capacity: int) -> CachePolicy:
        """Return an empty policy for ``cache_capacity`` blocks."""
        raise NotImplementedError

    @initialize(cache_capacity=st.integers(1, 8))
    def start(self, cache_capacity: int) -> None:
        """Start with an empty policy."""
        self.capacity = cache_capacity
        self.policy = self.make_policy(cache_capacity)
        self.getter = self.policy.getter()
        self.held: dict[OffloadKey, BlockStatus] = {}
        self.num_blocks = 0

    @rule(keys=key_lists, is_touched=st.booleans(), stays_in_flight=rarely)
    def store(self, keys: list[OffloadKey], is_touched: bool, stays_in_flight: bool) -> None:
        """Write the missing blocks of a request, if there is room, and touch the request."""
        missing = [key for key in dict.fromkeys(keys) if key not in self.held]
        num_to_evict = len(self.held) + len(missing) - self.capacity
        if not self.has_evicted(max(0, num_to_evict), keys):
            return
        blocks = [BlockStatus(self.num_blocks + number) for number in range(len(missing))]
        self.num_blocks += len(blocks)
        self.policy.insert_many(missing, blocks)
        self.held.update(zip(missing, blocks, strict=True))
        if is_touched:
            self.policy.touch(keys)
        if not stays_in_flight:
            self.finish_writes(missing, success=True)

    @rule(keys=key_lists, success=st.sampled_from([True, False]))
    def finish_writes(self, keys: list[OffloadKey], success: bool) -> None:
        """Complete writes in flight."""
        for key in dict.fromkeys(keys):
            block = self.held.get(key)
            if block is None or block.is_ready:
                continue
            if success:
                block.ref_cnt = 0
            else:
                self.policy.remove(key)
                del self.held[key]

    @rule()
    def finish_all_writes(self) -> None:
        """Complete all of them successfully."""
        self.finish_writes(KEYS, success=True)

    @rule(keys=key_lists)
    def touch(self, keys: list[OffloadKey]) -> None:
        """Touch blocks, held or not, some of them named twice."""
        self.policy.touch(keys)

    @rule(key=st.sampled_from(KEYS), times=st.integers(1, 4))
    def use_again(self, key: OffloadKey, times: int) -> None:
        """Touch one block several times."""
        for _ in range(times):
            self.policy.touch([key])

    @rule(key=st.sampled_from(KEYS), num_pins=st.integers(1, 2))
    def pin(self, key: OffloadKey, num_pins: int) -> None:
        """Pin a ready block."""
        block = self.held.get(key)
        if block is not None and block.is_ready:
            block.ref_cnt = num_pins

    @rule()
    def unpin(self) -> None:
        """Unpin every block."""
        for block in self.held.values():
            block.ref_cnt = min(block.ref_cnt, 0)

    @rule(n=st.integers(0, 3), protected=st.lists(st.sampled_from(KEYS), max_size=3))
    def evict(self, n: int, protected: list[OffloadKey]) -> None:
        """Evict, or be refused."""
        self.has_evicted(n, protected)

    @rule(is_meant=rarely)
    def clear(self, is_meant: bool) -> None:
        """Clear the policy, rarely: most behaviour shows only after the policy has been full for some time."""
        if is_meant:
            clear_policy(self.policy, self.capacity)
            self.held.clear()

    @invariant()
    def the_policy_holds_what_is_held(self) -> None:
        """The policy's own check passes, and lookups find each held block and no other."""
        self.policy.check(self.held)
        for key in KEYS:
            assert self.policy.get(key) is self.getter(key) is self.held.get(key)

    def has_evicted(self, n: int, protected: list[OffloadKey]) -> bool:
        """Evict all of ``n`` idle blocks or none; compare with the preview unless blocks were protected."""
        idle = {key for key, block in self.held.items() if block.ref_cnt == 0}
        preview = self.policy.next_victims(n)
        victims = self.policy.evict(n, set(protected))
        assert (victims is None) == (len(idle - set(protected)) < n)
        if victims is None:
            return False
        keys = [key for key, _ in victims]
        assert len(set(keys)) == len(keys) == n
        assert idle.difference(protected).issuperset(keys)
        assert preview is None or protected or keys == preview
        for key, block in victims:
            assert self.held.pop(key) is block
        return True
