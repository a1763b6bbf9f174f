"""LMCache's disk back end, driven with the same blocks as kvtier's tiers, if LMCache is installed.

LMCache keeps blocks in its own buffer and returns them as memory objects; that buffer corresponds to the rows of the
primary tier. So its disk back end writes from memory objects and reads into new ones, as kvtier's does with rows,
without further copies.

It runs with its own defaults: four threads, the event loop on which its writes are queued, buffered I/O unless direct
I/O is requested. Where the work differs, LMCache has less of it: one call gets all blocks whatever the number of jobs,
its keys are made and its files truncated outside the measured time, so that it never evicts, and
it has neither lookups nor pins.
"""

import asyncio
import importlib
import os
import threading
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.block_files import empty_files
from benchmarks.harness.tier_jobs import HANG_GUARD_S, flat_rows, job_numbers, rates_of
from kvtier.base import OffloadKey

DISK_NAME = "LMCache disk"
BACKENDS = "lmcache.v1.storage_backend"
TOKENS_PER_BLOCK = 16
PAGE_BYTES = 4096
DISK_GIB = 1024.0
"""Room for every round: it does not know that its files are truncated."""

LMCache = Any  # Any: modules and objects of a package that may be missing


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
