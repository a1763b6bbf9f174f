"""A block that is damaged, foreign, gone or too much costs itself only, and is counted with its reason."""

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.tiering.disks import small_disk_at
from tests.tiering.fs.conftest import HANG_GUARD_S, StartTier

from kvtier.testing.tier_suite import NUM_ROWS, ROW_BYTES, TierDriver, content_of, key_of
from kvtier.tiering.fs import block_writer, store
from kvtier.tiering.fs.system import REAL_CALLS, STOPPED, Buffers, SystemCalls, WholeFileCalls
from kvtier.tiering.kit import envelope

BLOCK_BYTES = ROW_BYTES + 4096


def file_of(root: Path, number: int, model_index: int = 0) -> Path:
    """Return the file of block ``number``, of the only namespace that has it unless told otherwise."""
    return sorted(root.glob(f"*/*/*/{key_of(number).hex()}.kv"))[model_index]


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def failed_alone(driver: TierDriver, number: int) -> bool:
    """Load ``number`` between two good blocks; return whether it failed and the others succeeded."""
    result = driver.load([1, number, 3])
    return not result.success and result.successful_keys == frozenset({key_of(1), key_of(3)})


@pytest.mark.parametrize("offset", [0, 8, 40, 82, 127, 4096, BLOCK_BYTES - 1])
def test_a_damaged_file_is_a_miss_counted_and_removed(start_tier: StartTier, root: Path, offset: int) -> None:
    driver = start_tier()
    driver.store([1, 2, 3])
    flip(file_of(root, 2), offset)
    assert failed_alone(driver, 2)
    assert driver.tier.stats()["damaged"] == 1
    assert not driver.lookup(2)
    with pytest.raises(IndexError):
        file_of(root, 2)


def test_damage_in_the_unused_part_of_the_page_harms_nobody(start_tier: StartTier, root: Path) -> None:
    driver = start_tier()
    driver.store([1])
    flip(file_of(root, 1), 200)
    assert driver.load([1]).success


@pytest.mark.parametrize("length", [0, 1, 127, 4096, 5000, BLOCK_BYTES - 1])
def test_a_truncated_file_is_a_miss_counted_and_removed(
    start_tier: StartTier, root: Path, length: int
) -> None:
    driver = start_tier()
    driver.store([1, 2, 3])
    os.truncate(file_of(root, 2), length)
    assert failed_alone(driver, 2)
    assert driver.tier.stats()["damaged"] == 1
    with pytest.raises(IndexError):
        file_of(root, 2)


def test_after_damage_the_block_can_be_stored_again(start_tier: StartTier, root: Path) -> None:
    driver = start_tier()
    driver.store([1])
    flip(file_of(root, 1), 5000)
    assert not driver.load([1]).success
    assert driver.store([1]).success
    assert driver.load([1]).success


def test_swapped_files_give_nobody_another_blocks_bytes(start_tier: StartTier, root: Path) -> None:
    driver = start_tier()
    driver.store([1, 2])
    first, second = file_of(root, 1), file_of(root, 2)
    first.rename(root / "third")
    second.rename(first)
    (root / "third").rename(second)
    result = driver.load([1, 2])
    assert not result.success
    assert not result.successful_keys
    assert driver.tier.stats()["damaged"] == 2


@pytest.mark.parametrize("is_back", [False, True])
def test_a_block_that_is_written_over_while_it_is_read_is_absent_and_not_damaged(
    start_tier: StartTier, root: Path, is_back: bool
) -> None:
    """An evictor takes the file, a writer puts another block into it; the block itself may have come back since."""
    to_evict: list[Path] = []

    def read_late(fd: int, buffers: Buffers, offset: int) -> int:
        while to_evict:
            path = to_evict.pop()
            whole = path.read_bytes()
            taken = path.rename(root / "taken")
            with taken.open("r+b") as file:
                file.seek(4096)
                file.write(bytes(content_of(9)))
            if is_back:
                path.write_bytes(whole)
        return os.preadv(fd, buffers, offset)

    driver = start_tier(calls=SystemCalls(preadv=read_late), num_threads=1)
    driver.store([1, 2, 3])
    path = file_of(root, 2)
    to_evict.append(path)
    result = driver.load([2, 1, 3])
    assert result.successful_keys == frozenset({key_of(1), key_of(3)})
    assert not result.is_fault
    assert (driver.tier.stats()["absent"], driver.tier.stats()["damaged"]) == (1, 0)
    assert path.exists() is is_back
    assert driver.load([2]).success is is_back


def test_a_block_of_another_namespace_in_our_folder_is_a_miss_and_left_alone(
    start_tier: StartTier, root: Path
) -> None:
    driver, other = start_tier(), start_tier("model-b")
    driver.store([1, 2, 3])
    ours = file_of(root, 2)
    other.store([2])
    (theirs,) = [path for path in root.glob(f"*/*/*/{key_of(2).hex()}.kv") if path != ours]
    shutil.copy(theirs, ours)
    assert failed_alone(driver, 2)
    assert driver.tier.stats()["foreign"] == 1
    assert ours.read_bytes() == theirs.read_bytes()
    assert other.load([2]).success


