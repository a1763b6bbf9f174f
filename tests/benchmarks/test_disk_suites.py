"""The fs suite measures each combination once, and what it calls a cold read comes from the device."""

import os
import re
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.benchmarks.harness.test_tier_jobs import is_cached
from tests.tiering.fs.slots import stored_blocks

from benchmarks import fs
from benchmarks.harness.block_files import spread_folders
from benchmarks.harness.disk_case import BLOCK_SIZES_BYTES, MANY_JOBS, MAX_BYTES, DiskCase, plan_cases
from benchmarks.harness.disk_peers import DiskPeers
from benchmarks.harness.measurement import FLOOR, OURS, Bar, Better
from benchmarks.harness.raw_slots import RawSlots
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


def test_a_warm_case_has_puts_and_gets_of_ours_and_the_floor(tmp_path: Path) -> None:
    case = DiskCase(BLOCK_BYTES, 8, is_direct=False, num_threads=2, has_usual_threads=False)

    put, get = fs.measure_case(case, tmp_path, fixed(3), DiskPeers())

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


def test_a_usual_case_has_a_sealed_floor_and_the_processor_time_of_puts_too(tmp_path: Path) -> None:
    case = DiskCase(BLOCK_BYTES, 8, is_direct=False, num_threads=2)

    lines = list(fs.measure_case(case, tmp_path, fixed(3), DiskPeers()))

    assert [(line.labels["operation"], line.unit, line.better) for line in lines] == [
        ("put", "MiB/s", Better.HIGHER),
        ("get", "MiB/s", Better.HIGHER),
        ("put, processor", "ms/MiB", Better.LOWER),
    ]
    assert all(set(line.values) == {OURS, FLOOR, fs.SEALED} for line in lines)
    assert num_bytes_of_blocks(tmp_path) == 0


@pytest.mark.parametrize(
    ("block_bytes", "is_direct", "num_jobs", "operation", "expected"),
    [
        (2**20, True, 8, "put", Bar(FLOOR, 0.85)),
        (2**20, True, 8, "get", Bar(FLOOR, 0.85)),
        (2**20, True, 1, "put", None),
        (2**20, False, 8, "get", None),
        (4 * 2**20, True, 8, "put", None),
        (64 * 2**10, False, 8, fs.PROCESSOR_TIME, Bar(fs.SEALED, 0.5)),
        (2**20, True, 1, fs.PROCESSOR_TIME, Bar(fs.SEALED, 1.0 / 1.4)),
        (4 * 2**20, True, 8, fs.PROCESSOR_TIME, None),
    ],
)
def test_bars_are_of_many_jobs_with_direct_io_and_of_processor_time(
    block_bytes: int, is_direct: bool, num_jobs: int, operation: str, expected: Bar | None
) -> None:
    assert fs.bar_of(DiskCase(block_bytes, num_jobs, is_direct, 4), operation) == expected


