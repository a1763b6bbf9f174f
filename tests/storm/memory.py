"""Memory of the storm's engine: what each block must hold, rows of host memory, copies that end when chance says.

What a block holds is a function of its content hash, its KV group, the weights, the worker and the tenant. Every byte
that is loaded can therefore be checked, in whatever life of the process it was stored, and for whomever.
"""

import hashlib
import random
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvtier.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    HandlerEntry,
    OffloadingHandler,
    OffloadingManager,
    OffloadingSpec,
    TransferJobId,
    TransferResult,
    TransferSpec,
)
from kvtier.config import OffloadingConfig
from kvtier.cpu.common import CPULoadStoreSpec

PAGE_BYTES = 64
NULL_BLOCK = 0
GARBAGE = 0xEE

Pages = npt.NDArray[np.uint8]


@lru_cache(maxsize=200_000)
def content_of(block_hash: bytes, group: int, weights: int, rank: int, tenant: bytes = b"") -> bytes:
    """Return what a device block with this content holds on one worker for one tenant."""
    salt = b"%d %d %d %b" % (group, weights, rank, tenant)
    return hashlib.blake2b(block_hash, key=salt, digest_size=PAGE_BYTES).digest()


class HostRows:
    """Rows of the primary tier, all workers' parts side by side, aligned to pages.

    Args:
        num_slots: rows.
        num_workers: parts in a row.
        block_size_factor: device blocks in a part.
    """

    def __init__(self, num_slots: int, num_workers: int, block_size_factor: int) -> None:
        self._part_bytes = block_size_factor * PAGE_BYTES
        row_bytes = num_workers * self._part_bytes
        raw = np.zeros(num_slots * row_bytes + 4096, dtype=np.int8)
        start = -raw.ctypes.data % 4096
        self.rows = raw[start : start + num_slots * row_bytes].reshape(num_slots, row_bytes)

    def create_kv_memoryview(self) -> memoryview:
        """Return the rows."""
        return self.rows.data

    def cleanup(self) -> None:
        """Do nothing: the rows go with their last reader."""

    def part(self, rank: int) -> Pages:
        """Return a worker's part, shape (num_slots, part_bytes)."""
        bytes_of = self.rows.view(np.uint8)
        return bytes_of[:, rank * self._part_bytes : (rank + 1) * self._part_bytes]


class StormHandler(OffloadingHandler):
    """One direction of one worker: copies a job when chance says, or when the worker half waits for it.

    Args:
        device: the worker's device blocks, shape (num_blocks, PAGE_BYTES).
        part: its part of the rows.
        factor: device blocks in a row.
        broken_laws: where it says what a copy did wrong.

    Attributes:
        expected: for each store what its device blocks must hold whenever they are read.
        num_to_fail: copies from now on that fail.
        num_to_decline: jobs from now on that are declined.
    """

    def __init__(self, device: Pages, part: Pages, factor: int, broken_laws: list[str]) -> None:
        self.expected: dict[TransferJobId, list[bytes]] = {}
        self.num_to_fail = 0
        self.num_to_decline = 0
        self._device = device
        self._part = part
        self._factor = factor
        self._broken_laws = broken_laws
        self._queue: deque[tuple[TransferJobId, TransferSpec]] = deque()
        self._ended: list[TransferResult] = []

    def transfer_async(self, job_id: TransferJobId, spec: TransferSpec) -> bool:
        if self.num_to_decline:
            self.num_to_decline -= 1
            self.expected.pop(job_id, None)
            return False
        self._queue.append((job_id, spec))
        return True

    def work(self, rng: random.Random, num_jobs: int) -> None:
        """Carry some jobs out, in any order."""
        for _ in range(min(num_jobs, len(self._queue))):
            at = int(rng.random() * len(self._queue))
            entry = self._queue[at]
            del self._queue[at]
            self._carry_out(*entry)

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[TransferJobId]) -> None:
        for entry in [entry for entry in self._queue if entry[0] in job_ids]:
            self._queue.remove(entry)
            self._carry_out(*entry)

    def _carry_out(self, job_id: TransferJobId, spec: TransferSpec) -> None:
        is_good = not self.num_to_fail
        self.num_to_fail -= not is_good
        expected = self.expected.pop(job_id, None)
        source, destination = spec
        gpu, cpu = (source, destination) if isinstance(source, GPULoadStoreSpec) else (destination, source)
        assert isinstance(gpu, GPULoadStoreSpec)
        assert isinstance(cpu, CPULoadStoreSpec)
        for place, (block_id, slot, inner) in enumerate(places_of(gpu, cpu, self._factor)):
            device = self._device[block_id]
            host = self._part[slot, inner * PAGE_BYTES : (inner + 1) * PAGE_BYTES]
            if gpu is destination:
                device[:] = host if is_good else GARBAGE
                continue
            if is_good and expected is not None and device.tobytes() != expected[place]:
                self._broken_laws.append(f"store {job_id} reads wrong bytes in device block {block_id}")
            host[:] = device if is_good else GARBAGE
        self._ended.append(TransferResult(job_id, is_good))


def places_of(gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, factor: int) -> list[tuple[int, int, int]]:
    """Return (device block, slot, index within the slot) of each device block of a job. Pure."""
    places: list[tuple[int, int, int]] = []
    blocks, slots = gpu.block_ids.tolist(), cpu.block_ids.tolist()
    for size, first in zip(gpu.group_sizes, gpu.block_indices, strict=True):
        entered = first % factor
        for position in range(size):
            slot, inner = divmod(entered + position, factor)
            places.append((blocks[position], slots[slot], inner))
        blocks, slots = blocks[size:], slots[-(-(entered + size) // factor) if size else 0 :]
    return places


class StormSpec(OffloadingSpec):
    """A spec of what the storm has built.

    Args:
        config: what the engine says of itself.
        manager: the scheduler half's manager.
        entries: the worker half's handlers.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        manager: OffloadingManager | None = None,
        entries: Sequence[HandlerEntry] = (),
    ) -> None:
        super().__init__(config)
        self._manager = manager
        self._entries = entries

    def get_manager(self) -> OffloadingManager:
        assert self._manager is not None, "the worker half asks for no manager"
        return self._manager

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerEntry]:
        yield from self._entries
