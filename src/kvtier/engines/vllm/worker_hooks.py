"""The hooks that vLLM calls in a worker's process, and views of its KV cache in the form of kvtier's handlers.

Each hook calls the worker half of ``kvtier.connector``. How a failed load is reported depends on the model. With one
full-attention group vLLM gets the device blocks whose load failed, together with the report that ends the load, and
computes from the first of them on. Otherwise it gets the request and computes from the first token: block numbers are
not unique among several groups, and with a window it would go on from a block whose predecessors were never allocated.

vLLM registers one tensor a layer, in the shape of its attention backend. kvtier needs where the page of a layer for a
device block starts, its length without padding, and the distance to the next block's. There are three layouts:

- separate: each layer has a region of its own, pages one after another;
- overlaid: layers of different groups share a region, because a device block belongs to one group at a time;
- packed: the pages of several layers for one device block are adjacent. Adjacent pages of a group become one page, so a
  block is one copy.

The page of a recurrent state has several tensors one after the other, of several types, and padding behind them.

Rows outlive the process, so the order of a group's pages depends on the configuration only: by position within an
allocation, and allocations by their first layer, never by address.

Source: ``KVConnectorBase_V1`` of vLLM 0.28 to 0.33.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

from kvtier.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvtier.connector.common import OffloadingConnectorMetadata, OffloadingWorkerMetadata
from kvtier.connector.offloading_connector import OffloadingConnector
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.engines.vllm.compat import TransferResults
from kvtier.engines.vllm.groups import (
    NO_REMEDY,
    can_recompute_from_block,
    first_spec,
    page_bytes_of_layers,
)
from kvtier.errors import KVCacheLayoutError

LAYOUT_REMEDY = (
    "set VLLM_KV_CACHE_LAYOUT to LBNHC, LBHNC, BLNHC or BLHNC (NHD or HND in vLLM 0.28), or choose another attention "
    "backend"
)

LayerCache = torch.Tensor | Sequence[torch.Tensor]
"""The KV cache of a layer as vLLM registers it: one tensor, or those of a recurrent state, in the order of its page."""


class WorkerHooks:
    """The hooks of KVTierConnector in a worker's process. Used from the thread that runs the model."""

    _connector: OffloadingConnector
    _connector_metadata: KVConnectorMetadata | None
    _kv_cache_config: KVCacheConfig

    def __init__(self) -> None:
        self._invalid_block_ids: set[int] = set()
        self._kv_caches: Mapping[str, LayerCache] = {}
        self._is_registered = False

    @property
    def _worker(self) -> OffloadingConnectorWorker:
        worker = self._connector.connector_worker
        assert worker is not None, "a hook of a worker was called on the scheduler"
        return worker

    @property
    def _step(self) -> OffloadingConnectorMetadata:
        metadata = self._connector_metadata
        assert isinstance(metadata, OffloadingConnectorMetadata), "vLLM binds the metadata before each step"
        return metadata

    def register_kv_caches(self, kv_caches: Mapping[str, LayerCache]) -> None:
        """Register the KV cache of every layer, before the first step."""
        self._worker.register_kv_caches(make_canonical_kv_caches(self._kv_cache_config, kv_caches))
        self._kv_caches = kv_caches
        self._is_registered = True

    def unregister_kv_caches(self) -> None:
        """End every copy and let go of the KV caches, whose memory vLLM frees while it sleeps; idempotent.

        vLLM calls this from 0.33 on. It takes the memory from under the tensors and keeps their addresses.
        """
        if self._is_registered:
            self._worker.unregister_kv_caches()
            self._is_registered = False

    def restore_kv_caches(self) -> None:
        """Use the same KV caches again, which have memory again but not their content; idempotent."""
        if not self._is_registered:
            self.register_kv_caches(self._kv_caches)

    def handle_preemptions(self, kv_connector_metadata: OffloadingConnectorMetadata) -> None:
        """Start the stores of the last step and finish those whose device blocks will be overwritten."""
        self._worker.handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        """Start the loads of this step."""
        self._worker.start_kv_transfers(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is scheduled when its blocks are loaded whole."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: object
    ) -> None:
        """Do nothing: blocks are stored whole, after the step that computed them."""

    def wait_for_save(self) -> None:
        """Prepare the stores of this step, which start in the next one."""
        self._worker.prepare_store_kv(self._step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return no stores, and the requests whose load has ended, successfully or not; each once."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        """Return the requests whose load has ended, and those of them to compute from the first token."""
        finished_sending, finished_recving = self._worker.get_finished(finished_req_ids)
        failed = self._worker.take_failed_loads()
        if not can_recompute_from_block(self._connector.spec.config.groups):
            return TransferResults(finished_sending, finished_recving, set(failed))
        self._invalid_block_ids.update(*failed.values())
        return TransferResults(finished_sending, finished_recving)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the device blocks of the last report's failed loads; empty except with one full-attention group."""
        invalid_block_ids, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid_block_ids

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """Return this worker's reports since the last call."""
        return self._worker.build_connector_worker_meta()


@dataclass(frozen=True, slots=True)
class PageRun:
    """Pages of one layer, or of adjacent ones: block ``b`` starts at ``start_byte + b * stride_bytes``.

    Attributes:
        storage: the memory, as bytes.
        start_byte: start of block 0 in it.
        stride_bytes: distance from one block to the next.
        page_bytes: bytes of a block, unpadded.
    """

    storage: torch.UntypedStorage
    start_byte: int
    stride_bytes: int
    page_bytes: int

    @property
    def place(self) -> tuple[int, int]:
        """Memory address of block 0, and the stride; equal for layers that overlay each other."""
        return self.storage.data_ptr() + self.start_byte, self.stride_bytes

    def is_followed_by(self, other: "PageRun") -> bool:
        """Return whether each page of ``other`` begins where this run's page of the same block ends."""
        return (
            self.storage.data_ptr() == other.storage.data_ptr()
            and self.stride_bytes == other.stride_bytes
            and self.start_byte + self.page_bytes == other.start_byte
            and self.page_bytes + other.page_bytes <= self.stride_bytes
        )


def make_canonical_kv_caches(
    kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, LayerCache]
) -> CanonicalKVCaches:
    """Return views of every group's pages.

    Args:
        kv_cache_config: the groups and the number of device blocks.
        kv_caches: the KV cache of each layer, first dimension device blocks or equal parts of them; several tensors for
            a recurrent state.

    Raises:
        KVCacheLayoutError: a layer is missing, or its pages have no constant stride; the message names it.
    """
    runs_of_groups = [
        find_runs(kv_cache_config, group, kv_caches) for group in kv_cache_config.kv_cache_groups
    ]
    widest: dict[tuple[int, int], PageRun] = {}
    for run in (run for runs in runs_of_groups for run in runs):
        known = widest.get(run.place)
        if known is None or known.page_bytes < run.page_bytes:
            widest[run.place] = run
    order = {place: index for index, place in enumerate(widest)}
    num_blocks = kv_cache_config.num_blocks
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(view_pages(run, num_blocks), run.page_bytes) for run in widest.values()],
        [[CanonicalKVCacheRef(order[run.place], run.page_bytes) for run in runs] for runs in runs_of_groups],
    )


