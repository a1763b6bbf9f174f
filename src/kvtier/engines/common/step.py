"""One step of an engine as the connector reads it: what will be computed, and what the workers reported.

Plain values with the attributes of ``kvtier.connector.protocols``, for engines without such classes. And the calls of a
worker half, in the order of that contract, for an engine whose process computes what it plans: ``begin_step``, then the
forward pass, then ``end_step``, whose report goes to the scheduler half's ``update_connector_output``.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvtier.connector.common import OffloadingConnectorMetadata, OffloadingWorkerMetadata

if TYPE_CHECKING:
    from kvtier.connector.worker import OffloadingConnectorWorker  # it needs torch


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that is scheduled for the first time.

    Attributes:
        req_id: its name.
        block_ids: its whole block table, one list for each KV group.
        num_computed_tokens: tokens whose keys and values exist before the step.
    """

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CachedRequests:
    """Requests that were scheduled before, as parallel sequences.

    Attributes:
        req_ids: their names.
        resumed_req_ids: those that resume after pre-emption.
        new_block_ids: the blocks appended to each block table, or None.
        num_computed_tokens: tokens whose keys and values exist before the step.
    """

    req_ids: Sequence[str] = ()
    resumed_req_ids: Collection[str] = ()
    new_block_ids: Sequence[tuple[list[int], ...] | None] = ()
    num_computed_tokens: Sequence[int] = ()


NO_CACHED_REQUESTS = CachedRequests()


@dataclass(frozen=True, slots=True)
class NamedStates:
    """The recurrent states that device blocks hold after a step, for an engine that keeps some of them.

    Attributes:
        boundary_state_offloads: by request, each as KV group, device block, and the tokens that the state covers.
    """

    boundary_state_offloads: Mapping[str, Sequence[tuple[int, int, int]]]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step will compute; nothing by default.

    Attributes:
        scheduled_new_reqs: requests in their first step.
        scheduled_cached_reqs: requests in a later one.
        num_scheduled_tokens: tokens to compute, by request.
        preempted_req_ids: requests that lost their device blocks in this step.
        finished_req_ids: requests that ended since the last step.
        kv_connector_block_state: the states that can be stored; None: each block of a state group has one.
    """

    scheduled_new_reqs: Sequence[NewRequest] = ()
    scheduled_cached_reqs: CachedRequests = NO_CACHED_REQUESTS
    num_scheduled_tokens: Mapping[str, int] = field(default_factory=dict)
    preempted_req_ids: Collection[str] | None = None
    finished_req_ids: frozenset[str] = frozenset()
    kv_connector_block_state: NamedStates | None = None


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """What the workers of one step reported.

    Attributes:
        kv_connector_worker_meta: their metadata, aggregated; None when they had nothing to report.
    """

    kv_connector_worker_meta: OffloadingWorkerMetadata | None


class EndedStep(NamedTuple):
    """What a worker says at the end of a step.

    Attributes:
        loads: requests whose load has ended, each with the device blocks whose bytes are not right; None: all are.
        report: for the scheduler half, to be aggregated where there are several workers.
    """

    loads: dict[str, list[int] | None]
    report: OffloadingWorkerMetadata


def begin_step(worker: "OffloadingConnectorWorker", metadata: OffloadingConnectorMetadata) -> None:
    """Finish what must end before device blocks are written, and start the step's loads."""
    worker.handle_preemptions(metadata)
    worker.start_kv_transfers(metadata)


def end_step(
    worker: "OffloadingConnectorWorker", metadata: OffloadingConnectorMetadata, *, is_computed: bool = True
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
