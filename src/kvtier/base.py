"""The vocabulary and the contracts: keys, load/store specs, events, manager, spec, canonical KV caches.

There are two halves. On the scheduler side an OffloadingManager knows which blocks are held, reserves room and pins
blocks that are read. On the worker side handlers copy bytes between media, as a pair of LoadStoreSpecs describes. An
OffloadingSpec builds both halves from one OffloadingConfig.

Source: the contracts follow vLLM's KV offloading subsystem as of May 2026 (pull requests 37874 and 36644).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, NewType, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.config import OffloadingConfig
from kvtier.errors import KVCacheLayoutError
from kvtier.hints.values import RequestHints, parse_hints
from kvtier.histogram import HistogramSnapshot

if TYPE_CHECKING:
    import torch

OffloadKey = NewType("OffloadKey", bytes)
"""Content hash of a block and of its whole prefix, its tenant's number if it has one, the KV group index. Bytes, not a
tuple: millions of them must not burden the garbage collector."""

TransferJobId = NewType("TransferJobId", int)
"""A job of the connector: device -> primary or primary -> device."""

JobId = NewType("JobId", int)
"""A job of a secondary tier: primary -> tier or tier -> primary."""

BlockIds = npt.NDArray[np.int64]
"""Numbers of device blocks or slots, shape (num_blocks,)."""

GROUP_INDEX_BYTES = 4
"""Bytes behind the hash of a block without a tenant: the group index, below 256, so that the first three are zero."""

TENANT_BYTES = 7
TENANT_SUFFIX_BYTES = TENANT_BYTES + 1
"""Bytes behind the hash of a tenant's block, its number and the group: a header has room for them and a SHA-256."""

MAX_TENANT_NUMBER = 2 ** (8 * TENANT_BYTES) - 1
TENANT_MARK = 2**24 - 1
"""Bits of a tenant's number that are never all zero, where a key without one has zeros: so a key tells which it is."""

# Slices that are written out are made again for each key, which takes as long as the rest.
_MARK, _TENANT = slice(-GROUP_INDEX_BYTES, -1), slice(-TENANT_SUFFIX_BYTES, -1)
_PLAIN_HASH, _TENANTS_HASH = slice(-GROUP_INDEX_BYTES), slice(-TENANT_SUFFIX_BYTES)
_NO_TENANT, _read_number = bytes(GROUP_INDEX_BYTES - 1), int.from_bytes


def make_offload_key(block_hash: bytes, group_idx: int, tenant: int = 0) -> OffloadKey:
    """Return the key of a block with that content hash; otherwise as ``make_offload_keys``. Pure."""
    return make_offload_keys((block_hash,), group_idx, tenant)[0]


def make_offload_keys(block_hashes: Iterable[bytes], group_idx: int, tenant: int = 0) -> list[OffloadKey]:
    """Return the key of each block of one group, in order. Pure.

    Args:
        block_hashes: content hashes, each of a block and of its whole prefix.
        group_idx: KV group, below 256.
        tenant: number of the request's tenant (``kvtier.tenants.tenant_number``); 0 for none.

    Raises:
        OverflowError: the group or the number is none of these.
    """
    if not 0 <= group_idx < 256:
        raise OverflowError(f"group_idx={group_idx}: must be 0 to 255, a key has one byte for it")
    if tenant and not (tenant & TENANT_MARK and 0 < tenant <= MAX_TENANT_NUMBER):
        raise OverflowError(f"tenant={tenant}: must be 0, or below 2^56 and no multiple of 2^24")
    suffix = (tenant << 8 | group_idx).to_bytes(TENANT_SUFFIX_BYTES if tenant else GROUP_INDEX_BYTES, "big")
    return [OffloadKey(block_hash + suffix) for block_hash in block_hashes]


def get_offload_block_hash(key: OffloadKey) -> bytes:
    """Return the content hash that ``key`` was made from. Pure."""
    return key[_PLAIN_HASH if key[_MARK] == _NO_TENANT else _TENANTS_HASH]


def get_offload_group_idx(key: OffloadKey) -> int:
    """Return the KV group index that ``key`` was made from. Pure."""
    return key[-1]


def get_offload_tenant(key: OffloadKey) -> int:
    """Return the number of the tenant that ``key`` was made for; 0 for none. Pure."""
    return 0 if key[_MARK] == _NO_TENANT else _read_number(key[_TENANT])


@dataclass(eq=False, slots=True)
class ReqContext:
    """One request for managers and tiers; compared by identity.

    The same object reaches every manager and tier call made for the request.

    Attributes:
        req_id: the engine's id of the request.
        kv_transfer_params: the client's hints, unchanged by the engine.
    """

    req_id: str
    kv_transfer_params: dict[str, Any] | None = None  # Any: a client's JSON, read where it is used
    _hints: RequestHints | None = field(default=None, init=False, repr=False)

    @property
    def hints(self) -> RequestHints:
        """The hints among ``kv_transfer_params``; they are read when they are first asked for, and then never again."""
        if self._hints is None:
            self._hints = parse_hints(self.kv_transfer_params)
        return self._hints


class LoadStoreSpec(ABC):
    """Where the bytes of a transfer are, on one medium."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Return the name of the medium, for example "GPU"."""


