"""Who creates, joins and removes the region's file, whoever dies at whatever instant."""

import fcntl
import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtier.cpu.region_file import (
    RegionGeometry,
    leave_region_file,
    make_region_path,
    open_region_file,
    remove_name,
)
from kvtier.errors import RegionError, RegionGeometryError, RegionMemoryError, RegionOwnerError
from kvtier.limits import MemoryLimit
from kvtier.testing.clock import ManualClock

FOUR_ROWS = RegionGeometry(num_blocks=4, row_stride=100, num_workers=1, cpu_page_size=100)
TWO_ROWS = RegionGeometry(num_blocks=2, row_stride=200, num_workers=1, cpu_page_size=200)
HANG_GUARD_S = 60

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of an engine's region, in a directory of its own."""
    return make_region_path("engine", tmp_path)


def test_the_first_process_creates_and_the_next_joins_the_same_file(path: Path) -> None:
    first = open_region_file(path, FOUR_ROWS)
    second = open_region_file(path, FOUR_ROWS)

    assert (first.is_creator, second.is_creator) == (True, False)
    assert first.identity == second.identity
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == FOUR_ROWS.file_size_bytes
    leave_region_file(first)
    leave_region_file(second)


def test_the_last_process_to_leave_removes_the_name(path: Path) -> None:
    first = open_region_file(path, FOUR_ROWS)
    second = open_region_file(path, FOUR_ROWS)

    leave_region_file(first)
    was_kept = path.exists()
    leave_region_file(second)

    assert was_kept
    assert not path.exists()


def test_a_file_in_use_with_another_geometry_of_the_same_size_is_refused_naming_both(path: Path) -> None:
    first = open_region_file(path, FOUR_ROWS)

    with pytest.raises(RegionGeometryError, match=r"4 rows of 100 .* 2 rows of 200"):
        open_region_file(path, TWO_ROWS)

    assert path.exists()
    leave_region_file(first)


@pytest.mark.parametrize("left", [b"", b"x", b"x" * 5000, b"x" * FOUR_ROWS.file_size_bytes])
def test_what_dead_processes_left_is_replaced(path: Path, left: bytes) -> None:
    path.write_bytes(left)

    file = open_region_file(path, FOUR_ROWS)

    assert file.is_creator
    assert os.pread(file.fd, 400, 0) == bytes(400)
    leave_region_file(file)


def test_a_finished_file_of_a_crashed_run_is_not_joined_even_when_its_geometry_fits(path: Path) -> None:
    crashed = open_region_file(path, FOUR_ROWS)
    os.pwrite(crashed.fd, b"stale", 0)
    os.close(crashed.fd)

    file = open_region_file(path, FOUR_ROWS)

    assert file.is_creator
    assert file.identity != crashed.identity or os.pread(file.fd, 5, 0) == bytes(5)
    leave_region_file(file)


def test_a_joiner_waits_until_the_creator_has_finished(path: Path) -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()
    results = []

    def wait_for_test() -> MemoryLimit | None:
        has_begun.set()
        assert may_go_on.wait(HANG_GUARD_S)
        return None

    creator = threading.Thread(
        target=lambda: results.append(open_region_file(path, FOUR_ROWS, memory_limit=wait_for_test))
    )
    creator.start()
    assert has_begun.wait(HANG_GUARD_S)

    joined = open_region_file(path, FOUR_ROWS, pause=lambda _: may_go_on.set())
    creator.join(HANG_GUARD_S)

    assert not joined.is_creator
    assert [file.identity for file in results] == [joined.identity]
    for file in (joined, *results):
        leave_region_file(file)


@pytest.mark.parametrize("unfinished", [b"", b"x" * FOUR_ROWS.file_size_bytes])
def test_an_unfinished_file_is_never_joined_though_a_shared_lock_on_it_can_be_had(
    path: Path, unfinished: bytes
) -> None:
    path.write_bytes(unfinished)
    other_joiner = os.open(path, os.O_RDWR)
    fcntl.flock(other_joiner, fcntl.LOCK_SH)

    file = open_region_file(path, FOUR_ROWS, pause=lambda _: os.close(other_joiner))

    assert file.is_creator
    leave_region_file(file)


