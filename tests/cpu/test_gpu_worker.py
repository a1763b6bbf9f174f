"""Handlers on private rows, on a region and on CUDA keep the suite's promises; what is theirs alone is here."""

import gc
import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    TransferJobId,
    TransferSpec,
)
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.gpu_worker import CpuGpuOffloadingHandlers
from kvtier.cpu.row_layout import plan_layout
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.errors import KVCacheLayoutError, WorkerAreaError
from kvtier.testing.handler_suite import TWO_BLOCKS, load, store
from kvtier.testing.joining_suite import JoiningHandlerSuite

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
region_numbers = itertools.count()


class TestPrivateRows(JoiningHandlerSuite):
    """CPU tensors, rows of the worker's own."""

    def make_handlers(
        self, kv_caches: CanonicalKVCaches, block_size_factor: int, num_cpu_blocks: int
    ) -> CpuGpuOffloadingHandlers:
        return CpuGpuOffloadingHandlers(kv_caches, block_size_factor, num_cpu_blocks)


class TestRegionRows(JoiningHandlerSuite):
    """CPU tensors, the second of two workers' parts of a region with aligned rows."""

    @pytest.fixture(autouse=True)
    def _region_directory(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        self.directory = tmp_path_factory.mktemp("region")
        self.regions: list[SharedOffloadRegion] = []
        yield
        for region in self.regions:
            region.cleanup()

    def make_handlers(
        self, kv_caches: CanonicalKVCaches, block_size_factor: int, num_cpu_blocks: int
    ) -> CpuGpuOffloadingHandlers:
        part = plan_layout(kv_caches, block_size_factor).part_bytes + 5
        stride = -(-2 * part // 64) * 64
        name = f"r{next(region_numbers)}"
        region = SharedOffloadRegion(
            name,
            stride * num_cpu_blocks,
            num_cpu_blocks,
            1,
            2,
            part,
            row_alignment_bytes=64,
            directory=self.directory,
        )
        self.regions.append(region)
        return CpuGpuOffloadingHandlers(kv_caches, block_size_factor, num_cpu_blocks, region)


@needs_cuda
@pytest.mark.cuda
class TestCuda(JoiningHandlerSuite):
    """CUDA tensors, pinned private rows."""

    device = "cuda"

    def make_handlers(
        self, kv_caches: CanonicalKVCaches, block_size_factor: int, num_cpu_blocks: int
    ) -> CpuGpuOffloadingHandlers:
        return CpuGpuOffloadingHandlers(kv_caches, block_size_factor, num_cpu_blocks)


@needs_cuda
@pytest.mark.cuda
class TestCudaRegion(TestRegionRows):
    """CUDA tensors, a pinned region."""

    device = "cuda"


@needs_cuda
@pytest.mark.cuda
def test_a_store_on_cuda_waits_for_the_compute_that_produces_it() -> None:
    tensor = torch.zeros((4, 1 << 20), dtype=torch.int8, device="cuda")
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 1 << 20)], [[CanonicalKVCacheRef(0, 1 << 20)]])
    handlers = CpuGpuOffloadingHandlers(caches, 1, 4)
    operand = torch.ones((4096, 4096), device="cuda")
    for _ in range(20):
        operand = operand @ operand * 1e-4
    tensor.fill_(5)

    spec = TransferSpec(GPULoadStoreSpec([0, 1, 2, 3], [4], [0]), CPULoadStoreSpec([0, 1, 2, 3]))
    assert handlers.gpu_to_cpu_handler.transfer_async(TransferJobId(1), spec)
    handlers.gpu_to_cpu_handler.wait({TransferJobId(1)})

    assert bool((handlers.rows == 5).all())
    handlers.shutdown()


def test_tensors_of_any_type_whose_blocks_are_contiguous_are_taken_as_bytes() -> None:
    tensor = torch.arange(4 * 2 * 3, dtype=torch.float32).reshape(4, 2, 3)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 24)], [[CanonicalKVCacheRef(0, 24)]])
    handlers = CpuGpuOffloadingHandlers(caches, 1, 2)
    spec = TransferSpec(GPULoadStoreSpec([3, 1], [2], [0]), CPULoadStoreSpec([0, 1]))

    handlers.gpu_to_cpu_handler.transfer_async(TransferJobId(1), spec)
    handlers.gpu_to_cpu_handler.wait({TransferJobId(1)})

    assert torch.equal(handlers.rows.view(torch.float32).view(2, 2, 3), tensor[[3, 1]])
    handlers.shutdown()


