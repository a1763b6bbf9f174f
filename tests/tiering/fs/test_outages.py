"""A directory that cannot be used for a while costs misses and one line of the log, and then works by itself."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.storm.power_loss import explain_no_mount
from tests.tiering.disks import BROKEN, NO_ROOM, FailingWrites
from tests.tiering.fs.conftest import StartTier

from kvtier.testing.tier_suite import ROW_BYTES
from kvtier.tiering.fs.shared_usage import SharedUsage, unpack_record
from kvtier.tiering.fs.system import SystemCalls, current_owner

BLOCK_BYTES = ROW_BYTES + 4096

Spoil = Callable[[Path], object]


def make_folder(usage: Path) -> None:
    """Put a folder in place of the count."""
    usage.unlink()
    usage.mkdir()


def make_pipe(usage: Path) -> None:
    """Put a pipe there."""
    usage.unlink()
    os.mkfifo(usage)


UNUSABLE: dict[str, Spoil] = {"folder": make_folder, "pipe": make_pipe}


@pytest.mark.parametrize("spoil", UNUSABLE.values(), ids=UNUSABLE)
def test_a_count_that_cannot_be_changed_is_a_fault_said_once_until_it_can_be(
    start_tier: StartTier, root: Path, spoil: Spoil, caplog: pytest.LogCaptureFixture
) -> None:
    driver = start_tier()
    driver.store([1])
    spoil(root / ".usage")

    for number in range(10, 16):
        result = driver.store([number])
        assert (result.success, result.is_fault) == (False, True)
    assert len(caplog.records) == 1
    assert f"tier fs at {root}: the count of bytes cannot be changed" in caplog.text

    if (root / ".usage").is_dir():
        (root / ".usage").rmdir()
    else:
        (root / ".usage").unlink()
    driver.poll_until(lambda: driver.store([20]).success)
    driver.poll_until(lambda: driver.load_right([1, 20]) == {1, 20})
    assert [record.message for record in caplog.records if "works again" in record.message] == [
        f"tier fs at {root} works again"
    ]


@pytest.mark.parametrize(
    "text", [b"", b"x", b"garbage" * 1000, bytes(4096)], ids=["empty", "short", "garbage", "zeros"]
)
def test_a_count_that_is_garbage_or_cut_is_made_anew(start_tier: StartTier, root: Path, text: bytes) -> None:
    driver = start_tier()
    driver.store([1])
    # In place, as a program does that truncates the file while this process has it open or mapped.
    with (root / ".usage").open("r+b") as file:
        file.truncate(0)
        file.write(text)
    driver.poll_until(lambda: driver.store([2]).success)
    assert driver.load_right([1, 2]) == {1, 2}

    def is_right() -> bool:
        return unpack_record((root / ".usage").read_bytes()).used_bytes == 2 * BLOCK_BYTES

    driver.poll_until(is_right)


def test_a_count_whose_closing_fails_leaks_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SharedUsage(tmp_path / ".usage", current_owner(), 1000, 0o600, lambda: 0.0)
    begun = usage.begin_recount()
    assert begun is not None
    usage.end_recount(0, begun)
    close = os.close

    def fail_behind(fd: int) -> None:
        close(fd)
        raise OSError(errno.EIO, "Input/output error")

    for _ in range(20):
        monkeypatch.setattr(os, "close", fail_behind)
        grant = usage.reserve(3, 300)
        monkeypatch.undo()
        assert grant.num_blocks == 3
        usage.end_reservation(900, 0)
    record = unpack_record((tmp_path / ".usage").read_bytes())
    assert (record.used_bytes, record.in_flight_bytes) == (0, 0)


def test_a_full_disk_is_said_once_and_declined_and_used_again_when_it_has_room(
    start_tier: StartTier, caplog: pytest.LogCaptureFixture
) -> None:
    writes = FailingWrites()
    driver = start_tier(calls=SystemCalls(pwritev=writes.pwritev))
    driver.store([1])
    writes.error = NO_ROOM
    for number in range(2, 8):
        result = driver.store([number])
        assert (result.success, result.is_fault) == (False, False)
    assert [
        "no room although capacity_bytes is not reached" in record.message for record in caplog.records
    ] == [True]
    writes.error = 0
    assert driver.store([9]).success
    assert "works again" in caplog.records[-1].message
    assert len(caplog.records) == 2


def test_stores_that_the_system_refuses_are_said_once(
    start_tier: StartTier, caplog: pytest.LogCaptureFixture
) -> None:
    writes = FailingWrites()
    driver = start_tier(calls=SystemCalls(pwritev=writes.pwritev))
    writes.error = BROKEN
    assert all(driver.store([number, number + 1]).is_fault for number in range(10, 40))
    assert len(caplog.records) == 1
    writes.error = 0
    assert driver.store([1]).success
    assert "works again" in caplog.records[-1].message


SCENARIOS = ("unmounted", "unmounted-below", "read-only", "slab-unmounted")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_file_system_that_goes_and_comes_back(tmp_path: Path, scenario: str) -> None:
    reason = explain_no_mount()
    if reason is not None:
        pytest.skip(reason)
    command = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        sys.executable,
        "-m",
        "tests.tiering.remounts",
    ]
    done = subprocess.run(
        [*command, scenario, str(tmp_path)], capture_output=True, text=True, timeout=120.0, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