def test_a_creator_that_hangs_ends_the_wait_with_an_error_that_says_so(path: Path) -> None:
    clock = ManualClock()
    with path.open("wb") as hanging:
        fcntl.flock(hanging, fcntl.LOCK_EX)

        with pytest.raises(RegionError, match=r"did not finish within 30"):
            open_region_file(path, FOUR_ROWS, join_timeout_s=30, clock=clock, pause=clock.advance)


def test_a_creator_whose_file_was_removed_under_it_starts_over(path: Path) -> None:
    """What an intruder does who gets the exclusive lock while the creator turns its own into a shared one."""
    attempts = []

    def intrude_once() -> MemoryLimit | None:
        attempts.append(path.stat().st_ino)
        if len(attempts) == 1:
            path.rename(path.with_name("removed"))
        return None

    file = open_region_file(path, FOUR_ROWS, memory_limit=intrude_once)

    assert len(attempts) == 2
    assert file.identity[1] == path.stat().st_ino == attempts[1] != attempts[0]
    leave_region_file(file)


def test_sealing_removes_the_name_only_while_it_is_the_files_own(path: Path) -> None:
    first = open_region_file(path, FOUR_ROWS)
    remove_name(path, first.identity)
    remove_name(path, first.identity)
    second = open_region_file(path, TWO_ROWS)

    remove_name(path, first.identity)

    assert second.is_creator
    assert path.exists()
    leave_region_file(first)
    assert path.exists()
    leave_region_file(second)


@needs_root
def test_another_users_file_is_refused_and_left_alone(path: Path) -> None:
    path.write_bytes(b"theirs")
    os.chown(path, 12345, 12345)

    with pytest.raises(RegionOwnerError, match=r"12345|another user"):
        open_region_file(path, FOUR_ROWS)

    assert path.read_bytes() == b"theirs"


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    path.symlink_to(target)

    with pytest.raises(RegionOwnerError, match="is a link"):
        open_region_file(path, FOUR_ROWS)

    assert target.read_bytes() == b"precious"


def test_a_missing_mount_is_an_error_that_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(RegionError, match="no_mount"):
        open_region_file(tmp_path / "no_mount" / "region", FOUR_ROWS)


@needs_root
def test_a_mount_that_is_too_small_is_refused_with_the_remedy_and_nothing_is_left(tmp_path: Path) -> None:
    command = ["/bin/mount", "-t", "tmpfs", "-o", "size=1m", "kvtier-test", str(tmp_path)]
    mount = subprocess.run(command, capture_output=True, check=False)
    if mount.returncode:
        pytest.skip(f"cannot mount: {mount.stderr.decode().strip()}")
    try:
        with pytest.raises(RegionMemoryError, match=r"--shm-size.*cpu_bytes_to_use"):
            open_region_file(tmp_path / "region", RegionGeometry(1024, 4096, 1, 4096))

        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["/bin/umount", str(tmp_path)], check=True)


