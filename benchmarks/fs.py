"""Throughput of the fs tier against raw files of the same size.

The floor writes and reads one file per block with as many threads as the tier: ``open``, one ``pwritev`` or ``preadv``
of a page and a row, ``close``. It has no checksum, no atomic rename and no count of bytes. A second floor seals and
checks each row as the tier does; the difference is the cost of envelope and checksum, which has its own lines. vLLM's
fs tier and LMCache's disk back end have their own numbers of threads, so they are not measured where these vary.

Each contestant writes its own files. The tier and the floors read the same ones, which the tier wrote in the previous
round, because the place of a file on the disk affects the speed of reading. Peers read what they have just written. No
file is removed while others are measured: files are truncated instead. Cold reads use a few sets of files, written back
before the first read, and each set is dropped from the page cache before it is read. Puts into a full directory, which
has to evict, come last.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from benchmarks import fs_full
from benchmarks.harness import vllm_fs
from benchmarks.harness.block_files import FileSet, RawFiles, empty_files, spread_folders
from benchmarks.harness.disk_case import (
    BAR_BLOCK_BYTES,
    BLOCK_SIZES_BYTES,
    MANY_JOBS,
    ONE_JOB,
    QUICK_SIZES_BYTES,
    DiskCase,
    plan_cases,
)
from benchmarks.harness.disk_peers import DiskPeers, find_disk_peers
from benchmarks.harness.measurement import FLOOR, OURS, Bar, Better, Measurement
from benchmarks.harness.rounds import Contestant, RoundCount, fixed, run_rounds
from benchmarks.harness.suite import Options
from benchmarks.harness.tier_jobs import (
    HANG_GUARD_S,
    cold_rate_of,
    make_config,
    make_keys,
    make_rows,
    move_blocks,
    rates_of,
    write_back,
)
from kvtier.namespace import make_namespace
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.folders import block_path, namespace_path
from kvtier.tiering.kit.disk import plan_num_threads

CAPACITY = "64GiB"
"""Room for every round: the tier does not know that its files are truncated."""

NUM_ROUNDS, NUM_QUICK_ROUNDS = 6, 3
"""At least; rounded up so that each contestant begins equally often."""

NUM_COLD_SETS = 3
"""Sets of files that are read in turn, to average over places on the disk; each more is written first."""

ENVELOPE_BLOCKS = 16
NUM_ENVELOPE_SETS = 8
"""The same for small sets."""

NUM_ENVELOPE_ROUNDS, NUM_QUICK_ENVELOPE_ROUNDS = 60, 20
"""Many short rounds: the cost is smaller than the variation of a disk's speed from one second to the next."""

SEALED = "sealed floor"
MANY_JOBS_BAR, ONE_JOB_PUT_BAR = 0.95, 1.4
"""Ratios to vLLM's fs tier: with direct I/O and eight jobs, and in buffered puts of one job."""

ENVELOPE_BAR_PERCENT = 10.0
"""Share of the time of a put or a get, with direct I/O."""

Rounds = Mapping[str, Mapping[str, tuple[float, ...]]]
"""Measured values of contestants, by operation."""

MakeSet = Callable[[int], FileSet]
"""Returns the files of a round, given its number."""


class Turns:
    """The tier's turns: in each it writes a set of files, which all contestants read in the next round.

    Args:
        tier: the tier under test.
        case: the measured case.
        rows: the tier's rows.
        make_set: the files of a round.
    """

    def __init__(self, tier: FSTier, case: DiskCase, rows: memoryview, make_set: MakeSet) -> None:
        self._tier = tier
        self._case = case
        self._num_bytes = rows.nbytes
        self._make_set = make_set
        self._numbers = count()
        self._put(make_set(0))

    def run(self) -> Mapping[str, float]:
        """Store the blocks of the next round, load those of this one, and return the rates."""
        number = next(self._numbers)
        if number > 0:
            self._make_set(number - 1).empty()
        read, written = self._make_set(number), self._make_set(number + 1)
        return rates_of(
            self._num_bytes,
            lambda: self._put(written),
            lambda: move_blocks(self._tier, read.keys, self._case.num_jobs, is_promotion=True),
        )

    def _put(self, files: FileSet) -> None:
        move_blocks(self._tier, files.keys, self._case.num_jobs, is_promotion=False)


