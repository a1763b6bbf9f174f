"""The scheduler half against the real primary tier."""

from tests.connector.fakes import (
    FakeBlocks,
    FakeRequest,
    FakeSpec,
    TableManager,
    block_ids_of,
    hash_tokens,
    keys_of,
    make_config,
    make_first_step,
    make_later_step,
    report_jobs,
)
from tests.cpu.policies.learner import NOTING_LEARNER, NotingLearner

from kvtier.base import (
    GPULoadStoreSpec,
    ReqContext,
)
from kvtier.connector.common import (
    BlockRemoved,
    BlockStored,
    LostLoadStoreSpec,
    OffloadingConnectorMetadata,
)
from kvtier.connector.prefix_search import maximal_prefix_lookup, sliding_window_lookup
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.engines.common.step import StepOutput

PROMPT = list(range(17))


class Bench:
    """A scheduler half with a real primary tier, and the calls an engine makes."""

    def __init__(self, num_blocks: int = 16, num_workers: int = 1, cache_policy: str = "lru") -> None:
        self.manager = CPUOffloadingManager(num_blocks, cache_policy, enable_events=True)
        self.half = OffloadingConnectorScheduler(FakeSpec(make_config(num_workers), self.manager))
        self._next_block = 0

    def compute(self, request: FakeRequest, *block_ids: int) -> OffloadingConnectorMetadata:
        """Compute all of a request's tokens in one step."""
        self.half.get_num_new_matched_tokens(request, 0)
        step = make_first_step(request.request_id, (list(block_ids),), request.num_tokens)
        return self.half.build_connector_meta(step)

    def store(self, request: FakeRequest) -> None:
        """Compute a request, and see its stores through."""
        blocks = range(self._next_block, self._next_block + 5)
        self._next_block += 5
        metadata = self.compute(request, *blocks)
        self.half.update_connector_output(report_jobs(metadata))
        self.half.request_finished(request)

    def load(self, request: FakeRequest, *block_ids: int) -> OffloadingConnectorMetadata:
        """Begin the load of a request of which the device holds nothing."""
        num_tokens, _ = self.half.get_num_new_matched_tokens(request, 0)
        assert num_tokens
        self.half.update_state_after_alloc(request, FakeBlocks((list(block_ids),)), num_tokens)
        return self.half.build_connector_meta(StepOutput())


def test_a_stored_prefix_is_found_beside_the_engines_steps() -> None:
    bench = Bench()
    bench.store(FakeRequest("a", PROMPT))

    assert bench.half.get_num_new_matched_tokens(FakeRequest("b", [*PROMPT, 99]), 0) == (16, True)


def test_what_the_device_holds_is_not_loaded() -> None:
    bench = Bench()
    bench.store(FakeRequest("a", PROMPT))

    assert bench.half.get_num_new_matched_tokens(FakeRequest("b", PROMPT), 8) == (8, True)
    assert bench.half.get_num_new_matched_tokens(FakeRequest("c", PROMPT), 16) == (0, False)


def test_one_token_at_least_is_left_to_compute() -> None:
    bench = Bench()
    bench.store(FakeRequest("a", PROMPT))

    assert bench.half.get_num_new_matched_tokens(FakeRequest("b", PROMPT[:16]), 0) == (12, True)


def test_a_client_can_forbid_or_limit_loading() -> None:
    bench = Bench()
    bench.store(FakeRequest("a", PROMPT))

    forbidden = FakeRequest("b", PROMPT, {"skip_load": True})
    limited = FakeRequest("c", PROMPT, {"max_load_tokens": 9})

    assert bench.half.get_num_new_matched_tokens(forbidden, 0) == (0, False)
    assert bench.half.get_num_new_matched_tokens(limited, 0) == (8, True)


def test_a_client_can_forbid_storing() -> None:
    bench = Bench()

    metadata = bench.compute(FakeRequest("a", PROMPT, {"skip_store": True}), 0, 1, 2, 3, 4)

    assert metadata.store_jobs == {}


def test_a_store_names_its_device_blocks_and_slots() -> None:
    bench = Bench()

    metadata = bench.compute(FakeRequest("a", PROMPT), 7, 6, 5, 4, 3)

    [job] = metadata.store_jobs.values()
    assert job.req_id == "a"
    assert block_ids_of(job.transfer_spec.source) == [7, 6, 5, 4]
    assert block_ids_of(job.transfer_spec.destination) == [0, 1, 2, 3]


