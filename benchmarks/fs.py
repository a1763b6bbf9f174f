"""Throughput and processor time of the fs tier against raw vectored calls on a file of the same layout.

The floor writes and reads runs of neighbouring slots with as many threads as the tier, each slot a page and a row. It
has no checksum, no journal, no index, no pins and no eviction. A second floor seals and checks each row as the tier
does; the difference is the cost of envelope and checksum, which has its own lines. vLLM's fs tier and LMCache's disk
back end keep a file a block and have their own numbers of threads, so they are not measured where these vary.

The tier's directory has room for some rounds and is full before the first: each put drops as many blocks as it writes.
The oldest blocks are neighbours, as they were stored together; lines of scattered victims come last, where blocks were
used in another order than they were stored in. Each contestant has its own files and reads what it has just written.
Cold reads go round the sets of blocks, which are written back before the first read and dropped from the page cache
before each.
"""

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from benchmarks.harness import vllm_fs
from benchmarks.harness.block_files import empty_files, spread_folders
from benchmarks.harness.disk_case import (
    BAR_BLOCK_BYTES,
    BLOCK_SIZES_BYTES,
    MANY_JOBS,
    QUICK_SIZES_BYTES,
    DiskCase,
    plan_cases,
)
from benchmarks.harness.disk_peers import DiskPeers, find_disk_peers
from benchmarks.harness.measurement import FLOOR, OURS, Bar, Better, Measurement
from benchmarks.harness.raw_slots import RawSlots
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
from kvtier.base import OffloadKey, ReqContext
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.pack_header import PackGeometry, disk_bytes_of
from kvtier.tiering.fs.settings import plan_max_task_blocks
from kvtier.tiering.kit.disk import plan_num_threads

NUM_ROUNDS, NUM_QUICK_ROUNDS = 6, 3
"""At least; rounded up so that each contestant begins equally often."""

NUM_SETS = 3
"""Rounds that a directory has room for, a pack each. With one, a cold read would always be of the same place on the
disk; each more is written before the first round."""

ENVELOPE_BLOCKS = 16
NUM_ENVELOPE_ROUNDS, NUM_QUICK_ENVELOPE_ROUNDS = 60, 20
"""Many short rounds: the cost is smaller than the variation of a disk's speed from one second to the next."""

SEALED = "sealed floor"
FLOOR_BAR, VLLM_BAR = 0.85, 0.95
"""Ratios to raw calls and to vLLM's fs tier: 1 MiB, direct I/O, many jobs."""

PROCESSOR_BARS = {64 * 2**10: 2.0, 2**20: 1.4}
"""By the length of a block, the most processor time of a put, as a multiple of the sealed floor's."""

PROCESSOR_TIME = "put, processor"
SCATTERED = "put, scattered victims"
SCATTERED_CASES = ((64 * 2**10, True), (64 * 2**10, False), (BAR_BLOCK_BYTES, True), (BAR_BLOCK_BYTES, False))
"""Bytes of a block, and whether I/O is direct."""

ENVELOPE_BAR_PERCENT = 10.0
"""Share of the time of a put or a get, with direct I/O."""

Rounds = Mapping[str, Mapping[str, tuple[float, ...]]]
"""Measured values of contestants, by operation."""

Move = Callable[[int, Sequence[OffloadKey]], None]
"""Moves every block of a round, given its number and keys."""


class FullTier:
    """The tier, in a directory that is full.

    Args:
        case: kind of I/O, and number of jobs.
        rows: the tier's rows.
        root: its directory.
    """

    def __init__(self, case: DiskCase, rows: memoryview, root: Path) -> None:
        self.root = root
        self._case = case
        self._tier = start_tier(case, rows, root)
        self._chance = random.Random(0)  # noqa: S311  # an order that is the same in each run
        for number in range(-NUM_SETS, 0):
            self.put(number, keys_of(case, number))

    def put(self, number: int, keys: Sequence[OffloadKey]) -> None:
        """Store a round's blocks; as many others are evicted."""
        move_blocks(self._tier, keys, self._case.num_jobs, is_promotion=False)

    def get(self, number: int, keys: Sequence[OffloadKey]) -> None:
        """Load a round's blocks."""
        move_blocks(self._tier, keys, self._case.num_jobs, is_promotion=True)

    def scatter(self, number: int) -> None:
        """Use every block that is held before round ``number``, in an order of chance."""
        keys = [key for one in range(number - NUM_SETS, number) for key in keys_of(self._case, one)]
        self._chance.shuffle(keys)
        self._tier.touch(keys, ReqContext("bench"))

    def close(self) -> None:
        """End the tier."""
        self._tier.shutdown(HANG_GUARD_S)