def measure(options: Options) -> Iterator[Measurement]:
    """Yield rates by direction, block size, jobs, threads and kind of I/O, then the cost of the envelope."""
    peers = find_disk_peers(options.note)
    num_rounds = options.count_rounds(NUM_ROUNDS, NUM_QUICK_ROUNDS)
    with options.new_folder() as folder:
        spread_folders(folder)
        for case in plan_cases(QUICK_SIZES_BYTES if options.is_quick else BLOCK_SIZES_BYTES):
            yield from measure_case(
                case, folder, case.rounds_of(num_rounds), peers if case.is_usual else DiskPeers()
            )
        num_rounds = fixed(NUM_QUICK_ENVELOPE_ROUNDS if options.is_quick else NUM_ENVELOPE_ROUNDS)
        for is_direct, num_threads in plan_envelopes():
            case = DiskCase(BAR_BLOCK_BYTES, MANY_JOBS, is_direct, num_threads)
            yield from measure_envelope(case, folder, num_rounds)
        yield from fs_full.measure(options, folder)


def plan_envelopes() -> Sequence[tuple[bool, int]]:
    """Return (is direct, number of threads) of each measurement of the envelope. Pure."""
    usual = [
        (is_direct, plan_num_threads(None, BAR_BLOCK_BYTES, has_direct_io=is_direct))
        for is_direct in (True, False)
    ]
    return [(True, 1), *usual]


def bar_of(case: DiskCase, operation: str) -> Bar | None:
    """Return the tier's bar in ``operation``. Pure."""
    if case.block_bytes != BAR_BLOCK_BYTES or not case.is_usual:
        return None
    if case.is_direct and case.num_jobs == MANY_JOBS:
        return Bar(vllm_fs.NAME, MANY_JOBS_BAR)
    is_one_put = not case.is_direct and case.num_jobs == ONE_JOB and operation == "put"
    return Bar(vllm_fs.NAME, ONE_JOB_PUT_BAR) if is_one_put else None


def measure_case(
    case: DiskCase, folder: Path, num_rounds: RoundCount, peers: DiskPeers
) -> Iterator[Measurement]:
    """Run tier, floors and peers in turns; truncated files stay in ``folder``."""
    rounds = run_cold(case, folder, num_rounds) if case.is_cold else run_warm(case, folder, num_rounds, peers)
    for operation, values in rounds.items():
        yield Measurement(case.labels(operation), "MiB/s", Better.HIGHER, values, bar_of(case, operation))


def run_warm(case: DiskCase, folder: Path, num_rounds: RoundCount, peers: DiskPeers) -> Rounds:
    """Run tier, floors and peers in turns, writing and reading."""
    rows = make_rows(case.num_blocks, case.block_bytes)
    place = Path(tempfile.mkdtemp(dir=folder))
    with ExitStack() as ends:
        tier = start_tier(case, rows, place / "tier")
        ends.callback(tier.shutdown, HANG_GUARD_S)
        make_set = files_of_tier(case, place / "tier")
        contestants: dict[str, Contestant] = {OURS: Turns(tier, case, rows, make_set).run}
        for name, is_sealed in ((FLOOR, False), (SEALED, True)) if case.is_usual else ((FLOOR, False),):
            floor = RawFiles(rows, case.num_threads, is_direct=case.is_direct, is_sealed=is_sealed)
            ends.callback(floor.close)
            make_own = files_of_floor(place / name, case.num_blocks)
            contestants[name] = floor_of(floor, make_own, make_set)
        contestants |= peers.open(case, rows, place, ends, is_direct=case.is_direct)
        rounds = run_rounds(contestants, num_rounds)
    empty_files(place.rglob("*.kv"))
    return rounds


def run_cold(case: DiskCase, folder: Path, num_rounds: RoundCount) -> Rounds:
    """Run tier and floor in turns, reading files that are not in the page cache."""
    rows = make_rows(case.num_blocks, case.block_bytes)
    place = Path(tempfile.mkdtemp(dir=folder))
    with ExitStack() as ends:
        tier = start_tier(case, rows, place / "tier")
        ends.callback(tier.shutdown, HANG_GUARD_S)
        floor = RawFiles(rows, case.num_threads, is_direct=case.is_direct, is_sealed=False)
        ends.callback(floor.close)
        make_set = files_of_tier(case, place / "tier")
        for number in range(NUM_COLD_SETS):
            move_blocks(tier, make_set(number).keys, case.num_jobs, is_promotion=False)
        write_back(place.rglob("*.kv"))

        def reading(get: Callable[[FileSet], None]) -> Contestant:
            numbers = count()

            def run() -> Mapping[str, float]:
                files = make_set(next(numbers) % NUM_COLD_SETS)
                return cold_rate_of(rows.nbytes, map(Path, files.paths), lambda: get(files))

            return run

        def load(files: FileSet) -> None:
            move_blocks(tier, files.keys, case.num_jobs, is_promotion=True)

        contestants = {OURS: reading(load), FLOOR: reading(floor.get)}
        rounds = run_rounds(contestants, num_rounds)
    empty_files(place.rglob("*.kv"))
    return rounds


