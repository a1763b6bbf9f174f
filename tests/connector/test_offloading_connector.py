"""Both halves with the real specs, handlers and tensors: bytes go out, are overwritten, and come back."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.connector.fakes import HASH_TOKENS, FakeBlocks, FakeRequest, make_first_step

from kvtier.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.connector import ConnectorRole, OffloadingConnector
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.engines.common.step import StepOutput, WorkerOutput, begin_step, end_step

NUM_DEVICE_BLOCKS = 12
PAGE_BYTES = 64
PROMPT = list(range(17))
TIERS = [{"type": "example"}]
STEP_LIMIT = 10_000


class Engine:
    """An engine in one process: two connectors, one device tensor, and a forward pass that is a fill."""

    def __init__(self, config: OffloadingConfig) -> None:
        self.connectors = [
            OffloadingConnector(config, ConnectorRole.SCHEDULER),
            OffloadingConnector(replace(config, rank=0), ConnectorRole.WORKER),
        ]
        self.pages = torch.zeros((NUM_DEVICE_BLOCKS, PAGE_BYTES), dtype=torch.int8)
        tensor = CanonicalKVCacheTensor(self.pages, PAGE_BYTES)
        self.worker.register_kv_caches(CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(0, PAGE_BYTES)]]))
        self.ended: dict[str, list[int] | None] = {}

    @property
    def scheduler(self) -> OffloadingConnectorScheduler:
        """The scheduler half."""
        half = self.connectors[0].connector_scheduler
        assert half is not None
        return half

    @property
    def worker(self) -> OffloadingConnectorWorker:
        """The worker half."""
        half = self.connectors[1].connector_worker
        assert half is not None
        return half

    def step(self, step: StepOutput | None = None) -> None:
        """Do one step."""
        metadata = self.scheduler.build_connector_meta(step or StepOutput())
        begin_step(self.worker, metadata)
        loads, report = end_step(self.worker, metadata)
        self.ended |= loads
        self.scheduler.update_connector_output(WorkerOutput(report))

    def settle(self) -> None:
        """Step until no job is open."""
        for _ in range(STEP_LIMIT):
            self.step()
            if not self.scheduler.stats()["connector.open_jobs"]:
                return
        raise AssertionError("a job did not end")

    def compute(self, request: FakeRequest, block_ids: list[int]) -> None:
        """Compute a request's tokens: block n gets bytes of value n + 1."""
        self.scheduler.get_num_new_matched_tokens(request, 0)
        for position, block_id in enumerate(block_ids):
            self.pages[block_id] = position + 1
        step = make_first_step(request.request_id, (block_ids,), request.num_tokens)
        self.step(step)

    def shutdown(self) -> None:
        """End both halves."""
        for connector in self.connectors:
            connector.shutdown()


def make_config(*, is_tiered: bool, **settings: object) -> OffloadingConfig:
    """Return a configuration with eight slots."""
    extra = settings | {"cpu_bytes_to_use": f"{8 * (4096 if is_tiered else PAGE_BYTES)}B"}
    if is_tiered:
        extra |= {"secondary_tiers": TIERS, "instance_id": f"connector-test-{os.getpid()}"}
    group = KVGroup(HASH_TOKENS, ("layer",), PAGE_BYTES)
    return OffloadingConfig("engine", ModelIdentity("model"), (group,), HASH_TOKENS, extra_config=extra)


@pytest.fixture(params=[False, True], ids=["cpu", "tiered"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine whose halves know each other."""
    made = Engine(make_config(is_tiered=request.param))
    made.step()
    yield made
    made.shutdown()


def test_what_was_stored_comes_back_whole_after_the_device_has_forgotten_it(engine: Engine) -> None:
    first, second = FakeRequest("a", PROMPT), FakeRequest("b", PROMPT)
    engine.compute(first, [0, 1, 2, 3, 4])
    engine.scheduler.request_finished(first)
    engine.settle()
    engine.pages.zero_()

    assert engine.scheduler.get_num_new_matched_tokens(second, 0) == (16, True)
    engine.scheduler.update_state_after_alloc(second, FakeBlocks(([11, 10, 9, 8, 7],)), 16)
    engine.settle()

    assert engine.ended == {"b": None}
    assert [int(engine.pages[block_id].min()) for block_id in (11, 10, 9, 8)] == [1, 2, 3, 4]
    assert [int(engine.pages[block_id].max()) for block_id in (11, 10, 9, 8, 7)] == [1, 2, 3, 4, 0]


def test_an_engine_that_steps_while_work_is_pending_rests_with_every_store_ended(engine: Engine) -> None:
    request = FakeRequest("a", PROMPT)
    engine.compute(request, [0, 1, 2, 3, 4])
    engine.scheduler.request_finished(request)

    num_steps = 0
    while engine.connectors[0].has_pending_push_work() and num_steps < STEP_LIMIT:
        engine.step()
        num_steps += 1

    assert 0 < num_steps < STEP_LIMIT
    assert engine.scheduler.get_num_new_matched_tokens(FakeRequest("b", PROMPT), 0) == (16, True)


def test_prompt_only_blocks_with_generated_tokens_are_not_found_again() -> None:
    engine = Engine(make_config(is_tiered=False, offload_prompt_only=True))
    engine.step()
    request = FakeRequest("a", PROMPT)
    request.num_prompt_tokens = 11
    engine.compute(request, [0, 1, 2, 3, 4])
    engine.settle()

    assert engine.scheduler.get_num_new_matched_tokens(FakeRequest("b", PROMPT), 0) == (8, True)
    engine.shutdown()


def test_a_load_into_blocks_that_the_device_lacks_fails_and_the_request_is_computed(engine: Engine) -> None:
    first, second = FakeRequest("a", PROMPT), FakeRequest("b", PROMPT)
    engine.compute(first, [0, 1, 2, 3, 4])
    engine.settle()
    assert engine.scheduler.get_num_new_matched_tokens(second, 0) == (16, True)
    beyond_the_pool = [NUM_DEVICE_BLOCKS + block for block in range(5)]

    engine.scheduler.update_state_after_alloc(second, FakeBlocks((beyond_the_pool,)), 16)
    engine.settle()

    assert engine.ended == {"b": beyond_the_pool[:4]}
    assert engine.scheduler.get_num_new_matched_tokens(second, 0) == (0, False)


def test_the_workers_moves_are_measured(engine: Engine) -> None:
    engine.compute(FakeRequest("a", PROMPT), [0, 1, 2, 3, 4])
    engine.settle()

    assert engine.scheduler.stats()["connector.store_bytes"] == 4 * PAGE_BYTES
    assert engine.scheduler.histograms()["connector.store_size_bytes"].sum == 4 * PAGE_BYTES
    assert engine.scheduler.histograms()["connector.load_duration_s"].count == 0


def test_each_role_builds_its_own_half_only(engine: Engine) -> None:
    scheduler, worker = engine.connectors

    assert (scheduler.connector_worker, worker.connector_scheduler) == (None, None)
    assert not worker.has_pending_push_work()
    assert "scheduler" in repr(scheduler)


def test_shutdown_may_be_repeated(engine: Engine) -> None:
    engine.shutdown()
    engine.shutdown()