def find_runs(
    kv_cache_config: KVCacheConfig, group: KVCacheGroupSpec, kv_caches: Mapping[str, LayerCache]
) -> list[PageRun]:
    """Return the pages of one group, adjacent ones joined, in the order of their bytes in a row. Pure.

    Raises:
        KVCacheLayoutError: as in ``make_canonical_kv_caches``.
    """
    pages = page_bytes_of_layers(kv_cache_config, group)
    num_blocks = kv_cache_config.num_blocks
    return merge_adjacent(
        [
            _find_pages_of(group, name, kv_caches.get(name), pages[name], num_blocks)
            for name in group.layer_names
        ]
    )


def find_pages(layer: str, cache: object, page_bytes: int, num_blocks: int) -> PageRun:
    """Return where the pages of one layer are. Pure.

    Args:
        layer: its name, for messages.
        cache: its KV cache as vLLM registered it.
        page_bytes: its bytes in a device block, unpadded.
        num_blocks: device blocks.

    Raises:
        KVCacheLayoutError: no tensor was registered for it, or its blocks have no constant stride.
    """
    if not isinstance(cache, torch.Tensor):
        raise KVCacheLayoutError(
            f"layer {layer!r}: vLLM registered {type(cache).__name__}, kvtier needs one tensor for each layer"
        )
    if cache.dim() == 0 or not cache.shape[0] or cache.shape[0] % num_blocks:
        raise KVCacheLayoutError(
            f"layer {layer!r}: its KV cache has shape {tuple(cache.shape)}, whose first dimension is not a multiple "
            f"of the {num_blocks} device blocks: {LAYOUT_REMEDY}"
        )
    parts_per_block = cache.shape[0] // num_blocks
    item_bytes = cache.element_size()
    part_stride_bytes = cache.stride(0) * item_bytes
    stride_bytes = part_stride_bytes * parts_per_block
    sizes_and_strides = zip(cache.shape[1:], cache.stride()[1:], strict=True)
    reach_bytes = (1 + sum((size - 1) * stride for size, stride in sizes_and_strides)) * item_bytes
    reach_bytes += part_stride_bytes * (parts_per_block - 1)
    if max(page_bytes, reach_bytes) > stride_bytes or reach_bytes > page_bytes:
        raise KVCacheLayoutError(
            f"layer {layer!r}: a device block has {page_bytes} bytes, but its KV cache of shape {tuple(cache.shape)} "
            f"spreads it over {reach_bytes} bytes with a stride of {stride_bytes}, so blocks are not contiguous: "
            f"{LAYOUT_REMEDY}"
        )
    run = PageRun(cache.untyped_storage(), int(cache.storage_offset()) * item_bytes, stride_bytes, page_bytes)
    end_byte = run.start_byte + stride_bytes * (num_blocks - 1) + page_bytes
    if end_byte > run.storage.nbytes():
        raise KVCacheLayoutError(
            f"layer {layer!r}: its last device block ends at byte {end_byte} of an allocation of "
            f"{run.storage.nbytes()}: vLLM's page size of {page_bytes} bytes contradicts what it allocated"
        )
    return run


