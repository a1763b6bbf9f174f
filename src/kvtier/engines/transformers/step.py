"""One step as the connector sees it: what will be computed, and what the worker reported of it.

Plain values with the attributes that ``kvtier.connector.protocols`` asks for; they decide nothing.
"""

from dataclasses import dataclass, field

from kvtier.connector.common import OffloadingWorkerMetadata
from kvtier.engines.transformers.request import Request


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that is scheduled for the first time.

    Attributes:
        req_id: its name.
        block_ids: its whole block table, one list for its one KV group.
        num_computed_tokens: tokens whose keys and values exist before the step.
    """

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class CachedRequests:
    """Requests that were scheduled before, as parallel sequences; here at most one.

    Attributes:
        req_ids: their names.
        resumed_req_ids: empty, this engine pre-empts nobody.
        new_block_ids: what was appended to each block table.
        num_computed_tokens: tokens whose keys and values exist before the step.
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: frozenset[str] = frozenset()
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step will compute.

    Attributes:
        scheduled_new_reqs: the request, when this is its first step.
        scheduled_cached_reqs: the request, in later steps.
        num_scheduled_tokens: tokens to compute, by request.
        preempted_req_ids: empty, this engine pre-empts nobody.
        finished_req_ids: requests that ended since the last step.
    """

    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: frozenset[str] = frozenset()
    finished_req_ids: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the worker reported of one step.

    Attributes:
        finished_recving: requests whose load has ended, well or badly.
        kv_connector_worker_meta: its metadata; None when it had nothing to say.
    """

    finished_recving: frozenset[str]
    kv_connector_worker_meta: OffloadingWorkerMetadata | None


def plan_step(request: Request, num_tokens: int, new_block_ids: list[int]) -> StepPlan:
    """Return the step that computes ``num_tokens`` tokens of ``request``. Pure.

    Args:
        request: the one request of the step.
        num_tokens: tokens to compute after those it has.
        new_block_ids: blocks appended to its table since its last step.
    """
    scheduled = {request.request_id: num_tokens}
    if not request.is_known:
        new = NewRequest(request.request_id, request.get_block_ids(), request.num_computed_tokens)
        return StepPlan(scheduled_new_reqs=[new], num_scheduled_tokens=scheduled)
    cached = CachedRequests(
        req_ids=[request.request_id],
        new_block_ids=[(new_block_ids,) if new_block_ids else None],
        num_computed_tokens=[request.num_computed_tokens],
    )
    return StepPlan(scheduled_cached_reqs=cached, num_scheduled_tokens=scheduled)