def measure(options: Options) -> Iterator[Measurement]:
    """Yield rates and processor time, then the cost of the envelope, then puts whose victims are scattered."""
    peers = find_disk_peers(options.note)
    num_rounds = options.count_rounds(NUM_ROUNDS, NUM_QUICK_ROUNDS)
    with options.new_folder() as folder:
        spread_folders(folder)
        for case in plan_cases(QUICK_SIZES_BYTES if options.is_quick else BLOCK_SIZES_BYTES):
            yield from measure_case(
                case, folder, case.rounds_of(num_rounds), peers if case.is_usual else DiskPeers()
            )
        num_envelope_rounds = fixed(NUM_QUICK_ENVELOPE_ROUNDS if options.is_quick else NUM_ENVELOPE_ROUNDS)
        for is_direct, num_threads in plan_envelopes():
            case = DiskCase(BAR_BLOCK_BYTES, MANY_JOBS, is_direct, num_threads)
            yield from measure_envelope(case, folder, num_envelope_rounds)
        for block_bytes, is_direct in SCATTERED_CASES[-1:] if options.is_quick else SCATTERED_CASES:
            num_threads = plan_num_threads(None, block_bytes, has_direct_io=is_direct)
            case = DiskCase(block_bytes, MANY_JOBS, is_direct, num_threads)
            yield measure_scattered(case, folder, case.rounds_of(num_rounds))


def plan_envelopes() -> Sequence[tuple[bool, int]]:
    """Return (is direct, number of threads) of each measurement of the envelope. Pure."""
    usual = [
        (is_direct, plan_num_threads(None, BAR_BLOCK_BYTES, has_direct_io=is_direct))
        for is_direct in (True, False)
    ]
    return [(True, 1), *usual]


def bar_of(case: DiskCase, operation: str) -> Bar | None:
    """Return the tier's bar in ``operation``. Pure."""
    if operation == PROCESSOR_TIME:
        most = PROCESSOR_BARS.get(case.block_bytes)
        return None if most is None else Bar(SEALED, 1.0 / most)
    has_one = case.is_direct and case.block_bytes == BAR_BLOCK_BYTES and case.num_jobs == MANY_JOBS
    return Bar(FLOOR, FLOOR_BAR) if has_one and case.has_usual_threads else None


def measure_case(
    case: DiskCase, folder: Path, num_rounds: RoundCount, peers: DiskPeers
) -> Iterator[Measurement]:
    """Run tier, floors and peers in turns; truncated files of peers stay in ``folder``."""
    rounds = run_cold(case, folder, num_rounds) if case.is_cold else run_warm(case, folder, num_rounds, peers)
    against_vllm = []
    for operation, values in rounds.items():
        labels, bar = case.labels(operation), bar_of(case, operation)
        if operation == PROCESSOR_TIME:
            yield Measurement(labels, "ms/MiB", Better.LOWER, values, bar)
            continue
        yield Measurement(labels, "MiB/s", Better.HIGHER, values, bar)
        if bar is not None and vllm_fs.NAME in values:
            pair = {name: values[name] for name in (OURS, vllm_fs.NAME)}
            against = labels | {"against": vllm_fs.NAME}
            bar = Bar(vllm_fs.NAME, VLLM_BAR)
            against_vllm.append(Measurement(against, "MiB/s", Better.HIGHER, pair, bar))
    yield from against_vllm


def run_warm(case: DiskCase, folder: Path, num_rounds: RoundCount, peers: DiskPeers) -> Rounds:
    """Run tier, floors and peers in turns, writing and reading."""
    rows = make_rows(case.num_blocks, case.block_bytes)
    place = Path(tempfile.mkdtemp(dir=folder))
    with ExitStack() as ends:
        tier = FullTier(case, rows, place / "tier")
        ends.callback(tier.close)
        contestants = {OURS: contestant_of(case, rows.nbytes, tier.put, tier.get)}
        for name, is_sealed in ((FLOOR, False), (SEALED, True)) if case.is_usual else ((FLOOR, False),):
            floor = open_floor(case, rows, place / name, ends, is_sealed=is_sealed)
            contestants[name] = contestant_of(case, rows.nbytes, floor.put, floor.get)
        contestants |= peers.open(case, rows, place, ends, is_direct=case.is_direct)
        rounds = run_rounds(contestants, num_rounds)
    empty_packs(place)
    return rounds


def run_cold(case: DiskCase, folder: Path, num_rounds: RoundCount) -> Rounds:
    """Run tier and floor in turns, reading blocks that are not in the page cache."""
    rows = make_rows(case.num_blocks, case.block_bytes)
    place = Path(tempfile.mkdtemp(dir=folder))
    with ExitStack() as ends:
        tier = FullTier(case, rows, place / "tier")
        ends.callback(tier.close)
        floor = open_floor(case, rows, place / FLOOR, ends, is_sealed=False)
        for number in range(NUM_SETS):
            tier.put(number, keys_of(case, number))
            floor.put(number, ())
        packs = list(tier.root.rglob("*.pack"))
        write_back([*packs, floor.path])

        def reading(get: Move, paths: Sequence[Path]) -> Contestant:
            numbers = count()

            def run() -> Mapping[str, float]:
                number = next(numbers) % NUM_SETS
                return cold_rate_of(rows.nbytes, paths, lambda: get(number, keys_of(case, number)))

            return run

        contestants = {OURS: reading(tier.get, packs), FLOOR: reading(floor.get, [floor.path])}
        rounds = run_rounds(contestants, num_rounds)
    empty_packs(place)
    return rounds


