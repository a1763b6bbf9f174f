"""kvtier's policies inside vLLM's real CPU manager decide as they do inside kvtier's own."""

import random
from collections.abc import Sequence

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.engines.vllm.stock_engine import StockEngine, key_of
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.base import ReqContext as StockReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager as StockManager
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy as StockPolicy

from kvtier.base import OffloadKey, ReqContext
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.engines.vllm.policies import KVTierARC, KVTierHazard, KVTierPolicy, in_prefix_order
from kvtier.errors import ConfigError
from kvtier.testing.clock import ManualClock
from kvtier.testing.policy_suite import make_trace

MODULE = "kvtier.engines.vllm.policies"
POLICIES = {"KVTierLRU": "lru", "KVTierARC": "arc"}
ALL_POLICIES = [*POLICIES, "KVTierHazard"]


@pytest.mark.parametrize("name", ["KVTierFIFO", "KVTierMQ", "KVTierS3FIFO", "KVTierSieve"])
def test_a_removed_policy_is_refused_with_what_to_write_instead(name: str) -> None:
    with pytest.raises(ConfigError, match=f"eviction_policy='{name}': no longer comes .* write kvtier-lru"):
        StockManager(4, name, MODULE)
    with pytest.raises(AttributeError, match="no attribute 'KVTierLFU'"):
        StockManager(4, "KVTierLFU", MODULE)


needs_request_ends = pytest.mark.skipif(
    not hasattr(StockPolicy, "on_request_finished"),
    reason="this vLLM tells a policy nothing at the end of a request (it does from 0.31 on)",
)
needs_accesses = pytest.mark.skipif(
    not hasattr(StockPolicy, "on_request_access"),
    reason="this vLLM does not tell a policy which request loads a block (it does from 0.33 on)",
)


class StockSide:
    """vLLM's manager with one of kvtier's policies."""

    def __init__(self, policy: str, num_blocks: int) -> None:
        self.manager = StockManager(num_blocks, policy, MODULE)
        self.policy = self.manager._policy
        self.num_requests = 0

    def begin(self, positions: Sequence[OffloadKey] = ()) -> StockReqContext:
        self.num_requests += 1
        context = StockReqContext(str(self.num_requests))
        self.manager.on_new_request(context)
        for position, key in enumerate(positions):
            context.set_offload_key_position(key, position)
        return context

    def write(self, context: StockReqContext, *numbers: int) -> None:
        """Store blocks of a request that goes on."""
        output = self.manager.prepare_store([key_of(number) for number in numbers], context)
        self.manager.complete_store(output.keys_to_store, context)

    def serve(self, keys: Sequence[OffloadKey]) -> int:
        """Load the leading blocks that are held, store the others; return how many were held."""
        context = self.begin(keys)
        num_hits = 0
        while num_hits < len(keys) and self.manager.lookup(keys[num_hits], context) is LookupResult.HIT:
            num_hits += 1
        self.manager.prepare_load(keys[:num_hits], context)
        self.manager.complete_load(keys[:num_hits], context)
        output = self.manager.prepare_store(keys[num_hits:], context)
        if output is not None:
            self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)
        return num_hits

    def store(self, *numbers: int) -> StockReqContext:
        """Store blocks and end the request."""
        context = self.begin()
        output = self.manager.prepare_store([key_of(number) for number in numbers], context)
        self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)
        return context

    def evicted_by(self, *numbers: int) -> list[OffloadKey] | None:
        """Return which blocks leave when these begin to be written, None when there is no room."""
        output = self.manager.prepare_store([key_of(number) for number in numbers], self.begin())
        return None if output is None else list(output.evicted_keys)


class OwnSide:
    """kvtier's manager, used in the same order; blocks in flight are touched, as its connector does."""

    def __init__(self, policy: str, num_blocks: int) -> None:
        self.manager = CPUOffloadingManager(num_blocks, POLICIES[policy])

    def serve(self, keys: Sequence[OffloadKey]) -> int:
        """As StockSide."""
        context = ReqContext("request")
        num_hits = 0
        while num_hits < len(keys) and self.manager.lookup(keys[num_hits], context):
            num_hits += 1
        hits, rest = keys[:num_hits], keys[num_hits:]
        self.manager.prepare_load(hits, context)
        self.manager.complete_load(hits, context)
        self.manager.touch([key for key in rest if self.manager.lookup(key, context) is False], context)
        held = [key for key in rest if self.manager.lookup(key, context)]
        output = self.manager.prepare_store(rest, context)
        stored = [] if output is None else output.keys_to_store
        used = {*hits, *held}
        for key in reversed(keys):
            if key in used or key in stored:
                self.manager.touch([key], context)
        self.manager.complete_store(stored, context)
        return num_hits


@needs_request_ends
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_blocks", [16, 128])
def test_hits_on_single_blocks_are_those_of_kvtiers_own_manager(policy: str, num_blocks: int) -> None:
    trace = make_trace(seed=5, length=6_000)
    stock, own = StockSide(policy, num_blocks), OwnSide(policy, num_blocks)
    hits = [stock.serve([key]) for key in trace]
    assert hits == [own.serve([key]) for key in trace]
    assert 0 < sum(hits) < len(trace)


