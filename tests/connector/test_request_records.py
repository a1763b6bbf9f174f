"""Where each prompt token came from: one origin or one cause, for every way in which a request can begin."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.connector.fakes import (
    FakeBlocks,
    FakeRegionSpec,
    FakeRequest,
    FakeSpec,
    TableManager,
    keys_of,
    make_config,
    make_first_step,
    report_jobs,
)

from kvtier.base import OffloadingManager, OffloadKey, ReqContext, TransferJobId
from kvtier.config import GroupKind, KVGroup
from kvtier.connector.jobs import JobKind, OpenTransfer
from kvtier.connector.request_records import MAX_RECORDS
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.engines.common.step import CachedRequests, StepOutput
from kvtier.misses import Miss, MissCause, MissedRun, RequestRecord
from kvtier.testing.clock import ManualClock

PROMPT = list(range(18))
TABLE = ([0, 1, 2, 3, 4],)
EVICTED = Miss(MissCause.EVICTED, "host", {"ago_s": 3.0})
PARTIAL = Miss(MissCause.PARTIAL_BLOCK)
NEVER_SEEN = Miss(MissCause.NEVER_SEEN)


class ExplainingManager(CPUOffloadingManager):
    """Gives one explanation of every block, and remembers what it was asked."""

    def __init__(self, miss: Miss | None = EVICTED) -> None:
        super().__init__(16)
        self.miss = miss
        self.asked: list[OffloadKey] = []

    def explain(
        self, key: OffloadKey, req_context: ReqContext, behind: Sequence[OffloadKey] = ()
    ) -> Miss | None:
        self.asked.append(key)
        return self.miss


@dataclass
class Bench:
    """A scheduler half and the calls of an engine."""

    manager: OffloadingManager = field(default_factory=ExplainingManager)
    is_prompt_only: bool = False
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        spec = FakeSpec(make_config(offload_prompt_only=self.is_prompt_only), self.manager)
        self.half = OffloadingConnectorScheduler(spec, clock=self.clock, wall_clock=lambda: 1000.0)

    @property
    def latest(self) -> RequestRecord:
        for record in self.half.records.latest:
            record.check()
        return self.half.records.latest[-1]

    def store(self, tokens: list[int], num_blocks: int | None = None) -> None:
        """Keep the first blocks of a prompt in host memory."""
        keys, context = keys_of(tokens)[:num_blocks], ReqContext("stored")
        self.manager.prepare_store(keys, context)
        self.manager.complete_store(keys, context)

    def begin(self, request: FakeRequest, num_local: int = 0) -> int:
        """Search a request and begin it."""
        found, _ = self.half.get_num_new_matched_tokens(request, num_local)
        assert found is not None
        self.half.update_state_after_alloc(request, FakeBlocks(TABLE), found)
        return found

    def end_load(self, *, is_good: bool = True) -> None:
        """Let the workers report the loads that have begun."""
        metadata = self.half.build_connector_meta(StepOutput())
        failed = () if is_good else list(metadata.load_jobs)
        self.half.update_connector_output(report_jobs(metadata, failed=failed))

    def compute(self, request: FakeRequest) -> None:
        """Compute the prompt in one step, and see its stores through."""
        step = make_first_step(request.request_id, TABLE, request.num_tokens)
        self.half.update_connector_output(report_jobs(self.half.build_connector_meta(step)))


def test_a_prompt_of_which_nothing_is_held_is_missed_for_the_managers_cause() -> None:
    bench = Bench()
    bench.begin(FakeRequest("a", PROMPT))

    assert bench.latest == RequestRecord(
        "a", 1000.0, 18, {}, (MissedRun(0, 16, EVICTED), MissedRun(16, 2, PARTIAL)), 0.0, keys_of(PROMPT)[0]
    )


def test_a_request_that_misses_nothing_asks_for_no_cause_and_divides_nothing() -> None:
    manager = ExplainingManager()
    bench = Bench(manager)
    bench.store(PROMPT)
    request = FakeRequest("a", PROMPT)
    bench.begin(request)

    begun = bench.half.records._loading[bench.half._requests["a"]]
    assert (manager.asked, begun.missed) == ([], ())
    bench.end_load()
    assert bench.latest.missed == (MissedRun(16, 2, PARTIAL),)


def test_the_manager_is_asked_once_for_the_first_block_that_is_missing() -> None:
    manager = ExplainingManager()
    bench = Bench(manager)
    bench.store(PROMPT, num_blocks=2)
    bench.begin(FakeRequest("a", PROMPT))
    bench.end_load()

    assert manager.asked == [keys_of(PROMPT)[2]]
    assert bench.latest.tokens_by_origin == {"host": 8}
    assert bench.latest.missed == (MissedRun(8, 8, EVICTED), MissedRun(16, 2, PARTIAL))


def test_nothing_is_asked_when_nothing_is_missing() -> None:
    manager = ExplainingManager()
    bench = Bench(manager)
    bench.store(PROMPT)
    bench.begin(FakeRequest("a", PROMPT), num_local=4)
    bench.end_load()
    bench.begin(FakeRequest("b", PROMPT), num_local=16)

    first, second = bench.half.records.latest
    assert first.tokens_by_origin == {"device": 4, "host": 12}
    assert second.tokens_by_origin == {"device": 16}
    assert first.missed == second.missed == (MissedRun(16, 2, PARTIAL),)
    assert manager.asked == []
    assert second.first_key is None


def test_the_last_token_is_computed_even_when_the_device_has_the_whole_prompt() -> None:
    bench = Bench()
    bench.begin(FakeRequest("a", PROMPT[:16]), num_local=16)

    assert bench.latest.tokens_by_origin == {"device": 15}
    assert bench.latest.missed == (MissedRun(15, 1, PARTIAL),)


def test_a_prompt_shorter_than_a_block_is_a_partial_block() -> None:
    bench = Bench()
    bench.begin(FakeRequest("a", PROMPT[:3]))

    assert bench.latest.missed == (MissedRun(0, 3, PARTIAL),)


def test_a_manager_that_explains_nothing_leaves_never_seen() -> None:
    for manager in (ExplainingManager(None), CPUOffloadingManager(16)):
        bench = Bench(manager)
        bench.begin(FakeRequest("a", PROMPT))
        assert bench.latest.missed[0] == MissedRun(0, 16, NEVER_SEEN)


def test_what_the_requests_own_limit_keeps_from_loading_is_limited() -> None:
    bench = Bench()
    bench.store(PROMPT)
    bench.begin(FakeRequest("a", PROMPT, {"max_load_tokens": 9}))
    bench.end_load()
    assert bench.latest.tokens_by_origin == {"host": 8}
    limited = Miss(MissCause.LIMITED, "", {"max_load_tokens": 9})
    assert bench.latest.missed == (MissedRun(8, 8, limited), MissedRun(16, 2, PARTIAL))

    bench.begin(FakeRequest("b", PROMPT, {"skip_load": True}))
    assert bench.latest.tokens_by_origin == {}
    limited = Miss(MissCause.LIMITED, "", {"max_load_tokens": 0})
    assert bench.latest.missed == (MissedRun(0, 16, limited), MissedRun(16, 2, PARTIAL))


def test_a_load_that_fails_turns_its_tokens_into_missed_ones() -> None:
    bench = Bench()
    bench.store(PROMPT, num_blocks=3)
    bench.begin(FakeRequest("a", PROMPT), num_local=4)
    assert not bench.half.records.latest  # nothing is known before the load has ended
    bench.end_load(is_good=False)

    failed = Miss(MissCause.LOAD_FAILED, "host", {"reason": "copy to the device"})
    assert bench.latest.tokens_by_origin == {"device": 4}
    assert bench.latest.missed == (
        MissedRun(4, 8, failed),
        MissedRun(12, 4, EVICTED),
        MissedRun(16, 2, PARTIAL),
    )


def test_a_reset_fails_the_loads_under_way_by_name() -> None:
    bench = Bench()
    bench.store(PROMPT)
    bench.begin(FakeRequest("a", PROMPT))
    bench.half.reset()
    bench.end_load()

    assert bench.latest.missed[0] == MissedRun(
        0, 16, Miss(MissCause.LOAD_FAILED, "host", {"reason": "reset"})
    )


def test_a_block_that_leaves_between_search_and_load_is_named() -> None:
    bench = Bench()
    bench.store(PROMPT)
    request = FakeRequest("a", PROMPT)
    found, _ = bench.half.get_num_new_matched_tokens(request, 0)
    bench.manager.reset()
    bench.half.update_state_after_alloc(request, FakeBlocks(TABLE), found or 0)
    bench.end_load(is_good=False)

    lost = Miss(MissCause.LOAD_FAILED, "host", {"reason": "evicted before the load"})
    assert bench.latest.missed[0] == MissedRun(0, 16, lost)


def test_a_request_has_one_record_of_its_prompt_however_often_it_begins() -> None:
    bench = Bench()
    request = FakeRequest("a", [*PROMPT])
    bench.begin(request)
    bench.compute(request)
    request.tokens += range(100, 110)
    step = StepOutput(preempted_req_ids={"a"}, scheduled_cached_reqs=CachedRequests())
    bench.half.build_connector_meta(step)
    bench.begin(request)
    bench.end_load()

    assert len(bench.half.records.latest) == 1
    assert bench.latest.num_prompt_tokens == 18


def test_a_request_that_never_begins_has_no_record() -> None:
    bench = Bench()
    request = FakeRequest("a", PROMPT)
    bench.half.get_num_new_matched_tokens(request, 0)
    bench.half.request_finished(request)

    assert not bench.half.records.latest


def test_a_hit_that_the_engine_does_not_load_is_the_engines_choice() -> None:
    bench = Bench()
    bench.store(PROMPT)
    request = FakeRequest("a", PROMPT)
    bench.half.get_num_new_matched_tokens(request, 0)
    bench.half.update_state_after_alloc(request, FakeBlocks(TABLE), 0)

    declined = Miss(MissCause.LIMITED, "", {"reason": "the engine did not load it"})
    assert bench.latest.missed == (MissedRun(0, 16, declined), MissedRun(16, 2, PARTIAL))


def test_before_the_workers_are_connected_host_memory_is_down() -> None:
    spec = FakeRegionSpec(make_config(), ExplainingManager())
    half = OffloadingConnectorScheduler(spec)
    request = FakeRequest("a", PROMPT)
    for _ in range(100_000):
        found, _ = half.get_num_new_matched_tokens(request, 0)
        if found is not None:
            break
        half.build_connector_meta(StepOutput())
    half.update_state_after_alloc(request, FakeBlocks(TABLE), 0)

    (record,) = half.records.latest
    record.check()
    down = Miss(MissCause.TIER_DOWN, "host", {"reason": "workers not connected"})
    assert record.missed[0] == MissedRun(0, 16, down)


def test_what_one_group_holds_and_another_does_not_is_group_short() -> None:
    groups = (KVGroup(4, ("a",), 64), KVGroup(4, ("b",), 64, GroupKind.WINDOW, window_tokens=5))
    hashes = FakeRequest("a", PROMPT).block_hashes
    held = {OffloadKey(block_hash + bytes(4)): True for block_hash in hashes[:3]}
    held[OffloadKey(hashes[0] + b"\0\0\0\1")] = True
    half = OffloadingConnectorScheduler(FakeSpec(make_config(groups=groups), TableManager({**held})))
    request = FakeRequest("a", PROMPT)
    assert half.get_num_new_matched_tokens(request, 0) == (4, True)
    state = half._requests["a"]
    half.records.on_begun(state, 4)
    state.load.tokens_by_tier = {"CPU": 4}
    half.records.on_load_ended(OpenTransfer(TransferJobId(0), JobKind.LOAD, state, [], 0, []))

    short = Miss(MissCause.GROUP_SHORT, "", {"group": 1, "cause": "never_seen"})
    (record,) = half.records.latest
    assert record.missed == (MissedRun(4, 8, short), MissedRun(12, 4, NEVER_SEEN), MissedRun(16, 2, PARTIAL))
    assert record.first_key == OffloadKey(hashes[2] + b"\0\0\0\1")  # of the window's last block


def test_blocks_that_a_request_kept_from_being_stored_are_named_for_the_next_one() -> None:
    for params, is_prompt_only, reason in (
        ({"skip_store": True}, False, "skip_store"),
        ({"max_store_tokens": 0}, False, "skip_store"),
        ({"max_store_tokens": 3}, False, "max_store_tokens"),
        (None, True, "prompt_only"),
    ):
        bench = Bench(CPUOffloadingManager(16), is_prompt_only)
        prompt = PROMPT if params else PROMPT[:2]
        first = FakeRequest("a", prompt, params)
        bench.begin(first)
        first.tokens = [*PROMPT, 99]
        bench.compute(first)
        bench.half.request_finished(first)
        bench.clock.advance(7.0)
        bench.begin(FakeRequest("b", PROMPT))

        missed = bench.latest.missed[0].miss
        assert missed == Miss(MissCause.NOT_STORED, "host", {"reason": reason, "ago_s": 7.0})


def test_the_last_token_of_an_answer_is_never_computed_so_its_block_was_not_kept_from_being_stored() -> None:
    bench = Bench(CPUOffloadingManager(16))
    first = FakeRequest("a", PROMPT[:7], {"skip_store": True})
    bench.begin(first)
    bench.compute(first)
    first.tokens.append(
        PROMPT[7]
    )  # the eighth token fills the second block, and its KV is computed by no step
    bench.half.request_finished(first)

    bench.begin(FakeRequest("b", PROMPT))
    bench.begin(FakeRequest("c", PROMPT), num_local=4)

    causes = [record.missed[0].miss.cause for record in bench.half.records.latest]
    assert causes[1:] == [MissCause.NOT_STORED, MissCause.NEVER_SEEN]


def test_what_the_manager_knows_of_a_block_outweighs_that_a_request_kept_it_from_being_stored() -> None:
    bench = Bench(ExplainingManager(EVICTED))
    first = FakeRequest("a", [*PROMPT], {"skip_store": True})
    bench.begin(first)
    bench.compute(first)
    first.tokens.append(99)
    bench.half.request_finished(first)
    bench.begin(FakeRequest("b", PROMPT))

    assert bench.latest.missed[0].miss == EVICTED


def test_blocks_for_which_host_memory_had_no_room_are_named() -> None:
    bench = Bench(CPUOffloadingManager(2))
    bench.store([1, 2, 3, 4, 5, 6, 7, 8])
    bench.manager.prepare_load(keys_of([1, 2, 3, 4, 5, 6, 7, 8]), ReqContext("pins"))
    first = FakeRequest("a", [*PROMPT])
    bench.begin(first)
    bench.compute(first)
    first.tokens.append(99)
    bench.half.request_finished(first)
    bench.begin(FakeRequest("b", PROMPT))

    assert bench.latest.missed[0].miss == Miss(
        MissCause.NOT_STORED, "host", {"reason": "no_room", "ago_s": 0.0}
    )


def test_a_request_that_is_not_searched_for_has_a_record_with_the_reason() -> None:
    bench = Bench()
    request, other = FakeRequest("a", PROMPT), FakeRequest("b", PROMPT)
    reason = Miss(MissCause.LIMITED, "", {"reason": "prompt_logprobs"})
    bench.half.records.exclude(request, 4, reason)
    bench.half.records.exclude(other, 0, reason)
    bench.half.update_state_after_alloc(request, FakeBlocks(TABLE), 0)
    bench.half.request_finished(request)
    bench.half.request_finished(other)
    bench.half.update_state_after_alloc(other, FakeBlocks(TABLE), 0)

    (record,) = bench.half.records.latest
    assert record.tokens_by_origin == {"device": 4}
    assert record.missed == (MissedRun(4, 14, reason),)


def test_counts_of_all_requests_are_among_the_statistics() -> None:
    bench = Bench()
    bench.store(PROMPT, num_blocks=1)
    for number in range(3):
        bench.begin(FakeRequest(f"r{number}", PROMPT), num_local=4)

    stats = bench.half.stats()
    assert stats["connector.recorded_requests"] == 3
    assert stats["connector.prompt_tokens.device"] == 12
    assert stats["connector.missed_tokens.evicted.host"] == 36
    assert stats["connector.missed_tokens.partial_block"] == 6


def test_only_the_latest_records_are_kept_and_all_requests_are_counted() -> None:
    bench = Bench()
    for number in range(2500):
        request = FakeRequest(f"r{number}", PROMPT)
        bench.begin(request)
        bench.half.request_finished(request)

    assert len(bench.half.records._unread) < MAX_RECORDS  # also while nothing reads them
    assert [record.req_id for record in bench.half.records.latest] == [f"r{n}" for n in range(1500, 2500)]
    assert bench.half.records.num_requests == 2500
    assert sum(bench.half.records.missed_tokens.values()) == 2500 * 18


def test_the_wait_from_the_first_search_to_the_begin_is_recorded() -> None:
    bench = Bench(TableManager({}))
    request = FakeRequest("a", PROMPT)
    bench.half.get_num_new_matched_tokens(request, 0)
    bench.clock.advance(1.5)
    bench.begin(request)

    assert bench.latest.waited_s == 1.5


def test_a_prefix_whose_store_never_ends_is_computed_after_the_deadline() -> None:
    clock = ManualClock()
    bench = Bench(CPUOffloadingManager(16, clock=clock, lookup_deadline_s=5.0), clock=clock)
    bench.store(PROMPT, num_blocks=2)
    bench.manager.prepare_store(keys_of(PROMPT), ReqContext("its worker hangs"))
    request = FakeRequest("a", PROMPT)
    for _ in range(5):
        assert bench.half.get_num_new_matched_tokens(request, 0) == (None, False)
        bench.half.build_connector_meta(StepOutput())
        clock.advance(1.0)

    assert bench.begin(request) == 8
    bench.end_load()
    in_flight, partial = bench.latest.missed
    assert (in_flight[:2], in_flight.miss.cause) == ((8, 8), MissCause.IN_FLIGHT)
    assert (partial, bench.latest.waited_s) == (MissedRun(16, 2, PARTIAL), 5.0)