def test_a_strided_tensor_is_copied_in_place() -> None:
    whole = torch.zeros((4, 100), dtype=torch.int8)
    part = whole[:, 10:42]
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(part, 32)], [[CanonicalKVCacheRef(0, 32)]])
    handlers = CpuGpuOffloadingHandlers(caches, 1, 2)
    handlers.rows.fill_(3)
    spec = TransferSpec(CPULoadStoreSpec([1]), GPULoadStoreSpec([2], [1], [0]))

    handlers.cpu_to_gpu_handler.transfer_async(TransferJobId(1), spec)
    handlers.cpu_to_gpu_handler.wait({TransferJobId(1)})

    assert whole.sum() == 3 * 32
    assert bool((whole[2, 10:42] == 3).all())
    handlers.shutdown()


@pytest.mark.parametrize(
    ("tensor", "page_size_bytes", "ref_page_bytes"),
    [
        (torch.zeros((4, 2, 8), dtype=torch.int8).transpose(1, 2), 16, 16),
        (torch.zeros((4, 16), dtype=torch.int8), 32, 16),
        (torch.zeros((4, 16), dtype=torch.int8), 16, 17),
        (torch.zeros((4, 16), dtype=torch.int8, device="meta"), 16, 16),
    ],
)
def test_tensors_that_cannot_be_placed_are_refused(
    tensor: torch.Tensor, page_size_bytes: int, ref_page_bytes: int
) -> None:
    cache = CanonicalKVCacheTensor(tensor, page_size_bytes)
    caches = CanonicalKVCaches([cache], [[CanonicalKVCacheRef(0, ref_page_bytes)]])

    with pytest.raises(KVCacheLayoutError):
        CpuGpuOffloadingHandlers(caches, 1, 2)


def test_a_region_with_too_small_a_part_is_refused(tmp_path: Path) -> None:
    region = SharedOffloadRegion("small", 4 * 90, 4, 0, 1, 90, directory=tmp_path)

    with pytest.raises(WorkerAreaError, match="exceeds worker area end"):
        CpuGpuOffloadingHandlers(TWO_BLOCKS.make_caches("cpu"), 1, 4, region)

    region.cleanup()


def test_a_region_of_another_number_of_slots_is_refused(tmp_path: Path) -> None:
    region = SharedOffloadRegion("short", 3 * 96, 3, 0, 1, 96, directory=tmp_path)

    with pytest.raises(KVCacheLayoutError, match="num_cpu_blocks=4"):
        CpuGpuOffloadingHandlers(TWO_BLOCKS.make_caches("cpu"), 1, 4, region)

    region.cleanup()


def test_after_shutdown_handlers_hold_neither_the_region_nor_the_cache(tmp_path: Path) -> None:
    region = SharedOffloadRegion("held", 4 * 96, 4, 0, 1, 96, directory=tmp_path)
    handlers = CpuGpuOffloadingHandlers(TWO_BLOCKS.make_caches("cpu"), 1, 4, region)
    store(handlers, TWO_BLOCKS)
    load(handlers, TWO_BLOCKS)

    handlers.shutdown()
    gc.collect()
    mapping = region.mapping()
    mapping.close()

    assert mapping.closed
    region.cleanup()


DEVICES = ["cpu", pytest.param("cuda", marks=[needs_cuda, pytest.mark.cuda])]
PAGE_BYTES = 4 << 20
ALL_BLOCKS = [0, 1, 2, 3]


def one_tensor(tensor: torch.Tensor) -> CanonicalKVCaches:
    """Return a cache of one layer whose pages are the tensor's rows."""
    size = tensor.shape[1]
    return CanonicalKVCaches([CanonicalKVCacheTensor(tensor, size)], [[CanonicalKVCacheRef(0, size)]])