def make_prefixes() -> list[list[OffloadKey]]:
    rng = random.Random(6)
    conversations = [[key_of(1000 * number + block) for block in range(12)] for number in range(30)]
    return [rng.choice(conversations)[: rng.randint(1, 12)] for _ in range(2_000)]


@needs_request_ends
@pytest.mark.parametrize("policy", POLICIES)
def test_hits_on_prefixes_are_those_of_kvtiers_own_manager(policy: str) -> None:
    trace = make_prefixes()
    stock, own = StockSide(policy, 100), OwnSide(policy, 100)
    hits, expected = [stock.serve(keys) for keys in trace], [own.serve(keys) for keys in trace]
    if hasattr(StockPolicy, "on_request_access"):
        # The head that a request has loaded stays while it stores its tail: some more is found.
        assert sum(expected) <= sum(hits) < 1.1 * sum(expected)
    else:
        assert hits == expected
    assert 0 < sum(hits) < sum(map(len, trace))


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_pinned_blocks_and_blocks_in_flight_stay(policy: str) -> None:
    side = StockSide(policy, 3)
    side.store(1, 2)
    loading = side.begin()
    side.manager.prepare_load([key_of(1)], loading)
    assert side.evicted_by(3) == []
    assert side.evicted_by(4, 5) is None
    assert side.evicted_by(4) == [key_of(2)]
    assert side.evicted_by(5) is None
    side.manager.complete_load([key_of(1)], loading)
    assert side.evicted_by(5) == [key_of(1)]


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_a_store_never_evicts_what_it_names(policy: str) -> None:
    side = StockSide(policy, 2)
    side.store(1, 2)
    assert side.evicted_by(1, 3) == [key_of(2)]


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_a_block_whose_store_failed_is_gone(policy: str) -> None:
    side = StockSide(policy, 2)
    context = side.begin()
    side.manager.prepare_store([key_of(1)], context)
    side.manager.complete_store([key_of(1)], context, success=False)
    assert side.manager.lookup(key_of(1), context) is LookupResult.MISS
    assert side.evicted_by(2, 3) == []


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_a_reset_forgets_every_block(policy: str) -> None:
    side = StockSide(policy, 2)
    side.store(1, 2)
    side.manager.reset_cache()
    assert side.manager.lookup(key_of(1), side.begin()) is LookupResult.MISS
    assert side.evicted_by(3, 4) == []


@needs_request_ends
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_the_tail_of_a_stored_prefix_leaves_first(policy: str) -> None:
    side = StockSide(policy, 3)
    side.store(1, 2, 3)
    assert side.evicted_by(4, 5) == [key_of(3), key_of(2)]


@needs_request_ends
def test_storing_a_block_is_no_second_use_of_it_for_arc() -> None:
    side = StockSide("KVTierARC", 4)
    side.serve([key_of(1), key_of(2)])
    assert isinstance(side.policy, KVTierARC)
    assert list(side.policy.policy.t1) == [key_of(2), key_of(1)]
    side.serve([key_of(1)])
    assert list(side.policy.policy.t1) == [key_of(2)]
    assert list(side.policy.policy.t2) == [key_of(1)]


@needs_request_ends
def test_blocks_of_several_groups_are_put_into_one_prefix_order() -> None:
    full, window = [key_of(1), key_of(2)], [key_of(1, group_idx=1), key_of(2, group_idx=1)]
    context = StockReqContext("request")
    assert in_prefix_order([full, window], context) == full + window
    for position in range(2):
        context.set_offload_key_position(full[position], 16 * position)
        context.set_offload_key_position(window[position], 16 * position)
    assert in_prefix_order([full, window], context) == [full[0], window[0], full[1], window[1]]


@needs_request_ends
@pytest.mark.parametrize("policy", ALL_POLICIES)
@pytest.mark.parametrize("batches", [[1, 1, 1, 1], [4], [2, 2], [1, 3]], ids=str)
def test_of_an_unfinished_request_the_tail_leaves_before_the_head(policy: str, batches: list[int]) -> None:
    side = StockSide(policy, 4)
    context = side.begin([key_of(number) for number in range(4)])
    numbers = iter(range(4))
    for size in batches:
        side.write(context, *[next(numbers) for _ in range(size)])
    assert side.evicted_by(10, 11) == [key_of(3), key_of(2)]


