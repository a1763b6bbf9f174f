"""LMCache's local back ends, driven with the same blocks as kvtier's tiers, if LMCache is installed.

LMCache keeps blocks in its own buffer and returns them as memory objects; that buffer corresponds to the rows of the
primary tier. So its disk back end writes from memory objects and reads into new ones, as kvtier's does with rows,
without further copies. Its CPU back end allocates a memory object for each block, and a tensor is copied into it or
out of it.

It runs with its own defaults: four threads, the event loop on which its writes are queued, buffered I/O unless direct
I/O is requested. Where the work differs, LMCache has less of it: one call gets all blocks whatever the number of jobs,
its keys are made and its files truncated or its blocks removed outside the measured time, so that it never evicts, and
it has neither lookups nor pins.
"""

import asyncio
import importlib
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness.block_files import empty_files
from benchmarks.harness.tier_jobs import HANG_GUARD_S, flat_rows, job_numbers, rates_of
from kvtier.base import OffloadKey
from kvtier.cpu.row_copy import MAX_COPY_THREADS
from kvtier.limits import count_usable_cores

DISK_NAME, CPU_NAME = "LMCache disk", "LMCache CPU"
BACKENDS = "lmcache.v1.storage_backend"
TOKENS_PER_BLOCK = 16
PAGE_BYTES = 4096
DISK_GIB = 1024.0
"""Room for every round: it does not know that its files are truncated."""

Bytes = npt.NDArray[np.uint8]
LMCache = Any  # Any: modules and objects of a package that may be missing
Tensor = Any  # Any: torch is imported with LMCache only


class Memory:
    """LMCache's CPU back end with a buffer for exactly ``num_blocks`` blocks.

    Args:
        num_blocks: capacity.
        block_bytes: length of each, a multiple of a page.
        settings: further settings of LMCache.

    Attributes:
        config: LMCache's settings.
        backend: its back end.
    """

    def __init__(self, num_blocks: int, block_bytes: int, **settings: object) -> None:
        torch = importlib.import_module("torch")
        allocators: LMCache = importlib.import_module("lmcache.v1.memory_allocators.mixed_memory_allocator")
        objects: LMCache = importlib.import_module("lmcache.v1.memory_management")
        self._make_key: LMCache = importlib.import_module("lmcache.utils").CacheEngineKey
        self._dtype: LMCache = torch.bfloat16
        width = block_bytes // (2 * TOKENS_PER_BLOCK * self._dtype.itemsize)
        self._shape: LMCache = torch.Size((2, 1, TOKENS_PER_BLOCK, width))
        self._format: LMCache = objects.MemoryFormat.KV_2LTD
        self.config: LMCache = importlib.import_module("lmcache.v1.config").LMCacheEngineConfig.from_defaults(
            **settings
        )
        self.backend: LMCache = importlib.import_module(f"{BACKENDS}.local_cpu_backend").LocalCPUBackend(
            self.config, memory_allocator=allocators.MixedMemoryAllocator(num_blocks * block_bytes)
        )

    def allocate(self) -> LMCache:
        """Return a new memory object of one block."""
        found = self.backend.allocate(self._shape, self._dtype, self._format)
        assert found is not None
        return found

    def name(self, key: OffloadKey) -> LMCache:
        """Return LMCache's key, from a number of 64 bits like its own hash."""
        return self._make_key("bench", 1, 0, hash(key) % 2**64, self._dtype)


