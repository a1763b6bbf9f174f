"""One living process holds an instance id, whoever forks, dies or cleans up meanwhile."""

import fcntl
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvtier.cpu.instance_lock import InstanceLock, make_lock_path, remove_dead_locks
from kvtier.cpu.region_file import make_region_path
from kvtier.errors import ConfigError, RegionError, RegionOwnerError
from kvtier.testing.clock import ManualClock

HANG_GUARD_S = 60.0
NUM_CONTENDERS = 3
NUM_ROUNDS = 150
NUM_FORKS = 60

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

HOLDER = """
import os, sys
from pathlib import Path
from kvtier.cpu.instance_lock import InstanceLock

lock = InstanceLock("engine", Path(sys.argv[1]))
if "forks" in sys.argv and os.fork():
    sys.stdin.read()
print(os.getpid(), flush=True)
os.read(0, 1)
os._exit(0)
"""

CONTENDER = """
import os, sys
from pathlib import Path
from kvtier.cpu.instance_lock import InstanceLock

directory = Path(sys.argv[1])
for _ in range(int(sys.argv[2])):
    lock = InstanceLock("engine", directory, grace_s=60.0, pause=lambda _: None)
    os.close(os.open(directory / "inside", os.O_CREAT | os.O_EXCL))
    os.unlink(directory / "inside")
    lock.release()
"""


def take(directory: Path, instance_id: str = "engine") -> InstanceLock:
    """Take the id at once or not at all."""
    return InstanceLock(instance_id, directory, grace_s=0.0)


def is_taken(directory: Path) -> bool:
    """Return whether the id is refused."""
    try:
        take(directory).release()
    except ConfigError:
        return True
    return False