def test_a_file_size_limit_is_refused_with_the_remedy_and_nothing_is_left(path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(RegionMemoryError, match="ulimit -f"):
            open_region_file(path, RegionGeometry(16, 4096, 1, 4096))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert not path.exists()


def test_a_memory_limit_that_is_too_small_is_refused_with_the_remedy_and_nothing_is_left(path: Path) -> None:
    with pytest.raises(RegionMemoryError, match=r"memory\.max leaves 10: lower cpu_bytes_to_use"):
        open_region_file(path, FOUR_ROWS, memory_limit=lambda: MemoryLimit(10, "memory.max"))

    assert not path.exists()


@pytest.mark.parametrize(
    "instance_id", ["../../etc/passwd", "", "a/b", "a\0b", "é" * 90, "x" * 101, "..", "\ud800", "a b"]
)
def test_an_odd_id_becomes_a_plain_file_name_of_its_own(instance_id: str, tmp_path: Path) -> None:
    path = make_region_path(instance_id, tmp_path)

    assert path.parent == tmp_path
    assert path.name.isascii()
    assert len(path.name) < 200
    assert path.name.startswith(f"kvtier_{os.geteuid()}_")
    assert path != make_region_path(instance_id + "x", tmp_path)


RACE = """
import json, os, sys
from pathlib import Path
from kvtier.cpu.region_file import RegionGeometry, leave_region_file, open_region_file
path, seed = Path(sys.argv[1]), int(sys.argv[2])
geometry = RegionGeometry(4, 100, 1, 100)
if seed % 3 == 1:
    path.write_bytes(b"x" * 5000)
if seed % 3 == 2:
    os.close(open_region_file(path, geometry).fd)
start_r, start_w = os.pipe()
done_r, done_w = os.pipe()
hold_r, hold_w = os.pipe()
for racer in range(8):
    if os.fork() == 0:
        os.close(start_w), os.close(hold_w)
        os.read(start_r, 1)
        file = open_region_file(path, geometry, join_timeout_s=30)
        os.write(done_w, json.dumps([file.is_creator, *file.identity]).encode() + b"\\n")
        os.read(hold_r, 1)
        leave_region_file(file)
        os._exit(0)
os.close(start_w)
with os.fdopen(done_r) as done:
    print(json.dumps([json.loads(done.readline()) for _ in range(8)]))
os.close(hold_w)
for racer in range(8):
    os.wait()
"""


@pytest.mark.parametrize("seed", range(9))
def test_of_racing_processes_one_creates_and_all_share_its_file(path: Path, seed: int) -> None:
    racers = json.loads(_run(RACE, path, seed))

    assert sum(is_creator for is_creator, _, _ in racers) == 1
    assert len({(device, inode) for _, device, inode in racers}) == 1
    assert not path.exists()


KILL = """
import os, signal, sys
from pathlib import Path
from kvtier.cpu import region_file
path, has_stale_file = Path(sys.argv[1]), int(sys.argv[2])
geometry = region_file.RegionGeometry(4, 100, 1, 100)

def open_and_die(at):
    left = at
    def on_line(frame, event, arg):
        nonlocal left
        if frame.f_code.co_filename != region_file.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return on_line
    sys.settrace(on_line)
    region_file.open_region_file(path, geometry, join_timeout_s=30)
    os._exit(0)

num_killed = num_survivors = at = 0
while num_survivors < 4:
    at += 1
    if has_stale_file:
        path.write_bytes(b"x" * 5000)
    victim = os.fork()
    if victim == 0:
        open_and_die(at)
    if at % 2:  # every other time the next start meets the victim alive
        _, status = os.waitpid(victim, 0)
    file = region_file.open_region_file(path, geometry, join_timeout_s=30)
    if at % 2 == 0:
        _, status = os.waitpid(victim, 0)
    assert (path.stat().st_dev, path.stat().st_ino) == file.identity, at
    assert path.stat().st_size == geometry.file_size_bytes, at
    assert os.pread(file.fd, 400, 0) == bytes(400), at
    region_file.leave_region_file(file)
    assert not list(path.parent.iterdir()), (at, list(path.parent.iterdir()))
    num_killed += os.WIFSIGNALED(status)
    num_survivors += os.WIFEXITED(status)
print(num_killed)
"""


@pytest.mark.parametrize("has_stale_file", [0, 1])
def test_a_kill_at_any_line_of_setting_up_leaves_what_the_next_start_can_use(
    path: Path, has_stale_file: int
) -> None:
    num_killed = int(_run(KILL, path, has_stale_file))

    assert num_killed > 30


def _run(script: str, path: Path, argument: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), str(argument)],
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
