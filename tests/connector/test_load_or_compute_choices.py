"""With load_if "faster" a hit that would sooner be computed is not loaded, and nothing else changes."""

from collections.abc import Callable

import pytest
from tests.connector.fakes import (
    HASH_TOKENS,
    FakeBlocks,
    FakeRequest,
    FakeSpec,
    make_config,
    make_first_step,
    report_jobs,
)
from tests.tiering.drivers import make_example

from kvtier.base import CanonicalKVCaches, OffloadKey, ReqContext
from kvtier.connector.common import OffloadingConnectorMetadata, OffloadingWorkerMetadata
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.engines.common.step import StepOutput, WorkerOutput
from kvtier.testing.clock import ManualClock
from kvtier.testing.tiering_driver import TieringDriver
from kvtier.testing.wrapped_tier import SlowTier

NUM_SLOTS = 16
NUM_BLOCKS = 8
NUM_TOKENS = NUM_BLOCKS * HASH_TOKENS
PROMPT = list(range(NUM_TOKENS + 1))
"""Eight blocks of four tokens, and one that has to be computed."""

TOKEN_S = 0.1
"""A block is computed in 0.4 seconds."""


class Clock:
    """The driver's clock, for tiers that are built before it."""

    def __init__(self) -> None:
        self.reading: Callable[[], float] = ManualClock()

    def __call__(self) -> float:
        return self.reading()


class AskingTier(SlowTier):
    """A slow tier that cannot tell at once what it has while a test says so."""

    is_asking = False

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return None if self.is_asking else super().lookup(key, req_context)


class Bench:
    """A scheduler half over host memory and one tier as slow as a test wants, and an engine's calls."""

    def __init__(self, load_if: str = "faster", block_s: float = 0.1) -> None:
        clock = Clock()
        self.driver = TieringDriver(
            NUM_SLOTS,
            lambda view: [AskingTier(make_example(view), clock, block_s)],
            lookup_deadline_s=1000.0,
        )
        clock.reading = self.clock = self.driver.clock
        config = make_config(load_if=load_if)
        self.half = OffloadingConnectorScheduler(FakeSpec(config, self.driver.manager), clock=self.clock)
        self._num_requests = 0

    @property
    def tier(self) -> AskingTier:
        """The tier."""
        tier = self.driver.tiers[0]
        assert isinstance(tier, AskingTier)
        return tier

    def know_prefill(self, token_s: float = TOKEN_S) -> None:
        """Let the engine say how fast it computes."""
        assert self.half.load_or_compute is not None
        for _ in range(3):
            self.half.load_or_compute.report_prefill(100, 100 * token_s)

    def request(self, prompt: list[int] = PROMPT) -> FakeRequest:
        """Return a new request."""
        self._num_requests += 1
        return FakeRequest(f"request-{self._num_requests}", prompt)

    def compute(self, request: FakeRequest, num_loaded: int = 0) -> OffloadingConnectorMetadata:
        """Compute what a request lacks in one step."""
        step = make_first_step(
            request.request_id, (list(range(20)),), request.num_tokens - num_loaded, num_loaded
        )
        metadata = self.half.build_connector_meta(step)
        self.half.update_connector_output(report_jobs(metadata))
        return metadata

    def fill(self, prompt: list[int] = PROMPT) -> None:
        """Compute a prompt once, so that the tier has its blocks and host memory does not."""
        request = self.request(prompt)
        assert self.half.get_num_new_matched_tokens(request, 0)[0] == 0
        self.half.update_state_after_alloc(request, FakeBlocks((list(range(20)),)), 0)
        self.compute(request)
        self.half.request_finished(request)
        self.driver.evict_everything()

    def ask(self, request: FakeRequest) -> tuple[int, float]:
        """Return how many tokens can be loaded, and how long the request has waited for that."""
        begun_s = self.clock()
        for _ in range(100_000):
            answer, _ = self.half.get_num_new_matched_tokens(request, 0)
            if answer is not None:
                return answer, self.clock() - begun_s
            self.half.build_connector_meta(StepOutput())
            self.driver.manager.check()
            self.clock.advance(0.1)
        raise AssertionError("the request waits for ever")

    def serve(self, prompt: list[int] = PROMPT) -> tuple[int, float]:
        """Serve a request from beginning to end; return what ``ask`` has."""
        request = self.request(prompt)
        num_tokens, waited_s = self.ask(request)
        self.half.update_state_after_alloc(request, FakeBlocks((list(range(20)),)), num_tokens)
        metadata = self.half.build_connector_meta(StepOutput())
        self.half.update_connector_output(report_jobs(metadata))
        self.compute(request, num_tokens)
        self.half.request_finished(request)
        self.driver.manager.check()
        assert self.driver.manager.stats()["waiting_requests"] == 0
        return num_tokens, waited_s

    def count(self, name: str) -> float:
        """Return a counter, 0 when there is none."""
        return self.half.stats().get(name, 0.0)


