"""The calls of a worker half in one step, in the order of ``kvtier.connector.protocols``.

For an engine whose process computes what it plans: ``begin_step``, then the forward pass, then ``end_step``, whose
report goes to the scheduler half's ``update_connector_output``.
"""

from typing import NamedTuple

from kvtier.connector.common import OffloadingConnectorMetadata, OffloadingWorkerMetadata
from kvtier.connector.worker import OffloadingConnectorWorker


class EndedStep(NamedTuple):
    """What a worker says at the end of a step.

    Attributes:
        loads: requests whose load has ended, each with the device blocks whose bytes are not right; None: all are.
        report: for the scheduler half, to be aggregated where there are several workers.
    """

    loads: dict[str, list[int] | None]
    report: OffloadingWorkerMetadata


def begin_step(worker: OffloadingConnectorWorker, metadata: OffloadingConnectorMetadata) -> None:
    """Finish what must end before device blocks are written, and start the step's loads."""
    worker.handle_preemptions(metadata)
    worker.start_kv_transfers(metadata)


def end_step(
    worker: OffloadingConnectorWorker, metadata: OffloadingConnectorMetadata, *, is_computed: bool = True
) -> EndedStep:
    """Prepare the step's stores, and return what has ended.

    Args:
        worker: the worker half.
        metadata: what the step was begun with.
        is_computed: whether the step's computation succeeded; otherwise its stores fail, as their bytes do not exist.
    """
    if is_computed:
        worker.prepare_store_kv(metadata)
    _, ended = worker.get_finished(())
    failed = worker.take_failed_loads()
    report = worker.build_connector_worker_meta() or OffloadingWorkerMetadata()
    if not is_computed:
        for job_id in metadata.store_jobs:
            report.mark_completed(job_id, success=False)
    return EndedStep({req_id: failed.get(req_id) for req_id in sorted(ended)}, report)