def test_a_block_of_another_version_is_a_miss_and_left_alone(start_tier: StartTier, root: Path) -> None:
    driver = start_tier()
    driver.store([1, 2, 3])
    path = file_of(root, 2)
    with path.open("r+b") as file:
        file.seek(4)
        file.write((envelope.VERSION + 1).to_bytes(2, "little"))
    assert failed_alone(driver, 2)
    assert driver.tier.stats()["foreign"] == 1
    assert path.exists()


def test_a_block_that_is_gone_is_a_miss_and_no_longer_found(start_tier: StartTier, root: Path) -> None:
    driver = start_tier()
    driver.store([1, 2, 3])
    file_of(root, 2).unlink()
    assert driver.lookup(2)
    assert failed_alone(driver, 2)
    assert driver.tier.stats()["absent"] == 1
    assert not driver.lookup(2)


def set_batches(monkeypatch: pytest.MonkeyPatch, batch_blocks: int, num_ahead: int) -> None:
    """Have so many blocks be moved by one call, and checksums of so many batches be computed ahead."""
    monkeypatch.setattr(block_writer, "plan_num_checksums_ahead", lambda *_, **__: num_ahead)
    for module in (block_writer, store):
        monkeypatch.setattr(module, "plan_batch_files", lambda _: batch_blocks)


@pytest.mark.parametrize("batch_blocks", [1, 3, NUM_ROWS])
@pytest.mark.parametrize("num_ahead", [0, 1, 4])
def test_blocks_whose_checksums_are_ahead_keep_their_own_headers(
    start_tier: StartTier, monkeypatch: pytest.MonkeyPatch, num_ahead: int, batch_blocks: int
) -> None:
    set_batches(monkeypatch, batch_blocks, num_ahead)
    driver = start_tier(num_threads=1)
    numbers = list(range(NUM_ROWS))
    assert driver.store(numbers).success
    assert driver.load_right(numbers[::-1]) == set(numbers)


