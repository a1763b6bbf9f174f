"""Throughput of the obj tier against the plain client, in one run on one real server.

The floor puts and gets one object per block with obstore alone, with as many concurrent requests as the tier has
threads: no envelope, no checksum, no conditional create, and received bytes are not copied into a row. The server is a
SeaweedFS on the same cores and disk, so only ratios are meaningful.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path

import obstore
from obstore.store import S3Store

from benchmarks.harness.measurement import FLOOR, OURS, Better, Measurement
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
from kvtier.cli.demo.storage import open_server as open_demo_server
from kvtier.tiering.obj import ObjTier

NUM_THREADS = 16
MAX_BLOCKS, MAX_BYTES = 128, 32 * 2**20
"""Limits of a round. The server accepts about a hundred objects a second: many more small blocks would take most of the
run."""

BLOCK_SIZES_BYTES = (64 * 2**10, 512 * 2**10, 2 * 2**20)
QUICK_SIZES_BYTES = BLOCK_SIZES_BYTES[1:2]
NUM_ROUNDS, NUM_QUICK_ROUNDS = 4, 4
"""At most four times as many run: all they write has to fit the server's disk, which is cleaned later."""

REQUEST_TIMEOUT_S = 30.0


class Floor:
    """The plain client.

    Args:
        place: settings that reach the server.
        rows: data to write, shape (num_blocks, block_bytes).
    """

    def __init__(self, place: Place, rows: memoryview) -> None:
        self._rows = flat_rows(rows)
        self._pool = ThreadPoolExecutor(NUM_THREADS)
        # Credentials are in the environment, where the tier finds them too.
        self._store = S3Store.from_url(
            place["url"],
            endpoint=place["endpoint"],
            client_options={"allow_http": True, "timeout": timedelta(seconds=REQUEST_TIMEOUT_S)},
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
        )

    def run(self) -> Mapping[str, float]:
        """Write every row as one object, read each, and return the rates."""
        name = f"floor/{os.urandom(8).hex()}"

        def put(number: int) -> None:
            obstore.put(self._store, f"{name}/{number}", self._rows[number], use_multipart=False)

        def get(number: int) -> None:
            assert len(obstore.get(self._store, f"{name}/{number}").bytes()) == len(self._rows[number])

        return rates_of(sum(map(len, self._rows)), partial(self._each, put), partial(self._each, get))

    def close(self) -> None:
        """Shut down the threads and remove every object of the bucket, so that the server's disk stays small."""
        self._pool.shutdown()
        obstore.delete(self._store, [meta["path"] for meta in obstore.list(self._store).collect()])

    def _each(self, move: Callable[[int], None]) -> None:
        for _ in self._pool.map(move, range(len(self._rows))):
            pass


def open_server(folder: Path) -> AbstractContextManager[Place]:
    """Run a SeaweedFS during the block."""
    return open_demo_server("obj", folder)


def measure(options: Options, place: Place) -> Iterator[Measurement]:
    """Yield rates by direction and block size."""
    for block_bytes in QUICK_SIZES_BYTES if options.is_quick else BLOCK_SIZES_BYTES:
        rounds = run_case(block_bytes, place, options.count_rounds(NUM_ROUNDS, NUM_QUICK_ROUNDS))
        for operation, values in rounds.items():
            labels = labels_of("obj", operation, block_bytes, NUM_THREADS, "1 an object")
            yield Measurement(labels, "MiB/s", Better.HIGHER, values)


def run_case(
    block_bytes: int, place: Place, num_rounds: RoundCount
) -> dict[str, dict[str, tuple[float, ...]]]:
    """Run tier and floor in turns, each round with its own blocks."""
    num_blocks = min(MAX_BLOCKS, MAX_BYTES // block_bytes)
    rows = make_rows(num_blocks, block_bytes)
    generations = count()
    with ExitStack() as ends:
        floor = Floor(place, rows)
        ends.callback(floor.close)
        tier = ObjTier(
            make_config(block_bytes),
            rows,
            **place,
            prefix=f"tier/{os.urandom(4).hex()}",
            num_threads=NUM_THREADS,
            timeout_s=REQUEST_TIMEOUT_S,
        )
        ends.callback(tier.shutdown, HANG_GUARD_S)

        def run_ours() -> Mapping[str, float]:
            keys = make_keys(num_blocks, next(generations))
            return rates_of(
                rows.nbytes,
                lambda: move_blocks(tier, keys, is_promotion=False),
                lambda: move_blocks(tier, keys, is_promotion=True),
            )

        return run_rounds({OURS: run_ours, FLOOR: floor.run}, num_rounds)
