"""Engines over two mounts of one folder share its blocks, what is deleted there, and its capacity.

As a program, in a mount namespace of its own:

    unshare --mount --propagation private python -m tests.tiering.obj.test_two_mounts FOLDER
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiering.obj.conftest import HANG_GUARD_S, StartTier, tiers_of
from tests.tiering.remounts import run

from kvtier.testing.tier_suite import ROW_BYTES, TierDriver
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES
from kvtier.tiering.obj import ObjTier

PROJECT = Path(__file__).parents[3]
CAPACITY_BYTES = 64 * (ENVELOPE_BYTES + ROW_BYTES)


@pytest.mark.slow
def test_engines_on_two_mounts_share_one_folder(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mounting needs the superuser and unshare: apt-get install util-linux")
    command = [
        "unshare", "--mount", "--propagation", "private",
        sys.executable, "-m", "tests.tiering.obj.test_two_mounts", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_GUARD_S * 4, check=False, cwd=PROJECT
    )
    assert done.returncode == 0, done.stderr


def mount_twice(folder: Path) -> tuple[str, str]:
    """Return the URLs of two mounts of one folder."""
    shared, urls = folder / "shared", []
    shared.mkdir()
    for name in ("here", "there"):
        (folder / name).mkdir()
        run("mount", "--bind", shared, folder / name)
        urls.append(f"file://{folder / name}")
    return urls[0], urls[1]


def find_and_delete(start_tier: StartTier, here: str, there: str) -> None:
    """What one stores the other finds; what is deleted by way of one mount is a miss for both."""
    first, second = start_tier(url=here), start_tier(url=there)
    assert not second.lookup(1)
    assert first.store([1, 2, 3]).success
    second.poll_until(lambda: second.lookup(1))
    assert second.load_right([1, 2, 3]) == {1, 2, 3}
    assert second.store([4]).success
    assert first.load_right([4]) == {4}

    place = ObjTier.open_place({"url": there})
    place.begin_removal()
    assert place.remove(list(place.blocks()), unless_changed=False).num == 4
    place.close()
    for driver in (first, second):
        assert driver.load_right([1, 2, 3, 4]) == set()
        driver.poll_until(lambda driver=driver: not driver.lookup(1))  # type: ignore[misc]  # a default
    assert first.store([1]).success
    assert second.load_right([1]) == {1}


def keep_one_capacity(start_tier: StartTier, shared: Path, here: str, there: str) -> None:
    """Two that write at once keep one capacity; what either deletes the other does not find."""
    drivers = [start_tier(url=url, capacity_bytes=CAPACITY_BYTES) for url in (here, there)]
    for number in range(200):
        fill(drivers[number % 2], number)
    for driver in drivers:
        assert driver.tier.shutdown(HANG_GUARD_S)
    num_bytes = sum(path.stat().st_size for path in shared.rglob("*.kv"))
    assert CAPACITY_BYTES // 2 < num_bytes <= CAPACITY_BYTES * 9 // 8
    assert sum(driver.tier.stats()["evicted"] for driver in drivers) >= 200 - 64 * 9 // 8
    for url in (here, there):
        reader = start_tier(url=url)
        assert reader.load_right(list(range(192, 200))) == set(range(192, 200))
        assert reader.load_right([0, 1]) == set()


def fill(driver: TierDriver, number: int) -> None:
    """Store a block until it is taken: what is declined finds room after a pass."""
    driver.poll_until(lambda: driver.store([number]).success)


def main(folder: Path) -> None:
    """Mount a folder twice and have engines use it; what goes wrong is an exception."""
    here, there = mount_twice(folder)
    with tiers_of({"num_threads": 4}) as start_tier:
        find_and_delete(start_tier, here, there)
        keep_one_capacity(start_tier, folder / "shared", here, there)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
