"""A forked child cannot use its parent's tiers, waits for nothing, and leaves what the parent uses as it is."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.errors import TierError
from kvtier.testing.tier_suite import NUM_ROWS, ROW_BYTES, TierDriver, key_of, make_config, make_rows
from kvtier.tiering.fs import FSTier

pytestmark = pytest.mark.slow

HANG_GUARD_S = 120.0
PROJECT = Path(__file__).parents[2]

PROGRAM = """
import os, sys, multiprocessing, warnings
from pathlib import Path
from tests.tiering.test_forks import Parent
warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads is what is tried here
parent = Parent(Path(sys.argv[1]))
parent.begin()
if sys.argv[2] == "fork":
    pid = os.fork()
    if pid == 0:
        parent.be_child()
        sys.exit(0)  # with the interpreter's own end
    assert os.waitpid(pid, 0)[1] == 0
else:
    child = multiprocessing.get_context("fork").Process(target=parent.be_child)
    child.start()
    child.join()
    assert child.exitcode == 0
parent.go_on()
"""


class Parent:
    """A process with a tier of each kind and host memory.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: Path) -> None:
        self.root, self.shm = folder / "fs", folder / "shm"
        self.shm.mkdir()
        rows = make_rows()
        tier = FSTier(make_config(), rows, root_dir=self.root, capacity_bytes="8MiB")
        self.drivers = [TierDriver(tier, rows)]
        size = NUM_ROWS * ROW_BYTES
        self.region = SharedOffloadRegion("id", size, NUM_ROWS, 0, 1, ROW_BYTES, directory=self.shm)

    def begin(self) -> None:
        """Store something, and hold what a child must not wait for."""
        for driver in self.drivers:
            assert driver.store([1, 2]).success
            # As when another thread is just in the middle of something.
            driver.tier._pool._changed.acquire()  # type: ignore[attr-defined]

    def be_child(self) -> None:
        """Try to use everything, and end it."""
        before = self.contents()
        for driver in self.drivers:
            tier = driver.tier
            calls = (
                lambda tier=tier: tier.lookup(key_of(1), None),
                lambda driver=driver: driver.submit([3], [0], is_promotion=False),
                lambda driver=driver: driver.submit([1], [0], is_promotion=True),
                tier.get_finished,
                tier.end_step,
                tier.stats,
                tier.drain_evicted,
                lambda tier=tier: tier.reset(bytes(16)),
                lambda tier=tier: tier.drain(HANG_GUARD_S),
            )
            for call in calls:
                with pytest.raises(TierError, match="of which this one is a fork"):
                    call()
            assert tier.shutdown(HANG_GUARD_S)
        self.region.seal()
        self.region.cleanup()
        assert self.contents() == before

    def go_on(self) -> None:
        """Use everything as if there had been no child."""
        for driver in self.drivers:
            driver.tier._pool._changed.release()  # type: ignore[attr-defined]
            assert driver.load_right([1, 2]) == {1, 2}
            assert driver.store([3]).success
        neighbour = FSTier(make_config(), make_rows(), root_dir=self.root, capacity_bytes="8MiB")
        assert neighbour.wait_indexed(HANG_GUARD_S)
        assert neighbour.stats()["own_packs"] == 0, "the child has given the parent's locks away"
        assert neighbour.shutdown(HANG_GUARD_S)
        second = SharedOffloadRegion(
            "id", NUM_ROWS * ROW_BYTES, NUM_ROWS, 0, 1, ROW_BYTES, directory=self.shm, join_timeout_s=1.0
        )
        assert second.identity == self.region.identity
        second.cleanup()
        self.region.seal()
        self.region.cleanup()
        assert all(driver.tier.shutdown(HANG_GUARD_S) for driver in self.drivers)
        assert list(self.shm.iterdir()) == []

    def contents(self) -> dict[str, bytes]:
        """Return every file but the parent's notes, which it writes each second."""
        paths = [path for path in (*self.root.rglob("*"), *self.shm.iterdir()) if path.suffix != ".notes"]
        return {str(path): path.read_bytes() for path in paths if path.is_file()}


@pytest.mark.parametrize("way", ["fork", "multiprocessing"])
def test_a_forked_child_is_refused_and_leaves_everything_as_it_is(tmp_path: Path, way: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), way],
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
        check=False,
        cwd=PROJECT,
    )
    assert done.returncode == 0, done.stderr


KILLED_PARENT = """
import os, sys, warnings
from pathlib import Path
from kvtier.testing.tier_suite import TierDriver, make_config, make_rows
from kvtier.tiering.fs import FSTier
warnings.simplefilter("ignore", DeprecationWarning)
rows = make_rows()
driver = TierDriver(FSTier(make_config(), rows, root_dir=Path(sys.argv[1]), capacity_bytes="8MiB"), rows)
assert driver.store([1, 2]).success
if os.fork() == 0:
    sys.stdin.read()  # until the test has seen that the packs are free
    os._exit(0)
os.kill(os.getpid(), 9)
"""


def test_a_child_that_outlives_its_parent_keeps_no_pack_locked(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_PARENT, str(root)], stdin=subprocess.PIPE, cwd=PROJECT
    )
    try:
        assert process.wait(HANG_GUARD_S) == -9
        rows = make_rows()
        tier = FSTier(make_config(), rows, root_dir=root, capacity_bytes="8MiB")
        assert tier.wait_indexed(HANG_GUARD_S)
        assert tier.stats()["own_packs"] == 1
        assert TierDriver(tier, rows).load_right([1, 2]) == {1, 2}
        assert tier.shutdown(HANG_GUARD_S)
    finally:
        assert process.stdin is not None
        process.stdin.close()