def make_slow_bench(block_s: float = 2.0) -> Bench:
    """Return a bench whose tier takes five times as long as computing, and whose scheduler half knows both."""
    bench = Bench(block_s=block_s)
    bench.know_prefill()
    bench.fill()
    bench.serve()
    bench.driver.evict_everything()
    return bench


def test_what_nobody_has_measured_is_loaded_and_known_afterwards() -> None:
    bench = Bench(block_s=2.0)
    bench.know_prefill()
    bench.fill()

    num_tokens, waited_s = bench.serve()

    assert num_tokens == NUM_TOKENS
    assert waited_s == pytest.approx(16.0, abs=0.2)
    assert bench.count("tier.0.slow.load_bytes_per_s") == pytest.approx(4096 / 2, rel=0.01)


def test_as_long_as_nobody_knows_how_fast_the_engine_computes_everything_is_loaded() -> None:
    bench = Bench(block_s=2.0)
    bench.fill()

    for _ in range(3):
        assert bench.serve()[0] == NUM_TOKENS
        bench.driver.evict_everything()


def test_a_hit_that_loads_slower_than_it_computes_is_not_loaded_and_nobody_waits() -> None:
    bench = make_slow_bench()
    num_before = bench.tier.num_loaded_blocks

    assert bench.serve() == (0, 0.0)

    assert bench.tier.num_loaded_blocks == num_before
    assert bench.count("connector.not_loaded_tokens.slow") == NUM_TOKENS


def test_after_a_reset_nothing_is_left_that_could_have_been_loaded() -> None:
    bench = make_slow_bench()
    request = bench.request()
    assert bench.ask(request)[0] == 0

    bench.half.reset()
    bench.half.update_state_after_alloc(request, FakeBlocks((list(range(20)),)), 0)

    assert bench.count("connector.not_loaded_tokens.slow") == 0


def test_with_always_it_is_loaded_all_the_same() -> None:
    bench = Bench("always", block_s=2.0)
    bench.fill()

    for _ in range(2):
        num_tokens, waited_s = bench.serve()
        bench.driver.evict_everything()
        assert num_tokens == NUM_TOKENS
        assert waited_s == pytest.approx(16.0, abs=0.2)
    assert not any("not_loaded" in name or "prefill" in name for name in bench.half.stats())


def test_a_hit_that_loads_faster_than_it_computes_is_loaded() -> None:
    bench = Bench(block_s=0.2)
    bench.know_prefill()
    bench.fill()

    for _ in range(3):
        assert bench.serve()[0] == NUM_TOKENS
        bench.driver.evict_everything()
    assert bench.count("connector.not_loaded_tokens.slow") == 0


def test_of_a_run_that_begins_in_the_host_the_slow_part_is_computed() -> None:
    bench = make_slow_bench()
    bench.serve(PROMPT[: 3 * HASH_TOKENS + 1])

    assert bench.serve() == (3 * HASH_TOKENS, 0.0)

    assert bench.count("connector.not_loaded_tokens.slow") == (3 + 5) * HASH_TOKENS


def test_what_was_computed_instead_is_loaded_from_the_host_next_time() -> None:
    bench = make_slow_bench()
    bench.serve()

    assert bench.serve() == (NUM_TOKENS, 0.0)

    assert bench.count("connector.loaded_tokens.CPU") == NUM_TOKENS


