"""First touch of the region: the cost of its pages, by when and by which threads they are touched.

A region of the primary tier is a file in shared memory. Creating it reserves and zeroes its memory ("reserve"); the
first touch then costs a page fault for each page of the mapping. "prefault" touches all of them in advance, with as
many threads as there are cores, at most eight. "first store" fills the whole region the first time: ours after a
prefault, "lazily" without one. "touch and store" is both together, of which the lazy one has only the store: the ratio
is the gain that is left when the prefault itself is counted. With one core the process is confined to it.

The floor fills touched memory of that size, with as many threads. The name of a region is unlinked before the
measurement, and its memory is freed after each round.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from benchmarks.harness.measurement import FLOOR, OURS, Better, Measurement
from benchmarks.harness.rounds import RoundCount, run_rounds, timed
from benchmarks.harness.suite import Options
from kvtier.cpu.shared_offload_region import (
    CHUNK_BYTES,
    MAX_PREFAULT_THREADS,
    SharedOffloadRegion,
    prefault_pages,
)
from kvtier.errors import RegionMemoryError
from kvtier.limits import count_usable_cores

REGION_BYTES, QUICK_REGION_BYTES = 512 << 20, 128 << 20
ROW_BYTES = 2 << 20
NUM_ROUNDS, NUM_QUICK_ROUNDS = 6, 3
LAZILY = "lazily"
STORE, TOUCH_AND_STORE, PREFAULT, RESERVE = "first store", "touch and store", "prefault", "reserve"
OPERATIONS = (STORE, TOUCH_AND_STORE, PREFAULT, RESERVE)

Times = Mapping[str, float]
"""Seconds by operation."""


def measure(options: Options) -> Iterator[Measurement]:
    """Yield times of a GiB by operation and cores, with one core and with all."""
    num_bytes = QUICK_REGION_BYTES if options.is_quick else REGION_BYTES
    for num_cores in sorted({1, count_usable_cores()}):
        try:
            yield from measure_cores(num_cores, num_bytes, options.count_rounds(NUM_ROUNDS, NUM_QUICK_ROUNDS))
        except RegionMemoryError as error:
            options.note(f"no region of {num_bytes >> 20} MiB could be measured: {error}")
            return


def measure_cores(num_cores: int, num_bytes: int, num_rounds: RoundCount) -> Iterator[Measurement]:
    """Run regions and touched memory in turns on so many cores.

    Raises:
        RegionMemoryError: shared memory has no room.
    """
    touched = mmap.mmap(-1, num_bytes)
    with _confined_to(num_cores):
        fill(touched, num_bytes)
        contestants: dict[str, Callable[[], Times]] = {
            OURS: lambda: time_region(num_bytes, is_prefaulted=True),
            FLOOR: lambda: dict.fromkeys(OPERATIONS, timed(lambda: fill(touched, num_bytes))),
            LAZILY: lambda: time_region(num_bytes, is_prefaulted=False),
        }
        rounds = run_rounds(contestants, num_rounds)
    for operation in OPERATIONS:
        values = {
            name: tuple(1e3 * seconds * 2**30 / num_bytes for seconds in times)
            for name, times in rounds[operation].items()
        }
        labels: dict[str, str | int] = {"operation": operation, "cores": num_cores}
        yield Measurement(labels, "ms/GiB", Better.LOWER, values)


def time_region(num_bytes: int, *, is_prefaulted: bool) -> Times:
    """Create a region, fill it, and return the times.

    Raises:
        RegionMemoryError: shared memory has no room.
    """
    regions: list[SharedOffloadRegion] = []
    reserve_s = timed(lambda: regions.append(make_region(num_bytes)))
    (region,) = regions
    try:
        region.seal()
        mapping = region.mapping()
        prefault_s = timed(lambda: prefault_pages(mapping, num_bytes)) if is_prefaulted else 0.0
        store_s = timed(lambda: fill(mapping, num_bytes))
    finally:
        region.cleanup()
    times = {STORE: store_s, TOUCH_AND_STORE: prefault_s + store_s}
    return times | {PREFAULT: prefault_s, RESERVE: reserve_s} if is_prefaulted else times


def make_region(num_bytes: int) -> SharedOffloadRegion:
    """Return a region without mapped pages."""
    name = f"benchmark-{os.getpid()}"
    return SharedOffloadRegion(name, num_bytes, num_bytes // ROW_BYTES, 0, 1, ROW_BYTES, prefault=False)


def fill(memory: mmap.mmap, num_bytes: int) -> None:
    """Write every byte, with the threads and pieces of the prefault."""
    # The address is taken in here, because a view that lives longer would keep a region's mapping from being closed.
    address = np.frombuffer(memory, dtype=np.int8).ctypes.data
    with ThreadPoolExecutor(min(MAX_PREFAULT_THREADS, count_usable_cores())) as pool:
        for start in range(0, num_bytes, CHUNK_BYTES):
            pool.submit(ctypes.memset, address + start, 1, min(CHUNK_BYTES, num_bytes - start))


@contextmanager
def _confined_to(num_cores: int) -> Iterator[None]:
    """Restrict this thread, and those that it starts, to so many of its cores during the block."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:num_cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