def _find_pages_of(
    group: KVCacheGroupSpec, layer: str, cache: object, page_bytes: int, num_blocks: int
) -> PageRun:
    """Return where the pages of one layer of a group are."""
    is_state = isinstance(first_spec(group), MambaSpec)
    if is_state and isinstance(cache, list | tuple) and cache:
        return find_state_pages(layer, cache, page_bytes, num_blocks)
    return find_pages(layer, cache, page_bytes, num_blocks)


def find_state_pages(layer: str, parts: Sequence[object], page_bytes: int, num_blocks: int) -> PageRun:
    """Return where the pages of a recurrent state are, the parts of which lie one behind the other. Pure.

    Args:
        layer: its name, for messages.
        parts: its KV cache as vLLM registered it, tensors of one dtype each.
        page_bytes: its bytes in a device block, unpadded.
        num_blocks: device blocks.

    Raises:
        KVCacheLayoutError: there is a gap between parts, they are not tensors, or they are not ``page_bytes`` long.
    """
    runs = [find_pages(layer, part, _bytes_per_block(part), num_blocks) for part in parts]
    joined = runs[0]
    for run in runs[1:]:
        if not joined.is_followed_by(run):
            raise KVCacheLayoutError(
                f"layer {layer!r}: the {len(parts)} parts of its recurrent state do not lie one behind the other: "
                f"{NO_REMEDY}"
            )
        joined = replace(joined, page_bytes=joined.page_bytes + run.page_bytes)
    if joined.page_bytes != page_bytes:
        raise KVCacheLayoutError(
            f"layer {layer!r}: a recurrent state has {page_bytes} bytes, but the tensors of its KV cache have "
            f"{joined.page_bytes} a block: {NO_REMEDY}"
        )
    return joined


def _bytes_per_block(part: object) -> int:
    return math.prod(part.shape[1:]) * part.element_size() if isinstance(part, torch.Tensor) else 0


def merge_adjacent(runs: Sequence[PageRun]) -> list[PageRun]:
    """Join pages of one group that are adjacent in memory, so that they are copied at once. Pure.

    Args:
        runs: one for each layer, in the order of the layers.

    Returns:
        The same bytes by position within an allocation, allocations in the order of their first layers.
    """
    storages = list(dict.fromkeys(run.storage.data_ptr() for run in runs))
    in_order = sorted(runs, key=lambda run: (storages.index(run.storage.data_ptr()), run.start_byte))
    merged: list[PageRun] = []
    for run in in_order:
        if merged and merged[-1].is_followed_by(run):
            before = merged.pop()
            joint_bytes = before.page_bytes + run.page_bytes
            merged.append(PageRun(before.storage, before.start_byte, before.stride_bytes, joint_bytes))
        else:
            merged.append(run)
    return merged


def view_pages(run: PageRun, num_blocks: int) -> torch.Tensor:
    """Return the pages as bytes, shape (num_blocks, page_bytes), int8, on the device; a view. Pure."""
    raw = torch.empty(0, dtype=torch.int8, device=run.storage.device)
    return raw.set_(run.storage, run.start_byte, (num_blocks, run.page_bytes), (run.stride_bytes, 1))