@pytest.mark.parametrize("batch_blocks", [1, 3, NUM_ROWS])
@pytest.mark.parametrize("num_ahead", [0, 1, 4])
@pytest.mark.parametrize("num_refusals", [1, 2])
def test_a_full_disk_spoils_no_block_that_is_prepared_before_or_behind(
    start_tier: StartTier,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_ahead: int,
    num_refusals: int,
    batch_blocks: int,
) -> None:
    set_batches(monkeypatch, batch_blocks, num_ahead)
    unlucky, refusals = bytes(content_of(5)), [errno.ENOSPC] * num_refusals

    def full(fd: int, buffers: Buffers, offset: int) -> int:
        if any(bytes(buffer) == unlucky for buffer in buffers) and refusals:
            raise OSError(refusals.pop(), "full")
        return os.pwritev(fd, buffers, offset)

    driver = start_tier(num_threads=1, calls=SystemCalls(pwritev=full))
    assert driver.store([NUM_ROWS]).success
    os.utime(file_of(root, NUM_ROWS), (0, 0))  # the oldest, which is evicted when room is made
    numbers = list(range(NUM_ROWS))
    result = driver.store(numbers)
    assert result.success == (num_refusals == 1)
    of_same_call = range(6, 5 // batch_blocks * batch_blocks + batch_blocks)
    succeeded = numbers if num_refusals == 1 else [*range(5), *of_same_call]
    assert [number for number in numbers if driver.lookup(number)] == succeeded
    assert result.success or result.successful_keys == frozenset(map(key_of, succeeded))
    assert driver.load_right(succeeded) == set(succeeded)


class RefusingCalls:
    """Compiled calls of which some files are refused, each once for every error."""

    def __init__(self, real: WholeFileCalls, errors: dict[int, list[int]]) -> None:
        self._real = real
        self._errors = {bytes(content_of(number)): left for number, left in errors.items()}

    def publish(
        self, files: Sequence[tuple[str, Buffers, str | None]], flags: int, mode: int, /
    ) -> list[int]:
        """Refuse some and write the others."""
        refused = [self._errors.get(bytes(buffers[-1])) for _, buffers, _ in files]
        real = iter(
            self._real.publish(
                [file for file, errors in zip(files, refused, strict=True) if not errors], flags, mode
            )
        )
        return [errors.pop() if errors else next(real) for errors in refused]

    def read(
        self, files: Sequence[tuple[str, Buffers]], flags: int, touch_before_s: float, /
    ) -> list[tuple[int, int, int, float] | int]:
        """Read all."""
        return self._real.read(files, flags, touch_before_s)


def test_of_a_batch_each_file_has_its_own_fate(start_tier: StartTier, root: Path) -> None:
    if REAL_CALLS.whole_files is None:
        pytest.skip(
            "nothing was compiled when kvtier was installed: apt-get install gcc python3-dev, make clean venv"
        )
    errors = {2: [errno.ENOENT], 4: [errno.EIO], 5: [errno.EEXIST], 7: [errno.ENOSPC], 9: [STOPPED]}
    driver = start_tier(
        num_threads=1, calls=SystemCalls(whole_files=RefusingCalls(REAL_CALLS.whole_files, errors))
    )
    oldest = [NUM_ROWS, NUM_ROWS + 1]
    assert driver.store(oldest).success, "they leave when room is made"
    for number in oldest:
        os.utime(file_of(root, number), (0, 0))
    numbers = list(range(NUM_ROWS))
    result = driver.store(numbers)
    assert result.successful_keys == frozenset(key_of(number) for number in numbers if number != 4)
    assert result.is_fault
    assert driver.tier.stats()["store_errors"] == 1
    there = [number for number in numbers if number not in (4, 5)]
    assert driver.load_right(there) == set(there)
    assert not driver.load([5]).success, "it was said to be there and never was"


def test_a_block_that_somebody_removed_is_written_again_by_the_next_store(
    start_tier: StartTier, root: Path
) -> None:
    driver = start_tier()
    driver.store([1])
    file_of(root, 1).unlink()
    assert driver.store([1]).success
    assert driver.load([1]).success


def test_an_unreadable_block_is_a_miss_and_kept(start_tier: StartTier, root: Path) -> None:
    def broken(fd: int, buffers: Buffers, offset: int) -> int:
        raise OSError(errno.EIO, "broken disk")

    writer, driver = start_tier(), start_tier(calls=SystemCalls(preadv=broken), direct_io=False)
    writer.store([1])
    assert driver.lookup(1)
    assert not driver.load([1]).success
    assert driver.tier.stats()["io_error"] == 1
    assert file_of(root, 1).exists()
    assert writer.load([1]).success


def test_a_block_that_cannot_be_written_fails_alone(start_tier: StartTier) -> None:
    unlucky = content_of(2)

    def broken(fd: int, buffers: Buffers, offset: int) -> int:
        if bytes(buffers[-1]) == bytes(unlucky):
            raise OSError(errno.EIO, "broken disk")
        return os.pwritev(fd, buffers, offset)

    driver = start_tier(calls=SystemCalls(pwritev=broken), direct_io=False)
    result = driver.store([1, 2, 3])
    assert result.successful_keys == frozenset({key_of(1), key_of(3)})
    assert driver.tier.stats()["store_errors"] == 1
    assert driver.load([1, 3]).success


def test_a_folder_that_somebody_removed_is_made_again(start_tier: StartTier, root: Path) -> None:
    driver = start_tier()
    driver.store([1])
    shutil.rmtree(file_of(root, 1).parents[2])
    assert driver.store([1, 2]).success
    assert driver.load([1, 2]).success
    assert len(list(root.glob("*/namespace.json"))) == 1


def test_a_store_of_a_held_block_writes_nothing(start_tier: StartTier, root: Path) -> None:
    driver = start_tier()
    driver.store([1])
    inode = file_of(root, 1).stat().st_ino
    assert driver.store([1]).success
    assert start_tier().store([1]).success
    assert file_of(root, 1).stat().st_ino == inode
    assert driver.tier.stats()["stored_blocks"] == 1


def test_a_job_larger_than_the_capacity_stores_what_fits(start_tier: StartTier, root: Path) -> None:
    driver = start_tier(capacity_bytes=4 * BLOCK_BYTES, num_threads=1)
    result = driver.store(list(range(NUM_ROWS)))
    total_bytes = sum(path.stat().st_size for path in root.glob("*/*/*/*.kv"))
    assert 0 < total_bytes <= 4 * BLOCK_BYTES
    assert result.success or result.successful_keys


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB, where this user may mount one."""
    with small_disk_at(tmp_path / "disk") as folder:
        yield folder


def test_a_full_disk_evicts_or_declines_and_what_is_there_stays_right(
    start_tier: StartTier, small_disk: Path
) -> None:
    driver = start_tier(root_dir=small_disk / "blocks", capacity_bytes="1GiB")
    for first in range(0, 20 * NUM_ROWS, NUM_ROWS):
        driver.store(list(range(first, first + NUM_ROWS)))
    stats = driver.tier.stats()
    assert stats["declined"] > 0
    assert stats["evicted_blocks"] > 0
    assert stats["stored_blocks"] > 2 * 2**20 // BLOCK_BYTES, "room that was made was not used"
    last = list(range(19 * NUM_ROWS, 20 * NUM_ROWS))
    kept = [number for number in last if driver.load([number]).success]
    for number in kept:
        driver.load([number])
        assert np.array_equal(driver.rows[0], content_of(number))
    assert driver.tier.shutdown(HANG_GUARD_S)
