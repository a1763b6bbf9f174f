"""The contract of device <-> primary handlers, as a suite of tests to inherit.

A subclass builds its handlers and names the device they serve. Random transfers (several groups, empty ones, partial
blocks, padded pages) are compared byte by byte with a few lines of numpy::

    class TestMyHandlers(HandlerSuite):
        def make_handlers(self, kv_caches, block_size_factor, num_cpu_blocks):
            return MyHandlers(kv_caches, block_size_factor, num_cpu_blocks)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferJobId,
    TransferResult,
    TransferSpec,
)
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.testing.examples import num_examples

Bytes = npt.NDArray[np.int8]


class Handlers(Protocol):
    """Both directions, and the rows they copy to and from."""

    gpu_to_cpu_handler: OffloadingHandler
    cpu_to_gpu_handler: OffloadingHandler
    rows: torch.Tensor

    def shutdown(self) -> None:
        """Shut down both directions."""


@dataclass(frozen=True, slots=True)
class GroupCase:
    """One group of a transfer.

    Attributes:
        page_sizes: unpadded bytes of each ref; each has its own tensor.
        padding: additional bytes of each tensor's pages.
        device_blocks: the blocks to move.
        first_index: index within the request of the first of them.
        slots: their slots.
    """

    page_sizes: tuple[int, ...]
    padding: int
    device_blocks: tuple[int, ...]
    first_index: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyCase:
    """A cache and a transfer between it and the rows.

    Attributes:
        groups: the groups.
        factor: device blocks in an offloaded block.
        num_device_blocks: blocks of each tensor.
        num_slots: slots.
    """

    groups: tuple[GroupCase, ...]
    factor: int
    num_device_blocks: int
    num_slots: int

    def make_caches(self, device: str) -> CanonicalKVCaches:
        """Build tensors of random bytes."""
        random = np.random.default_rng(0)
        tensors: list[CanonicalKVCacheTensor] = []
        refs: list[list[CanonicalKVCacheRef]] = []
        for group in self.groups:
            refs.append([])
            for size in group.page_sizes:
                shape = (self.num_device_blocks, size + group.padding)
                tensor = torch.from_numpy(random.integers(-128, 128, shape, dtype=np.int8)).to(device)
                refs[-1].append(CanonicalKVCacheRef(len(tensors), size))
                tensors.append(CanonicalKVCacheTensor(tensor, shape[1]))
        return CanonicalKVCaches(tensors, refs)

    def specs(self) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
        """Return both sides of the transfer."""
        blocks = [block for group in self.groups for block in group.device_blocks]
        sizes = [len(group.device_blocks) for group in self.groups]
        device = GPULoadStoreSpec(blocks, sizes, [group.first_index for group in self.groups])
        return device, CPULoadStoreSpec([slot for group in self.groups for slot in group.slots])

    def pieces(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield (tensor, device block, slot, start in the part, bytes) of every page to move."""
        first_tensor = 0
        for group in self.groups:
            offset = 0
            for tensor, size in enumerate(group.page_sizes, first_tensor):
                for position, block in enumerate(group.device_blocks, group.first_index % self.factor):
                    slot, sub_block = group.slots[position // self.factor], position % self.factor
                    yield tensor, block, slot, offset + sub_block * size, size
                offset += size * self.factor
            first_tensor += len(group.page_sizes)

    @property
    def num_bytes(self) -> int:
        """Unpadded bytes to move."""
        return sum(size for _, _, _, _, size in self.pieces())


@st.composite
def copy_cases(draw: st.DrawFn) -> CopyCase:
    """Draw caches and transfers: small odd pages, and some large enough to be copied run by run."""
    factor = draw(st.integers(1, 4))
    num_device_blocks = draw(st.integers(1, 12))
    sizes = st.sampled_from((1, 3, 8, 48, 9001, 16384))
    drafts = []
    for _ in range(draw(st.integers(1, 3))):
        blocks = draw(st.lists(st.integers(0, num_device_blocks - 1), unique=True))
        if draw(st.booleans()):
            blocks = sorted(blocks)
        first_index = draw(st.integers(0, 9))
        num_slots = -(-(first_index % factor + len(blocks)) // factor) if blocks else 0
        page_sizes = draw(st.lists(sizes, min_size=1, max_size=3))
        drafts.append((tuple(page_sizes), draw(st.integers(0, 9)), tuple(blocks), first_index, num_slots))
    num_slots = sum(draft[-1] for draft in drafts) + draw(st.integers(1, 3))
    order = list(range(num_slots))
    slots = iter(draw(st.one_of(st.just(order), st.permutations(order))))
    groups = [GroupCase(*draft[:-1], tuple(next(slots) for _ in range(draft[-1]))) for draft in drafts]
    return CopyCase(tuple(groups), factor, num_device_blocks, num_slots)


TWO_BLOCKS = CopyCase((GroupCase((64, 32), 8, (2, 0), 0, (1, 3)),), 1, 4, 4)
"""A plain case: two device blocks of two padded layers."""


class HandlerSuite:
    """The contract of a pair of handlers. Inherit it and implement make_handlers.

    Attributes:
        device: the device of the KV cache.
    """

    device = "cpu"

    def make_handlers(
        self, kv_caches: CanonicalKVCaches, block_size_factor: int, num_cpu_blocks: int
    ) -> Handlers:
        """Build the handlers under test."""
        raise NotImplementedError

    @contextmanager
    def open(self, case: CopyCase) -> Iterator[tuple[Handlers, CanonicalKVCaches]]:
        """Build a case's cache and handlers, and shut them down at the end."""
        caches = case.make_caches(self.device)
        handlers = self.make_handlers(caches, case.factor, case.num_slots)
        try:
            yield handlers, caches
        finally:
            handlers.shutdown()

    @given(case=copy_cases())
    @settings(
        max_examples=num_examples(40), deadline=None, suppress_health_check=[HealthCheck.differing_executors]
    )
    def test_a_store_writes_its_pages_zeroes_the_tails_and_touches_nothing_else(self, case: CopyCase) -> None:
        with self.open(case) as (handlers, caches):
            handlers.rows.fill_(7)
            expected = expect_rows(case, caches, handlers.rows.numpy())

            result = store(handlers, case)

            np.testing.assert_array_equal(handlers.rows.numpy(), expected)
            assert result.success

    @given(case=copy_cases())
    @settings(
        max_examples=num_examples(40), deadline=None, suppress_health_check=[HealthCheck.differing_executors]
    )
    def test_a_load_writes_its_pages_and_touches_nothing_else(self, case: CopyCase) -> None:
        with self.open(case) as (handlers, caches):
            random = np.random.default_rng(1)
            rows = random.integers(-128, 128, tuple(handlers.rows.shape), dtype=np.int8)
            handlers.rows.copy_(torch.from_numpy(rows))
            expected = expect_device(case, caches, rows)

            result = load(handlers, case)

            for cache, wanted in zip(caches.tensors, expected, strict=True):
                np.testing.assert_array_equal(cache.tensor.cpu().numpy(), wanted)
            np.testing.assert_array_equal(handlers.rows.numpy(), rows)
            assert result.success

    def test_a_result_counts_unpadded_bytes_and_names_the_media(self) -> None:
        with self.open(TWO_BLOCKS) as (handlers, _):
            stored, loaded = store(handlers, TWO_BLOCKS), load(handlers, TWO_BLOCKS)

            assert stored.transfer_size == loaded.transfer_size == 2 * (64 + 32) == TWO_BLOCKS.num_bytes
            assert (stored.transfer_type, loaded.transfer_type) == (("GPU", "CPU"), ("CPU", "GPU"))
            assert stored.transfer_time is not None
            assert stored.transfer_time >= 0

    def test_jobs_of_one_direction_end_in_the_order_of_submission_each_reported_once(self) -> None:
        with self.open(TWO_BLOCKS) as (handlers, _):
            device, rows = TWO_BLOCKS.specs()
            jobs = [TransferJobId(job) for job in (5, 3, 9, 1)]
            for job in jobs:
                assert handlers.gpu_to_cpu_handler.transfer_async(job, TransferSpec(device, rows))

            handlers.gpu_to_cpu_handler.wait(set(jobs))
            finished = handlers.gpu_to_cpu_handler.get_finished()

            assert [result.job_id for result in finished] == jobs
            assert handlers.gpu_to_cpu_handler.get_finished() == []

    def test_a_transfer_of_no_blocks_succeeds(self) -> None:
        case = CopyCase((GroupCase((64,), 0, (), 0, ()), GroupCase((8,), 0, (), 3, ())), 2, 4, 4)
        with self.open(case) as (handlers, _):
            assert store(handlers, case).transfer_size == 0

    def test_waiting_for_unknown_jobs_returns(self) -> None:
        with self.open(TWO_BLOCKS) as (handlers, _):
            handlers.cpu_to_gpu_handler.wait({TransferJobId(77)})

            assert handlers.cpu_to_gpu_handler.get_finished() == []

    def test_a_transfer_whose_ends_do_not_fit_is_declined_and_moves_nothing(self) -> None:
        with self.open(TWO_BLOCKS) as (handlers, _):
            handlers.rows.fill_(7)
            device, rows = TWO_BLOCKS.specs()
            bad = [
                TransferSpec(GPULoadStoreSpec([2, 4], [2], [0]), rows),
                TransferSpec(GPULoadStoreSpec([2, -1], [2], [0]), rows),
                TransferSpec(GPULoadStoreSpec([2, 0], [1, 1], [0, 0]), rows),
                TransferSpec(device, CPULoadStoreSpec([1])),
                TransferSpec(device, CPULoadStoreSpec([1, 3, 0])),
                TransferSpec(device, CPULoadStoreSpec([1, 4])),
                TransferSpec(device, CPULoadStoreSpec([1, -1])),
                TransferSpec(rows, device),
            ]

            accepted = [handlers.gpu_to_cpu_handler.transfer_async(TransferJobId(1), spec) for spec in bad]

            assert accepted == [False] * len(bad)
            assert handlers.gpu_to_cpu_handler.get_finished() == []
            assert bool((handlers.rows == 7).all())

    def test_shutdown_reports_what_was_accepted_once_and_declines_what_comes_later(self) -> None:
        with self.open(TWO_BLOCKS) as (handlers, _):
            device, rows = TWO_BLOCKS.specs()
            jobs = [TransferJobId(job) for job in range(20)]
            for job in jobs:
                assert handlers.gpu_to_cpu_handler.transfer_async(job, TransferSpec(device, rows))

            handlers.shutdown()
            handlers.shutdown()

            finished = [result.job_id for result in handlers.gpu_to_cpu_handler.get_finished()]
            assert finished == jobs
            late = handlers.gpu_to_cpu_handler.transfer_async(TransferJobId(99), TransferSpec(device, rows))
            assert not late
            assert handlers.gpu_to_cpu_handler.get_finished() == []


def store(handlers: Handlers, case: CopyCase, job_id: int = 1) -> TransferResult:
    """Store a case's blocks and wait for the result."""
    device, rows = case.specs()
    return _transfer(handlers.gpu_to_cpu_handler, TransferJobId(job_id), TransferSpec(device, rows))


def load(handlers: Handlers, case: CopyCase, job_id: int = 2) -> TransferResult:
    """Load a case's blocks and wait for the result."""
    device, rows = case.specs()
    return _transfer(handlers.cpu_to_gpu_handler, TransferJobId(job_id), TransferSpec(rows, device))


def _transfer(handler: OffloadingHandler, job_id: TransferJobId, spec: TransferSpec) -> TransferResult:
    assert handler.transfer_async(job_id, spec), f"declined: {spec}"
    handler.wait({job_id})
    (result,) = handler.get_finished()
    assert result.job_id == job_id
    return result


def expect_rows(case: CopyCase, caches: CanonicalKVCaches, before: Bytes) -> Bytes:
    """Return the rows after a store of ``case``, given those before it. Pure."""
    rows = before.copy()
    for group in case.groups:
        for slot in group.slots:
            rows[slot, sum(group.page_sizes) * case.factor :] = 0
    for tensor, block, slot, start, size in case.pieces():
        rows[slot, start : start + size] = caches.tensors[tensor].tensor[block, :size].cpu().numpy()
    return rows


def expect_device(case: CopyCase, caches: CanonicalKVCaches, rows: Bytes) -> list[Bytes]:
    """Return the device tensors after a load of ``case`` from ``rows``. Pure."""
    device = [cache.tensor.cpu().numpy().copy() for cache in caches.tensors]
    for tensor, block, slot, start, size in case.pieces():
        device[tensor][block, :size] = rows[slot, start : start + size]
    return device
