"""The interfaces of an engine's objects, managers and specs that the connector uses, as structural types.

An engine passes its own objects; the connector reads the attributes named here and writes none. They are modelled on
what vLLM's v1 scheduler passes to a KV connector, so its objects fit unchanged. Any other engine supplies four small
classes with the same attributes, or uses those of ``kvtier.engines.common.step``.

One step of the engine, in order:

1. scheduler half, for each request that wants to start: ``get_num_new_matched_tokens``, then, once its device
   blocks are allocated, ``update_state_after_alloc``;
2. scheduler half, once: ``build_connector_meta``; the metadata goes to every worker;
3. worker half: ``handle_preemptions``, ``start_kv_transfers``, (forward pass), ``prepare_store_kv``,
   ``get_finished``, ``take_failed_loads``, ``build_connector_worker_meta``;
4. scheduler half, once, with the sum over all workers: ``update_connector_output``; before or after it,
   ``request_finished`` for each request that ended.

Point 2 of the next step may come before point 4 of this one. A step without tokens is a step too: a request
whose lookup returned None or whose load is open needs steps to go on, and so does a store until it has ended.

Source: vLLM's ``KVConnectorBase_V1`` as of version 0.32.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from kvtier.base import OffloadingManager
from kvtier.connector.common import OffloadingWorkerMetadata
from kvtier.connector.groups import GroupLayout
from kvtier.misses import RequestRecord


class Request(Protocol):
    """A request of the engine's scheduler; read whenever the connector is called."""

    @property
    def request_id(self) -> str:
        """Name, unique among the engine's requests."""

    @property
    def num_tokens(self) -> int:
        """Prompt and confirmed output tokens; drafts and placeholders do not count."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt as it arrived; pre-emption adds no output to it."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One chained hash for each full ``hash_block_size`` of confirmed tokens; it only grows."""

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:  # Any: a client's JSON, checked where read
        """The client's hints: ``skip_load``, ``skip_store``, ``max_load_tokens``, ``max_store_tokens``."""


class DeviceBlocks(Protocol):
    """The device blocks of one request."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Return the block table of each KV group, from the request's first token on."""


class NewRequest(Protocol):
    """A request that is scheduled for the first time."""

    @property
    def req_id(self) -> str:
        """Name of the request."""

    @property
    def block_ids(self) -> tuple[list[int], ...]:
        """Its whole block table, one list for each KV group."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in its blocks before this step."""


class CachedRequests(Protocol):
    """Requests that were scheduled before, as parallel sequences."""

    @property
    def req_ids(self) -> Sequence[str]:
        """Names of the requests."""

    @property
    def resumed_req_ids(self) -> Collection[str]:
        """Those that come back from pre-emption; their ``new_block_ids`` replace the block table."""

    @property
    def new_block_ids(self) -> Sequence[tuple[list[int], ...] | None]:
        """What was appended to each block table, or None."""

    @property
    def num_computed_tokens(self) -> Sequence[int]:
        """Tokens whose KV is in the blocks before this step, drafts of earlier steps included."""


class SchedulerOutput(Protocol):
    """What one step will compute."""

    @property
    def scheduled_new_reqs(self) -> Sequence[NewRequest]:
        """Requests scheduled for the first time, those whose load has ended included."""

    @property
    def scheduled_cached_reqs(self) -> CachedRequests:
        """Requests scheduled before."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """Tokens to compute for each scheduled request, drafts included."""

    @property
    def preempted_req_ids(self) -> Collection[str] | None:
        """Requests that lost their device blocks in this step."""


class ConnectorOutput(Protocol):
    """What the workers of one step reported, summed by the engine."""

    @property
    def kv_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """The metadata of all workers, aggregated; None when none had anything to report."""


class LatestRecords(Protocol):
    """Records of requests."""

    @property
    def latest(self) -> Sequence[RequestRecord]:
        """The latest, oldest first. Thread: any."""


class StoppedLoads(Protocol):
    """What stops loading when blocks are wrong."""

    def resume(self) -> bool:
        """Load hits again; return whether loading was stopped."""


class ControlledHalf(Protocol):
    """The scheduler half of a connector, as its operators see it."""

    @property
    def audit(self) -> StoppedLoads | None:
        """What may have stopped loading; None when nothing can."""

    @property
    def manager(self) -> OffloadingManager:
        """Which blocks are held."""

    @property
    def layouts(self) -> Sequence[GroupLayout]:
        """The KV groups."""

    @property
    def records(self) -> LatestRecords:
        """Where the prompts of the latest requests came from. Thread: any."""

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by dotted name."""

    def has_open_stores(self) -> bool:
        """Return whether a worker still has to report a store."""
