"""The fs and slab suites measure each combination once, and what they call a cold read comes from the device."""

import os
import re
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from tests.benchmarks.harness.test_tier_jobs import is_cached
from tests.tiering.patience import be_patient

from benchmarks import fs, fs_full, slab
from benchmarks.harness.block_files import FileSet, RawFiles, spread_folders
from benchmarks.harness.disk_case import BLOCK_SIZES_BYTES, MANY_JOBS, MAX_BYTES, DiskCase, plan_cases
from benchmarks.harness.disk_peers import DiskPeers
from benchmarks.harness.measurement import FLOOR, OURS, Bar, Better
from benchmarks.harness.rounds import RoundCount, fixed
from benchmarks.harness.tier_jobs import make_keys, make_rows, move_blocks
from kvtier.base import OffloadKey
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES

IO_COUNTERS = Path("/proc/self/io")
BLOCK_BYTES = 4096


def num_bytes_read_from_devices() -> int:
    """Return how many bytes this process has made devices read so far."""
    try:
        found = re.search(r"^read_bytes: (\d+)$", IO_COUNTERS.read_text(), re.MULTILINE)
    except OSError as error:
        pytest.skip(f"the kernel does not count: {error}")
    assert found
    return int(found[1])


def skip_without_page_cache(folder: Path) -> None:
    """Skip the test where files are in memory only."""
    probe = folder / "probe"
    probe.write_bytes(bytes(BLOCK_BYTES))
    try:
        is_cached(probe)
    except OSError as error:
        pytest.skip(f"this file system has no page cache that could forget: {error}")
    probe.unlink()


def test_every_size_has_each_kind_of_io_and_threads_are_counted_up() -> None:
    cases = list(plan_cases(BLOCK_SIZES_BYTES))

    labels = Counter(tuple(case.labels("get").items()) for case in cases)
    assert set(labels.values()) == {1}
    assert {(case.block_bytes, case.is_direct, case.is_cold) for case in cases} == {
        (size, *kind) for size in BLOCK_SIZES_BYTES for kind in ((True, False), (False, False), (False, True))
    }
    swept = [
        case.num_threads
        for case in cases
        if case.block_bytes == 2**20 and case.is_direct and case.num_jobs == 8
    ]
    assert sorted(swept) == [1, 2, 4, 8]


@pytest.mark.parametrize("block_bytes", [64 * 2**10, 2**20, 4 * 2**20])
def test_blocks_of_a_round_fit_its_room_and_fill_their_jobs(block_bytes: int) -> None:
    case = DiskCase(block_bytes, 8, is_direct=True, num_threads=4)

    assert case.num_blocks * block_bytes <= MAX_BYTES
    assert case.num_blocks % 8 == 0
    assert case.labels("put")["jobs"] == f"8 of {case.num_blocks // 8}"


@pytest.mark.parametrize(
    ("block_bytes", "is_direct", "is_cold", "expected"),
    [
        (64 * 2**10, True, False, RoundCount(6, 192)),
        (64 * 2**10, False, True, RoundCount(6, 192)),
        (2**20, True, False, RoundCount(6, 24)),
        (4 * 2**20, False, True, RoundCount(6, 24)),
        (4 * 2**20, False, False, RoundCount(6, 48)),
    ],
)
def test_rounds_of_small_blocks_and_of_the_page_cache_may_be_more(
    block_bytes: int, *, is_direct: bool, is_cold: bool, expected: RoundCount
) -> None:
    case = DiskCase(block_bytes, 8, is_direct=is_direct, num_threads=4, is_cold=is_cold)

    assert case.rounds_of(RoundCount(6, 24)) == expected
    assert case.rounds_of(fixed(3)) == fixed(3)


@pytest.mark.parametrize("suite", [fs, slab])
def test_a_warm_case_has_puts_and_gets_of_ours_and_the_floor(suite: ModuleType, tmp_path: Path) -> None:
    case = DiskCase(BLOCK_BYTES, 8, is_direct=False, num_threads=2, has_usual_threads=False)

    put, get = suite.measure_case(case, tmp_path, fixed(3), DiskPeers())

    for operation, measurement in (("put", put), ("get", get)):
        assert measurement.labels == {
            "operation": operation,
            "block": "4 KiB",
            "jobs": "8 of 16",
            "threads": 2,
            "I/O": "buffered",
        }
        assert set(measurement.values) == {OURS, FLOOR}
        assert {len(values) for values in measurement.values.values()} == {4}, "whole turns of two"
        assert all(value > 0 for values in measurement.values.values() for value in values)
    assert num_bytes_of_blocks(tmp_path) == 0


