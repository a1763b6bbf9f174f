"""Throughput of the mooncake tier against Mooncake's plain API on the same sizes, in one run.

The floor is ``batch_put_from`` and ``batch_get_into`` on registered rows with as many threads and as large batches as
the tier: no envelope, no checksum, one piece per value. A second floor computes the checksum of each row before it is
put and after it was got, in the same threads, and discards it: the ratio of the two is the cost of checksums. Each
contestant has its own master and provides the only segment of that store, so bytes are copied within one process
without a network: the tier's own share looks largest. The warm-up rounds touch the segments' memory.
"""  # always imported as benchmarks.tiers.mooncake

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import xxhash
from mooncake.store import MooncakeDistributedStore

from benchmarks.harness.measurement import FLOOR, OURS, Bar, Better, Measurement
from benchmarks.harness.rounds import RoundCount, run_rounds
from benchmarks.harness.suite import Options
from benchmarks.harness.tier_jobs import (
    HANG_GUARD_S,
    flat_rows,
    make_config,
    make_keys,
    make_rows,
    move_blocks,
    rates_of,
)
from benchmarks.tiers.suite import Place, labels_of
from kvtier.cli.demo.storage import open_master
from kvtier.errors import TierError
from kvtier.namespace import make_namespace
from kvtier.tiering.mooncake import MooncakeTier
from kvtier.tiering.mooncake.blobs import MooncakeNames, plan_task_blocks
from kvtier.tiering.mooncake.settings import DEFAULT_NUM_THREADS

STDERR = 2

MAX_BLOCKS, MAX_BYTES = 512, 128 * 2**20
"""Limits of a round; the first keeps small blocks from taking most of the run."""

SEGMENT_BYTES = 3 * MAX_BYTES
"""Memory of each contestant: three rounds, so that nothing has to be evicted."""

BLOCK_SIZES_BYTES = (64 * 2**10, 2**20, 4 * 2**20)
QUICK_SIZES_BYTES = BLOCK_SIZES_BYTES[1:2]
NUM_WARMUPS = 3
"""Enough to touch a whole segment, wherever the store places a round's blocks."""

NUM_ROUNDS, NUM_QUICK_ROUNDS = 9, 6

SEALED = "sealed floor"
BAR_RATIO = 0.8
"""Ratio to the plain API."""


class Floor:
    """The plain API, with its own segment.

    Args:
        master: address of the store's master.
        rows: data to write, and memory to read into, shape (num_blocks, block_bytes).
        is_sealed: whether each row's checksum is computed in both directions.
    """

    def __init__(self, master: str, rows: memoryview, *, is_sealed: bool) -> None:
        self._flat = np.asarray(rows)
        self._rows = flat_rows(rows)
        self._is_sealed = is_sealed
        self._pool = ThreadPoolExecutor(DEFAULT_NUM_THREADS)
        self._store = join(master, SEGMENT_BYTES)
        assert self._store.register_buffer(self._flat.ctypes.data, self._flat.nbytes) == 0

    def run(self) -> Mapping[str, float]:
        """Write every block, then read it, and return the rates."""
        rates = rates_of(self._flat.nbytes, lambda: self._each(self._put), lambda: self._each(self._get))
        names = [name_of(number) for number in range(len(self._rows))]
        self._store.batch_remove(names, True)  # noqa: FBT003  # a positional argument of the library
        return rates

    def close(self) -> None:
        """End the threads and leave the store."""
        self._pool.shutdown()
        self._store.close()

    def _each(self, move: Callable[[range], None]) -> None:
        num_blocks, block_bytes = self._flat.shape
        size = plan_task_blocks(block_bytes)
        batches = [range(begin, min(begin + size, num_blocks)) for begin in range(0, num_blocks, size)]
        for _ in self._pool.map(move, batches):
            pass

    def _put(self, numbers: range) -> None:
        self._checksum(numbers)
        self._call("batch_put_from", numbers, 0)

    def _get(self, numbers: range) -> None:
        self._call("batch_get_into", numbers, self._flat.shape[1])
        self._checksum(numbers)

    def _checksum(self, numbers: range) -> None:
        if self._is_sealed:
            for number in numbers:
                xxhash.xxh3_128_digest(self._rows[number])

    def _call(self, method: str, numbers: range, expected: int) -> None:
        block_bytes = self._flat.shape[1]
        names = [name_of(number) for number in numbers]
        addresses = [self._flat.ctypes.data + number * block_bytes for number in numbers]
        answers = getattr(self._store, method)(names, addresses, [block_bytes] * len(numbers))
        assert answers == [expected] * len(numbers), answers