def floor_of(floor: RawFiles, make_own: MakeSet, make_read: MakeSet) -> Contestant:
    """Return a contestant that writes its own files and reads the tier's."""
    numbers = count()

    def run() -> Mapping[str, float]:
        number = next(numbers)
        own, read = make_own(number), make_read(number)
        rates = rates_of(floor.num_bytes, lambda: floor.put(own), lambda: floor.get(read))
        own.empty()
        return rates

    return run


def files_of_tier(case: DiskCase, root: Path) -> MakeSet:
    """Return the files in which a tier at ``root`` keeps the blocks of a round."""
    namespace = make_namespace(make_config(case.block_bytes), case.block_bytes)
    path = namespace_path(root, namespace.name)

    def make_set(number: int) -> FileSet:
        keys = make_keys(case.num_blocks, number)
        return FileSet([block_path(path, key) for key in keys], keys, namespace.digest)

    return make_set


def files_of_floor(folder: Path, num_blocks: int) -> MakeSet:
    """Return files in one new folder, with new names in each round."""
    folder.mkdir()

    def make_set(number: int) -> FileSet:
        keys = make_keys(num_blocks, number)
        return FileSet([f"{folder}/{number}-{block}" for block in range(len(keys))], keys, bytes(32))

    return make_set


def start_tier(case: DiskCase, rows: memoryview, root: Path) -> FSTier:
    """Build a tier with an empty directory."""
    tier = FSTier(
        make_config(case.block_bytes),
        rows,
        root_dir=root.absolute(),
        capacity_bytes=CAPACITY,
        direct_io="auto" if case.is_direct else False,
        num_threads=None if case.has_usual_threads else case.num_threads,
    )
    assert tier.wait_indexed(HANG_GUARD_S)
    return tier


def measure_envelope(case: DiskCase, folder: Path, num_rounds: RoundCount) -> Iterator[Measurement]:
    """Run the floors in turns; yield the share of the sealed one's time that envelope and checksum take."""
    rows = make_rows(ENVELOPE_BLOCKS, case.block_bytes)
    place = Path(tempfile.mkdtemp(dir=folder))
    make_set = files_of_floor(place / "read", ENVELOPE_BLOCKS)

    def make_read(number: int) -> FileSet:
        return make_set(number % NUM_ENVELOPE_SETS)

    with ExitStack() as ends:
        contestants: dict[str, Contestant] = {}
        for name, is_sealed in ((FLOOR, False), (SEALED, True)):
            floor = RawFiles(rows, case.num_threads, is_direct=case.is_direct, is_sealed=is_sealed)
            ends.callback(floor.close)
            make_own = files_of_floor(place / name, ENVELOPE_BLOCKS)
            contestants[name] = floor_of(floor, make_own, make_read)
        for number in range(NUM_ENVELOPE_SETS):
            floor.put(make_read(number))
        rounds = run_rounds(contestants, num_rounds)
    for number in range(NUM_ENVELOPE_SETS):
        make_read(number).empty()
    for operation, values in rounds.items():
        labels = case.labels(operation) | {"share of": "envelope and checksum"}
        del labels["jobs"]
        bar = Bar(None, ENVELOPE_BAR_PERCENT) if case.is_direct else None
        shares = envelope_shares_percent(values[FLOOR], values[SEALED])
        yield Measurement(labels, "%", Better.LOWER, {OURS: shares}, bar)


def envelope_shares_percent(floor: Sequence[float], sealed: Sequence[float]) -> tuple[float, ...]:
    """Return by how much the sealed floor is slower, in per cent of its time, from the rates. Pure."""
    return tuple(
        100.0 * (1.0 - sealed_rate / floor_rate)
        for floor_rate, sealed_rate in zip(floor, sealed, strict=True)
    )
