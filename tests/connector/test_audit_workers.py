"""The audit of several workers: a block is as far off as the worst of them has found, whenever it reports."""

from collections.abc import Callable, Sequence

import pytest
from tests.connector.fakes import FakeBlocks, FakeRequest, FakeSpec, keys_of, make_config, make_first_step

from kvtier.base import ReqContext, TransferJobId
from kvtier.connector.common import AuditReport, OffloadingWorkerMetadata
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.engines.common.step import WorkerOutput

PROMPT = list(range(13))
NUM_WORKERS = 3


class AuditedFakeSpec(FakeSpec):
    """Its handlers can compare blocks."""

    def audited_namespace(self) -> str:
        return "namespace"

    def audited_groups(self) -> frozenset[int]:
        return frozenset({0})


def begin_audit() -> tuple[OffloadingConnectorScheduler, TransferJobId]:
    """Compute a prompt that is held; return the scheduler half and the job that compares its three blocks."""
    manager = CPUOffloadingManager(16)
    manager.prepare_store(keys_of(PROMPT), ReqContext("held"))
    manager.complete_store(keys_of(PROMPT), ReqContext("held"))
    half = OffloadingConnectorScheduler(AuditedFakeSpec(make_config(NUM_WORKERS, audit_ratio=1.0), manager))
    request = FakeRequest("a", PROMPT)
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    half.update_state_after_alloc(request, FakeBlocks(([0, 1, 2, 3],)), 0)
    step = make_first_step("a", ([0, 1, 2, 3],), request.num_tokens)
    (job_id,) = half.build_connector_meta(step).store_jobs
    return half, job_id


Report = Callable[[OffloadingConnectorScheduler, Sequence[OffloadingWorkerMetadata]], None]


def report_together(half: OffloadingConnectorScheduler, reports: Sequence[OffloadingWorkerMetadata]) -> None:
    whole = OffloadingWorkerMetadata()
    for report in reports:
        whole = whole.aggregate(report)
    half.update_connector_output(WorkerOutput(whole))


def report_one_by_one(
    half: OffloadingConnectorScheduler, reports: Sequence[OffloadingWorkerMetadata]
) -> None:
    for report in reports:
        half.update_connector_output(WorkerOutput(report))


@pytest.mark.parametrize("report", [report_together, report_one_by_one])
@pytest.mark.parametrize("bad_worker", range(NUM_WORKERS))
def test_a_block_is_as_far_off_as_the_worst_worker_says(report: Report, bad_worker: int) -> None:
    half, job_id = begin_audit()
    found = [(0.0, 0.0, 0.25)] * NUM_WORKERS
    found[bad_worker] = (0.0, 7.0, 0.5)

    report(
        half,
        [OffloadingWorkerMetadata({job_id: 1}, audits=(AuditReport(job_id, one),)) for one in found],
    )

    stats = half.stats()
    counts = {name: stats[f"audit.{name}"] for name in ("equal_blocks", "close_blocks", "wrong_blocks")}
    assert counts == {"equal_blocks": 1, "close_blocks": 1, "wrong_blocks": 1}
    assert stats["audit.largest_deviation"] == 7.0
    held = [half.manager.lookup(key, ReqContext("b")) for key in keys_of(PROMPT)]
    assert held == [True, False, True]


@pytest.mark.parametrize("report", [report_together, report_one_by_one])
def test_a_worker_that_could_not_compare_leaves_nothing_known(report: Report) -> None:
    half, job_id = begin_audit()
    good = OffloadingWorkerMetadata({job_id: 1}, audits=(AuditReport(job_id, (0.0, 9.0, 0.0)),))
    bad = OffloadingWorkerMetadata({job_id: 1}, frozenset({job_id}))

    report(half, [good, bad, good])

    stats = half.stats()
    assert (stats["audit.lost_blocks"], stats["audit.wrong_blocks"], stats["audit.equal_blocks"]) == (3, 0, 0)
    assert all(half.manager.lookup(key, ReqContext("b")) for key in keys_of(PROMPT))
    assert half.stats()["primary.evictable_blocks"] == 3
