"""Memory and copies of the checked engine: what each token's KV must be, host rows, slow handlers.

Every byte that is loaded can be checked, in whatever life of the process it was stored, and for which tenant. Nothing
here decides. A copy happens as late as it may, when the model lets a handler work or when somebody
waits for it, or as early as it may, at once: so a block that changes hands before its store has ended gives
itself away, and so does a store that begins before its bytes are computed.
"""

import hashlib
import random
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

PAGE_CELLS = 8
CELL_BYTES = 8
PAGE_BYTES = PAGE_CELLS * CELL_BYTES
ALIGNMENT_BYTES = 4096
"""Of rows: tiers read and write them past the page cache."""

GARBAGE = -1
NULL_BLOCK = 0

Cells = npt.NDArray[np.int64]


@lru_cache(maxsize=100_000)
def kv_of(tokens: tuple[int, ...], group: int, weights: int, tenant: str) -> tuple[int, ...]:
    """Return the KV of each of ``tokens``: it depends on those before it, the group, the weights and the tenant."""
    chained = hashlib.blake2b(repr((group, weights, tenant)).encode(), digest_size=7)
    values = []
    for token in tokens:
        chained.update(b"%d " % token)
        values.append(int.from_bytes(chained.digest(), "little"))
    return tuple(values)


def next_token(prefix: Sequence[int]) -> int:
    """Return what the model samples after ``prefix``."""
    return 1 + int.from_bytes(hashlib.blake2b(repr(list(prefix)).encode(), digest_size=2).digest(), "little")


