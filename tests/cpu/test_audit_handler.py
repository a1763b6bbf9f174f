"""What a comparison of device blocks with rows reports: each part of a page by its own measure, padding never."""

from collections.abc import Iterator

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
from kvtier.config import GroupKind, KVGroup, StatePart
from kvtier.cpu.audit_handler import divide_places
from kvtier.cpu.common import AuditLoadStoreSpec, CPULoadStoreSpec
from kvtier.cpu.compare import find_format, find_page_formats
from kvtier.cpu.gpu_worker import CpuGpuOffloadingHandlers
from kvtier.cpu.row_layout import PagePlace

NUM_BLOCKS = 4
PADDED_BYTES = 1024
PARTS = (StatePart("bfloat16", 256), StatePart("float32", 512))
"""Of a layer's state: a convolution and a sum."""

GROUPS = (
    KVGroup(16, ("attention",), 768),
    KVGroup(16, ("state.0", "state.1"), 2 * 768, GroupKind.STATE, state_parts=PARTS * 2),
    KVGroup(16, ("unknown",), 768, GroupKind.STATE),
)
ATTENTION, STATES, UNKNOWN = range(3)
CONVOLUTION, SUM = 2, 256 + 4
"""Bytes within a layer's state: the beginning of a number of each part."""


class Pages:
    """Two tensors of padded pages, and handlers between them and as many rows."""

    def __init__(self) -> None:
        # Of its own: a number near zero, whose exponent says little, would come with some order of the tests.
        self._rng = np.random.default_rng(3)
        self.tensors = [self._draw() for _ in range(2)]
        canonical = [CanonicalKVCacheTensor(tensor, PADDED_BYTES) for tensor in self.tensors]
        refs = [CanonicalKVCacheRef(idx, 768) for idx in range(2)]
        caches = CanonicalKVCaches(canonical, [[refs[0]], refs, [refs[1]]])
        formats = find_page_formats(GROUPS, "bfloat16", "bfloat16")
        self.handlers = CpuGpuOffloadingHandlers(caches, 1, NUM_BLOCKS, audit_formats=formats)
        self._num_jobs = 0

    def store(self, group: int, block: int, slot: int) -> None:
        """Copy a device block into a row."""
        spec = TransferSpec(self._device(group, block), CPULoadStoreSpec([slot]))
        job_id = self._next_job()
        assert self.handlers.gpu_to_cpu_handler.transfer_async(job_id, spec)
        self.handlers.gpu_to_cpu_handler.wait({job_id})

    def compare(self, group: int, block: int, slot: int) -> float | None:
        """Return how far a device block is from a row; None when the handler declines."""
        handler, job_id = self.handlers.audit_handler, self._next_job()
        assert handler is not None
        if not handler.transfer_async(
            job_id, TransferSpec(self._device(group, block), AuditLoadStoreSpec([slot]))
        ):
            return None
        handler.wait({job_id})
        (result,) = handler.get_finished()
        assert result.deviations is not None
        (deviation,) = result.deviations
        return deviation

    def change(self, layer: int, block: int, byte: int, bits: int) -> None:
        """Change bits of one byte on the device."""
        self.tensors[layer].view(torch.uint8)[block, byte] ^= bits

    def _draw(self) -> torch.Tensor:
        convolution = torch.from_numpy(
            self._rng.standard_normal((NUM_BLOCKS, 128)).astype(np.float32)
        ).bfloat16()
        total = torch.from_numpy(self._rng.standard_normal((NUM_BLOCKS, 128)).astype(np.float32))
        padding = torch.zeros((NUM_BLOCKS, PADDED_BYTES - 768), dtype=torch.int8)
        return torch.cat([convolution.view(torch.int8), total.view(torch.int8), padding], dim=1)

    @staticmethod
    def _device(group: int, block: int) -> GPULoadStoreSpec:
        return GPULoadStoreSpec([block], [int(group == idx) for idx in range(len(GROUPS))], [0] * len(GROUPS))

    def _next_job(self) -> TransferJobId:
        self._num_jobs += 1
        return TransferJobId(self._num_jobs)


@pytest.fixture
def pages() -> Iterator[Pages]:
    """Pages whose handlers are shut down after the test."""
    made = Pages()
    yield made
    made.handlers.shutdown()


def test_a_state_equals_itself_and_no_other(pages: Pages) -> None:
    pages.store(STATES, 1, 0)

    same, other = pages.compare(STATES, 1, 0), pages.compare(STATES, 2, 0)

    assert same == 0
    assert other is not None
    assert other > 1


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("byte", "is_high"), [(CONVOLUTION, 1), (SUM, 3)])
def test_each_part_of_each_layer_is_read_as_its_own_dtype(
    pages: Pages, layer: int, byte: int, is_high: int
) -> None:
    """The lowest bit of a number is rounding, the highest of its exponent a fault."""
    pages.store(STATES, 1, 0)
    pages.change(layer, 1, byte, 0x01)
    low = pages.compare(STATES, 1, 0)
    pages.change(layer, 1, byte + is_high, 0x40)
    high = pages.compare(STATES, 1, 0)

    assert low is not None
    assert high is not None
    assert 0 < low < 0.1
    assert high > 1


@pytest.mark.parametrize("group", [ATTENTION, STATES])
def test_padding_is_never_compared(pages: Pages, group: int) -> None:
    pages.store(group, 1, 0)
    for byte in (768, PADDED_BYTES - 1):
        pages.change(0, 1, byte, 0xFF)
        pages.change(1, 1, byte, 0xFF)

    assert pages.compare(group, 1, 0) == 0


def test_a_group_whose_numbers_are_not_known_is_declined(pages: Pages) -> None:
    pages.store(UNKNOWN, 1, 0)

    assert pages.compare(UNKNOWN, 1, 0) is None


def test_parts_are_divided_among_refs_however_these_cut_them() -> None:
    kv_format = find_format("float32")
    assert kv_format is not None
    places = [PagePlace(0, 8, 0), PagePlace(1, 12, 8), PagePlace(2, 4, 20)]
    ((page),) = find_page_formats([KVGroup(16, ("a",), 24)], "float32", "float32")

    whole = divide_places(places, page)
    parted = divide_places(places, tuple(page[0]._replace(size_bytes=size) for size in (4, 12, 8)))

    assert [[(part.start, part.end) for part in of_place] for of_place in whole] == [
        [(0, 8)],
        [(0, 12)],
        [(0, 4)],
    ]
    assert [[(part.start, part.end) for part in of_place] for of_place in parted] == [
        [(0, 4), (4, 8)],
        [(0, 8), (8, 12)],
        [(0, 4)],
    ]
    assert divide_places(places, ()) == ((), (), ())
