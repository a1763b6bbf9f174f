"""The contracts of an offloading back end: its manager, its spec, and the names of ``kvtier.keys`` and ``handler``.

There are two halves. On the scheduler side an OffloadingManager knows which blocks are held, reserves room and pins
blocks that are read. On the worker side handlers copy bytes between media, as a pair of LoadStoreSpecs describes
(``kvtier.handler``). An OffloadingSpec builds both halves from one OffloadingConfig.

Source: the contracts follow vLLM's KV offloading subsystem as of May 2026 (pull requests 37874 and 36644).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple, NewType, Protocol

from kvtier.config import ModelIdentity, OffloadingConfig
from kvtier.handler import (
    BlockIds,
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    TransferJobId,
    TransferResult,
    TransferSpec,
    TransferType,
)
from kvtier.histogram import HistogramSnapshot
from kvtier.keys import (
    GROUP_INDEX_BYTES,
    MAX_TENANT_NUMBER,
    TENANT_BYTES,
    TENANT_MARK,
    TENANT_SUFFIX_BYTES,
    OffloadKey,
    ReqContext,
    get_offload_block_hash,
    get_offload_group_idx,
    get_offload_tenant,
    make_offload_key,
    make_offload_keys,
)
from kvtier.locations import BlockLocator
from kvtier.misses import Miss
from kvtier.operating import DrainResult, DroppedBlocks, PinnedBlocks, Purge

__all__ = [
    "GROUP_INDEX_BYTES",
    "MAX_TENANT_NUMBER",
    "TENANT_BYTES",
    "TENANT_MARK",
    "TENANT_SUFFIX_BYTES",
    "BlockIDsLoadStoreSpec",
    "BlockIds",
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "GPULoadStoreSpec",
    "HandlerEntry",
    "JobId",
    "LoadStoreSpec",
    "Locality",
    "OffloadKey",
    "OffloadingEvent",
    "OffloadingHandler",
    "OffloadingManager",
    "OffloadingSpec",
    "PrepareStoreOutput",
    "ReqContext",
    "RowMemory",
    "Run",
    "TransferJobId",
    "TransferResult",
    "TransferSpec",
    "TransferType",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "get_offload_tenant",
    "make_offload_key",
    "make_offload_keys",
    "overrides",
]

JobId = NewType("JobId", int)
"""A job of a secondary tier: primary -> tier or tier -> primary."""

NOTHING_PROMOTED: Mapping[OffloadKey, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PrepareStoreOutput:
    """What a prepared store will write, and what it evicted.

    Attributes:
        keys_to_store: the keys that got a slot, in the order of the call.
        store_spec: their slots, in the same order.
        evicted_keys: what was evicted to make room.
    """

    keys_to_store: list[OffloadKey]
    store_spec: LoadStoreSpec
    evicted_keys: list[OffloadKey]


class Locality(Enum):
    """Where a medium is as seen from the engine; the values are those of vLLM's events."""

    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """Blocks that this engine can load from a medium from now on, or no longer.

    There is no block size in it: blocks of different sizes may share one event.

    Attributes:
        keys: the blocks.
        medium: the medium: "CPU" for host memory, else the type of the tier.
        removed: True when the engine can no longer load them from there.
        tier: which secondary tier, unique within the engine; None for host memory.
        locality: where the medium is; None when that is not known.
    """

    keys: list[OffloadKey]
    medium: str
    removed: bool
    tier: str | None = None
    locality: Locality | None = Locality.LOCAL


class Run(NamedTuple):
    """What a manager holds of a request's keys.

    Attributes:
        num_held: how many of them, from the first, can be loaded now or later.
        num_ready: how many of these can be loaded now; the answer is final when it equals ``num_held``.
    """

    num_held: int
    num_ready: int


