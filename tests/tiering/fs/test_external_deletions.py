"""Files that another program removes under a living engine cost their blocks, and nothing else."""

import errno
import itertools
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.tiering.fs.conftest import HANG_GUARD_S, StartTier
from tests.tiering.fs.peer import Peer

from kvtier.namespace import Namespace
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import NUM_ROWS, ROW_BYTES, TierDriver, key_of, make_rows
from kvtier.tiering.fs import evictor
from kvtier.tiering.fs.directory import open_directory
from kvtier.tiering.fs.evictor import Evictor
from kvtier.tiering.fs.folders import BlockFile, walk_blocks
from kvtier.tiering.fs.recycled_files import RecycledFiles
from kvtier.tiering.fs.settings import FSSettings
from kvtier.tiering.fs.shared_usage import UsageRecord, unpack_record
from kvtier.tiering.fs.store import FSBlockStore
from kvtier.tiering.fs.system import SystemCalls
from kvtier.tiering.kit.backend import rows_of

pytestmark = pytest.mark.usefixtures("look_often")
BLOCK_BYTES = ROW_BYTES + 4096
FOLDER = 1 << 248
"""Between the numbers of blocks in neighbouring folders: a folder is called as the first byte of its keys."""

BLOCKS = [folder * FOLDER + number for folder in (0x00, 0x01, 0x3F) for number in (1, 2)]
OTHERS = [folder * FOLDER + number for folder in (0x01, 0x3F, 0x77) for number in (7, 8, 9)]

Remove = Callable[[Path], object]


def remove_contents(root: Path) -> None:
    """Do what ``rm -rf DIR/*`` does."""
    for path in root.glob("[!.]*"):
        shutil.rmtree(path)


def remove_namespaces(root: Path) -> None:
    """Remove what is beside ``tmp``."""
    for path in set(root.glob("[!.]*")) - {root / "tmp"}:
        shutil.rmtree(path)


def remove_folder(root: Path) -> None:
    """Remove one folder of blocks."""
    for path in root.glob("*/0/1"):
        shutil.rmtree(path)


def remove_folder_of_folders(root: Path) -> None:
    """Remove the folders of all blocks whose keys begin with the same digit."""
    for path in root.glob("*/0"):
        shutil.rmtree(path)


def replace(root: Path) -> None:
    """Remove the directory and make an empty one."""
    shutil.rmtree(root)
    root.mkdir(0o700)


ALL: dict[str, Remove] = {
    "directory": shutil.rmtree,
    "contents": remove_contents,
    "directory, and made again": replace,
    "directory, by moving it": lambda root: root.rename(root.with_name("elsewhere")),
    "namespace": remove_namespaces,
}
"""What takes every block, and is seen without a load."""

PARTS: dict[str, Remove] = {
    "one folder": remove_folder,
    "folders of one digit": remove_folder_of_folders,
    "the count": lambda root: (root / ".usage").unlink(),
    "temporary files": lambda root: shutil.rmtree(root / "tmp"),
    "the lock": lambda root: (root / ".lock").unlink(),
}


def carry_out(remove: Remove, root: Path) -> None:
    """Remove, and again where the tier has made a file in a folder meanwhile, as people repeat their ``rm -rf``."""
    while True:
        try:
            remove(root)
        except OSError:
            if root.exists():
                continue
        return


removed = pytest.mark.parametrize("remove", (ALL | PARTS).values(), ids=ALL | PARTS)


def blocks_in(root: Path) -> set[int]:
    """Return the numbers of the blocks on the disk."""
    return {int.from_bytes(bytes.fromhex(path.stem)[:-4], "big") for path in root.glob("*/*/*/*.kv")}


def bytes_in(root: Path) -> int:
    """Return the bytes of blocks and of temporary files on the disk."""
    total = 0
    for path in [*root.glob("*/*/*/*.kv"), *root.glob("tmp/*")]:
        with suppress(FileNotFoundError):  # evicted meanwhile
            total += path.stat().st_size
    return total