def test_a_tier_that_was_given_up_is_measured_now_and_then_and_taken_up_again() -> None:
    bench = make_slow_bench()
    bench.tier.block_s = 0.1
    assert bench.serve() == (0, 0.0)
    bench.driver.evict_everything()
    bench.clock.advance(1000.0)

    assert bench.serve() == (0, 0.0)
    bench.clock.advance(0.1)
    bench.driver.step()
    bench.driver.evict_everything()

    assert bench.count("tier.0.slow.probe_blocks") == 1
    assert bench.serve()[0] == NUM_TOKENS


def test_measuring_a_tier_that_is_still_slow_delays_nobody() -> None:
    bench = make_slow_bench()
    for _ in range(20):
        bench.clock.advance(100.0)
        assert bench.serve() == (0, 0.0)
        bench.clock.advance(100.0)
        bench.driver.step()
        bench.driver.evict_everything()

    assert bench.count("tier.0.slow.probe_blocks") > 0


def test_a_request_that_waits_for_its_blocks_goes_on_waiting_when_the_tier_slows_down() -> None:
    bench = Bench(block_s=0.2)
    bench.know_prefill()
    bench.fill()
    bench.serve()
    bench.driver.evict_everything()
    bench.tier.block_s = 2.0

    num_tokens, waited_s = bench.ask(bench.request())

    assert num_tokens == NUM_TOKENS
    assert waited_s == pytest.approx(16.0, abs=0.3)


def test_a_request_whose_neighbour_s_blocks_came_late_does_not_think_again() -> None:
    bench = Bench(block_s=0.2)
    bench.know_prefill()
    bench.fill()
    bench.serve()
    bench.driver.evict_everything()
    bench.tier.block_s = 1.0
    neighbour, request = bench.request(PROMPT[: 4 * HASH_TOKENS + 1]), bench.request()
    assert bench.half.get_num_new_matched_tokens(neighbour, 0) == (None, False)
    bench.half.build_connector_meta(StepOutput())

    num_tokens, waited_s = bench.ask(request)

    assert num_tokens == NUM_TOKENS
    assert waited_s == pytest.approx(8.0, abs=0.3)


def test_a_request_that_had_to_ask_and_loads_nothing_holds_nothing_when_it_begins() -> None:
    bench = make_slow_bench()
    request = bench.request()
    bench.tier.is_asking = True
    assert bench.half.get_num_new_matched_tokens(request, 0) == (None, False)
    bench.half.build_connector_meta(StepOutput())
    bench.tier.is_asking = False

    assert bench.ask(request)[0] == 0
    assert bench.count("waiting_requests") == 1
    bench.half.update_state_after_alloc(request, FakeBlocks((list(range(20)),)), 0)

    assert bench.count("waiting_requests") == 0
    bench.driver.manager.check()


def test_what_the_device_holds_comes_before_the_cut() -> None:
    bench = make_slow_bench()
    bench.serve(PROMPT[: 3 * HASH_TOKENS + 1])

    assert bench.half.get_num_new_matched_tokens(bench.request(), 2 * HASH_TOKENS) == (HASH_TOKENS, True)
    assert bench.half.get_num_new_matched_tokens(bench.request(), 3 * HASH_TOKENS) == (0, False)


def test_prompts_that_are_loaded_keep_the_engine_no_busier() -> None:
    bench = make_slow_bench(block_s=0.6)
    other = [7000 + number for number in range(12 * HASH_TOKENS + 1)]
    bench.serve(other)
    loaded = bench.request(other)
    num_tokens, _ = bench.ask(loaded)
    assert num_tokens == 12 * HASH_TOKENS
    bench.half.update_state_after_alloc(loaded, FakeBlocks((list(range(20)),)), num_tokens)

    assert bench.ask(bench.request())[0] == 0


def test_two_requests_of_one_step_know_of_each_other_s_loads() -> None:
    bench = Bench(block_s=0.24)
    bench.know_prefill()
    other_prompt = [1000 + token for token in PROMPT]
    bench.fill()
    bench.fill(other_prompt)
    bench.serve()
    bench.driver.evict_everything()

    first = bench.half.get_num_new_matched_tokens(bench.request(), 0)
    second = bench.half.get_num_new_matched_tokens(bench.request(other_prompt), 0)

    assert first == (None, False)
    assert second == (0, False)