def random_tensor(device: str) -> torch.Tensor:
    """Return four pages, large enough for a copy that takes a while."""
    return torch.randint(-128, 127, (4, PAGE_BYTES), dtype=torch.int8).to(device)


def submit(handlers: CpuGpuOffloadingHandlers, *, is_store: bool) -> bool:
    """Begin to copy every block."""
    device, rows, job = GPULoadStoreSpec(ALL_BLOCKS, [4], [0]), CPULoadStoreSpec(ALL_BLOCKS), TransferJobId(1)
    if is_store:
        return handlers.gpu_to_cpu_handler.transfer_async(job, TransferSpec(device, rows))
    return handlers.cpu_to_gpu_handler.transfer_async(job, TransferSpec(rows, device))


@pytest.mark.parametrize("device", DEVICES)
def test_detach_ends_a_store_under_way_and_its_bytes_come_back_into_another_tensor(device: str) -> None:
    first = random_tensor(device)
    wanted = first.cpu().clone()
    handlers = CpuGpuOffloadingHandlers(one_tensor(first), 1, 4)
    assert submit(handlers, is_store=True)

    handlers.detach()
    first.zero_()

    assert [result.success for result in handlers.gpu_to_cpu_handler.get_finished()] == [True]
    second = torch.zeros_like(first)
    handlers.attach(one_tensor(second))
    assert submit(handlers, is_store=False)
    handlers.cpu_to_gpu_handler.wait({TransferJobId(1)})
    assert torch.equal(second.cpu(), wanted)
    handlers.shutdown()


@pytest.mark.parametrize("device", DEVICES)
def test_without_a_cache_both_directions_decline(device: str, caplog: pytest.LogCaptureFixture) -> None:
    handlers = CpuGpuOffloadingHandlers(one_tensor(random_tensor(device)), 1, 4)

    handlers.detach()

    assert not handlers.is_attached
    assert not submit(handlers, is_store=True)
    assert not submit(handlers, is_store=False)
    assert "no KV cache is registered" in caplog.text
    handlers.shutdown()


@pytest.mark.slow
def test_after_detach_nothing_leads_to_the_tensor_that_was_copied() -> None:
    memory = np.ones((4, PAGE_BYTES), dtype=np.int8)
    handlers = CpuGpuOffloadingHandlers(one_tensor(torch.from_numpy(memory)), 1, 4)
    for is_store in (True, False):
        submit(handlers, is_store=is_store)
    found = weakref.ref(memory)
    del memory
    gc.collect()
    assert found() is not None

    handlers.detach()
    gc.collect()

    assert found() is None
    handlers.shutdown()


@needs_cuda
@pytest.mark.cuda
def test_after_detach_no_device_memory_is_held_on_cuda() -> None:
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated()
    handlers = CpuGpuOffloadingHandlers(one_tensor(random_tensor("cuda")), 1, 4)
    for is_store in (True, False):
        submit(handlers, is_store=is_store)

    handlers.detach()
    gc.collect()

    assert torch.cuda.memory_allocated() == before_bytes
    handlers.shutdown()


def test_tensors_of_another_layout_are_refused_and_those_before_stay() -> None:
    tensor = torch.full((4, 64), 3, dtype=torch.int8)
    handlers = CpuGpuOffloadingHandlers(one_tensor(tensor), 1, 4)

    for shape in [(4, 63), (5, 64)]:
        with pytest.raises(KVCacheLayoutError, match="same layout"):
            handlers.attach(one_tensor(torch.zeros(shape, dtype=torch.int8)))

    assert submit(handlers, is_store=True)
    handlers.gpu_to_cpu_handler.wait({TransferJobId(1)})
    assert bool((handlers.rows == 3).all())
    handlers.shutdown()


def test_after_shutdown_no_tensor_is_taken() -> None:
    handlers = CpuGpuOffloadingHandlers(one_tensor(torch.zeros((4, 64), dtype=torch.int8)), 1, 4)
    handlers.shutdown()

    handlers.attach(one_tensor(torch.zeros((4, 64), dtype=torch.int8)))

    assert not handlers.is_attached
    assert not submit(handlers, is_store=True)
