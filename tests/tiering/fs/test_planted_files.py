"""What another program puts under a block's name, or in place of a folder, hangs no thread and escapes no limit."""

import itertools
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.tiering.fs.conftest import StartTier

from kvtier.testing.tier_suite import ROW_BYTES, TierDriver
from kvtier.tiering.fs.block_file import BlockFiles
from kvtier.tiering.fs.file_support import FileSupport
from kvtier.tiering.fs.system import REAL_CALLS, SystemCalls, current_owner

BLOCK_BYTES = ROW_BYTES + 4096

Plant = Callable[[Path], object]


def plant_socket(path: Path) -> None:
    """Make a socket; its name would be too long as an absolute path."""
    before = Path.cwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(before)


def plant_device(path: Path) -> None:
    """Make a device whose reading never ends."""
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only the superuser makes devices")


PLANTED: dict[str, Plant] = {
    "pipe": os.mkfifo,
    "socket": plant_socket,
    "device": plant_device,
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to("/dev/zero"),
}

WAYS = {"compiled": REAL_CALLS, "stepwise": SystemCalls()}


@pytest.fixture(params=WAYS.values(), ids=list(WAYS))
def driver(start_tier: StartTier, request: pytest.FixtureRequest) -> TierDriver:
    """A tier that reads and writes files in one of two ways."""
    return start_tier(calls=request.param, negative_ttl_s=0.0)


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_what_is_no_file_is_a_miss_and_goes_and_the_block_can_be_stored_again(
    driver: TierDriver, root: Path, plant: Plant, caplog: pytest.LogCaptureFixture
) -> None:
    driver.store([1, 2])
    (path,) = root.glob("*/*/*/*1" + "0" * 8 + ".kv")
    path.unlink()
    plant(path)

    assert driver.load_right([1, 2]) == {2}

    assert driver.tier.stats()["damaged"] == 1
    assert not os.path.lexists(path)
    # The evictor's own check may have met the moment in which the test had removed the block's file.
    said = [record.message for record in caplog.records if str(path) in record.message]
    assert said == [f"tier fs: {path} is no regular file, as a block is one: it is removed"]
    assert driver.store([1]).success
    assert driver.load_right([1, 2]) == {1, 2}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_a_description_that_is_no_file_hangs_no_thread(
    start_tier: StartTier, root: Path, plant: Plant
) -> None:
    start_tier("model-b").store([1])
    (path,) = root.glob("*/namespace.json")
    path.unlink()
    plant(path)
    driver = start_tier("model-a", negative_ttl_s=0.0)
    assert not driver.lookup(1)  # it looks into the other namespace, and what that is
    again = start_tier("model-b")
    assert again.load_right([1]) == {1}


@pytest.mark.parametrize("level", ["*", "*/0", "*/0/0"])
def test_blocks_are_not_stored_behind_a_link_where_nobody_would_count_them(
    start_tier: StartTier, root: Path, tmp_path: Path, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    start_tier().store([1])
    (folder,) = {path for path in root.glob(level) if path.is_dir() and path.name != "tmp"}
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    driver = start_tier(negative_ttl_s=0.0)

    result = driver.store([2])

    assert (result.success, result.is_fault) == (False, True)
    assert not driver.lookup(1)
    assert not driver.store([3]).success
    assert len(list(elsewhere.rglob("*.kv"))) == 1
    messages = [record.message for record in caplog.records if "is a link" in record.message]
    assert len(messages) == 1
    folder.unlink()
    assert driver.store([2]).success
    assert driver.load_right([2]) == {2}


def test_a_link_that_takes_a_namespaces_place_under_a_living_tier_is_refused_too(
    start_tier: StartTier, root: Path, tmp_path: Path
) -> None:
    driver = start_tier(negative_ttl_s=0.0)
    driver.store([1])
    (folder,) = {path for path in root.glob("*") if path.is_dir() and path.name != "tmp"}
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    driver.poll_until(lambda: not driver.lookup(1))
    assert not driver.store([2]).success
    assert len(list(elsewhere.rglob("*.kv"))) == 1


@pytest.mark.parametrize("level", ["*/0", "*/0/0"])
def test_a_link_that_takes_a_folder_s_place_under_a_living_tier_is_noticed_within_a_check(
    start_tier: StartTier, root: Path, tmp_path: Path, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = start_tier(negative_ttl_s=0.0)
    driver.store([1])
    (folder,) = {path for path in root.glob(level) if path.is_dir()}
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    numbers = itertools.count(2)

    driver.poll_until(lambda: not driver.store([next(numbers)]).success)

    num_elsewhere = len(list(elsewhere.rglob("*.kv")))
    assert not driver.store([next(numbers)]).success
    assert len(list(elsewhere.rglob("*.kv"))) == num_elsewhere
    assert [record.message for record in caplog.records if "link" in record.message]
    folder.unlink()
    driver.poll_until(lambda: driver.store([1]).success)
    assert driver.load_right([1]) == {1}


@pytest.mark.parametrize("calls", [REAL_CALLS, SystemCalls()], ids=["compiled", "stepwise"])
def test_no_file_is_written_behind_a_link_that_has_just_taken_its_folder_s_place(
    tmp_path: Path, calls: SystemCalls
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "folder").symlink_to(tmp_path / "elsewhere")
    support = FileSupport(has_direct_io=False, has_unnamed_files=True)
    files = BlockFiles(support, tmp_path, current_owner(), 0o600, calls, time.time)
    (answer,) = files.publish([(f"{tmp_path}/folder/a.kv", (memoryview(b"x" * 10),), None)])
    assert isinstance(answer, OSError)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_directory_itself_may_be_a_link(start_tier: StartTier, root: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(0o700)
    root.symlink_to(tmp_path / "disk")
    driver = start_tier()
    assert driver.store([1]).success
    assert driver.load_right([1]) == {1}
