"""Throughput of the mooncake tier against Mooncake's plain API on the same sizes, in one run.

The floor is ``batch_put_from`` and ``batch_get_into`` on registered rows with as many threads and as large batches as
the tier has: no envelope, no checksum, one piece a value. Tier and floor take turns; each brings the only segment of
a store on this machine, so bytes are copied within one process and the network costs nothing: the tier's own share
looks its worst. The first round of a turn touches the segment's memory and does not count; medians are reported.

    python -m benchmarks.mooncake --quick
    python -m benchmarks.mooncake --json mooncake.json
"""  # always imported as benchmarks.mooncake

import argparse
import json
import mmap
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import mooncake
import numpy as np
from mooncake.store import MooncakeDistributedStore

from kvtier.base import JobId, OffloadKey, ReqContext, make_offload_key
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.namespace import make_namespace
from kvtier.tiering.base import JobMetadata
from kvtier.tiering.mooncake import MooncakeTier
from kvtier.tiering.mooncake.settings import DEFAULT_NUM_THREADS
from kvtier.tiering.mooncake.space import Space
from kvtier.tiering.mooncake.tier import MAX_PART_BLOCKS, MAX_PART_BYTES

TOTAL_BYTES = 128 * 2**20
SEGMENT_BYTES = 3 * TOTAL_BYTES
BLOCK_SIZES_BYTES = (64 * 2**10, 2**20, 4 * 2**20)
QUICK_SIZES_BYTES = BLOCK_SIZES_BYTES[:2]
NUM_TURNS, NUM_QUICK_TURNS = 3, 2
NUM_ROUNDS, NUM_QUICK_ROUNDS = 7, 4
HANG_GUARD_S = 120.0


@dataclass(frozen=True, slots=True)
class Result:
    """Rates of one size, MiB/s.

    Attributes:
        block_bytes: length of a row.
        num_threads: threads of tier and floor.
        put_mib_s: the tier's writes.
        get_mib_s: the tier's reads.
        floor_put_mib_s: the plain API's writes.
        floor_get_mib_s: the plain API's reads.
    """

    block_bytes: int
    num_threads: int
    put_mib_s: float
    get_mib_s: float
    floor_put_mib_s: float
    floor_get_mib_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """What both contestants need.

    Attributes:
        master: address of the store's master.
        rows: shape (num_blocks, block_bytes), format 'b'.
        keys: one for each row.
        num_threads: threads that move blocks.
        num_rounds: rounds that count.
        forget: removes every block from the store.
    """

    master: str
    rows: memoryview
    keys: Sequence[OffloadKey]
    num_threads: int
    num_rounds: int
    forget: Callable[[], None]

    def note(
        self, times: dict[str, list[float]], name: str, put: Callable[[], None], get: Callable[[], None]
    ) -> None:
        """Time puts and gets, round by round."""
        for round_number in range(self.num_rounds + 1):
            begun_s = time.perf_counter()
            put()
            between_s = time.perf_counter()
            get()
            ended_s = time.perf_counter()
            self.forget()
            if round_number > 0:
                times.setdefault(f"{name}_put", []).append(between_s - begun_s)
                times.setdefault(f"{name}_get", []).append(ended_s - between_s)


