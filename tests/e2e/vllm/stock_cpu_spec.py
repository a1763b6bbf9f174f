"""vLLM's own offloading on a host without a GPU: its ``TieringOffloadingSpec`` with a worker that copies in memory.

Everything else is vLLM's own: connector, scheduler half, tiering manager, shared region. Only its worker refuses CPUs.
A configuration names the spec here with ``spec_name`` and ``spec_module_path``.
"""

import time

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies each job where it is submitted.

    Args:
        kv_caches: the device's pages.
        blocks_per_chunk: device blocks of a row's part.
        region: host memory.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion
    ) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._region = region
        self._finished: list[TransferResult] = []
        sizes = [one.page_size_bytes for one in kv_caches.tensors]
        self._device = [
            one.tensor.view(torch.int8).view(-1, size)
            for one, size in zip(kv_caches.tensors, sizes, strict=True)
        ]
        self._host = [
            region.create_next_worker_view(size * blocks_per_chunk).unflatten(1, (blocks_per_chunk, size))
            for size in sizes
        ]

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(
        self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        del expedited
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: every job has ended."""

    def shutdown(self) -> None:
        self._device, self._host = [], []
        self._region.cleanup()

    def _copy(self, job_id: int, device: GPULoadStoreSpec, host: CPULoadStoreSpec, *, is_store: bool) -> bool:
        began_s, num_bytes = time.perf_counter(), 0
        block_ids, chunk_ids = torch.as_tensor(device.block_ids), torch.as_tensor(host.block_ids)
        for refs, size, first in zip(self._refs, device.group_sizes, device.block_indices, strict=True):
            blocks, block_ids = block_ids[:size], block_ids[size:]
            places = first % self._blocks_per_chunk + torch.arange(size)
            num_chunks = -(-(first % self._blocks_per_chunk + size) // self._blocks_per_chunk) if size else 0
            chunks, chunk_ids = chunk_ids[:num_chunks], chunk_ids[num_chunks:]
            rows, parts = chunks[places // self._blocks_per_chunk], places % self._blocks_per_chunk
            for ref in refs:
                pages, num = self._device[ref.tensor_idx], ref.page_size_bytes
                held = self._host[ref.tensor_idx]
                if is_store:
                    held[rows, parts, :num] = pages[blocks, :num]
                else:
                    pages[blocks, :num] = held[rows, parts, :num]
                num_bytes += size * num
        took_s = time.perf_counter() - began_s
        self._finished.append(TransferResult(job_id, True, num_bytes, took_s))
        return True


class CPUHostTieringSpec(TieringOffloadingSpec):
    """Tiered offloading with such a worker."""

    _own_worker: OffloadingWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._own_worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._own_worker = CopyingWorker(kv_caches, self.blocks_per_chunk, region)
        return self._own_worker
