"""One step of an engine as the connector reads it: what will be computed, and what the workers reported.

Plain values with the attributes of ``kvtier.connector.protocols``, for engines without such classes.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.connector.common import OffloadingWorkerMetadata


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