def record_of(root: Path) -> UsageRecord:
    """Return the shared count."""
    try:
        return unpack_record((root / ".usage").read_bytes())
    except FileNotFoundError:
        return UsageRecord()


def require_true_count(driver: TierDriver, root: Path) -> None:
    """Wait until the shared count says what is on the disk, nothing is in flight, and no recount is to come."""
    counter = driver.tier._block_store._evictor  # type: ignore[attr-defined]  # an fs tier's

    def is_true() -> bool:
        record = record_of(root)
        is_rough = counter._is_count_rough or counter.deletions.is_recount_due
        is_settled = record.is_counted and not (is_rough or record.in_flight_bytes)
        return is_settled and record.used_bytes == bytes_in(root)

    driver.poll_until(is_true)


def require_works(driver: TierDriver, root: Path, numbers: list[int]) -> None:
    """Store and load blocks as if nothing had happened."""
    driver.poll_until(lambda: driver.store(numbers).success)
    assert driver.load_right(numbers) == set(numbers)
    assert all(driver.lookup(number) for number in numbers)
    assert blocks_in(root) >= set(numbers)
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}
    if not driver.tier.stats()[
        "evicted_blocks"
    ]:  # a count that is made while blocks leave may have one twice
        require_true_count(driver, root)


def hand_driven_store(root: Path, calls: SystemCalls) -> tuple[FSBlockStore, Evictor]:
    """Return a store with room for four times ``BLOCKS``, and its evictor, whose thread has not been started."""
    rows = make_rows()
    num_blocks = 4 * len(BLOCKS)
    settings = FSSettings(root_dir=root, capacity_bytes=num_blocks * BLOCK_BYTES, direct_io=False)
    directory = open_directory(settings, rows, calls, ManualClock(), ManualClock())
    begun = directory.usage.begin_recount()
    assert begun is not None
    directory.usage.end_recount(0, begun)
    recycled = RecycledFiles(directory.files, directory.file_mode, directory.block_bytes)
    evictor = Evictor(directory, recycled)
    return FSBlockStore(directory, rows_of(rows), evictor, recycled, num_blocks, emit_events=False), evictor


