"""Memory and copies of the simulated engine: what each token's KV must be, device blocks, slow handlers.

Nothing here decides. A copy happens as late as it may, when the model lets a handler work or when somebody
waits for it, or as early as it may, at once: so a block that changes hands before its store has ended gives
itself away, and so does a store that begins before its bytes are computed.
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvtier.base import (
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferJobId,
    TransferResult,
    TransferSpec,
)
from kvtier.cpu.common import CPULoadStoreSpec

BLOCK_TOKENS = 4
TOKEN_BYTES = 8
GARBAGE = -1
NULL_BLOCK = 0

Cells = npt.NDArray[np.int64]


@lru_cache(maxsize=200_000)
def kv_of(prefix: tuple[int, ...], group: int, weights: int) -> int:
    """Return the KV of the last token of ``prefix``: it depends on each token, the group and the weights."""
    text = repr((prefix, group, weights)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


def next_token(prefix: Sequence[int]) -> int:
    """Return what the model samples after ``prefix``."""
    return 1 + int.from_bytes(hashlib.blake2b(repr(list(prefix)).encode(), digest_size=2).digest(), "little")


class HostRows:
    """Rows of the primary tier over all workers; any process of the simulation sees the same ones."""

    def __init__(self, num_slots: int, num_workers: int, block_size_factor: int) -> None:
        self.part_tokens = block_size_factor * BLOCK_TOKENS
        self.rows = np.zeros((num_slots, num_workers * self.part_tokens * TOKEN_BYTES), dtype=np.int8)

    def create_kv_memoryview(self) -> memoryview:
        """Return the rows as bytes."""
        return self.rows.data

    def cleanup(self) -> None:
        """Nothing to give back."""

    def part(self, worker: int) -> Cells:
        """Return a worker's part, shape (num_slots, part_tokens)."""
        cells = self.rows.view(np.int64)
        return cells[:, worker * self.part_tokens : (worker + 1) * self.part_tokens]


class SlowHandler(OffloadingHandler):
    """One direction of one worker; copies when told to, in the order of submission."""

    def __init__(self, device: Cells, part: Cells, block_size_factor: int) -> None:
        self._device = device
        self._part = part
        self._factor = block_size_factor
        self._queue: deque[tuple[TransferJobId, TransferSpec]] = deque()
        self._ended: list[TransferResult] = []
        self.num_to_fail = 0
        self.num_to_decline = 0
        self.is_eager = False

    def transfer_async(self, job_id: TransferJobId, spec: TransferSpec) -> bool:
        if self.num_to_decline:
            self.num_to_decline -= 1
            return False
        self._queue.append((job_id, spec))
        if self.is_eager:
            self.work(len(self._queue))
        return True

    def work(self, num_jobs: int) -> None:
        """Carry out the oldest jobs."""
        for _ in range(min(num_jobs, len(self._queue))):
            job_id, spec = self._queue.popleft()
            is_good = not self.num_to_fail
            self.num_to_fail -= not is_good
            self._copy(spec, is_good=is_good)
            self._ended.append(TransferResult(job_id, is_good))

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[TransferJobId]) -> None:
        positions = [n for n, (job_id, _) in enumerate(self._queue, 1) if job_id in job_ids]
        self.work(max(positions, default=0))

    def _copy(self, spec: TransferSpec, *, is_good: bool) -> None:
        source, destination = spec
        is_store = isinstance(source, GPULoadStoreSpec)
        gpu, cpu = (source, destination) if is_store else (destination, source)
        assert isinstance(gpu, GPULoadStoreSpec)
        assert isinstance(cpu, CPULoadStoreSpec)
        for block_id, slot, inner in self._places(gpu, cpu):
            device = self._device[block_id]
            host = self._part[slot, inner * BLOCK_TOKENS : (inner + 1) * BLOCK_TOKENS]
            written, read = (host, device) if is_store else (device, host)
            written[:] = read if is_good else GARBAGE

    def _places(self, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec) -> list[tuple[int, int, int]]:
        """Return (device block, slot, device block's index within the slot) of each block to copy."""
        places: list[tuple[int, int, int]] = []
        blocks, slots = gpu.block_ids.tolist(), cpu.block_ids.tolist()
        for size, first in zip(gpu.group_sizes, gpu.block_indices, strict=True):
            entered = first % self._factor
            num_slots = -(-(entered + size) // self._factor) if size else 0
            for position in range(size):
                slot, inner = divmod(entered + position, self._factor)
                places.append((blocks[position], slots[slot], inner))
            blocks, slots = blocks[size:], slots[num_slots:]
        assert not blocks
        assert not slots
        return places


class BlockPool:
    """Device block numbers, counted references, and the blocks whose content a prefix cache knows."""

    def __init__(self, num_blocks: int) -> None:
        self._free: deque[int] = deque(range(1, num_blocks))
        self._num_refs = [0] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take blocks, those that were freed first before others, or none at all."""
        if num_blocks > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(num_blocks)]
        for block_id in taken:
            self._num_refs[block_id] = 1
            self._forget(block_id)
        return taken

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix, without taking them."""
        found: list[int] = []
        for block_hash in hashes:
            if block_hash not in self._cached:
                break
            found.append(self._cached[block_hash])
        return found

    def share(self, block_ids: Sequence[int]) -> None:
        """Take cached blocks."""
        for block_id in block_ids:
            if self._num_refs[block_id] == 0:
                self._free.remove(block_id)
            self._num_refs[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Give blocks back, the last of them first."""
        for block_id in reversed(block_ids):
            if block_id == NULL_BLOCK:
                continue
            self._num_refs[block_id] -= 1
            if self._num_refs[block_id] == 0:
                self._free.append(block_id)

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Let others find a block that is full."""
        if block_hash not in self._cached and block_id not in self._hash_of:
            self._cached[block_hash] = block_id
            self._hash_of[block_id] = block_hash

    def forget_all(self) -> None:
        """Empty the prefix cache."""
        self._cached.clear()
        self._hash_of.clear()

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._cached[block_hash]
