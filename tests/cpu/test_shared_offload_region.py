"""The region's rows, views and lifetime, within a process and between processes that are killed."""

import gc
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvtier.cpu.shared_offload_region import SharedOffloadRegion, plan_row_stride
from kvtier.errors import RegionError, RegionGeometryError, WorkerAreaError

HANG_GUARD_S = 120


class Engine:
    """Makes regions of one engine, with two workers of 24 bytes and rows of 64."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.regions: list[SharedOffloadRegion] = []

    def region(self, rank: int | None, num_blocks: int = 4) -> SharedOffloadRegion:
        """Create or join."""
        region = SharedOffloadRegion(
            "engine",
            64 * num_blocks,
            num_blocks,
            rank,
            2,
            24,
            row_alignment_bytes=64,
            directory=self.directory,
        )
        self.regions.append(region)
        return region


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Return an engine whose regions are cleaned up in the end."""
    engine = Engine(tmp_path)
    yield engine
    for region in engine.regions:
        region.cleanup()


def test_what_a_worker_writes_into_its_view_is_in_its_part_of_the_schedulers_rows(engine: Engine) -> None:
    scheduler, worker = engine.region(None), engine.region(1)

    worker.create_next_view(10).fill_(1)
    worker.create_next_view(14)[2].fill_(2)

    with scheduler.create_kv_memoryview() as rows:
        assert (rows.shape, rows.format, rows.readonly) == ((4, 64), "b", False)
        assert bytes(rows)[128:192] == bytes([0] * 24 + [1] * 10 + [2] * 14 + [0] * 16)
        assert bytes(rows)[192:256] == bytes([0] * 24 + [1] * 10 + [0] * 30)


def test_a_view_is_int8_strided_over_the_rows_and_zero_copy(engine: Engine) -> None:
    worker = engine.region(0)
    view = worker.create_next_view(24)

    with worker.create_kv_memoryview() as rows:
        rows[3, 23] = 5

    assert (view.shape, view.dtype, view.stride()) == ((4, 24), torch.int8, (64, 1))
    assert view[3, 23] == 5


def test_a_view_over_the_end_of_the_workers_part_is_refused_and_moves_nothing(engine: Engine) -> None:
    worker = engine.region(0)
    worker.create_next_view(20)

    with pytest.raises(WorkerAreaError, match="exceeds worker area end"):
        worker.create_next_view(5)
    with pytest.raises(AssertionError):
        worker.create_next_view(0)

    assert worker.create_next_view(4).shape == (4, 4)


def test_the_schedulers_side_has_no_part(engine: Engine) -> None:
    with pytest.raises(WorkerAreaError, match="rank=None"):
        engine.region(None).create_next_view(1)


def test_all_sides_report_one_identity(engine: Engine) -> None:
    regions = [engine.region(rank) for rank in (None, 0, 1)]

    assert len({region.identity for region in regions}) == 1
    assert len({region.shared_identity for region in regions}) == 1
    assert [region.is_creator for region in regions] == [True, False, False]