def measure_scattered(case: DiskCase, folder: Path, num_rounds: RoundCount) -> Measurement:
    """Run tier and sealed floor in turns, the tier's victims being no neighbours."""
    rows = make_rows(case.num_blocks, case.block_bytes)
    place = Path(tempfile.mkdtemp(dir=folder))
    with ExitStack() as ends:
        tier = FullTier(case, rows, place / "tier")
        ends.callback(tier.close)
        floor = open_floor(case, rows, place / FLOOR, ends, is_sealed=True)
        numbers = count()

        def put_scattered() -> Mapping[str, float]:
            number = next(numbers)
            tier.scatter(number)
            keys = keys_of(case, number)
            return {SCATTERED: rates_of(rows.nbytes, lambda: tier.put(number, keys), bool)["put"]}

        def put_raw() -> Mapping[str, float]:
            keys = keys_of(case, 0)
            return {SCATTERED: rates_of(rows.nbytes, lambda: floor.put(0, keys), bool)["put"]}

        values = run_rounds({OURS: put_scattered, SEALED: put_raw}, num_rounds)[SCATTERED]
    empty_packs(place)
    return Measurement(case.labels(SCATTERED), "MiB/s", Better.HIGHER, values)


def contestant_of(case: DiskCase, num_bytes: int, put: Move, get: Move) -> Contestant:
    """Return what writes and reads a new round's blocks each time; usual cases have the processor time of the put."""
    numbers = count()

    def run() -> Mapping[str, float]:
        number = next(numbers)
        keys = keys_of(case, number)
        spent_s: list[float] = []

        def put_counted() -> None:
            begun_s = time.process_time()
            put(number, keys)
            spent_s.append(time.process_time() - begun_s)

        rates = rates_of(num_bytes, put_counted, lambda: get(number, keys))
        processor = {PROCESSOR_TIME: 1e3 * spent_s[0] / (num_bytes / 2**20)} if case.is_usual else {}
        return {**rates, **processor}

    return run


def open_floor(case: DiskCase, rows: memoryview, path: Path, ends: ExitStack, *, is_sealed: bool) -> RawSlots:
    """Make a floor whose file was written once; ``ends`` closes it and removes the file."""
    floor = RawSlots(
        path,
        rows,
        NUM_SETS,
        case.num_threads,
        plan_max_task_blocks(case.block_bytes),
        is_direct=case.is_direct,
        is_sealed=is_sealed,
    )
    ends.callback(path.unlink)
    ends.callback(floor.close)
    for number in range(NUM_SETS):
        floor.put(number, keys_of(case, number))
    return floor


def keys_of(case: DiskCase, number: int) -> list[OffloadKey]:
    """Return the keys of a round; those before the first have numbers below 0. Pure."""
    return make_keys(case.num_blocks, number + NUM_SETS)


def start_tier(case: DiskCase, rows: memoryview, root: Path) -> FSTier:
    """Build a tier with room for the blocks of some rounds, those of each in one pack."""
    pack_bytes = disk_bytes_of(PackGeometry(case.block_bytes, case.num_blocks))
    tier = FSTier(
        make_config(case.block_bytes),
        rows,
        root_dir=root.absolute(),
        capacity_bytes=NUM_SETS * pack_bytes,
        pack_bytes=pack_bytes,
        direct_io="auto" if case.is_direct else False,
        num_threads=None if case.has_usual_threads else case.num_threads,
    )
    assert tier.wait_indexed(HANG_GUARD_S)
    return tier


def empty_packs(folder: Path) -> None:
    """Truncate the packs of tiers that have ended, so that no disk fills while others are measured."""
    empty_files([*folder.rglob("*.pack"), *folder.rglob("*.index")])


def measure_envelope(case: DiskCase, folder: Path, num_rounds: RoundCount) -> Iterator[Measurement]:
    """Run the floors in turns; yield the share of the sealed one's time that envelope and checksum take."""
    rows = make_rows(ENVELOPE_BLOCKS, case.block_bytes)
    place = Path(tempfile.mkdtemp(dir=folder))
    with ExitStack() as ends:
        contestants = {}
        for name, is_sealed in ((FLOOR, False), (SEALED, True)):
            floor = open_floor(case, rows, place / name, ends, is_sealed=is_sealed)
            contestants[name] = contestant_of(case, rows.nbytes, floor.put, floor.get)
        rounds = run_rounds(contestants, num_rounds)
    for operation in ("put", "get"):
        values = rounds[operation]
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