class OffloadingManager(ABC):
    """The scheduler side: which blocks are held, in which slots, and which requests pin them.

    Called from one thread; must not block. Keys come first and positionally. A block is pinned from
    prepare_* to complete_*; a pinned block is not evicted. Three methods must be written. The others have defaults:
    those that ask for an ability return None where the manager does not have it.

    Attributes:
        locator: finds blocks without promoting them; None where the manager cannot.
    """

    locator: BlockLocator | None = None

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return True when ``key`` can be loaded now, False when absent, None when in flight: look it up again."""

    @abstractmethod
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin ready ``keys`` and return where to read them, in the same order.

        Raises:
            BlockNotReadyError: a key is absent or in flight; nothing is pinned.
        """

    @abstractmethod
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Reserve room for those of ``keys`` that are not held yet.

        Returns:
            What to write where; empty lists when nothing is missing; None when there is no room now, and
            then nothing has changed.
        """

    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        """Learn from an arrived request. The caller calls this once per request, before any other call for it.

        Args:
            chains: for each KV group the keys of the request's known full blocks, head first.
            req_context: the request.
        """

    def find_run(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Run:
        """Return how many leading ``keys`` are held, for a group whose every block is needed.

        A key in flight counts as held, so that those behind it are looked up too.
        """
        num_ready = 0
        for num_held, key in enumerate(keys):
            answer = self.lookup(key, req_context)
            if answer is False:
                return Run(num_held, num_ready)
            if answer and num_ready == num_held:
                num_ready += 1
        return Run(len(keys), num_ready)

    def find_window(self, keys: Sequence[OffloadKey], num_blocks: int, req_context: ReqContext) -> Run:
        """Return where the right-most run of ``num_blocks`` held blocks ends, else the length of the leading run.

        For groups that need only a tail of the prefix: sliding windows, recurrent states. A key in flight counts as
        held, unless a key to the left of it is absent: then it can no longer be part of the answer.

        Returns:
            ``num_ready`` is 0 while a block of the run that would be the answer is in flight.
        """
        length = num_pending = 0
        for position in range(len(keys) - 1, -1, -1):
            answer = self.lookup(keys[position], req_context)
            if answer is False:
                length = num_pending = 0
                continue
            length += 1
            num_pending += answer is None
            if length == num_blocks:
                length += position
                break
        return Run(length, 0 if num_pending else length)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark ``keys`` as recently used, the first of them most; unknown keys are ignored."""

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Unpin ``keys`` after a load."""

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Make the in-flight ones of ``keys`` ready, or drop them when the store failed."""

    def is_waiting(self, req_context: ReqContext) -> bool:
        """Return True when a lookup for this request returned None and another one now would return the same.

        Must cost little, one look in a set for example, so that an engine with a thousand waiting requests need not
        search for each. The first call of a step may also take the reports of transfers.
        """
        del req_context
        return False

    def promoted_for(self, req_context: ReqContext) -> Mapping[OffloadKey, str]:
        """Return the blocks that were promoted while the request waited for them, each with its tier's type.

        Called before the request's prepare_load, which ends its wait. Blocks that were in host memory, or were written
        to it by the device, are not among them; neither are blocks that arrived after the request's deadline.
        """
        del req_context
        return NOTHING_PROMOTED

    def will_have_room(self) -> bool:
        """Return True when a store that had no room may have it in a later step, although no request ends."""
        return False

    def on_unstored(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Handle that ``keys`` of a request that has ended had no room, and are not offered again."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call, oldest first, and drop them."""
        return ()

    def end_step(self) -> None:
        """Start the work that was planned during this step, and begin the next one."""

    def request_finished(self, req_context: ReqContext) -> None:
        """Forget the request; no job is cancelled by it."""

    def has_pending_work(self) -> bool:
        """Return True while planned loads wait for end_step; transfers that have started do not count."""
        return False

    def explain(
        self, key: OffloadKey, req_context: ReqContext, behind: Sequence[OffloadKey] = ()
    ) -> Miss | None:
        """Return why ``key`` is missing; None when nothing is known of it. Changes nothing.

        The connector calls this once for a request whose search has its final answer, for the first block that is
        missing, before it prepares the load of what was found.

        Args:
            key: the block.
            req_context: the request.
            behind: the next blocks of its prefix, a few of them, for those who remember only some.
        """
        return None

    def pin(
        self, keys: Collection[OffloadKey], lease_s: float, *, needs_block: bool = False
    ) -> PinnedBlocks | None:
        """Keep ``keys`` in host memory for ``lease_s`` seconds from now, from the moment they are ready.

        A lease that ends later stays as it is. A reset ends every lease.

        Args:
            keys: the blocks.
            lease_s: seconds.
            needs_block: pin nothing where host memory has none of them, and none is on its way there.

        Raises:
            PinLimitError: more blocks would be pinned than may be; nothing has changed.
        """
        return None

    def unpin(self, keys: Collection[OffloadKey] | None) -> int | None:
        """End the leases of ``keys``, or all for None; return how many there were."""
        return None

    def drop(self, keys: Collection[OffloadKey]) -> DroppedBlocks | None:
        """Forget ``keys``, whose bytes are wrong, in every tier, and end their leases.

        A secondary tier is not asked for them again by this engine. Those that host memory uses stay there: call again
        in a later step, and load them no more until then.
        """
        return None

    def purge(self, tiers: Collection[str] | None, tenant: int | None = None) -> Purge | None:
        """Begin to forget every block that is not in use, and end its lease; it goes on whether or not anyone waits.

        While another purge is under way both are one, with the tiers of both.

        Args:
            tiers: names of tiers, "host" for host memory; None: all.
            tenant: number of the tenant of requests whose blocks are to go; None: all.

        Raises:
            ControlError: a purge of other blocks is under way; nothing has changed.
            UnknownNameError: there is no such tier; nothing has changed.
        """
        return None

    def drain(self, timeout_s: float) -> DrainResult:
        """Wait until the tiers have got and ended what is pending for them, or ``timeout_s`` has passed."""
        del timeout_s
        return DrainResult()

    def reset(self) -> None:
        """Forget every block; slots of transfers in flight are freed when those are reported."""

    def switch_model(self, model: ModelIdentity | None) -> None:
        """Forget every block, as ``reset`` does, and go on with those of other weights.

        Args:
            model: the weights that are loaded now; what other engines have stored of them is found from now on. None
                for weights that nothing names: their blocks are kept in host memory alone.
        """
        del model
        self.reset()

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by dotted name. Thread: any."""
        return {}

    def histograms(self) -> dict[str, HistogramSnapshot]:
        """Return histograms by dotted name. Thread: any."""
        return {}

    def shutdown(self) -> None:
        """End every thread and free every resource; idempotent."""


class HandlerEntry(NamedTuple):
    """A handler and the media it copies between."""

    source: type[LoadStoreSpec]
    destination: type[LoadStoreSpec]
    handler: OffloadingHandler


class OffloadingSpec(ABC):
    """Builds both halves of an offloading back end from one configuration; each is built once.

    Args:
        config: the engine's configuration.

    Attributes:
        config: as given.
        extra_config: the user's settings, unparsed; ``config.settings`` has them parsed.
        hash_block_size: tokens covered by one content hash.
        gpu_block_size: tokens in a device block, one number for each group.
        block_size_factor: device blocks in an offloaded block.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        self.config = config
        self.extra_config: Mapping[str, Any] = config.extra_config  # Any: parsed in config.settings
        self.hash_block_size = config.hash_block_size
        self.gpu_block_size = tuple(group.block_size_tokens for group in config.groups)
        self.block_size_factor = config.block_size_factor

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """Return the scheduler side."""

    @abstractmethod
    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerEntry]:
        """Yield the worker side: each handler with the classes of its source and destination specs."""

    def region_identity(self) -> tuple[int, int] | None:
        """Return the identity of the memory region that this half has mapped; None when its halves share none.

        It is the same two numbers in all processes that share the memory, and others on another machine. The scheduler
        half starts no transfer until every worker has reported the identity that it has itself. The worker half calls
        this after ``get_handlers``, the scheduler half after ``get_manager``.
        """
        return None

    def seal_region(self) -> None:
        """Unlink the region's name: all processes have mapped it."""

    def audited_namespace(self) -> str | None:
        """Return the namespace of the blocks that the handlers can compare, for people; None when they compare none.

        Such handlers take a transfer from ``GPULoadStoreSpec`` to ``AuditLoadStoreSpec``, compare device blocks with
        host memory and report the deviations.
        """
        return None

    def audited_groups(self) -> frozenset[int]:
        """Return the KV groups whose blocks the handlers can compare."""
        return frozenset()

    def describe_start(self) -> list[str]:
        """Return what an operator wants to know of the scheduler's half once it is built, a line each."""
        return []

    def detach_kv_caches(self) -> None:
        """Drop every reference to a device tensor when begun copies have ended; what was stored stays. Idempotent.

        For engines that remove their KV cache to free the device's memory. Handlers report what they have begun, and
        decline transfers, until ``get_handlers`` is called again: with tensors of the same layout, between which and
        the same slots its handlers copy from then on. An engine whose spec does not override this keeps its KV cache:
        it cannot be put to sleep.
        """

    def shutdown(self) -> None:
        """Shut down what was built and free its memory; idempotent."""


class RowMemory(Protocol):
    """The memory of a primary tier: rows as bytes."""

    def create_kv_memoryview(self) -> memoryview:
        """Return the rows, writable, zero-copy, shape (num_blocks, row_stride), format 'b'."""

    def cleanup(self) -> None:
        """Free the memory; idempotent."""


def overrides(method: Callable[..., object], default: Callable[..., object]) -> bool:
    """Return whether an object's method is another than the contract's default, so that calling it has an effect.

    Args:
        method: of the object, for example ``manager.touch``.
        default: of the contract, for example ``OffloadingManager.touch``.
    """
    return getattr(method, "__func__", method) is not default