class LMCacheDisk:
    """LMCache's disk back end with its default number of threads: only the bytes of blocks, one file per block.

    Args:
        rows: data to write, shape (num_blocks, block_bytes); copied into LMCache's buffer once.
        folder: the folder of its files.
        is_direct: whether its setting for direct I/O is on; by default it uses the page cache.
    """

    def __init__(self, rows: memoryview, folder: Path, *, is_direct: bool) -> None:
        num_blocks, block_bytes = np.asarray(rows).shape
        self._num_bytes = rows.nbytes
        self._folder = folder
        self._memory = Memory(
            2 * num_blocks,  # the written ones, and room to read as many
            block_bytes,
            local_disk=str(folder),
            max_local_disk_size=DISK_GIB,
            extra_config={"use_odirect": is_direct},
        )
        self._blocks = [self._memory.allocate() for _ in range(num_blocks)]
        for block, row in zip(self._blocks, flat_rows(rows), strict=True):
            np.asarray(block.byte_array)[:] = row
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._tier: LMCache = importlib.import_module(f"{BACKENDS}.local_disk_backend").LocalDiskBackend(
            self._memory.config, self._loop, self._memory.backend
        )

    def run(self, keys: Sequence[OffloadKey], num_jobs: int) -> Mapping[str, float]:
        """Store and load every block once, and return the rates, MiB/s; keeps truncated files."""
        names = [self._memory.name(key) for key in keys]
        loaded: list[LMCache] = []
        rates = rates_of(
            self._num_bytes,
            lambda: self._put(names, num_jobs),
            lambda: loaded.extend(self._tier.batched_get_blocking(names)),
        )
        for found, block in zip(loaded, self._blocks, strict=True):
            assert found is not None
            # In the first round the memory is new, so correct bytes must have been read.
            assert bytes(found.byte_array[:PAGE_BYTES]) == bytes(block.byte_array[:PAGE_BYTES])
            found.ref_count_down()
        empty_files(self._folder.iterdir())
        return rates

    def close(self) -> None:
        """End its threads and free its memory."""
        self._tier.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        for block in self._blocks:
            block.ref_count_down()
        self._memory.backend.close()

    def _put(self, names: Sequence[LMCache], num_jobs: int) -> None:
        """Submit all jobs at once and wait until the last block is stored."""
        num_stored = count(1)
        is_done = threading.Event()

        def on_stored(name: LMCache) -> None:
            del name
            if next(num_stored) == len(names):
                is_done.set()

        for numbers in job_numbers(len(names), num_jobs):
            job_names = [names[number] for number in numbers]
            job_blocks = [self._blocks[number] for number in numbers]
            self._tier.batched_submit_put_task(job_names, job_blocks, on_complete_callback=on_stored)
        assert is_done.wait(HANG_GUARD_S), "LMCache hangs, or a put has failed"


class LMCacheCPU:
    """LMCache's CPU back end, and plain copies between its memory objects and tensors.

    LMCache's own kernels gather a block from the layers of a GPU; on a CPU it has slow replacements. So a block is one
    page here, and is copied like kvtier's, by numpy and as many threads as kvtier uses. A ``copy_`` of torch waits for
    its threads at the end of each block, which takes ten times as long when anything else runs on the machine.

    Args:
        sources: blocks to put, each shape (block_bytes,), int8, CPU, contiguous.
        targets: as many to get into.
    """

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        block_bytes = sources[0].numel()
        self._num_bytes = len(sources) * block_bytes
        self._memory = Memory(len(sources), block_bytes)
        self._sources = [bytes_of(block) for block in sources]
        self._targets = [bytes_of(block) for block in targets]
        self._num_threads = min(MAX_COPY_THREADS, count_usable_cores())
        self._pool = ThreadPoolExecutor(self._num_threads)

    def run(self, keys: Sequence[OffloadKey]) -> Mapping[str, float]:
        """Put and get every block once, and return the rates, MiB/s."""
        names = [self._memory.name(key) for key in keys]
        rates = rates_of(self._num_bytes, lambda: self._put(names), lambda: self._get(names))
        for name in names:
            self._memory.backend.remove(name)
        return rates

    def close(self) -> None:
        """End the threads and free its memory."""
        self._pool.shutdown()
        self._memory.backend.close()

    def _put(self, names: Sequence[LMCache]) -> None:
        """Allocate, copy, put and release, as LMCache's engine does."""
        blocks = [self._memory.allocate() for _ in names]
        self._copy([bytes_of(block.raw_tensor) for block in blocks], self._sources)
        self._memory.backend.batched_submit_put_task(names, blocks)
        for block in blocks:
            block.ref_count_down()

    def _get(self, names: Sequence[LMCache]) -> None:
        """Get, copy and release."""
        blocks = self._memory.backend.batched_get_blocking(names)
        self._copy(self._targets, [bytes_of(block.raw_tensor) for block in blocks])
        for block in blocks:
            block.ref_count_down()

    def _copy(self, targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
        """Copy block by block; thread i copies every n-th block from i on."""

        def copy_some(first: int) -> None:
            for number in range(first, len(targets), self._num_threads):
                np.copyto(targets[number], sources[number])

        for _ in self._pool.map(copy_some, range(self._num_threads)):
            pass


def find_obstacle() -> str | None:
    """Return why LMCache cannot be measured; None when it can.

    Effects: imports LMCache and makes it log errors only; other lines would appear within the table.
    """
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    try:
        importlib.import_module(f"{BACKENDS}.local_disk_backend")
    except ImportError as error:
        return f"LMCache was not measured ({error}): make bench-peers"
    return None


def bytes_of(tensor: Tensor) -> Bytes:
    """Return a tensor's memory, shape (num_bytes,). Pure."""
    found: Bytes = tensor.numpy().view(np.uint8)
    return found
