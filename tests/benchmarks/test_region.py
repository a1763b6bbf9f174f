"""Each way of touching a region is timed, every byte of it is written, and no region outlives its round."""

import mmap
import os
from pathlib import Path

import pytest

from benchmarks import region
from benchmarks.harness.measurement import FLOOR, OURS
from benchmarks.harness.rounds import fixed
from benchmarks.harness.suite import Options
from kvtier.cpu.region_file import SHARED_MEMORY_DIRECTORY, make_region_path
from kvtier.cpu.shared_offload_region import CHUNK_BYTES
from kvtier.errors import RegionMemoryError

SMALL_BYTES = 2 * region.ROW_BYTES


PATH = make_region_path(f"benchmark-{os.getpid()}", SHARED_MEMORY_DIRECTORY)


def num_regions_mapped() -> int:
    """Return how many mappings of this process are of the benchmark's region."""
    return Path("/proc/self/maps").read_text().count(str(PATH))


def num_regions_open() -> int:
    """Return how many descriptors of this process are of the benchmark's region."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(str(link.readlink()).startswith(str(PATH)) for link in links)


def test_each_operation_has_times_of_ours_and_the_floor_and_stores_of_the_lazy_one() -> None:
    cores = os.sched_getaffinity(0)

    lines = list(region.measure_cores(1, SMALL_BYTES, fixed(2)))

    assert [line.labels for line in lines] == [
        {"operation": operation, "cores": 1} for operation in region.OPERATIONS
    ]
    by_operation = {line.labels["operation"]: set(line.values) for line in lines}
    everybody = {OURS, FLOOR, region.LAZILY}
    assert by_operation[region.STORE] == by_operation[region.TOUCH_AND_STORE] == everybody
    assert by_operation[region.PREFAULT] == by_operation[region.RESERVE] == {OURS, FLOOR}
    assert all(value > 0 for line in lines for values in line.values.values() for value in values)
    assert {len(values) for line in lines for values in line.values.values()} == {3}, "each begins once"
    assert os.sched_getaffinity(0) == cores


def test_touch_and_store_is_both_together_where_there_was_a_prefault() -> None:
    prefaulted = region.time_region(SMALL_BYTES, is_prefaulted=True)
    lazy = region.time_region(SMALL_BYTES, is_prefaulted=False)

    assert prefaulted[region.TOUCH_AND_STORE] == prefaulted[region.PREFAULT] + prefaulted[region.STORE]
    assert lazy[region.TOUCH_AND_STORE] == lazy[region.STORE]


@pytest.mark.parametrize("num_bytes", [1, mmap.PAGESIZE, CHUNK_BYTES + mmap.PAGESIZE + 1])
def test_filling_writes_every_byte_and_none_behind_them(num_bytes: int) -> None:
    with mmap.mmap(-1, num_bytes + mmap.PAGESIZE) as memory:
        region.fill(memory, num_bytes)

        assert memory[:num_bytes].count(1) == num_bytes
        assert memory[num_bytes:].count(0) == mmap.PAGESIZE


def test_a_region_is_gone_after_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile = []
    fill = region.fill

    def spying_fill(memory: mmap.mmap, num_bytes: int) -> None:
        meanwhile.append((num_regions_mapped(), num_regions_open() > 0, PATH.exists()))
        fill(memory, num_bytes)

    monkeypatch.setattr(region, "fill", spying_fill)

    region.time_region(SMALL_BYTES, is_prefaulted=True)

    assert meanwhile == [(1, True, False)], (
        "it has no name any more, so that it is gone if the process is killed"
    )
    assert (num_regions_mapped(), num_regions_open()) == (0, 0)


def test_a_region_is_gone_though_its_round_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_fill(memory: mmap.mmap, num_bytes: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(region, "fill", failing_fill)

    with pytest.raises(KeyboardInterrupt):
        region.time_region(SMALL_BYTES, is_prefaulted=False)

    assert (num_regions_mapped(), num_regions_open()) == (0, 0)
    assert not PATH.exists()


def test_without_room_for_a_region_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(num_bytes: int) -> None:
        raise RegionMemoryError("no room")

    monkeypatch.setattr(region, "make_region", full)
    monkeypatch.setattr(region, "QUICK_REGION_BYTES", SMALL_BYTES)
    notes: list[str] = []
    cores = os.sched_getaffinity(0)

    assert list(region.measure(Options(True, None, notes.append))) == []

    assert notes == ["no region of 4 MiB could be measured: no room"]
    assert os.sched_getaffinity(0) == cores
