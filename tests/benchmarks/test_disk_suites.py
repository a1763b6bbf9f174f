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

from benchmarks import fs, slab
from benchmarks.harness.measurement import FLOOR, OURS, Bar, Better
from benchmarks.harness.suite import Options
from kvtier.base import OffloadKey
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.envelope import HEADER_PAGE_BYTES

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


@pytest.mark.parametrize("suite", [fs, slab])
def test_every_size_has_each_kind_of_io_and_threads_are_counted_up(suite: ModuleType) -> None:
    cases = list(suite.plan_cases(suite.BLOCK_SIZES_BYTES))

    labels = Counter(tuple(case.labels("get").items()) for case in cases)
    assert set(labels.values()) == {1}
    assert {(case.block_bytes, case.is_direct, case.is_cold) for case in cases} == {
        (size, *kind)
        for size in suite.BLOCK_SIZES_BYTES
        for kind in ((True, False), (False, False), (False, True))
    }
    swept = [
        case.num_threads
        for case in cases
        if case.block_bytes == 2**20 and case.is_direct and case.num_jobs == 8
    ]
    assert sorted(swept) == [1, 2, 4, 8]


@pytest.mark.parametrize("suite", [fs, slab])
@pytest.mark.parametrize("block_bytes", [64 * 2**10, 2**20, 4 * 2**20])
def test_blocks_of_a_round_fit_its_room_and_fill_their_jobs(suite: ModuleType, block_bytes: int) -> None:
    case = suite.Case(block_bytes, 8, is_direct=True)

    assert case.num_blocks * block_bytes <= suite.MAX_BYTES
    assert case.num_blocks % 8 == 0
    assert case.labels("put")["jobs"] == f"8 of {case.num_blocks // 8}"


@pytest.mark.parametrize("suite", [fs, slab])
def test_a_warm_case_has_puts_and_gets_of_ours_and_the_floor(suite: ModuleType, tmp_path: Path) -> None:
    case = suite.Case(BLOCK_BYTES, 8, is_direct=False, num_threads=2)

    put, get = suite.measure_case(
        case, Options(True, tmp_path, pytest.fail), has_vllm=False, has_lmcache=False
    )

    for operation, measurement in (("put", put), ("get", get)):
        assert measurement.labels == {
            "operation": operation,
            "block": "4 KiB",
            "jobs": "8 of 16",
            "threads": 2,
            "I/O": "buffered",
        }
        assert set(measurement.values) == {OURS, FLOOR}
        assert len({len(values) for values in measurement.values.values()}) == 1
        assert all(value > 0 for values in measurement.values.values() for value in values)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suite", [fs, slab])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_tier_has_as_many_threads_as_the_line_says(
    suite: ModuleType, num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = suite.Case(BLOCK_BYTES, 8, is_direct=False, num_threads=num_threads)
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

    list(suite.measure_case(case, Options(True, tmp_path, pytest.fail), has_vllm=False, has_lmcache=False))

    assert len(found) == num_threads


@pytest.mark.parametrize("suite", [fs, slab])
def test_a_cold_case_has_gets_alone_and_everyone_reads_the_device(suite: ModuleType, tmp_path: Path) -> None:
    skip_without_page_cache(tmp_path)
    case = suite.Case(BLOCK_BYTES, 8, is_direct=False, is_cold=True)
    before = num_bytes_read_from_devices()

    (get,) = suite.measure_case(case, Options(True, tmp_path, pytest.fail), has_vllm=False, has_lmcache=False)

    num_read_bytes = num_bytes_read_from_devices() - before
    assert (get.labels["operation"], get.labels["I/O"]) == ("get", "buffered, cold")
    assert set(get.values) == {OURS, FLOOR}
    num_rounds = 1 + len(get.values[OURS])
    num_stored_bytes = case.num_blocks * (HEADER_PAGE_BYTES + BLOCK_BYTES)
    # Of one contestant alone it would be half of that.
    assert num_read_bytes >= 0.9 * 2 * num_rounds * num_stored_bytes


@pytest.mark.parametrize(
    ("floor", "sealed", "share"),
    [(100.0, 100.0, 0.0), (100.0, 90.0, 10.0), (200.0, 100.0, 50.0), (100.0, 125.0, -25.0)],
)
def test_the_envelopes_share_is_of_the_time_with_it(floor: float, sealed: float, share: float) -> None:
    assert fs.envelope_shares_percent([floor, floor], [sealed, floor]) == pytest.approx((share, 0.0))


def test_the_envelope_is_measured_in_per_cent_of_puts_and_gets(tmp_path: Path) -> None:
    case = fs.Case(BLOCK_BYTES, fs.MANY_JOBS, is_direct=False, num_threads=2)

    put, get = fs.measure_envelope(case, Options(True, tmp_path, pytest.fail))

    for operation, measurement in (("put", put), ("get", get)):
        assert measurement.labels["operation"] == operation
        assert "jobs" not in measurement.labels
        assert (measurement.unit, measurement.better, measurement.bar) == ("%", Better.LOWER, None)
        assert len(measurement.values[OURS]) == fs.NUM_QUICK_ENVELOPE_ROUNDS


def test_with_direct_io_the_envelope_has_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "O_DIRECT", 0)  # the folder of a test may be one in memory
    case = fs.Case(BLOCK_BYTES, fs.MANY_JOBS, is_direct=True)

    bars = [line.bar for line in fs.measure_envelope(case, Options(True, tmp_path, pytest.fail))]

    assert bars == [Bar(None, 10.0)] * 2