def test_a_load_names_slots_and_the_device_blocks_after_those_that_are_held() -> None:
    bench = Bench()
    bench.store(FakeRequest("a", PROMPT))
    request = FakeRequest("b", PROMPT)
    assert bench.half.get_num_new_matched_tokens(request, 8) == (8, True)

    bench.half.update_state_after_alloc(request, FakeBlocks(([20, 21, 22, 23],)), 8)

    [job] = bench.half.build_connector_meta(StepOutput()).load_jobs.values()
    assert block_ids_of(job.transfer_spec.source) == [2, 3]
    assert block_ids_of(job.transfer_spec.destination) == [22, 23]
    assert isinstance(job.transfer_spec.destination, GPULoadStoreSpec)
    assert job.transfer_spec.destination.block_indices == (2,)


def test_asking_twice_before_blocks_are_allocated_changes_nothing() -> None:
    bench = Bench()
    bench.store(FakeRequest("a", PROMPT))
    request = FakeRequest("b", PROMPT)

    assert [bench.half.get_num_new_matched_tokens(request, 0) for _ in range(3)] == [(16, True)] * 3


def test_chunks_of_a_prefill_are_stored_as_they_are_computed() -> None:
    bench = Bench()
    request = FakeRequest("a", PROMPT)
    bench.half.get_num_new_matched_tokens(request, 0)
    first = make_first_step("a", ([0, 1],), 7)
    second = make_later_step("a", 7, 10, ([2, 3, 4],))

    stored = [bench.half.build_connector_meta(step).store_jobs for step in (first, second)]

    blocks = [[block_ids_of(job.transfer_spec.source) for job in jobs.values()] for jobs in stored]
    assert blocks == [[[0]], [[1, 2, 3]]]


def test_the_head_of_a_prefix_stored_in_chunks_outlives_its_tail() -> None:
    bench = Bench(num_blocks=4)
    request = FakeRequest("a", PROMPT)
    bench.half.get_num_new_matched_tokens(request, 0)
    first = make_first_step("a", ([0, 1],), 8)
    second = make_later_step("a", 8, 9, ([2, 3, 4],))
    for step in (first, second):
        bench.half.update_connector_output(report_jobs(bench.half.build_connector_meta(step)))

    bench.store(FakeRequest("b", list(range(50, 59))))

    assert bench.half.get_num_new_matched_tokens(FakeRequest("c", PROMPT), 0) == (8, True)


def test_a_request_that_was_answered_none_asks_the_manager_again_only_when_it_has_news() -> None:
    manager = TableManager(dict.fromkeys(keys_of(PROMPT)))
    half = OffloadingConnectorScheduler(FakeSpec(make_config(), manager))
    request = FakeRequest("a", PROMPT)

    assert half.get_num_new_matched_tokens(request, 0) == (None, False)
    manager.is_idle = True
    num_asked = len(manager.asked)
    assert half.get_num_new_matched_tokens(request, 0) == (None, False)
    assert len(manager.asked) == num_asked
    assert half.get_num_new_matched_tokens(request, 16) == (0, False)


def test_a_prefix_that_is_still_being_stored_is_waited_for() -> None:
    bench = Bench()
    stored = bench.compute(FakeRequest("a", PROMPT), 0, 1, 2, 3, 4)
    request = FakeRequest("b", PROMPT)

    assert bench.half.get_num_new_matched_tokens(request, 0) == (None, False)
    bench.half.update_connector_output(report_jobs(stored))
    assert bench.half.get_num_new_matched_tokens(request, 0) == (16, True)


def test_a_prefix_that_is_being_loaded_for_another_request_is_waited_for() -> None:
    bench = Bench()
    bench.store(FakeRequest("a", PROMPT))
    loading = bench.load(FakeRequest("b", PROMPT), 20, 21, 22, 23)
    request = FakeRequest("c", [*PROMPT, 1, 2, 3])

    assert bench.half.get_num_new_matched_tokens(request, 0) == (None, False)
    assert bench.half.get_num_new_matched_tokens(request, 0) == (None, False)
    bench.half.update_connector_output(report_jobs(loading))
    assert bench.half.get_num_new_matched_tokens(request, 16) == (0, False)
    assert bench.half.get_num_new_matched_tokens(request, 0) == (16, True)