def continue_tokens(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return ``prompt`` with what the model answers, ``num_tokens`` together."""
    tokens = list(prompt)
    while len(tokens) < num_tokens:
        tokens.append(next_token(tokens))
    return tokens


class HostRows:
    """Rows of the primary tier over all workers; any process of the simulation sees the same ones."""

    def __init__(self, num_slots: int, num_workers: int, block_size_factor: int) -> None:
        self.part_cells = block_size_factor * PAGE_CELLS
        row_bytes = num_workers * block_size_factor * PAGE_BYTES
        raw = np.zeros(num_slots * row_bytes + ALIGNMENT_BYTES, dtype=np.int8)
        start = -raw.ctypes.data % ALIGNMENT_BYTES
        self.rows = raw[start : start + num_slots * row_bytes].reshape(num_slots, row_bytes)

    def create_kv_memoryview(self) -> memoryview:
        """Return the rows as bytes."""
        return self.rows.data

    def cleanup(self) -> None:
        """Nothing to give back."""

    def part(self, worker: int) -> Cells:
        """Return a worker's part, shape (num_slots, part_cells)."""
        cells = self.rows.view(np.int64)
        return cells[:, worker * self.part_cells : (worker + 1) * self.part_cells]


class SlowHandler(OffloadingHandler):
    """One direction of one worker; copies when told to, oldest job first unless told otherwise.

    Args:
        device: the worker's device blocks.
        part: its part of the rows.
        block_size_factor: device blocks in a row.
        busy: for each copy that was submitted and not carried out, in both directions, its rows and whether it
            writes them.
        broken_laws: where it is told what a copy did wrong; whoever submits it may take an exception for a refusal.

    Attributes:
        expected: for each store, and each of its device blocks, what the first cells of it must be when it is read.
        begun: jobs that were ever submitted.
        pages: what device blocks held that were stored.
        num_to_fail: copies from now on that fail.
        num_to_decline: jobs from now on that are declined.
    """

    def __init__(
        self,
        device: Cells,
        part: Cells,
        block_size_factor: int,
        busy: dict[TransferJobId, tuple[set[int], bool]],
        broken_laws: list[str],
    ) -> None:
        self._busy = busy
        self._broken_laws = broken_laws
        self.expected: dict[TransferJobId, list[list[int]]] = {}
        self.begun: set[TransferJobId] = set()
        self.pages: set[bytes] = set()
        self._device = device
        self._part = part
        self._factor = block_size_factor
        self._queue: deque[tuple[TransferJobId, TransferSpec]] = deque()
        self._ended: list[TransferResult] = []
        self.num_to_fail = 0
        self.num_to_decline = 0
        self.is_eager = False
        self.is_newest_first = False

    def transfer_async(self, job_id: TransferJobId, spec: TransferSpec) -> bool:
        self.begun.add(job_id)
        if self.num_to_decline:
            self.num_to_decline -= 1
            self.expected.pop(job_id, None)
            return False
        self._queue.append((job_id, spec))
        self._occupy_rows(job_id, spec)
        if self.is_eager:
            self.work(len(self._queue))
        return True

    def work(self, num_jobs: int, rng: random.Random | None = None) -> None:
        """Carry out some jobs, in an order that ``rng`` draws if it is given."""
        for _ in range(min(num_jobs, len(self._queue))):
            if rng is not None:
                self._queue.rotate(int(rng.random() * len(self._queue)))
            self._carry_out(*(self._queue.pop() if self.is_newest_first else self._queue.popleft()))

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[TransferJobId]) -> None:
        for entry in [entry for entry in self._queue if entry[0] in job_ids]:
            self._queue.remove(entry)
            self._carry_out(*entry)

    def _carry_out(self, job_id: TransferJobId, spec: TransferSpec) -> None:
        del self._busy[job_id]
        is_good = not self.num_to_fail
        self.num_to_fail -= not is_good
        self._copy(spec, self.expected.pop(job_id, None), is_good=is_good)
        self._ended.append(TransferResult(job_id, is_good))

    def _occupy_rows(self, job_id: TransferJobId, spec: TransferSpec) -> None:
        is_store = isinstance(spec.destination, CPULoadStoreSpec)
        rows = spec.destination if is_store else spec.source
        assert isinstance(rows, CPULoadStoreSpec)
        slots = set(rows.block_ids.tolist())
        for other_id, (others, is_writing) in self._busy.items():
            if slots & others and (is_store or is_writing):
                self._broken_laws.append(f"jobs {other_id} and {job_id} use the same row, and one writes it")
        self._busy[job_id] = slots, is_store

    def _copy(self, spec: TransferSpec, expected: list[list[int]] | None, *, is_good: bool) -> None:
        source, destination = spec
        is_store = isinstance(source, GPULoadStoreSpec)
        gpu, cpu = (source, destination) if is_store else (destination, source)
        assert isinstance(gpu, GPULoadStoreSpec)
        assert isinstance(cpu, CPULoadStoreSpec)
        for place, (block_id, slot, inner) in enumerate(places_of(gpu, cpu, self._factor)):
            device = self._device[block_id]
            if is_store:
                self.pages.add(device.tobytes())
            wanted = expected[place] if expected is not None and is_good else []
            if device[: len(wanted)].tolist() != wanted:
                self._broken_laws.append(f"a store reads wrong bytes in device block {block_id}")
            host = self._part[slot, inner * PAGE_CELLS : (inner + 1) * PAGE_CELLS]
            written, read = (host, device) if is_store else (device, host)
            written[:] = read if is_good else GARBAGE


def places_of(gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, factor: int) -> list[tuple[int, int, int]]:
    """Return (device block, slot, device block's index within the slot) of each block to copy. Pure."""
    places: list[tuple[int, int, int]] = []
    blocks, slots = gpu.block_ids.tolist(), cpu.block_ids.tolist()
    for size, first in zip(gpu.group_sizes, gpu.block_indices, strict=True):
        entered = first % factor
        num_slots = -(-(entered + size) // factor) if size else 0
        for position in range(size):
            slot, inner = divmod(entered + position, factor)
            places.append((blocks[position], slots[slot], inner))
        blocks, slots = blocks[size:], slots[num_slots:]
    assert not blocks
    assert not slots
    return places
