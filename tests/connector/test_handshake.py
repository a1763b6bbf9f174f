"""No transfer before every worker has the scheduler's own region."""

import logging

import pytest
from tests.connector.fakes import (
    FakeRegionSpec,
    FakeRequest,
    FakeSpec,
    TableManager,
    block_ids_of,
    keys_of,
    make_config,
    make_first_step,
    make_later_step,
)

from kvtier.connector.common import OffloadingWorkerMetadata
from kvtier.connector.handshake import MAX_AWAITED_STEPS, RegionHandshake, make_handshake
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.engines.common.step import StepOutput, WorkerOutput

PROMPT = list(range(17))


def begin_handshake(spec: FakeRegionSpec) -> RegionHandshake:
    """Return the handshake of a spec that has a region."""
    handshake = make_handshake(spec)
    assert handshake is not None
    return handshake


def test_a_spec_without_region_may_start_at_once() -> None:
    assert make_handshake(FakeSpec(make_config(num_workers=2))) is None


def test_a_spec_that_owns_none_in_this_configuration_may_start_at_once() -> None:
    spec = FakeRegionSpec(make_config())
    spec.identity = None

    assert make_handshake(spec) is None


def test_it_opens_and_seals_once_with_the_last_worker() -> None:
    spec = FakeRegionSpec(make_config(num_workers=2))
    handshake = begin_handshake(spec)

    handshake.record([(1, 2)])
    assert (handshake.is_open, spec.num_seals) == (False, 0)
    handshake.record([(1, 2)])
    handshake.record([])
    assert (handshake.is_open, spec.num_seals) == (True, 1)


@pytest.mark.parametrize("reports", [[(1, 2), (1, 3)], [(9, 2), (1, 2)]])
def test_one_worker_with_another_region_keeps_it_shut(
    reports: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    spec = FakeRegionSpec(make_config(num_workers=2))
    handshake = begin_handshake(spec)

    with caplog.at_level(logging.ERROR):
        handshake.record(reports)
        handshake.record([(1, 2)])

    assert (handshake.is_open, spec.num_seals) == (False, 0)
    assert "instance_id" in caplog.text


class Bench:
    """A scheduler half whose blocks are all held, over a region that two workers have to report."""

    def __init__(self) -> None:
        manager = TableManager(dict.fromkeys(keys_of(PROMPT), True))
        self.half = OffloadingConnectorScheduler(FakeRegionSpec(make_config(num_workers=2), manager))

    def report(self, *identities: tuple[int, int]) -> None:
        """Let workers report their regions."""
        self.half.update_connector_output(
            WorkerOutput(OffloadingWorkerMetadata(region_identities=identities))
        )

    def search(self) -> tuple[int | None, bool]:
        """Ask for a request."""
        return self.half.get_num_new_matched_tokens(FakeRequest("a", PROMPT), 0)

    def num_stores(self) -> int:
        """Compute a request and return how many stores that makes."""
        step = make_first_step("a", ([0, 1, 2, 3, 4],), 17)
        return len(self.half.build_connector_meta(step).store_jobs)


def test_the_first_request_waits_for_the_reports_and_then_finds_what_is_held() -> None:
    bench = Bench()
    bench.report((1, 2))

    assert bench.search() == (None, False)
    bench.report((1, 2))
    assert bench.search() == (16, True)


def test_nothing_is_loaded_or_stored_over_a_foreign_region() -> None:
    bench = Bench()
    bench.report((1, 2), (1, 3))

    assert bench.search() == (0, False)
    assert bench.num_stores() == 0


def test_nobody_waits_for_a_worker_that_never_reports() -> None:
    bench = Bench()
    bench.report((1, 2))
    for _ in range(MAX_AWAITED_STEPS):
        assert bench.search() == (None, False)
        bench.half.build_connector_meta(StepOutput())

    assert bench.search() == (0, False)
    assert bench.num_stores() == 0


def test_blocks_computed_before_the_workers_were_known_are_stored_afterwards() -> None:
    half = OffloadingConnectorScheduler(FakeRegionSpec(make_config()))
    half.get_num_new_matched_tokens(FakeRequest("a", PROMPT), 0)
    step = make_first_step("a", ([0, 1, 2, 3, 4],), 16)
    half.build_connector_meta(step)
    half.update_connector_output(WorkerOutput(OffloadingWorkerMetadata(region_identities=((1, 2),))))

    step = make_later_step("a", 16, 1)

    [job] = half.build_connector_meta(step).store_jobs.values()
    assert block_ids_of(job.transfer_spec.source) == [0, 1, 2, 3]