def num_bytes_of_blocks(folder: Path) -> int:
    """Return how many bytes the files of blocks have, the tiers' own documents left out."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files if not path.name.endswith((".usage", "namespace.json")))


@pytest.mark.parametrize("suite", [fs, slab])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_tier_has_as_many_threads_as_the_line_says(
    suite: ModuleType, num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = DiskCase(BLOCK_BYTES, 8, is_direct=False, num_threads=num_threads, has_usual_threads=False)
    bystanders = set(threading.enumerate())
    found: set[str] = set()
    move_blocks = suite.move_blocks

    def watching_move_blocks(
        tier: SecondaryTierManager, keys: Sequence[OffloadKey], num_jobs: int, *, is_promotion: bool
    ) -> None:
        move_blocks(tier, keys, num_jobs, is_promotion=is_promotion)
        names = (thread.name for thread in set(threading.enumerate()) - bystanders)
        found.update(name for name in names if "-io-" in name)

    monkeypatch.setattr(suite, "move_blocks", watching_move_blocks)

    list(suite.measure_case(case, tmp_path, fixed(1), DiskPeers()))

    assert len(found) == num_threads


@pytest.mark.parametrize("suite", [fs, slab])
def test_a_cold_case_has_gets_alone_and_everyone_reads_the_device(suite: ModuleType, tmp_path: Path) -> None:
    skip_without_page_cache(tmp_path)
    case = DiskCase(BLOCK_BYTES, 8, is_direct=False, num_threads=4, is_cold=True)
    before = num_bytes_read_from_devices()

    (get,) = suite.measure_case(case, tmp_path, fixed(3), DiskPeers())

    num_read_bytes = num_bytes_read_from_devices() - before
    assert (get.labels["operation"], get.labels["I/O"]) == ("get", "buffered, cold")
    assert set(get.values) == {OURS, FLOOR}
    num_rounds = 1 + len(get.values[OURS])
    num_stored_bytes = case.num_blocks * (HEADER_PAGE_BYTES + BLOCK_BYTES)
    assert num_bytes_of_blocks(tmp_path) == 0
    # Of one contestant alone it would be half of that.
    assert num_read_bytes >= 0.9 * 2 * num_rounds * num_stored_bytes


@pytest.mark.parametrize(
    ("floor", "sealed", "share"),
    [(100.0, 100.0, 0.0), (100.0, 90.0, 10.0), (200.0, 100.0, 50.0), (100.0, 125.0, -25.0)],
)
def test_the_envelopes_share_is_of_the_time_with_it(floor: float, sealed: float, share: float) -> None:
    assert fs.envelope_shares_percent([floor, floor], [sealed, floor]) == pytest.approx((share, 0.0))


def test_the_envelope_is_measured_in_per_cent_of_puts_and_gets(tmp_path: Path) -> None:
    case = DiskCase(BLOCK_BYTES, MANY_JOBS, is_direct=False, num_threads=2)

    put, get = fs.measure_envelope(case, tmp_path, fixed(3))

    for operation, measurement in (("put", put), ("get", get)):
        assert measurement.labels["operation"] == operation
        assert "jobs" not in measurement.labels
        assert (measurement.unit, measurement.better, measurement.bar) == ("%", Better.LOWER, None)
        assert len(measurement.values[OURS]) == 4, "whole turns of two"
    assert num_bytes_of_blocks(tmp_path) == 0


def test_with_direct_io_the_envelope_has_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "O_DIRECT", 0)  # the folder of a test may be one in memory
    case = DiskCase(BLOCK_BYTES, MANY_JOBS, is_direct=True, num_threads=4)

    bars = [line.bar for line in fs.measure_envelope(case, tmp_path, fixed(2))]

    assert bars == [Bar(None, 10.0)] * 2


@pytest.mark.parametrize(
    ("block_bytes", "is_direct", "num_threads"),
    [(64 * 2**10, True, 4), (2**20, True, 8), (2**20, False, 4)],
)
@pytest.mark.parametrize("suite", [fs, slab])
def test_a_usual_case_has_the_threads_that_the_tier_takes_by_itself(
    suite: ModuleType, block_bytes: int, is_direct: bool, num_threads: int, tmp_path: Path
) -> None:
    if is_direct:
        skip_without_direct_io(tmp_path)
    usual = [case for case in plan_cases([block_bytes]) if case.is_usual and case.is_direct == is_direct]
    rows = make_rows(2 * num_threads, block_bytes)
    bystanders = set(threading.enumerate())

    tier = suite.start_tier(usual[0], rows, tmp_path / "tier")
    try:
        keys = make_keys(2 * num_threads, 0)
        move_blocks(tier, keys, len(keys), is_promotion=False)
        names = [thread.name for thread in set(threading.enumerate()) - bystanders]
    finally:
        tier.shutdown(1.0)

    assert sum("-io-" in name for name in names) == num_threads
    assert [case.num_threads for case in usual] == [num_threads] * 2


def skip_without_direct_io(folder: Path) -> None:
    """Skip the test where files cannot bypass the page cache."""
    try:
        os.close(os.open(folder / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600))
    except OSError as error:
        pytest.skip(f"no direct I/O here: {error}")


def test_in_a_round_floors_read_what_the_tier_reads_and_only_two_rounds_are_kept(tmp_path: Path) -> None:
    case = DiskCase(BLOCK_BYTES, 8, is_direct=False, num_threads=2)
    rows = make_rows(case.num_blocks, BLOCK_BYTES)
    stored = bytes(rows)
    tier = fs.start_tier(case, rows, tmp_path / "tier")
    make_set = fs.files_of_tier(case, tmp_path / "tier")
    turns = fs.Turns(tier, case, rows, make_set)
    floor = RawFiles(rows, 2, is_direct=False, is_sealed=True)
    run_floor = fs.floor_of(floor, fs.files_of_floor(tmp_path / "floor", case.num_blocks), make_set)
    try:
        for number in range(3):
            assert min(turns.run().values()) > 0
            rows.cast("B")[:] = bytes(rows.nbytes)
            assert min(run_floor().values()) > 0
            assert bytes(rows) == stored, "the sealed floor has read and checked the tier's blocks"

            has_bytes = [is_whole(make_set(before)) for before in range(number + 2)]
            assert has_bytes == [False] * number + [True, True]
            floor_files = list((tmp_path / "floor").iterdir())
            assert len(floor_files) == (number + 1) * case.num_blocks, "no file is removed"
            assert not any(path.stat().st_size for path in floor_files)
    finally:
        floor.close()
        tier.shutdown(1.0)


def is_whole(files: FileSet) -> bool:
    """Return whether the files have their bytes; either all or none of them do."""
    (size_bytes,) = {Path(path).stat().st_size for path in files.paths}
    return size_bytes > 0


def test_the_slab_and_its_floor_write_one_file_and_the_tier_reads_its_own_blocks(tmp_path: Path) -> None:
    case = DiskCase(BLOCK_BYTES, 8, is_direct=False, num_threads=2)
    rows = make_rows(case.num_blocks, BLOCK_BYTES)
    stored = bytes(rows)
    path = tmp_path / "slab"
    tier = slab.start_tier(case, rows, path)
    floor = slab.Floor(rows, path, case)
    turns = slab.Turns(tier, rows, case)
    try:
        for _ in range(2):
            turns.put()
            rows.cast("B")[:] = bytes(rows.nbytes)
            turns.get()
            assert bytes(rows) == stored
            of_tier = path.read_bytes()

            floor.put()
            rows.cast("B")[:] = bytes(rows.nbytes)
            floor.get()
            assert bytes(rows) == stored
            assert path.read_bytes() != of_tier, "without envelopes"
            assert len(path.read_bytes()) == len(of_tier)
    finally:
        floor.close()
        tier.shutdown(1.0)


def test_a_floor_does_not_accept_another_s_bytes(tmp_path: Path) -> None:
    floor = RawFiles(make_rows(2, BLOCK_BYTES), 2, is_direct=False, is_sealed=True)
    make_set = fs.files_of_floor(tmp_path / "floor", 2)
    try:
        floor.put(make_set(0))
        for first, second in zip(make_set(0).paths, make_set(1).paths, strict=True):
            Path(first).rename(second)

        with pytest.raises(AssertionError):
            floor.get(make_set(1))
    finally:
        floor.close()


def test_folders_are_spread_where_the_file_system_can_and_nothing_else_changes(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()

    spread_folders(tmp_path)
    spread_folders(tmp_path)

    (tmp_path / "after").mkdir()
    assert {path.name for path in tmp_path.iterdir()} == {"before", "after"}
    for name in ("before", "after"):
        (tmp_path / name / "file").write_bytes(b"bytes")


def test_a_folder_that_cannot_be_spread_is_left_alone() -> None:
    folder = Path("/proc/self/fdinfo")  # made by the kernel: it has no such flags

    spread_folders(folder)

    assert folder.is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("is_direct", [False, True])
def test_in_a_full_directory_each_put_takes_the_place_of_older_blocks(
    tmp_path: Path, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch.setattr)
    case = DiskCase(BLOCK_BYTES, 8, is_direct, num_threads=2)

    measured = fs_full.measure_case(case, tmp_path / "full", fixed(3))

    assert {name: len(values) for name, values in measured.values.items()} == {
        OURS: 3,
        FLOOR: 3,
        fs_full.REMOVED: 3,
    }
    assert all(rate > 0 for values in measured.values.values() for rate in values)
    most = fs_full.NUM_SETS * case.num_blocks
    for name in ("tier", FLOOR, fs_full.REMOVED):
        files = [path for path in (tmp_path / "full" / name).rglob("*") if path.stat().st_size > BLOCK_BYTES]
        # A recount of the tier beside its stores may count some twice, and more is evicted than must be.
        assert (0.5 if name == "tier" else 0.9) * most <= len(files) <= most
