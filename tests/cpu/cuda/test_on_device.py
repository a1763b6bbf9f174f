"""Each way to copy keeps the promises of handlers on a CUDA device, on private rows and on a region."""

import itertools
import os
from collections.abc import Iterator

import pytest
import torch

from kvtier.base import CanonicalKVCaches
from kvtier.config import CudaCopier
from kvtier.cpu.gpu_worker import CpuGpuOffloadingHandlers
from kvtier.cpu.row_layout import plan_layout
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.errors import ConfigError
from kvtier.testing.handler_suite import HandlerSuite

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
region_numbers = itertools.count()


class OnDevice(HandlerSuite):
    """CUDA tensors, the second of two workers' parts of a pinned region."""

    device = "cuda"
    way: CudaCopier

    @pytest.fixture(autouse=True)
    def _regions(self) -> Iterator[None]:
        self.regions: list[SharedOffloadRegion] = []
        yield
        for region in self.regions:
            region.cleanup()

    def make_handlers(
        self, kv_caches: CanonicalKVCaches, block_size_factor: int, num_cpu_blocks: int
    ) -> CpuGpuOffloadingHandlers:
        part = plan_layout(kv_caches, block_size_factor).part_bytes + 5
        stride = -(-2 * part // 64) * 64
        name = f"cuda-test-{os.getpid()}-{next(region_numbers)}"
        region = SharedOffloadRegion(
            name, stride * num_cpu_blocks, num_cpu_blocks, 1, 2, part, row_alignment_bytes=64
        )
        region.seal()
        self.regions.append(region)
        try:
            return CpuGpuOffloadingHandlers(
                kv_caches, block_size_factor, num_cpu_blocks, region, cuda_copier=self.way
            )
        except ConfigError as error:
            pytest.skip(str(error))


class TestBatch(OnDevice):
    """One batch a transfer."""

    way = CudaCopier.BATCH


class TestRuns(OnDevice):
    """One copy of torch's a span."""

    way = CudaCopier.RUNS


class TestStaged(OnDevice):
    """Through a buffer on the device."""

    way = CudaCopier.STAGED


class TestKernel(OnDevice):
    """A kernel."""

    way = CudaCopier.KERNEL
