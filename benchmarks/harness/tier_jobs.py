"""Blocks of random bytes, and jobs that move them through a secondary tier."""

import mmap
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness.rounds import timed
from kvtier.base import JobId, OffloadKey, ReqContext, make_offload_key
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.tiering.base import JobMetadata, SecondaryTierManager

HANG_GUARD_S = 300.0


def make_rows(num_blocks: int, block_bytes: int) -> memoryview:
    """Return rows of random bytes like a primary tier's, shape (num_blocks, block_bytes), format 'b', page-aligned."""
    memory = mmap.mmap(-1, num_blocks * block_bytes)
    rows = memoryview(memory).cast("b", (num_blocks, block_bytes))
    np.asarray(rows)[:] = np.random.default_rng(0).integers(-128, 128, rows.shape, dtype=np.int8)
    return rows


def flat_rows(rows: memoryview) -> list[memoryview]:
    """Return each row by itself, format 'B'. Pure."""
    flat = rows.cast("B")
    num_blocks, block_bytes = np.asarray(rows).shape
    return [flat[number * block_bytes : (number + 1) * block_bytes] for number in range(num_blocks)]


def make_config(block_bytes: int, extra_config: Mapping[str, object] | None = None) -> OffloadingConfig:
    """Return the configuration of an engine with blocks of that size. Pure."""
    group = KVGroup(block_size_tokens=16, layer_names=("layer.0",), page_size_bytes=block_bytes)
    return OffloadingConfig(
        "bench", ModelIdentity("bench"), (group,), hash_block_size=16, extra_config=extra_config or {}
    )


def make_keys(num_blocks: int, generation: int) -> list[OffloadKey]:
    """Return distinct keys; each generation has different ones. Pure."""
    seed = generation.to_bytes(8, "big")
    return [make_offload_key(seed + number.to_bytes(24, "big"), 0) for number in range(num_blocks)]


def job_numbers(num_blocks: int, num_jobs: int) -> list[range]:
    """Return the blocks of each job. Pure."""
    size = num_blocks // num_jobs
    return [range(number * size, (number + 1) * size) for number in range(num_jobs)]


def move_blocks(
    tier: SecondaryTierManager,
    keys: Sequence[OffloadKey],
    num_jobs: int = 1,
    *,
    is_promotion: bool,
    must_succeed: bool = True,
) -> None:
    """Submit jobs with a slot for each key at once, and wait for them; all must succeed unless told otherwise."""
    submit = tier.submit_load if is_promotion else tier.submit_store
    request = ReqContext("bench")
    for job_number, numbers in enumerate(job_numbers(len(keys), num_jobs)):
        job_keys = tuple(keys[number] for number in numbers)
        slots = np.array(numbers, dtype=np.int64)
        submit(JobMetadata(JobId(job_number), job_keys, slots, is_promotion, request))
    assert tier.drain(HANG_GUARD_S), "the tier hangs"
    results = list(tier.get_finished())
    assert len(results) == num_jobs
    assert not must_succeed or all(result.success for result in results)


def rates_of(
    num_bytes: int,
    put: Callable[[], object],
    get: Callable[[], object],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Mapping[str, float]:
    """Return how fast ``put`` and then ``get`` move ``num_bytes``, MiB/s."""
    mib = num_bytes / 2**20
    put_rate = mib / timed(put, clock)
    return {"put": put_rate, "get": mib / timed(get, clock)}


def cold_rate_of(
    num_bytes: int,
    paths: Iterable[Path],
    get: Callable[[], object],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Mapping[str, float]:
    """Return how fast ``get`` moves ``num_bytes``, MiB/s, after ``paths`` were dropped from the page cache, untimed.

    The caller must have written them back.
    """
    drop_page_cache(paths)
    return {"get": num_bytes / 2**20 / timed(get, clock)}


def write_back(paths: Iterable[Path]) -> None:
    """Wait until the device has every byte of the files: dirty pages cannot be dropped from the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def drop_page_cache(paths: Iterable[Path]) -> None:
    """Drop the pages of files that were written back from the page cache, so that the next read is from the device.

    They are not written back here: an fsync flushes the device's cache even for a clean file, which takes milliseconds
    per file. A file system in memory keeps its pages. Names and inodes stay cached, and so does the content in the
    cache of a virtual disk's host.
    """
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
