"""What the dead left in shared memory is removed; of the living, and of others, nothing."""

import fcntl
import os
from pathlib import Path

from kvtier.cpu.instance_lock import InstanceLock, make_lock_path, remove_dead_locks, remove_dead_regions
from kvtier.cpu.region_file import RegionGeometry, make_region_path, open_region_file

GEOMETRY = RegionGeometry(num_blocks=2, row_stride=4096, num_workers=1, cpu_page_size=4096)


def test_a_region_that_nobody_has_open_is_removed(tmp_path: Path) -> None:
    path = make_region_path("dead-engine", tmp_path)
    path.write_bytes(b"\0" * 100)

    assert remove_dead_regions(tmp_path) == 1
    assert not path.exists()


def test_a_region_in_use_is_left_alone(tmp_path: Path) -> None:
    file = open_region_file(make_region_path("live-engine", tmp_path), GEOMETRY)

    assert remove_dead_regions(tmp_path) == 0
    assert file.path.exists()
    os.close(file.fd)
    assert remove_dead_regions(tmp_path) == 1


def test_a_region_that_is_being_created_is_left_alone(tmp_path: Path) -> None:
    path = make_region_path("starting-engine", tmp_path)
    with path.open("wb") as creator:
        fcntl.flock(creator, fcntl.LOCK_EX)

        assert remove_dead_regions(tmp_path) == 0


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kvtier_4294967294_other-user").touch()
    (tmp_path / "psm_something").touch()
    make_region_path("folder", tmp_path).mkdir()
    make_region_path("link", tmp_path).symlink_to(tmp_path / "psm_something")

    assert remove_dead_regions(tmp_path) == 0
    assert len(list(tmp_path.iterdir())) == 4


def test_a_lock_that_nobody_holds_is_removed_and_one_that_is_held_is_not(tmp_path: Path) -> None:
    held = InstanceLock("live-engine", tmp_path)
    make_lock_path("dead-engine", tmp_path).touch()

    assert remove_dead_locks(tmp_path) == 1
    assert list(tmp_path.iterdir()) == [held.path]
    held.release()


def test_locks_are_no_regions_and_regions_are_no_locks(tmp_path: Path) -> None:
    make_lock_path("lock-of-the-dead", tmp_path).touch()
    make_region_path("region-of-the-dead", tmp_path).touch()

    assert (remove_dead_locks(tmp_path), len(list(tmp_path.iterdir()))) == (1, 1)
    assert (remove_dead_regions(tmp_path), len(list(tmp_path.iterdir()))) == (1, 0)
