"""What the checked engine remembers of requests and steps; values only.

The connector reads a ``CheckedRequest`` through its protocol. A ``Run`` is what the workers know of it: they learn
sampled tokens before the scheduler does.
"""

from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any

from tests.connector.fakes import HASH_TOKENS, hash_tokens

from kvtier.base import OffloadKey, make_offload_key
from kvtier.connector.common import OffloadingConnectorMetadata, OffloadingWorkerMetadata
from kvtier.engines.common.step import CachedRequests, NamedStates, NewRequest, StepOutput
from kvtier.tenants import NO_TENANT, Tenant

Tables = list[list[int]]


class Phase(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    LOADING = "loading"
    LOADED = "loaded"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False)
class Run:
    """What the workers know of a request between its start, or resumption, and its end or pre-emption.

    Attributes:
        tokens: those that the workers know.
        weights: for each token whose KV is computed the weights that computed it.
    """

    tokens: list[int]
    weights: list[int]

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is computed."""
        return len(self.weights)


@dataclass(eq=False)
class CheckedRequest:
    """A request.

    Attributes:
        request_id: its name; free again when the request has ended.
        tokens: prompt and confirmed output.
        max_tokens: length at which it ends.
        kv_transfer_params: the client's hints.
        tenant: whose blocks it may find.
        is_served: whether its tenant is one that is served; of another one nothing is loaded or stored.
        tables: for each group its device blocks, null blocks included.
        num_computed: tokens whose KV is computed or planned to be, drafts included.
        num_placeholders: tokens that planned steps will sample, drafts included.
        num_in_flight: tokens of planned steps whose output was not taken.
        num_stale: those of them that belong to a time before its last pre-emption.
        is_dropping_stale: whether what they sample is thrown away.
        num_preemptions: how often its blocks were taken.
        num_external: tokens that its last load was to bring.
        reports: for each worker that reported the load whether it failed.
        has_failed_load: whether one of them failed, known before the last has reported.
        load_slots: rows of the primary tier that its load reads.
        is_load_void: whether the cache was reset since the load began.
        run: what the workers know.
        is_mixed: whether the weights have changed while it was running.
        was_refused: whether the manager had no room in the last step that computed for it.
        epoch: the number of resets when it first began, or first began again after a reset; None before.
        is_whole: whether it then began with its first token.
        first_begin: tokens on the device and tokens to load when it first began; None before.
    """

    request_id: str
    tokens: list[int]
    max_tokens: int
    kv_transfer_params: dict[str, Any] | None = None  # Any: a client's JSON
    tenant: Tenant = NO_TENANT
    is_served: bool = True
    phase: Phase = Phase.WAITING
    tables: Tables = field(default_factory=list)
    num_computed: int = 0
    num_placeholders: int = 0
    num_in_flight: int = 0
    num_stale: int = 0
    is_dropping_stale: bool = False
    num_preemptions: int = 0
    num_external: int = 0
    reports: dict[int, bool] = field(default_factory=dict)
    has_failed_load: bool = False
    load_slots: set[int] = field(default_factory=set)
    is_load_void: bool = False
    run: Run | None = None
    is_mixed: bool = False
    was_refused: bool = False
    epoch: int | None = None
    is_whole: bool = False
    first_begin: tuple[int, int] | None = None
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Prompt and confirmed output tokens."""
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        """One chained hash for each full hash block."""
        return hash_tokens(self.tokens)

    def key_of(self, group: int, end_token: int) -> OffloadKey:
        """Return the key of a group's block that ends at a token."""
        return _key_of(self.block_hashes[end_token // HASH_TOKENS - 1], group, self.tenant)

    def limit(self, direction: str) -> int:
        """Return how many leading tokens may be loaded, or stored."""
        params = self.kv_transfer_params or {}
        if params.get(f"skip_{direction}") or not self.is_served:
            return 0
        return int(params.get(f"max_{direction}_tokens", 1_000_000))


@lru_cache(maxsize=10_000)
def _key_of(block_hash: bytes, group: int, tenant: Tenant) -> OffloadKey:
    return make_offload_key(tenant.own_hash(block_hash), group, tenant.number)


@dataclass(frozen=True)
class Work:
    """What one step computes for one request; ``drafts`` says which drafts turn out right."""

    request: CheckedRequest
    run: Run
    tables: Tables
    num_tokens: int
    drafts: list[bool]
    is_sampling: bool


@dataclass
class Plan:
    """A step while it is planned.

    Attributes:
        new: requests that are scheduled for the first time.
        cached: names of others; whether they resume; blocks appended to their tables; tokens that they have.
        num_tokens: tokens to compute, by request.
        works: what is computed.
    """

    new: list[NewRequest] = field(default_factory=list)
    cached: list[tuple[str, bool, tuple[list[int], ...] | None, int]] = field(default_factory=list)
    num_tokens: dict[str, int] = field(default_factory=dict)
    works: list[Work] = field(default_factory=list)

    def output(self, preempted: set[str], states: NamedStates | None) -> StepOutput:
        """Return what the connector reads of it."""
        names, resumed, blocks, num_computed = zip(*self.cached, strict=True) if self.cached else ((),) * 4
        resuming = {name for name, is_resumed in zip(names, resumed, strict=True) if is_resumed}
        cached = CachedRequests(names, resuming, blocks, num_computed)
        return StepOutput(
            self.new, cached, self.num_tokens, preempted or None, kv_connector_block_state=states
        )


@dataclass
class Step:
    """A step between its plan and the processing of its output.

    Attributes:
        metadata: what the connector told the workers.
        works: what is computed.
        weights: of the model when it was planned.
        sampled: for each work the tokens it sampled.
        ended_loads: worker, request and failed device blocks of each load that ended; None: it was good.
        report: what the workers reported; None before the step was executed.
    """

    metadata: OffloadingConnectorMetadata
    works: list[Work]
    weights: int
    sampled: list[list[int]] = field(default_factory=list)
    ended_loads: list[tuple[int, str, list[int] | None]] = field(default_factory=list)
    report: OffloadingWorkerMetadata | None = None