@needs_request_ends
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_two_unfinished_requests_and_two_groups_keep_their_heads(policy: str) -> None:
    side = StockSide(policy, 8)
    one = [key_of(number, group) for number in (0, 1) for group in (0, 1)]
    other = [key_of(number, group) for number in (5, 6) for group in (0, 1)]
    for keys in (one, other):
        context = side.begin()
        for position, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (position // 2 + 1))
        output = side.manager.prepare_store(keys, context)
        side.manager.complete_store(output.keys_to_store, context)
    evicted = side.evicted_by(20, 21)
    assert evicted is not None
    assert set(evicted) == set(one[2:])


@needs_request_ends
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_a_block_that_is_stored_late_stands_at_its_position(policy: str) -> None:
    side = StockSide(policy, 3)
    context = side.begin([key_of(number) for number in (1, 2, 3)])
    for number in (1, 3, 2):
        side.write(context, number)
    assert side.evicted_by(4) == [key_of(3)]


@needs_request_ends
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_a_store_that_failed_and_came_again_keeps_its_position(policy: str) -> None:
    side = StockSide(policy, 2)
    context = side.begin([key_of(1), key_of(2)])
    side.manager.prepare_store([key_of(1)], context)
    side.manager.complete_store([key_of(1)], context, success=False)
    side.write(context, 1)
    side.write(context, 2)
    assert side.evicted_by(3) == [key_of(2)]


@needs_accesses
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_a_head_that_an_unfinished_request_has_loaded_outlives_its_new_tail(policy: str) -> None:
    side = StockSide(policy, 4)
    side.store(1, 2)
    context = side.begin([key_of(number) for number in (1, 2, 3)])
    keys = [key_of(1), key_of(2)]
    side.manager.prepare_load(keys, context)
    side.manager.complete_load(keys, context)
    side.write(context, 3)
    evicted = side.evicted_by(10, 11, 12)
    assert evicted is not None
    assert set(evicted) == {key_of(2), key_of(3)}


@needs_request_ends
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_older_blocks_leave_before_those_of_an_unfinished_request(policy: str) -> None:
    side = StockSide(policy, 4)
    side.store(1, 2)
    side.write(side.begin([key_of(3), key_of(4)]), 3, 4)
    assert side.evicted_by(10, 11) == [key_of(2), key_of(1)]


@needs_request_ends
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_nothing_is_remembered_of_requests_that_have_ended_or_were_reset(policy: str) -> None:
    side = StockSide(policy, 64)
    assert isinstance(side.policy, KVTierPolicy)
    for number in range(20):
        side.serve([key_of(100 * number + block) for block in range(3)])
    assert not side.policy._live._by_id
    assert not side.policy._live._owners
    side.write(side.begin([key_of(1), key_of(2)]), 1, 2)
    side.manager.reset_cache()
    assert not side.policy._live._by_id


@needs_request_ends
def test_putting_a_long_unfinished_request_in_order_does_not_happen_at_each_store() -> None:
    side = StockSide("KVTierLRU", 600)
    for number in range(50):
        side.store(*range(1000 + 10 * number, 1010 + 10 * number))
    keys = [key_of(number) for number in range(400)]
    context = side.begin(keys)
    renewed: list[int] = []
    renew = side.policy.policy.renew

    def count(keys: Sequence[OffloadKey]) -> None:
        renewed.append(len(keys))
        renew(keys)

    side.policy.policy.renew = count
    for number in range(400):
        side.write(context, number)
    assert not renewed, "older blocks of others left, so no order was needed"


@needs_request_ends
def test_hazard_keeps_what_comes_again_and_lru_does_not() -> None:
    """A prompt that returns every ten requests, between prompts that never return: more than host memory holds."""
    hits = {}
    for name in ("KVTierLRU", "KVTierHazard"):
        side, clock = StockSide(name, 40), ManualClock()
        if isinstance(side.policy, KVTierHazard):
            side.policy._clock = clock
        hits[name] = 0
        for turn in range(1500):
            clock.advance(1.0)
            first = 8 * (turn % 10 // 5) if turn % 5 == 0 else 100_000 + 8 * turn
            num = side.serve([key_of(number) for number in range(first, first + 8)])
            hits[name] += num
    assert hits["KVTierHazard"] > hits["KVTierLRU"] + 1000


@needs_request_ends
def test_hazard_learns_a_prompt_whose_head_the_device_held() -> None:
    side = StockSide("KVTierHazard", 16)
    keys = [key_of(number) for number in range(6)]
    side.serve(keys)
    assert isinstance(side.policy, KVTierHazard)
    hazard = side.policy.policy
    context = side.begin(keys)
    side.manager.prepare_load(keys[3:], context)
    side.manager.complete_load(keys[3:], context)
    side.manager.on_request_finished(context)
    assert hazard.known_prefix(keys[3]) == keys[:3]
    assert [hazard._shadow.tree.nodes[key].num_seen for key in keys] == [2] * 6


def test_hazard_is_refused_where_vllm_reports_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(StockPolicy, "on_request_finished", raising=False)
    with pytest.raises(ConfigError, match=r"eviction_policy='kvtier-hazard': learns .*kvtier-lru"):
        KVTierHazard(cache_capacity=4)


def test_arguments_of_releases_to_come_are_ignored() -> None:
    assert KVTierARC(cache_capacity=4, brand_new=True).policy.cache_capacity == 4


def test_a_policy_is_found_by_its_module_path_under_the_tiering_manager_too() -> None:
    settings = {"eviction_policy": "KVTierARC", "cache_policy_module_path": MODULE}
    with StockEngine(extra_config=settings, num_blocks=4) as engine:
        engine.store([1, 2])
        assert engine.load([1, 2, 3]) == 2
        assert isinstance(engine.manager.primary_tier._policy, KVTierARC)
