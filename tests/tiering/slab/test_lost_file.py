"""A slab that another program deletes, replaces or cuts costs its blocks and one line; the tier goes on by itself."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.tiering.disks import BROKEN, FailingWrites
from tests.tiering.slab.conftest import StartTier, capacity_of

from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import NUM_ROWS
from kvtier.tiering.slab.reopening import CHECK_S
from kvtier.tiering.slab.slab_file import SystemCalls

Lose = Callable[[Path], object]


def replace_by_other(path: Path) -> None:
    """Put a file of another program in its place."""
    path.with_name("other").write_bytes(b"a letter to a friend")
    path.with_name("other").replace(path)


def replace_by_copy(path: Path) -> None:
    """Put a copy in its place, as a restored backup is."""
    path.with_name("copy").write_bytes(path.read_bytes())
    path.with_name("copy").replace(path)


def overwrite(path: Path) -> None:
    """Fill it with zeros, in place."""
    with path.open("r+b") as file:
        file.write(bytes(capacity_of(64)))


LOSSES: dict[str, Lose] = {
    "deleted": Path.unlink,
    "cut to nothing": lambda path: os.truncate(path, 0),
    "cut": lambda path: os.truncate(path, capacity_of(1)),
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_what_is_lost_is_a_miss_and_the_tier_goes_on(
    start_tier: StartTier, path: Path, lose: Lose, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    driver = start_tier(clock=clock)
    numbers = list(range(NUM_ROWS))
    assert driver.store(numbers).success

    lose(path)
    clock.advance(CHECK_S)

    assert driver.load_right(numbers) <= set(numbers[:1])
    clock.advance(CHECK_S)
    driver.poll_until(lambda: driver.store(numbers).success)
    assert driver.load_right(numbers) == set(numbers)
    assert path.stat().st_size == capacity_of(64)
    assert (
        sum("tier slab" in record.message for record in caplog.records if "again" not in record.message) == 1
    )
    num_open = sum(
        str(fd.readlink()).startswith(str(path)) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()
    )
    assert num_open == 1


def test_a_copy_in_its_place_is_used_with_its_blocks(start_tier: StartTier, path: Path) -> None:
    clock = ManualClock()
    driver = start_tier(clock=clock)
    assert driver.store([1, 2]).success
    replace_by_copy(path)
    clock.advance(CHECK_S)
    driver.load([1])
    driver.tier.wait_indexed(60.0)
    assert driver.load_right([1, 2]) == {1, 2}


@pytest.mark.parametrize("lose", [replace_by_other, overwrite], ids=["replaced", "zeros"])
def test_a_file_of_another_program_is_left_alone_until_it_goes(
    start_tier: StartTier, path: Path, lose: Lose, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    driver = start_tier(clock=clock)
    assert driver.store([1]).success
    lose(path)
    content = path.read_bytes()
    for number in range(2, 8):
        clock.advance(CHECK_S)
        result = driver.store([number])
        assert (result.success, result.is_fault) == (False, True)
    assert driver.load_right([1]) == set()
    assert path.read_bytes() == content
    assert ["holds something else" in record.message for record in caplog.records] == [True]

    path.unlink()
    clock.advance(CHECK_S)
    assert driver.store([1]).success
    assert driver.load_right([1]) == {1}
    assert len(caplog.records) == 2


def test_a_folder_that_goes_is_said_once_and_the_file_is_made_when_it_is_back(
    start_tier: StartTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, folder = ManualClock(), tmp_path / "disk"
    folder.mkdir()
    driver = start_tier(clock=clock, path=folder / "slab")
    assert driver.store([1]).success
    folder.rename(tmp_path / "elsewhere")
    for _ in range(5):
        clock.advance(CHECK_S)
        assert driver.store([2]).is_fault
    assert len(caplog.records) == 1
    folder.mkdir()
    clock.advance(CHECK_S)
    assert driver.store([2]).success


def test_a_disk_that_fails_is_said_once(start_tier: StartTier, caplog: pytest.LogCaptureFixture) -> None:
    writes = FailingWrites()
    driver = start_tier(calls=SystemCalls(pwritev=writes.pwritev))
    writes.error = BROKEN
    assert all(driver.store([number, number + 1]).is_fault for number in range(10, 40))
    assert len(caplog.records) == 1
    writes.error = 0
    driver.poll_until(lambda: driver.store([1]).success)
    assert "works again" in caplog.records[-1].message


def test_a_router_forgets_what_was_lost(start_tier: StartTier, path: Path) -> None:
    clock = ManualClock()
    driver = start_tier(clock=clock)
    driver.store([1])
    assert driver.tier.drain_evicted() == []
    path.unlink()
    clock.advance(CHECK_S)
    driver.store([2])
    assert driver.tier.drain_evicted() is None
    assert driver.tier.drain_evicted() == []
