"""Which request computes while it is loaded, who waits for it, and what a failed load takes back."""

import pytest
from tests.connector.fakes import (
    HASH_TOKENS,
    FakeBlocks,
    FakeCachedRequests,
    FakeNewRequest,
    FakeOutput,
    FakeRequest,
    FakeSpec,
    FakeStep,
    keys_of,
    make_config,
    report_jobs,
)

from kvtier.base import ReqContext
from kvtier.config import GroupKind, KVGroup
from kvtier.connector.common import OffloadingConnectorMetadata, OffloadingWorkerMetadata
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.cpu.manager import CPUOffloadingManager

PROMPT = list(range(17))
LONGER = [*PROMPT, *range(50, 58)]
OTHER = list(range(100, 117))
WINDOW = KVGroup(HASH_TOKENS, ("layer",), 64, GroupKind.WINDOW, window_tokens=9)


class Bench:
    """A scheduler half whose engine waits layer by layer, with two stored prompts."""

    def __init__(
        self, num_workers: int = 1, groups: tuple[KVGroup, ...] | None = None, **settings: object
    ) -> None:
        given = {} if groups is None else {"groups": groups}
        config = make_config(num_workers, **given, **{"layerwise_load": True, **settings})  # type: ignore[arg-type]  # settings are objects
        self.manager = CPUOffloadingManager(32)
        self.half = OffloadingConnectorScheduler(FakeSpec(config, self.manager))
        for number, tokens in enumerate((PROMPT, OTHER)):
            self.store(FakeRequest(f"stored-{number}", tokens), [number * 5 + index for index in range(5)])
        self.report(OffloadingWorkerMetadata(layerwise_workers=num_workers))

    def store(self, request: FakeRequest, block_ids: list[int]) -> None:
        """Put a prompt into the primary tier, without asking the connector for it by layer."""
        tables = tuple([list(block_ids)] * len(self.half.layouts))
        self.half.get_num_new_matched_tokens(request, 0)
        step = FakeStep([FakeNewRequest(request.request_id, tables)])
        step.num_scheduled_tokens[request.request_id] = request.num_tokens
        metadata = self.half.build_connector_meta(step)
        num_workers = self.half._jobs._num_workers
        self.half.update_connector_output(report_jobs(metadata, num_workers=num_workers))
        self.half.request_finished(request)

    def drain_invalid_blocks(self) -> set[int]:
        """Return the device blocks to forget."""
        assert self.half.layerwise is not None
        return self.half.layerwise.drain_invalid_blocks()

    def report(self, metadata: OffloadingWorkerMetadata) -> None:
        """Let the workers report."""
        self.half.update_connector_output(FakeOutput(metadata))

    def ask(
        self, request: FakeRequest, num_computed_tokens: int = 0, *, can_wait: bool = True
    ) -> tuple[int | None, bool]:
        """Ask for a request's prefix."""
        return self.half.get_num_new_matched_tokens(request, num_computed_tokens, can_wait_by_layer=can_wait)

    def begin(self, request: FakeRequest, block_ids: list[int]) -> OffloadingConnectorMetadata:
        """Load a request by layer and compute the rest of it in the same step."""
        num_tokens, is_async = self.ask(request)
        assert num_tokens
        assert not is_async
        self.half.update_state_after_alloc(request, FakeBlocks((list(block_ids),)), num_tokens)
        step = FakeStep([FakeNewRequest(request.request_id, (list(block_ids),), num_tokens)])
        step.num_scheduled_tokens[request.request_id] = request.num_tokens - num_tokens
        return self.half.build_connector_meta(step)


def test_a_request_computes_while_it_is_loaded() -> None:
    bench = Bench()

    metadata = bench.begin(FakeRequest("r", LONGER), list(range(20, 27)))

    ((job_id, job),) = metadata.load_jobs.items()
    assert job.is_layerwise
    assert len(metadata.store_jobs) == 1
    bench.half.update_connector_output(report_jobs(metadata))
    assert job_id not in bench.half._jobs.by_id  # it has ended
    stats = bench.half.stats()
    assert stats["connector.layerwise_load_jobs"] == 1
    assert stats["connector.loaded_tokens.CPU"] == 16
    bench.manager.check()