def test_the_regions_of_two_machines_differ_though_their_files_may_have_one_inode(
    engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    elsewhere = Engine(tmp_path / "elsewhere")
    here, there = engine.region(None), elsewhere.region(1)

    # Tmpfs counts inodes from one for each mount, so only the random number tells machines apart.
    assert here.shared_identity[1] != there.shared_identity[1]
    there.cleanup()


@pytest.mark.parametrize(
    ("total", "num_blocks", "rank", "num_workers", "page", "alignment"),
    [
        (255, 4, 0, 2, 24, 64),
        (4 * 48, 4, 0, 2, 24, 64),
        (256, 4, 2, 2, 24, 64),
        (256, 4, -1, 2, 24, 64),
        (0, 0, 0, 2, 24, 64),
        (0, 4, 0, 2, 0, 64),
        (256, 4, None, 0, 24, 64),
        (256, 4, 0, 2, 24, 0),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(
    tmp_path: Path, total: int, num_blocks: int, rank: int | None, num_workers: int, page: int, alignment: int
) -> None:
    with pytest.raises(RegionGeometryError):
        SharedOffloadRegion(
            "bad",
            total,
            num_blocks,
            rank,
            num_workers,
            page,
            row_alignment_bytes=alignment,
            directory=tmp_path,
        )

    assert list(tmp_path.iterdir()) == []


def test_rows_are_rounded_up_to_the_alignment() -> None:
    assert plan_row_stride(24, 2, 1) == 48
    assert plan_row_stride(24, 2, 4096) == 4096
    assert plan_row_stride(4096, 2, 4096) == 8192


def test_a_live_region_of_other_geometry_is_refused(engine: Engine) -> None:
    engine.region(0)

    with pytest.raises(RegionGeometryError, match=r"4 rows .* 8 rows"):
        engine.region(1, num_blocks=8)


def test_cleanup_gives_everything_back_and_may_be_repeated(engine: Engine) -> None:
    worker = engine.region(0)
    mapping = worker.mapping()

    worker.cleanup()
    worker.cleanup()

    assert mapping.closed
    assert (worker.fd, worker.mmap_obj) == (-1, None)
    assert list(engine.directory.iterdir()) == []
    with pytest.raises(RegionError, match="cleaned up"):
        worker.create_next_view(1)
    with pytest.raises(RegionError, match="cleaned up"):
        worker.create_kv_memoryview()


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [lambda region: region.create_next_view(24), lambda region: region.create_kv_memoryview()]
)
def test_memory_stays_mapped_until_the_last_view_is_gone(engine: Engine, make: object) -> None:
    worker = engine.region(0)
    assert callable(make)
    view = make(worker)
    part = view[1:]
    mapping = weakref.ref(worker.mapping())

    worker.cleanup()

    assert list(engine.directory.iterdir()) == []
    assert _is_mapped(worker.mmap_path)
    view[3, 3] = 9
    assert part[2, 3] == 9 if isinstance(view, torch.Tensor) else view[3, 3] == 9
    del view
    gc.collect()
    assert _is_mapped(worker.mmap_path)
    del part
    gc.collect()
    assert mapping() is None
    assert not _is_mapped(worker.mmap_path)


def test_the_first_to_leave_leaves_the_name_to_the_others(engine: Engine) -> None:
    first, second = engine.region(0), engine.region(1)

    first.cleanup()

    assert engine.region(None).identity == second.identity


def test_a_sealed_region_has_no_name_and_goes_on_working(engine: Engine) -> None:
    scheduler, worker = engine.region(None), engine.region(0)

    scheduler.seal()
    scheduler.seal()

    worker.create_next_view(1).fill_(3)
    assert list(engine.directory.iterdir()) == []
    with scheduler.create_kv_memoryview() as rows:
        assert rows[2, 0] == 3
    assert engine.region(1).identity != worker.identity


def test_every_page_is_present_after_the_start(tmp_path: Path) -> None:
    region = SharedOffloadRegion("pages", 1 << 20, 16, 0, 1, 1 << 16, directory=tmp_path)

    smaps = Path("/proc/self/smaps").read_text().split(region.mmap_path)[1]

    assert int(smaps.split("Rss:")[1].split()[0]) == 1024
    region.cleanup()


def test_repr_is_a_dashboard(engine: Engine) -> None:
    worker = engine.region(0)

    assert "4 x 64 bytes, rank=0" in repr(worker)
    worker.cleanup()
    assert "cleaned up" in repr(worker)


CRASH = """
import os, signal, sys
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
region = SharedOffloadRegion(sys.argv[1], 4096 * 8, 8, 0, 1, 4096, directory=sys.argv[2])
region.create_next_view(4096).fill_(7)
if sys.argv[3] == "sealed":
    region.seal()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("state", ["sealed", "named"])
def test_after_a_kill_a_sealed_region_is_gone_and_a_named_one_is_replaced(tmp_path: Path, state: str) -> None:
    crashed = subprocess.run(
        [sys.executable, "-c", CRASH, "crash", str(tmp_path), state], timeout=HANG_GUARD_S, check=False
    )
    left = list(tmp_path.iterdir())

    region = SharedOffloadRegion("crash", 4096 * 4, 4, 0, 1, 4096, directory=tmp_path)

    assert crashed.returncode == -signal.SIGKILL
    assert len(left) == (0 if state == "sealed" else 1)
    assert region.is_creator
    assert not region.create_next_view(4096).any()
    region.cleanup()
    assert list(tmp_path.iterdir()) == []


def _is_mapped(path: str) -> bool:
    return path in Path("/proc/self/maps").read_text()
