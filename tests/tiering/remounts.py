"""Takes a tier's file system away and brings it back, in a mount namespace of its own.

    unshare --mount --propagation private python -m tests.tiering.remounts SCENARIO FOLDER

The folder is empty and outside what is mounted. What goes wrong is an exception, and so exit status 1.
"""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kvtier.testing.tier_suite import TierDriver, make_config, make_rows
from kvtier.tiering.fs import FSTier

HANG_GUARD_S = 60.0


class Lines(logging.Handler):
    """Keeps the lines of the log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run(*command: str | Path) -> None:
    """Run a command that must succeed."""
    subprocess.run([str(part) for part in command], check=True)


class Disk:
    """An image with a file system, which can be mounted again and still has its files.

    Args:
        folder: where the image is, and the mount point.
    """

    def __init__(self, folder: Path) -> None:
        self.at = folder / "disk"
        self._image = folder / "image"
        self.at.mkdir()
        with self._image.open("wb") as file:
            file.truncate(64 * 2**20)
        run("mkfs.ext4", "-q", self._image)
        self.mount()

    def mount(self) -> None:
        """Mount it."""
        run("mount", "-o", "loop", self._image, self.at)

    def unmount(self) -> None:
        """Unmount it, though the tier has files open on it."""
        run("umount", "--lazy", self.at)


def start_fs(root: Path) -> TierDriver:
    """Return an fs tier on a directory."""
    rows = make_rows()
    tier = FSTier(make_config(), rows, root_dir=root, capacity_bytes="8MiB")
    assert tier.wait_indexed(HANG_GUARD_S)
    return TierDriver(tier, rows)


def lose_and_find(disk: Disk, root: Path, log: Lines) -> None:
    """Unmount and mount again below a living tier."""
    disk.at.chmod(0o700)
    driver = start_fs(root)
    assert driver.store([1, 2]).success

    disk.unmount()
    below = set(disk.at.rglob("*"))
    driver.poll_until(lambda: not driver.lookup(1) and not driver.lookup(2))
    assert driver.load_right([1, 2]) == set()
    driver.poll_until(lambda: driver.store([9]).is_fault)  # until then it has no room
    for number in range(10, 16):
        result = driver.store([number])
        assert (result.success, result.is_fault) == (False, True)
    assert set(disk.at.rglob("*")) == below, "the tier went on below the mount point"
    # A store that comes before it is noticed finds no room for a pack, which is said as well.
    told = [line for line in log.lines if "no pack can be made" not in line]
    assert ["nothing is mounted at" in line for line in told] == [True], log.lines

    disk.mount()
    driver.poll_until(lambda: driver.lookup(1) and driver.lookup(2))
    driver.poll_until(lambda: driver.store([3]).success)
    assert driver.load_right([1, 2, 3]) == {1, 2, 3}
    assert len([line for line in log.lines if "again" in line]) <= 2, log.lines
    assert driver.tier.shutdown(HANG_GUARD_S)


def unmounted(folder: Path, log: Lines) -> None:
    """The directory is the mount point; below it there is a directory too, which the tier may not take."""
    disk = Disk(folder)
    lose_and_find(disk, disk.at, log)


def unmounted_below(folder: Path, log: Lines) -> None:
    """The directory is a folder on the mounted file system."""
    disk = Disk(folder)
    lose_and_find(disk, disk.at / "cache" / "kvtier", log)


SCENARIOS: dict[str, Callable[[Path, Lines], None]] = {
    "unmounted": unmounted,
    "unmounted-below": unmounted_below,
}


if __name__ == "__main__":
    log = Lines()
    logging.getLogger("kvtier").addHandler(log)
    SCENARIOS[sys.argv[1]](Path(sys.argv[2]), log)