@pytest.mark.parametrize("reason", ["setting", "engine", "workers", "window"])
def test_where_it_cannot_be_the_load_runs_beside_the_steps(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(
        num_workers=2,
        groups=(WINDOW,) if reason == "window" else None,
        layerwise_load=reason != "setting",
    )
    if reason == "workers":
        bench.report(OffloadingWorkerMetadata(layerwise_workers=-1))

    num_tokens, is_async = bench.ask(FakeRequest("r", PROMPT), can_wait=reason != "engine")

    assert (num_tokens, is_async) == (16, True)
    assert ("loads nothing by layer" in caplog.text) == (reason == "window")


def test_every_worker_must_be_able_to() -> None:
    bench = Bench(num_workers=2)
    bench.report(OffloadingWorkerMetadata(layerwise_workers=-1))
    without = bench.ask(FakeRequest("a", PROMPT))
    bench.report(OffloadingWorkerMetadata(layerwise_workers=1))

    assert without == (16, True)
    assert bench.ask(FakeRequest("b", PROMPT)) == (16, False)


def test_nobody_is_let_in_while_another_load_is_under_way() -> None:
    bench = Bench()
    metadata = bench.begin(FakeRequest("r", PROMPT), list(range(20, 25)))
    beside_it = bench.ask(FakeRequest("s", OTHER))
    bench.half.update_connector_output(report_jobs(metadata))

    assert beside_it == (16, True)
    assert bench.ask(FakeRequest("t", OTHER)) == (16, False)


def test_whoever_shares_its_device_blocks_waits_for_the_end_of_the_load() -> None:
    bench = Bench()
    metadata = bench.begin(FakeRequest("r", PROMPT), list(range(20, 25)))

    # The device's prefix cache already knows the blocks that are being filled.
    sharing = bench.ask(FakeRequest("same", PROMPT), 16)
    partly = bench.ask(FakeRequest("partly", PROMPT[:6]), 4)
    other = bench.ask(FakeRequest("other", OTHER), 16)
    bench.half.update_connector_output(report_jobs(metadata))

    assert sharing == partly == (None, False)
    assert other == (0, False)
    assert bench.ask(FakeRequest("later", PROMPT), 16) == (0, False)


def test_blocks_in_front_of_the_load_may_be_shared() -> None:
    bench = Bench()
    request = FakeRequest("r", PROMPT)
    assert bench.ask(request, 8) == (8, False)
    bench.half.update_state_after_alloc(request, FakeBlocks((list(range(20, 25)),)), 8)

    assert bench.ask(FakeRequest("short", PROMPT[:10]), 8) == (0, False)
    assert bench.ask(FakeRequest("long", PROMPT), 12) == (None, False)


def test_what_was_computed_with_a_failed_load_is_forgotten_and_stored_when_computed_anew() -> None:
    bench = Bench()
    request = FakeRequest("r", LONGER)
    metadata = bench.begin(request, list(range(20, 27)))
    (load_id,), (store_id,) = metadata.load_jobs, metadata.store_jobs

    bench.half.update_connector_output(report_jobs(metadata, failed=[load_id, store_id]))

    assert bench.drain_invalid_blocks() == set(range(20, 27))
    assert bench.drain_invalid_blocks() == set()
    assert bench.manager.lookup(keys_of(LONGER)[4], ReqContext("?")) is False
    assert bench.ask(request) == (0, False)
    # It keeps its blocks, and is computed from its first token on.
    again = FakeStep(scheduled_cached_reqs=FakeCachedRequests(["r"], set(), [None], [0]))
    again.num_scheduled_tokens["r"] = len(LONGER)
    metadata = bench.half.build_connector_meta(again)
    bench.half.update_connector_output(report_jobs(metadata))
    assert bench.manager.lookup(keys_of(LONGER)[4], ReqContext("?")) is True
    bench.manager.check()


def test_the_failed_load_of_an_aborted_request_still_names_the_invalid_blocks() -> None:
    bench = Bench()
    request = FakeRequest("r", PROMPT)
    metadata = bench.begin(request, list(range(20, 25)))
    bench.half.request_finished(request)

    bench.half.update_connector_output(report_jobs(metadata, failed=list(metadata.load_jobs)))

    assert bench.drain_invalid_blocks() == set(range(20, 25))
    bench.manager.check()


def test_a_failed_load_beside_the_steps_makes_no_block_invalid() -> None:
    bench = Bench()
    request = FakeRequest("r", PROMPT)
    assert bench.ask(request, can_wait=False) == (16, True)
    bench.half.update_state_after_alloc(request, FakeBlocks((list(range(20, 25)),)), 16)
    metadata = bench.half.build_connector_meta(FakeStep())

    bench.half.update_connector_output(report_jobs(metadata, failed=list(metadata.load_jobs)))

    assert bench.drain_invalid_blocks() == set()
