"""An engine of one's own may use a request's name again: the earlier load is never taken for the later one."""

from collections import Counter

import pytest
from tests.connector.fakes import (
    HASH_TOKENS,
    FakeBlocks,
    FakeHandler,
    FakeRequest,
    FakeSpec,
    keys_of,
    make_config,
    make_first_step,
)

from kvtier.base import CanonicalKVCaches, GPULoadStoreSpec, HandlerEntry, ReqContext, TransferType
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.engines.common.step import StepOutput, WorkerOutput, begin_step, end_step

FIRST, SECOND = list(range(9)), list(range(100, 113))


class Engine:
    """Knows of loads what workers report: a request is loaded when each of them has named it once."""

    def __init__(self, num_workers: int, *, is_declining: bool = False) -> None:
        config = make_config(num_workers)
        self.manager = CPUOffloadingManager(16)
        self.scheduler = OffloadingConnectorScheduler(FakeSpec(config, self.manager))
        self.handlers = [
            FakeHandler(TransferType("CPU", "GPU"), is_declining=is_declining) for _ in range(num_workers)
        ]
        self.workers = []
        for handler in self.handlers:
            entry = HandlerEntry(CPULoadStoreSpec, GPULoadStoreSpec, handler)
            worker = OffloadingConnectorWorker(FakeSpec(config, entries=[entry]))
            worker.register_kv_caches(CanonicalKVCaches([], []))
            self.workers.append(worker)
        self.num_loaded: Counter[str] = Counter()
        self.failed: dict[str, list[int]] = {}
        self._reports: Counter[str] = Counter()
        for tokens in (FIRST, SECOND):
            self.manager.prepare_store(keys_of(tokens), ReqContext("held"))
            self.manager.complete_store(keys_of(tokens), ReqContext("held"))

    def ask(self, request: FakeRequest) -> tuple[int | None, bool]:
        """Search for a waiting request."""
        return self.scheduler.get_num_new_matched_tokens(request, 0)

    def begin(self, request: FakeRequest, *block_ids: int) -> None:
        """Begin the load of all of a request's full blocks."""
        num_tokens = len(block_ids) * HASH_TOKENS
        assert self.ask(request) == (num_tokens, True)
        self.scheduler.update_state_after_alloc(request, FakeBlocks((list(block_ids),)), num_tokens)
        self.step()

    def step(self) -> None:
        """Do a step without tokens."""
        metadata = self.scheduler.build_connector_meta(StepOutput())
        for worker in self.workers:
            begin_step(worker, metadata)
            loads, report = end_step(worker, metadata)
            self.failed |= {name: blocks for name, blocks in loads.items() if blocks is not None}
            for name in loads:
                self._reports[name] += 1
                if self._reports[name] == len(self.workers):
                    del self._reports[name]
                    self.num_loaded[name] += 1
            self.scheduler.update_connector_output(WorkerOutput(report))

    def end(self, worker: int, *, success: bool = True) -> None:
        """Let a worker's copies end, and do the step that reports them."""
        handler = self.handlers[worker]
        if not success:
            handler.failing |= set(handler.begun)
        handler.end(*handler.begun)
        self.step()


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("success", [True, False])
def test_the_next_request_of_the_name_waits_until_every_worker_has_reported_the_load(
    num_workers: int, success: bool
) -> None:
    engine = Engine(num_workers)
    first, second = FakeRequest("a", FIRST), FakeRequest("a", SECOND)
    engine.begin(first, 0, 1)
    engine.scheduler.request_finished(first)

    for worker in range(num_workers):
        assert engine.ask(second) == (None, False)
        engine.step()
        assert engine.num_loaded == {}
        engine.end(worker, success=success)

    assert engine.num_loaded == {"a": 1}
    assert engine.failed == ({} if success else {"a": [0, 1]})
    engine.failed.clear()
    engine.begin(second, 5, 6, 7)
    assert engine.num_loaded == {"a": 1}
    for worker in range(num_workers):
        engine.end(worker)
    assert engine.num_loaded == {"a": 2}
    assert engine.failed == {}
    assert engine.scheduler.is_idle() is False
    engine.scheduler.request_finished(second)
    assert engine.scheduler.is_idle()


def test_a_name_that_is_used_a_third_time_waits_too_and_other_names_do_not() -> None:
    engine = Engine(1)
    first, second, third = FakeRequest("a", FIRST), FakeRequest("a", SECOND), FakeRequest("a", SECOND)
    engine.begin(first, 0, 1)
    engine.scheduler.request_finished(first)
    assert engine.ask(second) == (None, False)
    engine.scheduler.request_finished(second)
    assert engine.ask(third) == (None, False)

    assert engine.ask(FakeRequest("b", SECOND)) == (12, True)
    engine.end(0)

    assert engine.ask(third) == (12, True)


def test_a_load_that_a_worker_declines_is_reported_and_ends_the_wait() -> None:
    engine = Engine(2, is_declining=True)
    first, second = FakeRequest("a", FIRST), FakeRequest("a", SECOND)
    num_tokens = 2 * HASH_TOKENS
    assert engine.ask(first) == (num_tokens, True)
    engine.scheduler.update_state_after_alloc(first, FakeBlocks(([0, 1],)), num_tokens)
    engine.scheduler.request_finished(first)
    assert engine.ask(second) == (None, False)

    engine.step()

    assert engine.num_loaded == {"a": 1}
    assert engine.ask(second) == (12, True)


def test_a_load_that_a_reset_made_void_keeps_its_name_until_it_is_reported() -> None:
    engine = Engine(2)
    first, second = FakeRequest("a", FIRST), FakeRequest("a", SECOND)
    engine.begin(first, 0, 1)
    engine.scheduler.request_finished(first)
    engine.scheduler.reset()

    assert engine.ask(second) == (None, False)
    engine.end(0)
    assert engine.ask(second) == (None, False)
    engine.end(1)

    assert engine.ask(second) == (0, False)
    assert engine.failed == {"a": [0, 1]}


def test_a_store_under_the_name_delays_no_request() -> None:
    engine = Engine(1)
    first = FakeRequest("a", list(range(200, 209)))
    assert engine.ask(first) == (0, False)
    step = make_first_step("a", ([0, 1, 2],), first.num_tokens)
    engine.scheduler.build_connector_meta(step)
    engine.scheduler.request_finished(first)
    assert engine.scheduler.has_open_stores()

    assert engine.ask(FakeRequest("a", SECOND)) == (12, True)