class Tier:
    """The tier, with its own segment, and a client that empties its store.

    Args:
        master: address of the store's master.
        rows: shape (num_blocks, block_bytes).
    """

    def __init__(self, master: str, rows: memoryview) -> None:
        self._num_blocks, block_bytes = np.asarray(rows).shape
        config = make_config(block_bytes)
        self._num_bytes = rows.nbytes
        self._tier = MooncakeTier(
            config, rows, master=master, segment_bytes=SEGMENT_BYTES, allow_any_interface=True
        )
        self._tier.check_reachable()
        self._janitor = join(master, 0)
        self._namespace = make_namespace(config, block_bytes).name
        self._generations = count()

    def run(self) -> Mapping[str, float]:
        """Store and load blocks of this round's own once, and return the rates."""
        keys = make_keys(self._num_blocks, next(self._generations))
        rates = rates_of(
            self._num_bytes,
            lambda: move_blocks(self._tier, keys, is_promotion=False),
            lambda: move_blocks(self._tier, keys, is_promotion=True),
        )
        names = [MooncakeNames().block(self._namespace, key) for key in keys]
        self._janitor.batch_remove(names, True)  # noqa: FBT003  # a positional argument of the library
        return rates

    def close(self) -> None:
        """Leave the store."""
        self._janitor.close()
        assert self._tier.shutdown(HANG_GUARD_S)


@contextmanager
def open_server(folder: Path) -> Iterator[Place]:
    """Run a master for each contestant during the block; contestants provide the memory."""
    with ExitStack() as ends:
        try:
            masters = [ends.enter_context(open_master(folder)) for _ in range(3)]
        except SystemExit as error:
            raise TierError("mooncake", str(error)) from error
        yield {"masters": masters}


def measure(options: Options, place: Place) -> Iterator[Measurement]:
    """Yield rates by direction and block size."""
    for block_bytes in QUICK_SIZES_BYTES if options.is_quick else BLOCK_SIZES_BYTES:
        rounds = run_size(block_bytes, place, options.count_rounds(NUM_ROUNDS, NUM_QUICK_ROUNDS))
        for operation, values in rounds.items():
            together = f"{plan_task_blocks(block_bytes)} a batch"
            labels = labels_of("mooncake", operation, block_bytes, DEFAULT_NUM_THREADS, together)
            yield Measurement(labels, "MiB/s", Better.HIGHER, values, Bar(FLOOR, BAR_RATIO))


@contextmanager
def native_noise_hidden() -> Iterator[None]:
    """Discard the process's standard error during the block; exceptions are printed after it.

    Mooncake's library (2026-11, 0.3.13.post1) logs the error "Local segment descriptor not found" whenever a client
    joins a store, and more after the end of its master; its log level cannot be lowered below errors.
    """
    kept = os.dup(STDERR)
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, STDERR)
        os.close(nowhere)
        yield
    finally:
        os.dup2(kept, STDERR)
        os.close(kept)


def run_size(
    block_bytes: int, place: Place, num_rounds: RoundCount
) -> dict[str, dict[str, tuple[float, ...]]]:
    """Run tier and floors in turns on the same rows, each with its own store."""
    rows = make_rows(min(MAX_BLOCKS, MAX_BYTES // block_bytes), block_bytes)
    with ExitStack() as ends:
        with native_noise_hidden():
            tier = Tier(place["masters"][0], rows)
            ends.callback(tier.close)
            floor = Floor(place["masters"][1], rows, is_sealed=False)
            ends.callback(floor.close)
            sealed = Floor(place["masters"][2], rows, is_sealed=True)
            ends.callback(sealed.close)
        return run_rounds(
            {OURS: tier.run, FLOOR: floor.run, SEALED: sealed.run}, num_rounds, num_warmups=NUM_WARMUPS
        )


def join(master: str, segment_bytes: int) -> MooncakeDistributedStore:
    """Return a plain client that has joined the store."""
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 0, "tcp", "", master) == 0
    return store


def name_of(number: int) -> str:
    """Return the name of a block of the floors. Pure."""
    return f"floor/{number}"