def test_blocks_are_pinned_until_every_worker_has_loaded_them() -> None:
    bench = Bench(num_blocks=4)
    bench.half = OffloadingConnectorScheduler(FakeSpec(make_config(num_workers=2), bench.manager))
    stored = bench.compute(FakeRequest("a", PROMPT), 0, 1, 2, 3, 4)
    bench.half.update_connector_output(report_jobs(stored, num_workers=2))
    loading = bench.load(FakeRequest("b", PROMPT), 20, 21, 22, 23)

    bench.half.update_connector_output(report_jobs(loading))
    assert bench.compute(FakeRequest("c", list(range(50, 59))), 30, 31, 32).store_jobs == {}
    bench.half.update_connector_output(report_jobs(loading))
    assert bench.compute(FakeRequest("d", list(range(50, 59))), 30, 31, 32).store_jobs != {}


def test_a_store_that_failed_on_one_of_two_workers_is_not_kept() -> None:
    bench = Bench(num_workers=2)
    stored = bench.compute(FakeRequest("a", PROMPT), 0, 1, 2, 3, 4)

    bench.half.update_connector_output(report_jobs(stored, failed=stored.store_jobs))
    bench.half.update_connector_output(report_jobs(stored))

    assert bench.half.get_num_new_matched_tokens(FakeRequest("b", PROMPT), 0) == (0, False)


def test_a_request_whose_load_failed_never_loads_again() -> None:
    bench = Bench()
    bench.store(FakeRequest("a", PROMPT))
    request = FakeRequest("b", PROMPT)
    loading = bench.load(request, 20, 21, 22, 23)

    bench.half.update_connector_output(report_jobs(loading, failed=loading.load_jobs))

    assert bench.half.get_num_new_matched_tokens(request, 0) == (0, False)
    assert bench.half.get_num_new_matched_tokens(FakeRequest("c", PROMPT), 0) == (16, True)


def test_a_key_that_is_gone_at_prepare_load_is_a_failed_load() -> None:
    bench = Bench(num_blocks=4)
    bench.store(FakeRequest("a", PROMPT))
    request = FakeRequest("b", PROMPT)
    assert bench.half.get_num_new_matched_tokens(request, 0) == (16, True)
    bench.manager.prepare_store(keys_of(list(range(60, 64))), bench.half._requests["b"].context)

    bench.half.update_state_after_alloc(request, FakeBlocks(([20, 21, 22, 23],)), 16)
    metadata = bench.half.build_connector_meta(StepOutput())

    [(job_id, job)] = metadata.load_jobs.items()
    assert isinstance(job.transfer_spec.source, LostLoadStoreSpec)
    assert block_ids_of(job.transfer_spec.destination) == [20, 21, 22, 23]
    bench.half.update_connector_output(report_jobs(metadata, failed=[job_id]))
    assert bench.half.get_num_new_matched_tokens(request, 0) == (0, False)
    bench.manager.check()


def test_an_aborted_request_keeps_its_load_until_the_workers_have_ended_it() -> None:
    bench = Bench(num_blocks=4)
    bench.store(FakeRequest("a", PROMPT))
    request = FakeRequest("b", PROMPT)
    loading = bench.load(request, 20, 21, 22, 23)

    assert bench.half.request_finished(request) == (False, None)
    assert bench.compute(FakeRequest("c", list(range(50, 59))), 30, 31, 32).store_jobs == {}
    bench.half.update_connector_output(report_jobs(loading))
    assert bench.compute(FakeRequest("d", list(range(50, 59))), 30, 31, 32).store_jobs != {}


def test_a_name_that_is_used_again_is_another_request() -> None:
    bench = Bench()
    bench.store(FakeRequest("a", PROMPT))
    first = FakeRequest("b", PROMPT)
    loading = bench.load(first, 20, 21, 22, 23)
    bench.half.request_finished(first)

    assert bench.half.get_num_new_matched_tokens(FakeRequest("b", PROMPT), 0) == (None, False)
    bench.half.update_connector_output(report_jobs(loading, failed=loading.load_jobs))
    assert bench.half.get_num_new_matched_tokens(FakeRequest("b", PROMPT), 0) == (16, True)