def num_bytes_of_blocks(folder: Path) -> int:
    """Return how many bytes the files of blocks have, the tiers' own documents left out."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files if not path.name.endswith((".usage", "namespace.json")))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_tier_has_as_many_threads_as_the_line_says(
    num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = DiskCase(BLOCK_BYTES, 8, is_direct=False, num_threads=num_threads, has_usual_threads=False)
    bystanders = set(threading.enumerate())
    found: set[str] = set()

    def watching_move_blocks(
        tier: SecondaryTierManager, keys: Sequence[OffloadKey], num_jobs: int, *, is_promotion: bool
    ) -> None:
        move_blocks(tier, keys, num_jobs, is_promotion=is_promotion)
        names = (thread.name for thread in set(threading.enumerate()) - bystanders)
        found.update(name for name in names if "-io-" in name)

    monkeypatch.setattr(fs, "move_blocks", watching_move_blocks)

    list(fs.measure_case(case, tmp_path, fixed(1), DiskPeers()))

    assert len(found) == num_threads


def test_a_cold_case_has_gets_alone_and_everyone_reads_the_device(tmp_path: Path) -> None:
    skip_without_page_cache(tmp_path)
    case = DiskCase(BLOCK_BYTES, 8, is_direct=False, num_threads=4, is_cold=True)
    before = num_bytes_read_from_devices()

    (get,) = fs.measure_case(case, tmp_path, fixed(3), DiskPeers())

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
def test_a_usual_case_has_the_threads_that_the_tier_takes_by_itself(
    block_bytes: int, is_direct: bool, num_threads: int, tmp_path: Path
) -> None:
    if is_direct:
        skip_without_direct_io(tmp_path)
    usual = [case for case in plan_cases([block_bytes]) if case.is_usual and case.is_direct == is_direct]
    rows = make_rows(2 * num_threads, block_bytes)
    bystanders = set(threading.enumerate())

    tier = fs.start_tier(usual[0], rows, tmp_path / "tier")
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


def test_the_directory_is_full_and_tier_and_floor_read_their_own_blocks(tmp_path: Path) -> None:
    case = DiskCase(BLOCK_BYTES, 8, is_direct=False, num_threads=2)
    rows = make_rows(case.num_blocks, BLOCK_BYTES)
    stored = bytes(rows)
    with ExitStack() as ends:
        tier = fs.FullTier(case, rows, tmp_path / "tier")
        ends.callback(tier.close)
        floor = fs.open_floor(case, rows, tmp_path / "floor", ends, is_sealed=True)
        num_floor_bytes = floor.path.stat().st_size
        for number in range(fs.NUM_SETS + 1):
            keys = fs.keys_of(case, number)
            held = held_keys(tmp_path / "tier")
            assert len(held) == fs.NUM_SETS * case.num_blocks
            assert not held & set(keys)
            for contestant in (tier, floor):
                contestant.put(number, keys)
                rows.cast("B")[:] = bytes(rows.nbytes)
                contestant.get(number, keys)
                assert bytes(rows) == stored
            assert held_keys(tmp_path / "tier") >= set(keys)
        assert floor.path.stat().st_size == num_floor_bytes


def held_keys(root: Path) -> set[bytes]:
    """Return the keys of the blocks below a tier's directory."""
    return {block.name for block in stored_blocks(root)}


@pytest.mark.parametrize("is_scattered", [False, True])
def test_victims_are_neighbours_unless_blocks_were_used_in_another_order(
    is_scattered: bool, tmp_path: Path
) -> None:
    case = DiskCase(BLOCK_BYTES, 8, is_direct=False, num_threads=2)
    tier = fs.FullTier(case, make_rows(case.num_blocks, BLOCK_BYTES), tmp_path)
    try:
        if is_scattered:
            tier.scatter(0)
        keys = set(fs.keys_of(case, 0))
        tier.put(0, list(keys))
    finally:
        tier.close()

    packs = Counter(block.pack for block in stored_blocks(tmp_path) if block.name in keys)
    assert packs.total() == case.num_blocks
    assert len(packs) == (fs.NUM_SETS if is_scattered else 1)


def test_scattered_victims_have_puts_of_ours_and_the_sealed_floor(tmp_path: Path) -> None:
    case = DiskCase(BLOCK_BYTES, MANY_JOBS, is_direct=False, num_threads=2)

    line = fs.measure_scattered(case, tmp_path, fixed(3))

    assert line.labels == case.labels("put, scattered victims")
    assert {name: len(values) for name, values in line.values.items()} == {OURS: 4, fs.SEALED: 4}
    assert all(value > 0 for values in line.values.values() for value in values)
    assert num_bytes_of_blocks(tmp_path) == 0


@pytest.mark.parametrize("is_the_place", [True, False])
def test_a_floor_does_not_accept_another_s_bytes(is_the_place: bool, tmp_path: Path) -> None:
    rows = make_rows(2, BLOCK_BYTES)
    floor = RawSlots(tmp_path / "floor", rows, 2, 2, 1, is_direct=False, is_sealed=True)
    try:
        floor.put(0, make_keys(2, 0))
        floor.put(1, make_keys(2, 1))
        floor.get(0, make_keys(2, 0))

        with pytest.raises(AssertionError):
            floor.get(*((1, make_keys(2, 0)) if is_the_place else (0, make_keys(2, 1))))
    finally:
        floor.close()


def test_a_floor_notices_a_byte_that_changed(tmp_path: Path) -> None:
    floor = RawSlots(tmp_path / "floor", make_rows(2, BLOCK_BYTES), 1, 2, 1, is_direct=False, is_sealed=True)
    try:
        floor.put(0, make_keys(2, 0))
        with floor.path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            (last,) = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))

        with pytest.raises(AssertionError):
            floor.get(0, make_keys(2, 0))
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