def test_a_request_asked_for_again_and_again_counts_once() -> None:
    bench = make_slow_bench()
    request = bench.request()
    for _ in range(5):
        assert bench.ask(request) == (0, 0.0)
        bench.half.build_connector_meta(StepOutput())

    assert bench.count("connector.not_loaded_tokens.slow") == 0
    bench.half.update_state_after_alloc(request, FakeBlocks((list(range(20)),)), 0)
    bench.half.update_state_after_alloc(request, FakeBlocks((list(range(20)),)), 0)

    assert bench.count("connector.not_loaded_tokens.slow") == NUM_TOKENS


def test_prompts_that_the_engine_has_begun_make_a_slow_load_worth_while() -> None:
    bench = make_slow_bench(block_s=0.6)
    assert bench.ask(bench.request()) == (0, 0.0)
    long = bench.request([5000 + number for number in range(801)])
    bench.ask(long)
    bench.half.update_state_after_alloc(long, FakeBlocks((list(range(201)),)), 0)

    assert bench.ask(bench.request())[0] == NUM_TOKENS


def test_without_tiers_everything_in_host_memory_is_loaded() -> None:
    half = OffloadingConnectorScheduler(FakeSpec(make_config(load_if="faster"), CPUOffloadingManager(16)))
    first, second = FakeRequest("a", PROMPT), FakeRequest("b", PROMPT)
    half.get_num_new_matched_tokens(first, 0)
    step = make_first_step("a", (list(range(9)),), len(PROMPT))
    half.update_connector_output(report_jobs(half.build_connector_meta(step)))

    assert half.get_num_new_matched_tokens(second, 0) == (NUM_TOKENS, True)


def test_a_reset_forgets_what_was_chosen() -> None:
    bench = Bench(block_s=0.2)
    bench.know_prefill()
    bench.fill()
    request = bench.request()
    assert bench.half.get_num_new_matched_tokens(request, 0) == (None, False)

    bench.half.reset()

    assert bench.ask(request)[0] == 0
    bench.driver.manager.check()


def test_the_engine_s_steps_tell_how_fast_it_computes() -> None:
    bench = Bench()
    worker = OffloadingConnectorWorker(FakeSpec(make_config(load_if="faster")))
    worker.register_kv_caches(CanonicalKVCaches([], []))
    for number in range(3):
        prompt = [number * 10_000 + token for token in range(400)]
        request = bench.request(prompt)
        bench.half.get_num_new_matched_tokens(request, 0)
        step = make_first_step(request.request_id, (list(range(100)),), 400)
        metadata = bench.half.build_connector_meta(step)
        worker.start_kv_transfers(metadata)
        bench.clock.advance(2.0)
        report = worker.build_connector_worker_meta()
        assert report is not None
        bench.half.update_connector_output(WorkerOutput(report))
        bench.clock.advance(500.0)

    assert bench.count("connector.prefill_tokens_per_s") == pytest.approx(200.0)


def test_a_worker_is_asked_to_report_a_step_only_when_that_is_of_use() -> None:
    for load_if, is_asked in (("faster", True), ("always", False)):
        bench = Bench(load_if)
        request = bench.request(list(range(400)))
        bench.half.get_num_new_matched_tokens(request, 0)
        step = make_first_step(request.request_id, (list(range(100)),), 400)
        assert (bench.half.build_connector_meta(step).measured_step is not None) is is_asked
        assert bench.half.build_connector_meta(StepOutput()).measured_step is None


def test_reports_of_several_workers_add_their_bytes_and_keep_the_longest_time() -> None:
    one = OffloadingWorkerMetadata(load_bytes=100, load_time_s=2.0, measured_step=None)
    other = OffloadingWorkerMetadata(load_bytes=100, load_time_s=4.0, measured_step=7)

    both = one.aggregate(other)

    assert (both.load_bytes, both.load_time_s, both.measured_step) == (200, 4.0, 7)
    assert other.aggregate(one).measured_step == 7
    assert not both.is_empty()


def test_the_link_to_the_device_is_learned_from_reports() -> None:
    bench = Bench()

    bench.half.update_connector_output(
        WorkerOutput(OffloadingWorkerMetadata(load_bytes=500, load_time_s=2.0))
    )

    assert bench.count("connector.load_bytes_per_s") == 250.0