def lines_about_removal(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was said at WARNING or above."""
    return [record.getMessage() for record in caplog.records if record.levelname not in ("DEBUG", "INFO")]


@removed
def test_what_is_removed_is_a_miss_and_the_tier_goes_on(
    start_tier: StartTier, root: Path, remove: Remove, caplog: pytest.LogCaptureFixture
) -> None:
    driver = start_tier()
    assert driver.store(BLOCKS).success

    carry_out(remove, root)

    left = blocks_in(root)
    assert driver.load_right(BLOCKS) == left
    assert {number for number in BLOCKS if driver.lookup(number)} == left
    require_works(driver, root, OTHERS)
    require_works(driver, root, BLOCKS)
    assert len(lines_about_removal(caplog)) <= 1


@removed
def test_a_store_that_comes_first_after_a_removal_is_kept(
    start_tier: StartTier, root: Path, remove: Remove
) -> None:
    driver = start_tier()
    assert driver.store(BLOCKS).success

    carry_out(remove, root)

    require_works(driver, root, BLOCKS[1:] + OTHERS)


@pytest.mark.parametrize("remove", ALL.values(), ids=ALL)
def test_lookups_miss_what_was_removed_before_anybody_loads_it(
    start_tier: StartTier, root: Path, remove: Remove, caplog: pytest.LogCaptureFixture
) -> None:
    driver = start_tier()
    assert driver.store(BLOCKS).success

    carry_out(remove, root)

    driver.poll_until(lambda: not any(driver.lookup(number) for number in BLOCKS))
    assert ["deleted by another program" in line for line in lines_about_removal(caplog)] == [True]


@removed
def test_the_capacity_holds_and_no_room_is_taken_by_what_is_gone(
    start_tier: StartTier, root: Path, remove: Remove
) -> None:
    capacity_blocks = 12
    driver = start_tier(capacity_bytes=capacity_blocks * BLOCK_BYTES)
    assert driver.store(BLOCKS).success
    carry_out(remove, root)
    num_left = len(blocks_in(root))
    driver.load(BLOCKS)
    driver.poll_until(lambda: driver.store(OTHERS[:1]).success)
    require_true_count(driver, root)

    fitting = [FOLDER * 2 + number for number in range(capacity_blocks - num_left - 1)]
    assert [driver.store([number]).success for number in fitting] == [True] * len(fitting)
    assert driver.tier.stats()["evicted_blocks"] == 0
    for number in range(3 * capacity_blocks):
        driver.store([FOLDER * 3 + number])
        assert bytes_in(root) <= capacity_blocks * BLOCK_BYTES
    assert len(blocks_in(root)) == capacity_blocks


@removed
def test_files_that_wait_to_be_written_over_may_be_removed_too(
    start_tier: StartTier, root: Path, remove: Remove
) -> None:
    driver = start_tier(capacity_bytes=64 * BLOCK_BYTES)
    numbers = itertools.count()

    def is_any_waiting() -> bool:
        number = next(numbers)
        driver.store([number])
        return number >= 80 and any((root / "tmp").iterdir())

    driver.poll_until(is_any_waiting)

    carry_out(remove, root)

    driver.load([80])
    require_works(driver, root, BLOCKS)
    require_works(driver, root, OTHERS)


class Remover:
    """Calls of the system, of which one removes files first or afterwards.

    Args:
        root: the directory.
        remove: what is done.
    """

    def __init__(self, root: Path, remove: Remove) -> None:
        self._root = root
        self._remove = remove
        self.num_calls_left: int | None = None

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        """Remove before the write of a block, whose file is open."""
        self._count()
        return os.pwritev(fd, buffers, offset)

    def link(self, fd: int, path: str) -> None:
        """Remove behind the publication of a block, whose room is still reserved."""
        SystemCalls().link(fd, path)
        self._count()

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        """Remove before the read of a block, whose file is open."""
        self._count()
        return os.preadv(fd, buffers, offset)

    def _count(self) -> None:
        if self.num_calls_left is not None:
            self.num_calls_left -= 1
            if self.num_calls_left == 0:
                carry_out(self._remove, self._root)


@pytest.mark.parametrize("job_blocks", [1, NUM_ROWS // 2], ids=["small jobs", "one job"])
@pytest.mark.parametrize("call", ["pwritev", "link", "preadv"])
@removed
def test_a_removal_under_jobs_costs_no_report_and_leaves_no_room_taken(
    start_tier: StartTier, root: Path, remove: Remove, call: str, job_blocks: int
) -> None:
    remover = Remover(root, remove)
    # One thread: the removal is not to come between another's calls, which would make rmtree fail, not the tier.
    driver = start_tier(calls=SystemCalls(**{call: getattr(remover, call)}), num_threads=1)
    assert driver.store(BLOCKS).success
    remover.num_calls_left = 3

    half = NUM_ROWS // 2
    driver.place(range(100, 100 + half), range(half))
    slots_of_jobs = [list(range(slot, slot + job_blocks)) for slot in range(0, half, job_blocks)]
    jobs = [
        driver.submit([100 + slot for slot in slots], slots, is_promotion=False) for slots in slots_of_jobs
    ]
    jobs += [driver.submit([BLOCKS[0], BLOCKS[1]], [half, half + 1], is_promotion=True) for _ in range(half)]
    driver.poll_until(lambda: all(job in driver.results for job in jobs))
    driver.poll()

    assert remover.num_calls_left <= 0
    assert sorted(driver.results) == [*range(1 + len(jobs))]
    driver.load(list(range(100, 100 + half)))
    driver.load(BLOCKS)
    require_true_count(driver, root)
    require_works(driver, root, BLOCKS)


def test_a_folder_that_another_thread_makes_first_was_not_removed(
    start_tier: StartTier, caplog: pytest.LogCaptureFixture
) -> None:
    is_armed, is_late = threading.Event(), threading.Event()

    def open_late(path: str, flags: int, mode: int) -> int:
        if is_armed.is_set() and not is_late.is_set() and flags & os.O_TMPFILE == os.O_TMPFILE:
            is_late.set()
            given_up_s = time.monotonic() + HANG_GUARD_S
            while not driver.tier.stats()["stored_blocks"]:
                assert time.monotonic() < given_up_s, "the other block is not stored"
            raise FileNotFoundError(errno.ENOENT, "")  # as it was before the other thread made the folder
        return os.open(path, flags, mode)

    driver = start_tier(calls=SystemCalls(open=open_late), num_threads=2)
    is_armed.set()
    driver.place([1, 2], [0, 1])
    jobs = [driver.submit([number], [number - 1], is_promotion=False) for number in (1, 2)]
    driver.poll_until(lambda: all(job in driver.results for job in jobs))

    assert is_late.is_set()
    assert driver.tier.stats()["evicted_blocks"] == 0
    assert driver.load_right([1, 2]) == {1, 2}
    assert lines_about_removal(caplog) == []


def test_what_was_stored_between_a_removal_and_its_discovery_is_found(root: Path) -> None:
    removed, stored = ([key_of(number) for number in numbers] for numbers in (BLOCKS, OTHERS))
    store, evictor = hand_driven_store(root, SystemCalls())
    namespace = store.open_namespace(Namespace("{}", bytes(32)), is_new=True)
    evictor.deletions.begin()
    store.store(namespace, removed, range(len(removed)))
    evictor.deletions.check()
    shutil.rmtree(namespace.path)
    store.store(namespace, stored, range(len(stored)))

    assert evictor.deletions.check()
    assert [key for key in removed + stored if key in namespace.index] == stored


def test_a_recount_during_a_store_is_repeated_when_blocks_of_the_store_were_removed(root: Path) -> None:
    keys = [key_of(number) for number in BLOCKS]

    def link(fd: int, path: str) -> None:
        SystemCalls().link(fd, path)
        if Path(path).stem == keys[-1].hex():
            shutil.rmtree(root)
            deletions.on_deleted(str(root))
            assert deletions.claim_recount()  # the evictor makes it before the store is counted

    store, evictor = hand_driven_store(root, SystemCalls(link=link))
    deletions = evictor.deletions
    namespace = store.open_namespace(Namespace("{}", bytes(32)), is_new=True)

    store.store(namespace, keys, range(len(keys)))

    assert not root.exists()
    assert deletions.is_recount_due


@pytest.mark.parametrize("remove", ALL.values(), ids=ALL)
def test_a_removal_at_any_moment_of_many_jobs_leaves_a_tier_that_works(
    start_tier: StartTier, root: Path, remove: Remove
) -> None:
    driver = start_tier()
    for _ in range(5):
        driver.place(BLOCKS, range(len(BLOCKS)))
        jobs = [
            driver.submit([number], [slot], is_promotion=False)
            for _ in range(4)
            for slot, number in enumerate(BLOCKS)
        ]
        jobs += [driver.submit(BLOCKS, list(range(8, 8 + len(BLOCKS))), is_promotion=True)]
        carry_out(remove, root)
        driver.poll_until(lambda jobs=jobs: all(job in driver.results for job in jobs))  # type: ignore[misc]
        shutil.rmtree(root.with_name("elsewhere"), ignore_errors=True)
    require_works(driver, root, BLOCKS + OTHERS[:2])


@removed
def test_of_two_tiers_both_go_on_and_find_each_others_blocks(
    start_tier: StartTier, root: Path, remove: Remove
) -> None:
    first, second = start_tier(negative_ttl_s=0.0), start_tier(negative_ttl_s=0.0)
    assert first.store(BLOCKS).success
    assert second.load_right(BLOCKS) == set(BLOCKS)

    carry_out(remove, root)

    left = blocks_in(root)
    require_works(first, root, OTHERS)
    assert second.load_right(BLOCKS) == left
    assert second.load_right(OTHERS) == set(OTHERS)
    require_works(second, root, BLOCKS)
    assert first.load_right(BLOCKS) == set(BLOCKS)
    require_true_count(first, root)


def test_a_count_that_was_made_beside_a_writer_is_made_again_when_it_rests(
    start_tier: StartTier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = start_tier(negative_ttl_s=0.0)
    assert driver.store(BLOCKS).success
    peer = Peer(root, 100 * BLOCK_BYTES)
    num_walks = 0

    def walk_beside_a_writer(folder: Path) -> Iterator[BlockFile]:
        nonlocal num_walks
        num_walks += 1
        if num_walks == 1:
            assert peer.store(1000) == [1000]  # found by this walk, and finished since it began
        yield from walk_blocks(folder)

    try:
        assert peer.store(900) == [900]
        monkeypatch.setattr(evictor, "walk_blocks", walk_beside_a_writer)
        remove_folder(root)
        driver.load(BLOCKS)  # which notices it, so that what is left is counted
        driver.poll_until(lambda: num_walks >= 1)
        require_true_count(driver, root)
        assert num_walks > 1
    finally:
        peer.close()


def test_a_namespace_that_nobody_serves_here_gives_its_room_back(start_tier: StartTier, root: Path) -> None:
    other = start_tier("model-b")
    assert other.store(BLOCKS).success
    assert other.tier.shutdown(HANG_GUARD_S)
    driver = start_tier()
    (foreign,) = set(root.glob("[!.]*")) - {root / "tmp"}
    assert driver.store(BLOCKS).success
    driver.poll_until(lambda: record_of(root).used_bytes == 2 * len(BLOCKS) * BLOCK_BYTES)

    shutil.rmtree(foreign)

    require_true_count(driver, root)
    assert driver.load_right(BLOCKS) == set(BLOCKS)


@pytest.mark.parametrize("remove", ALL.values(), ids=ALL)
def test_another_process_goes_on_too(start_tier: StartTier, root: Path, remove: Remove) -> None:
    driver = start_tier(negative_ttl_s=0.0)
    peer = Peer(root, 100 * BLOCK_BYTES)
    try:
        assert peer.store(1, 2) == [1, 2]
        assert driver.load_right([1, 2]) == {1, 2}
        carry_out(remove, root)
        require_works(driver, root, BLOCKS)
        driver.poll_until(lambda: peer.store(1, 2) == [1, 2])
        assert driver.load_right([1, 2]) == {1, 2}
        require_true_count(driver, root)
    finally:
        peer.close()


def test_a_directory_that_cannot_be_made_again_costs_stores_and_one_line(
    start_tier: StartTier, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = start_tier()
    assert driver.store(BLOCKS).success
    shutil.rmtree(root)
    root.write_text("in the way")

    assert [driver.store([number]).success for number in (1, 2, 3)] == [False] * 3
    assert len([line for line in lines_about_removal(caplog) if "cannot be made again" in line]) == 1
    root.unlink()
    require_works(driver, root, OTHERS)


def test_nothing_is_made_while_nothing_is_stored(start_tier: StartTier, root: Path) -> None:
    driver = start_tier()
    assert driver.store(BLOCKS).success
    shutil.rmtree(root)
    driver.poll_until(lambda: not driver.tier.lookup(key_of(BLOCKS[0]), driver.request))
    assert driver.tier.shutdown(HANG_GUARD_S)
    assert not root.exists()