@contextmanager
def holder(directory: Path, *options: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Give a process that holds the id, and the id of its child, or its own."""
    command = [sys.executable, "-c", HOLDER, str(directory), *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_an_id_that_is_held_is_refused_naming_it_and_the_remedy(tmp_path: Path) -> None:
    first = take(tmp_path)

    with pytest.raises(ConfigError, match=r"instance_id='engine'.*running engine.*its own instance_id"):
        take(tmp_path)

    assert first.path.stat().st_mode & 0o777 == 0o600
    first.release()


def test_other_ids_and_other_directories_are_free(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    locks = [take(tmp_path), take(tmp_path, "engine-2"), take(tmp_path / "other")]

    assert len({lock.path for lock in locks}) == 3
    for lock in locks:
        lock.release()


def test_release_leaves_no_file_and_frees_the_id(tmp_path: Path) -> None:
    first = take(tmp_path)

    first.release()

    assert list(tmp_path.iterdir()) == []
    take(tmp_path).release()


def test_a_second_release_takes_nothing_from_the_next_holder(tmp_path: Path) -> None:
    first = take(tmp_path)
    first.release()
    second = take(tmp_path)

    first.release()

    assert is_taken(tmp_path)
    second.release()


def test_an_engine_that_is_dropped_without_its_end_gives_the_id_back(tmp_path: Path) -> None:
    first = take(tmp_path)
    assert is_taken(tmp_path)

    del first
    gc.collect()

    assert not is_taken(tmp_path)


def test_an_id_of_a_process_that_was_killed_is_free_although_its_file_is_there(tmp_path: Path) -> None:
    with holder(tmp_path) as (process, _):
        assert is_taken(tmp_path)

        process.kill()
        process.wait(HANG_GUARD_S)

        assert make_lock_path("engine", tmp_path).exists()
        assert not is_taken(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_outlives_a_killed_holder_does_not_keep_the_id(tmp_path: Path) -> None:
    with holder(tmp_path, "forks") as (process, child):
        assert is_taken(tmp_path)

        process.kill()
        process.wait(HANG_GUARD_S)

        os.kill(child, 0)
        assert not is_taken(tmp_path)


def test_a_child_that_outlives_a_released_hold_does_not_keep_the_id(tmp_path: Path) -> None:
    lock = take(tmp_path)
    with forked(lambda: None):
        lock.release()

        assert not is_taken(tmp_path)


def test_a_child_that_releases_and_drops_the_lock_takes_nothing_from_its_parent(tmp_path: Path) -> None:
    locks = [take(tmp_path)]

    def end_like_an_engine() -> None:
        locks[0].release()
        locks.clear()
        gc.collect()

    with forked(end_like_an_engine):
        assert is_taken(tmp_path)
    assert is_taken(tmp_path)
    locks[0].release()


@pytest.mark.slow
def test_a_child_forked_while_another_thread_takes_and_releases_holds_nothing(tmp_path: Path) -> None:
    is_over = threading.Event()

    def take_and_release() -> None:
        while not is_over.is_set():
            take(tmp_path).release()

    taker = threading.Thread(target=take_and_release, daemon=True)
    taker.start()

    def fork_one() -> int:
        child = os.fork()
        if child == 0:
            os._exit(any(tmp_path in path.parents for path in open_files()))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    found = [fork_one() for _ in range(NUM_FORKS)]
    is_over.set()
    taker.join()

    assert found == [0] * NUM_FORKS


def open_files() -> list[Path]:
    """Return where this process's descriptors lead."""
    paths = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            paths.append(link.readlink())
    return paths


@contextmanager
def forked(act: Callable[[], None]) -> Iterator[None]:
    """Run the body while a child lives that has acted."""
    done_fd, acted_fd = os.pipe()
    stay_fd, leave_fd = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            act()
            os.write(acted_fd, b"+")
        finally:
            os.write(acted_fd, b"-")
            os.read(stay_fd, 1)
            os._exit(0)
    try:
        assert os.read(done_fd, 1) == b"+", "the child failed"
        yield
    finally:
        os.write(leave_fd, b"x")
        os.waitpid(child, 0)
        for fd in (done_fd, acted_fd, stay_fd, leave_fd):
            os.close(fd)


def test_a_lock_that_is_given_back_within_the_grace_is_taken(tmp_path: Path) -> None:
    held = [take(tmp_path)]

    lock = InstanceLock(
        "engine", tmp_path, grace_s=1.0, clock=ManualClock(), pause=lambda _: held.pop().release()
    )

    assert held == []
    assert is_taken(tmp_path)
    lock.release()


def test_a_sweeper_that_holds_a_dead_lock_for_a_moment_keeps_nobody_out(tmp_path: Path) -> None:
    path = make_lock_path("engine", tmp_path)
    sweeper = path.open("wb")
    fcntl.flock(sweeper, fcntl.LOCK_EX)

    def end_sweep(_: float) -> None:
        path.unlink()
        sweeper.close()

    lock = InstanceLock("engine", tmp_path, clock=ManualClock(), pause=end_sweep)

    assert is_taken(tmp_path)
    lock.release()


def test_when_the_grace_is_over_the_id_is_refused(tmp_path: Path) -> None:
    first, clock = take(tmp_path), ManualClock()

    with pytest.raises(ConfigError):
        InstanceLock("engine", tmp_path, grace_s=1.0, clock=clock, pause=clock.advance)

    assert 1.0 <= clock() < 1.1
    first.release()


def test_of_processes_that_fight_for_an_id_while_others_sweep_one_has_it_at_a_time(tmp_path: Path) -> None:
    is_over = threading.Event()

    def sweep() -> None:
        while not is_over.is_set():
            remove_dead_locks(tmp_path)

    sweeper = threading.Thread(target=sweep, daemon=True)
    command = [sys.executable, "-c", CONTENDER, str(tmp_path), str(NUM_ROUNDS)]
    contenders = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(NUM_CONTENDERS)]
    sweeper.start()

    complaints = [process.communicate(timeout=HANG_GUARD_S)[1] for process in contenders]
    is_over.set()
    sweeper.join()

    assert complaints == [""] * NUM_CONTENDERS
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("instance_id", ["x", "lock_0_x", "x.lock", "../x", "x" * 200])
def test_no_region_is_where_a_lock_is(instance_id: str, tmp_path: Path) -> None:
    path = make_lock_path(instance_id, tmp_path)

    assert path.parent == tmp_path
    assert not path.name.startswith("kvtier_")
    assert make_region_path(instance_id, tmp_path).name.startswith("kvtier_")
    take(tmp_path, instance_id).release()


@pytest.mark.parametrize(
    "make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.parent / "elsewhere")]
)
def test_what_is_no_file_is_refused_and_left_alone(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = make_lock_path("engine", tmp_path)
    make(path)

    with pytest.raises(RegionOwnerError, match="another instance_id"):
        take(tmp_path)

    assert list(tmp_path.iterdir()) == [path]


@needs_root
def test_another_users_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = make_lock_path("engine", tmp_path)
    path.touch()
    os.chown(path, 12345, 12345)

    with pytest.raises(RegionOwnerError, match="user 12345"):
        take(tmp_path)

    assert path.exists()


def test_without_the_directory_there_is_no_lock_and_the_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(RegionError, match=r"absent.*No such file"):
        take(tmp_path / "absent")