def test_whoever_gets_a_block_of_an_unfinished_store_makes_it_finish_first() -> None:
    bench = Bench()
    request = FakeRequest("a", PROMPT)
    stored = bench.compute(request, 0, 1, 2, 3, 4)
    bench.half.request_finished(request)

    harmless = bench.compute(FakeRequest("b", [7, 8]), 4)
    harmful = bench.compute(FakeRequest("c", [7, 8]), 2)
    again = bench.compute(FakeRequest("d", [7, 8]), 1)

    assert harmless.jobs_to_flush is None
    assert harmful.jobs_to_flush == set(stored.store_jobs)
    assert again.jobs_to_flush is None


def test_a_load_into_a_block_of_an_unfinished_store_makes_it_finish_first() -> None:
    bench = Bench()
    bench.store(FakeRequest("a", PROMPT))
    other = FakeRequest("b", list(range(50, 67)))
    stored = bench.compute(other, 30, 31, 32, 33, 34)
    bench.half.request_finished(other)

    loading = bench.load(FakeRequest("c", PROMPT), 33, 21, 22, 23)

    assert loading.jobs_to_flush == set(stored.store_jobs)


def test_sharing_a_block_of_an_unfinished_store_needs_no_fence() -> None:
    bench = Bench()
    bench.compute(FakeRequest("a", PROMPT), 0, 1, 2, 3, 4)
    bench.half.get_num_new_matched_tokens(FakeRequest("b", PROMPT), 16)
    step = make_first_step("b", ([0, 1, 2, 3, 9],), 1, 16)

    assert bench.half.build_connector_meta(step).jobs_to_flush is None


def test_pre_emption_makes_the_requests_stores_finish_first() -> None:
    bench = Bench()
    stored = bench.compute(FakeRequest("a", PROMPT), 0, 1, 2, 3, 4)

    metadata = bench.half.build_connector_meta(StepOutput(preempted_req_ids={"a"}))

    assert metadata.jobs_to_flush == set(stored.store_jobs)


def test_a_store_that_ended_is_flushed_by_nobody() -> None:
    bench = Bench()
    bench.store(FakeRequest("a", PROMPT))

    assert bench.compute(FakeRequest("b", [7, 8]), 2).jobs_to_flush is None


def test_a_store_is_open_from_the_step_that_computed_it_until_every_worker_has_reported_it() -> None:
    bench = Bench(num_workers=2)
    assert not bench.half.has_open_stores()

    stored = bench.compute(FakeRequest("a", PROMPT), 0, 1, 2, 3, 4)
    bench.half.build_connector_meta(StepOutput())
    bench.half.update_connector_output(report_jobs(stored))
    assert bench.half.has_open_stores()
    bench.half.update_connector_output(report_jobs(stored))
    assert not bench.half.has_open_stores()


def test_a_step_is_idle_when_it_computes_no_token() -> None:
    bench = Bench()

    assert not bench.compute(FakeRequest("a", PROMPT), 0, 1, 2, 3, 4).is_idle
    assert bench.half.build_connector_meta(StepOutput()).is_idle


def test_events_name_content_hashes_and_leave_sizes_to_the_device_cache() -> None:
    bench = Bench(num_blocks=4)
    bench.store(FakeRequest("a", PROMPT))
    bench.store(FakeRequest("b", list(range(50, 55))))

    stored, removed, other = bench.half.take_events()

    assert stored == BlockStored(tuple(hash_tokens(PROMPT)), "CPU", block_size=0)
    assert removed == BlockRemoved((hash_tokens(PROMPT)[3],), "CPU")
    assert other == BlockStored(tuple(hash_tokens(list(range(50, 55)))), "CPU")
    assert bench.half.take_events() == []


def test_after_a_reset_nothing_stored_before_is_found() -> None:
    bench = Bench()
    bench.store(FakeRequest("a", PROMPT))

    bench.half.reset()

    assert bench.half.get_num_new_matched_tokens(FakeRequest("b", PROMPT), 0) == (0, False)


def test_a_reset_fails_loads_under_way_and_frees_their_slots_when_reported() -> None:
    bench = Bench(num_blocks=4)
    bench.store(FakeRequest("a", PROMPT))
    request = FakeRequest("b", PROMPT)
    loading = bench.load(request, 20, 21, 22, 23)

    bench.half.reset()

    metadata = bench.half.build_connector_meta(StepOutput())
    assert metadata.jobs_to_fail == set(loading.load_jobs)
    bench.half.update_connector_output(report_jobs(loading))
    assert bench.half.get_num_new_matched_tokens(request, 0) == (0, False)
    bench.manager.check()
    assert bench.compute(FakeRequest("c", PROMPT), 0, 1, 2, 3, 4).store_jobs != {}