def main() -> int:
    """Measure, print a table, write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--threads", type=int, default=DEFAULT_NUM_THREADS, help="threads of tier and floor")
    arguments = parser.parse_args()
    print("MiB/s; ratios to the plain API in brackets")
    print(f"{'block':>8} {'put':>14} {'get':>14} {'plain put':>10} {'plain get':>10}")
    results = []
    with start_master() as master:
        for block_bytes in QUICK_SIZES_BYTES if arguments.quick else BLOCK_SIZES_BYTES:
            result = measure(master, block_bytes, arguments.threads, is_quick=arguments.quick)
            results.append(result)
            put = f"{result.put_mib_s:.0f} ({result.put_mib_s / result.floor_put_mib_s:.2f})"
            get = f"{result.get_mib_s:.0f} ({result.get_mib_s / result.floor_get_mib_s:.2f})"
            floor = f"{result.floor_put_mib_s:>10.0f} {result.floor_get_mib_s:>10.0f}"
            print(f"{block_bytes // 1024:>5}KiB {put:>14} {get:>14} {floor}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return 0


def measure(master: str, block_bytes: int, num_threads: int, *, is_quick: bool) -> Result:
    """Let tier and floor take turns on blocks of one size."""
    num_blocks = TOTAL_BYTES // block_bytes
    rows = memoryview(mmap.mmap(-1, TOTAL_BYTES)).cast("b", (num_blocks, block_bytes))
    np.asarray(rows)[:] = np.random.default_rng(0).integers(-128, 128, (1, block_bytes), dtype=np.int8)
    keys = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(num_blocks)]
    space = Space(make_namespace(make_config(block_bytes), block_bytes))
    names = [f"floor/{number}" for number in range(num_blocks)] + [space.name_of(key) for key in keys]
    janitor = join(master, 0)
    times: dict[str, list[float]] = {}
    turn = Turn(
        master,
        rows,
        keys,
        num_threads,
        NUM_QUICK_ROUNDS if is_quick else NUM_ROUNDS,
        lambda: janitor.batch_remove(names, True),  # noqa: FBT003  # a positional argument of the library
    )
    for _ in range(NUM_QUICK_TURNS if is_quick else NUM_TURNS):
        run_floor(turn, times)
        run_tier(turn, times)
    janitor.close()
    median_mib_s = {name: TOTAL_BYTES / 2**20 / statistics.median(values) for name, values in times.items()}
    return Result(
        block_bytes,
        num_threads,
        put_mib_s=median_mib_s["tier_put"],
        get_mib_s=median_mib_s["tier_get"],
        floor_put_mib_s=median_mib_s["floor_put"],
        floor_get_mib_s=median_mib_s["floor_get"],
    )


def run_floor(turn: Turn, times: dict[str, list[float]]) -> None:
    """Time the plain API."""
    store = join(turn.master, SEGMENT_BYTES)
    flat = np.asarray(turn.rows)
    num_blocks, block_bytes = flat.shape
    assert store.register_buffer(flat.ctypes.data, flat.nbytes) == 0
    batch = min(MAX_PART_BLOCKS, max(1, MAX_PART_BYTES // block_bytes))
    batches = [range(begin, min(begin + batch, num_blocks)) for begin in range(0, num_blocks, batch)]

    def call(method: str, numbers: range, expected: int) -> None:
        names = [f"floor/{number}" for number in numbers]
        addresses = [flat.ctypes.data + number * block_bytes for number in numbers]
        answers = getattr(store, method)(names, addresses, [block_bytes] * len(numbers))
        assert answers == [expected] * len(numbers), answers

    with ThreadPoolExecutor(turn.num_threads) as pool:

        def put() -> None:
            list(pool.map(lambda numbers: call("batch_put_from", numbers, 0), batches))

        def get() -> None:
            list(pool.map(lambda numbers: call("batch_get_into", numbers, block_bytes), batches))

        turn.note(times, "floor", put, get)
    store.close()


def run_tier(turn: Turn, times: dict[str, list[float]]) -> None:
    """Time the tier: one job of all blocks in each direction."""
    config = make_config(np.asarray(turn.rows).shape[1])
    tier = MooncakeTier(
        config, turn.rows, master=turn.master, segment_bytes=SEGMENT_BYTES, num_threads=turn.num_threads
    )
    tier.check_reachable()
    block_ids = np.arange(len(turn.keys), dtype=np.int64)

    def run(*, is_promotion: bool) -> None:
        job = JobMetadata(JobId(0), tuple(turn.keys), block_ids, is_promotion, ReqContext("bench"))
        (tier.submit_load if is_promotion else tier.submit_store)(job)
        assert tier.drain(HANG_GUARD_S), "the tier hangs"
        (result,) = tier.get_finished()
        assert result.success

    turn.note(times, "tier", lambda: run(is_promotion=False), lambda: run(is_promotion=True))
    assert tier.shutdown(HANG_GUARD_S)


def make_config(block_bytes: int) -> OffloadingConfig:
    """Return the configuration of an engine with such blocks."""
    group = KVGroup(block_size_tokens=16, layer_names=("layer.0",), page_size_bytes=block_bytes)
    return OffloadingConfig("bench", ModelIdentity("bench"), (group,), hash_block_size=16)


def join(master: str, segment_bytes: int) -> MooncakeDistributedStore:
    """Return a plain client that has joined the store."""
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 0, "tcp", "", master) == 0
    return store


@contextmanager
def start_master() -> Iterator[str]:
    """Run a master on the loopback interface; gives its address."""
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    binary = Path(mooncake.__file__).parent / "mooncake_master"
    options = [f"--rpc_port={ports[0]}", "--rpc_address=127.0.0.1"]
    options += ["--metrics_host=127.0.0.1", f"--metrics_port={ports[1]}"]
    master = subprocess.Popen([str(binary), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_listening(ports[0])
        yield f"127.0.0.1:{ports[0]}"
    finally:
        master.kill()
        master.wait()


def wait_listening(port: int) -> None:
    """Block until somebody accepts connections."""
    end_s = time.monotonic() + HANG_GUARD_S
    while time.monotonic() < end_s:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("the master does not listen")


if __name__ == "__main__":
    sys.exit(main())