class BlockIDsLoadStoreSpec(LoadStoreSpec, ABC):
    """Blocks named by number.

    Args:
        block_ids: block or slot numbers, any iterable of integers.
    """

    def __init__(self, block_ids: Iterable[int]) -> None:
        if isinstance(block_ids, np.ndarray):
            self.block_ids: BlockIds = block_ids.astype(np.int64, copy=False).reshape(-1)
        else:  # np.asarray takes half as long again for a list of numbers, because it looks for nesting
            self.block_ids = np.fromiter(block_ids, np.int64)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Device blocks, ordered by KV group.

    Args:
        block_ids: device block numbers, all groups one after another.
        group_sizes: how many of them belong to each group.
        block_indices: for each group the index, within the request, of its first block here, so that a
            worker can enter the middle of an offloaded block.

    Raises:
        KVCacheLayoutError: the lengths disagree.
    """

    def __init__(
        self, block_ids: Iterable[int], group_sizes: Sequence[int], block_indices: Sequence[int]
    ) -> None:
        super().__init__(block_ids)
        self.group_sizes = tuple(group_sizes)
        self.block_indices = tuple(block_indices)
        if sum(self.group_sizes) != len(self.block_ids):
            raise KVCacheLayoutError(
                f"group_sizes={self.group_sizes} sum to {sum(self.group_sizes)} but there are "
                f"{len(self.block_ids)} block ids: give one size for each group, in order"
            )
        if len(self.group_sizes) != len(self.block_indices):
            raise KVCacheLayoutError(
                f"{len(self.group_sizes)} group sizes but {len(self.block_indices)} block indices: "
                "give one of each for every group"
            )

    @staticmethod
    def medium() -> str:
        return "GPU"


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


class OffloadingManager(ABC):
    """The scheduler side: which blocks are held, in which slots, and which requests pin them.

    Called from one thread; must not block. Keys come first and positionally. A block is pinned from
    prepare_* to complete_*; a pinned block is not evicted.
    """

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

    def reset(self) -> None:
        """Forget every block; slots of transfers in flight are freed when those are reported."""

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by dotted name. Thread: any."""
        return {}

    def histograms(self) -> dict[str, HistogramSnapshot]:
        """Return histograms by dotted name. Thread: any."""
        return {}

    def shutdown(self) -> None:
        """End every thread and free every resource; idempotent."""


class OffloadingHandler(ABC):
    """The worker side of one direction: copies between two media, asynchronously.

    Called from one thread.
    """

    @abstractmethod
    def transfer_async(self, job_id: TransferJobId, spec: "TransferSpec") -> bool:
        """Start a transfer; False when it could not be started, and then it is never reported."""

    @abstractmethod
    def get_finished(self) -> list["TransferResult"]:
        """Return the jobs that ended since the last call, each exactly once; does not block."""

    @abstractmethod
    def wait(self, job_ids: set[TransferJobId]) -> None:
        """Block until each of ``job_ids`` has succeeded or failed; unknown ids are ignored."""

    def shutdown(self) -> None:
        """Shut down the handler after its started copies; idempotent."""


class JoiningHandler(ABC):
    """Optional contract of a handler that copies small transfers of many requests with one call.

    Called from the thread that calls the handler.
    """

    @abstractmethod
    def transfer_joined(self, jobs: "Mapping[TransferJobId, TransferSpec]") -> set[TransferJobId]:
        """Start transfers in their order, each with the outcome that it would have alone.

        Returns:
            Those that were started; each of them is reported by itself, the others never.
        """


class TransferSpec(NamedTuple):
    """A transfer: source and destination."""

    source: LoadStoreSpec
    destination: LoadStoreSpec


class TransferType(NamedTuple):
    """The media of a transfer, for example ("GPU", "CPU")."""

    source: str
    destination: str


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Result of a transfer.

    Attributes:
        job_id: the job.
        success: False when any byte may be missing.
        transfer_size: bytes moved, without padding.
        transfer_time: seconds of the copy itself.
        transfer_type: the media.
        deviations: of a job that compares instead of copying, how far each block is from what is held, in the order of
            its slots: 0 for equal bytes, at most 1 within the tolerance.
    """

    job_id: TransferJobId
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None
    transfer_type: TransferType | None = None
    deviations: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheTensor:
    """One tensor of the engine's KV cache, as bytes.

    Attributes:
        tensor: shape (num_blocks, page_size_bytes), int8, on the device; rows may be strided.
        page_size_bytes: bytes from the start of one page to its end, padding included.
    """

    tensor: "torch.Tensor"
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """A layer's bytes within a canonical tensor.

    Attributes:
        tensor_idx: index into ``CanonicalKVCaches.tensors``.
        page_size_bytes: bytes of one page without padding; they are the first of the tensor's page.
    """

    tensor_idx: int
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """The KV cache of one worker in the form that handlers use.

    Attributes:
        tensors: the tensors, in the order of their bytes in a row.
        group_data_refs: for each KV group what to copy, in the order of the bytes in a row.
    """

    tensors: list[CanonicalKVCacheTensor]
    group_data_refs: list[list[CanonicalKVCacheRef]]


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

    def shutdown(self) -> None:
        """Shut down what was built and free its memory; idempotent."""


class RowMemory(Protocol):
    """The memory of a primary tier: rows as bytes."""

    def create_kv_memoryview(self) -> memoryview:
        """Return the rows, writable, zero-copy, shape (num_blocks, row_stride), format 'b'."""

    def cleanup(self) -> None:
        """Free the memory; idempotent."""