def test_a_load_that_was_not_sent_before_a_reset_is_sent_as_lost() -> None:
    bench = Bench()
    bench.store(FakeRequest("a", PROMPT))
    request = FakeRequest("b", PROMPT)
    bench.half.get_num_new_matched_tokens(request, 0)
    bench.half.update_state_after_alloc(request, FakeBlocks(([20, 21, 22, 23],)), 16)

    bench.half.reset()

    [job] = bench.half.build_connector_meta(StepOutput()).load_jobs.values()
    assert isinstance(job.transfer_spec.source, LostLoadStoreSpec)


def test_a_store_of_before_a_reset_ends_without_being_kept_or_mistaken_for_a_newer_one() -> None:
    bench = Bench()
    request = FakeRequest("a", PROMPT)
    old = bench.compute(request, 0, 1, 2, 3, 4)
    bench.half.reset()
    bench.half.request_finished(request)

    early = bench.compute(FakeRequest("b", PROMPT), 5, 6, 7, 8, 9)
    bench.half.update_connector_output(report_jobs(old))

    assert early.store_jobs == {}
    assert bench.half.get_num_new_matched_tokens(FakeRequest("c", PROMPT), 0) == (0, False)
    bench.manager.check()


def test_blocks_computed_before_a_reset_are_not_stored_after_it() -> None:
    bench = Bench()
    request = FakeRequest("a", PROMPT)
    bench.half.get_num_new_matched_tokens(request, 0)
    first = make_first_step("a", ([0, 1, 2, 3, 4],), 3)
    bench.half.build_connector_meta(first)
    bench.half.reset()

    second = make_later_step("a", 3, 14)

    assert bench.half.build_connector_meta(second).store_jobs == {}


def test_stats_count_jobs_and_include_the_managers() -> None:
    bench = Bench()
    bench.store(FakeRequest("a", PROMPT))

    stats = bench.half.stats()

    assert stats["connector.store_jobs"] == 1
    assert stats["connector.open_jobs"] == stats["connector.requests"] == stats["connector.fenced_jobs"] == 0
    assert stats["primary.stored"] == 4


def test_searches_depend_on_the_manager_alone() -> None:
    keys = keys_of(PROMPT)
    context = ReqContext("a")
    manager = TableManager({keys[0]: True, keys[1]: True, keys[3]: None})

    assert maximal_prefix_lookup(manager, keys, context) == 2
    assert sliding_window_lookup(manager, keys[:3], 2, context) == 2


def test_blocks_of_one_salt_are_not_found_with_another() -> None:
    bench = Bench()
    bench.store(FakeRequest("a", PROMPT))

    assert bench.half.get_num_new_matched_tokens(FakeRequest("b", PROMPT), 0, b"adapter") == (0, False)


def test_a_policy_that_learns_is_told_of_a_request_once_with_the_blocks_of_its_prompt() -> None:
    bench = Bench(cache_policy=NOTING_LEARNER)
    learner = NotingLearner.made[-1]
    request = FakeRequest("a", list(PROMPT), {"skip_load": True})

    bench.half.get_num_new_matched_tokens(request, 0)
    bench.store(request)

    assert [(told.req_id, told.chains, told.params) for told in learner.requests] == [
        ("a", (tuple(keys_of(PROMPT)),), {"skip_load": True})
    ]
    assert learner.offered == [("a", keys_of(PROMPT))]
    assert learner.finished == ["a"]


def test_what_the_policy_refuses_is_neither_stored_nor_offered_again() -> None:
    bench = Bench(cache_policy=NOTING_LEARNER)
    learner = NotingLearner.made[-1]
    learner.refused = set(keys_of(PROMPT)[2:])
    request = FakeRequest("a", list(PROMPT))

    bench.compute(request, *range(5))
    bench.half.build_connector_meta(StepOutput(num_scheduled_tokens={"a": 0}))

    assert len(learner.offered) == 1
    assert bench.manager.stats()["primary.in_flight_blocks"] == 2
