"""A directory of packs keeps within its capacity, takes room only from packs without an owner, and is private."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiering.fs.packed import (
    CAPACITY_BYTES,
    NAMESPACE,
    OTHER_NAMESPACE,
    Faults,
    changes_of,
    create,
    make_directory,
    no_file_stays_open,
    read_slot,
    slot_of,
    stored,
    used_on_disk,
)

from kvtier.errors import PlaceError
from kvtier.tiering.fs.directory import PackDirectory
from kvtier.tiering.fs.pack import Pack
from kvtier.tiering.fs.pack_files import FoundPack, list_packs
from kvtier.tiering.fs.pack_header import MAX_PACK_BYTES, NUM_PACKS, disk_bytes_of, plan_geometry
from kvtier.tiering.fs.system_calls import SystemCalls, fallocate, try_lock

T = TypeVar("T")

STEM = "0123456789abcdef"


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Where a test's directory is; no file of it stays open."""
    with no_file_stays_open(tmp_path):
        yield tmp_path / "root"


def fill(
    directory: PackDirectory, namespace_name: str = NAMESPACE, *, may_remove: bool = False
) -> list[Pack]:
    """Make packs until there is no room."""
    packs = []
    while (
        pack := directory.create(namespace_name, directory.capacity_bytes, may_remove=may_remove)
    ) is not None:
        packs.append(pack)
    return packs


def close_all(packs: list[Pack]) -> None:
    """Give packs up; the one that was made first was used longest ago."""
    for number, pack in enumerate(packs):
        pack.close()
        if pack.path.exists():
            os.utime(pack.path, (1000 + number, 1000 + number))


# How large packs are


@given(row_bytes=st.integers(1, 2**24), capacity_bytes=st.integers(2**20, 2**45))
def test_packs_fit_into_the_capacity_and_leave_little_of_it(row_bytes: int, capacity_bytes: int) -> None:
    geometry = plan_geometry(row_bytes, capacity_bytes)
    assert geometry.is_possible()
    num_packs = capacity_bytes // disk_bytes_of(geometry)
    if geometry.num_slots > 1:
        assert num_packs >= 4
        block_bytes = num_packs * geometry.num_slots * geometry.slot_bytes
        assert block_bytes > 0.4 * capacity_bytes
    if capacity_bytes <= NUM_PACKS * MAX_PACK_BYTES:
        assert num_packs <= 2 * NUM_PACKS or geometry.num_slots == 1


@pytest.mark.parametrize(
    ("row_bytes", "capacity_bytes", "pack_bytes", "num_slots"),
    [
        (2**16, 2**30, None, 240),
        (2**20, 2**30, None, 15),
        (2**20, 2**26, None, 1),
        (4096, 2**20, None, 14),
        (4096, 2**15, None, 1),
        (4096, 2**30, 2**20, 124),
        (4096, 2**30, 1, 1),
        (2**20, 2**50, None, 65280),
    ],
)
def test_a_pack_is_a_64th_of_the_capacity_and_has_a_slot_at_least(
    row_bytes: int, capacity_bytes: int, pack_bytes: int | None, num_slots: int
) -> None:
    assert plan_geometry(row_bytes, capacity_bytes, pack_bytes).num_slots == num_slots


# Capacity


def test_packs_never_take_more_of_the_disk_than_the_capacity(root: Path) -> None:
    directory = make_directory(root)
    packs = fill(directory)
    assert len(packs) == CAPACITY_BYTES // disk_bytes_of(directory.geometry)
    longest = [stored(0)] * 60
    for pack in packs:
        for slot in range(pack.geometry.num_slots):
            pack.write(slot, slot_of(b"full"))
        pack.journal.append(longest)
    assert used_on_disk(root) <= directory.used_bytes() <= CAPACITY_BYTES
    close_all(packs)


def test_all_namespaces_share_the_capacity(root: Path) -> None:
    directory = make_directory(root)
    packs = [create(directory), create(directory, OTHER_NAMESPACE)]
    packs += fill(directory)
    assert directory.create(OTHER_NAMESPACE, CAPACITY_BYTES, may_remove=True) is None
    assert len(packs) == CAPACITY_BYTES // disk_bytes_of(directory.geometry)
    close_all(packs)


def test_a_pack_with_holes_counts_as_a_whole_one(root: Path) -> None:
    directory = make_directory(root)
    packs = fill(directory)
    for pack in packs:
        pack.punch(range(pack.geometry.num_slots))
    assert directory.create(NAMESPACE, CAPACITY_BYTES, may_remove=True) is None
    close_all(packs)


def test_packs_without_an_owner_go_those_unused_for_longest_first(root: Path) -> None:
    directory = make_directory(root)
    packs = fill(directory)
    close_all(packs)
    os.utime(packs[0].path, (5000, 5000))
    assert directory.create(NAMESPACE, CAPACITY_BYTES, may_remove=False) is None
    made = directory.create(NAMESPACE, CAPACITY_BYTES, may_remove=True)
    assert made is not None
    assert {pack.name for pack in packs} - directory.names(NAMESPACE) == {packs[1].name}
    assert not packs[1].path.with_suffix(".index").exists()
    assert used_on_disk(root) <= CAPACITY_BYTES
    made.close()


def test_packs_that_are_first_to_go_do(root: Path) -> None:
    directory = make_directory(root)
    released = create(directory, OTHER_NAMESPACE)
    packs = fill(directory)
    close_all(packs)
    released.close(is_first_to_go=True)
    made = directory.create(NAMESPACE, CAPACITY_BYTES, may_remove=True)
    assert made is not None
    assert directory.names(OTHER_NAMESPACE) == set()
    assert directory.names(NAMESPACE) == {pack.name for pack in [*packs, made]}
    made.close()


def test_owned_packs_stay_and_no_other_goes_where_that_would_not_be_enough(root: Path) -> None:
    directory = make_directory(root)
    packs = fill(directory)
    close_all(packs[:2])
    names = directory.names(NAMESPACE)
    room_bytes = disk_bytes_of(directory.geometry)
    assert directory.create(NAMESPACE, CAPACITY_BYTES - 2 * room_bytes, may_remove=True) is None
    assert directory.names(NAMESPACE) == names
    made = directory.create(NAMESPACE, CAPACITY_BYTES - room_bytes, may_remove=True)
    assert made is not None
    assert len(directory.names(NAMESPACE)) == len(names) - 1
    close_all([*packs[2:], made])


def test_the_bytes_of_a_pack_go_although_a_reader_keeps_it_open(root: Path) -> None:
    directory = make_directory(root)
    packs = fill(directory)
    packs[0].write(3, slot_of(b"kept"))
    close_all(packs)
    reader = directory.open(NAMESPACE, packs[0].name)
    assert reader is not None
    made = directory.create(NAMESPACE, CAPACITY_BYTES, may_remove=True)
    assert made is not None
    assert reader.is_lost()
    assert read_slot(reader, 3) == b""
    reader.close()
    made.close()


def test_a_full_disk_leaves_nothing_of_a_new_pack(root: Path) -> None:
    is_full = False

    def full(fd: int, mode: int, offset: int, num_bytes: int) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fallocate(fd, mode, offset, num_bytes)

    directory = make_directory(root, calls=SystemCalls(fallocate=full))
    is_full = True
    with pytest.raises(OSError, match="No space"):
        directory.create(NAMESPACE, CAPACITY_BYTES, may_remove=True)
    assert list(directory.folder_of(NAMESPACE).iterdir()) == []


def test_a_full_disk_is_one_that_a_tier_can_start_on(root: Path) -> None:
    def full(fd: int, mode: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert make_directory(root, calls=SystemCalls(fallocate=full)).used_bytes() == 0


def test_blocks_of_older_versions_count_and_stay(root: Path) -> None:
    folder = root / NAMESPACE / "0" / "f"
    folder.mkdir(parents=True)
    root.chmod(0o700)
    for number in range(3):
        (folder / f"{number:02x}.kv").write_bytes(bytes(10_000))
    (folder / "notes.txt").write_bytes(bytes(10_000))
    directory = make_directory(root)
    num_files, num_bytes = directory.older_formats()
    assert (num_files, num_bytes) == (3, sum(path.stat().st_blocks * 512 for path in folder.glob("*.kv")))
    packs = fill(directory, may_remove=True)
    assert len(packs) == (CAPACITY_BYTES - num_bytes) // disk_bytes_of(directory.geometry)
    assert len(list(folder.iterdir())) == 4
    close_all(packs)


# What dead processes leave


def plant(directory: PackDirectory, *suffixes: str) -> list[Path]:
    """Make files of a pack that is not there."""
    folder = directory.make_folder(NAMESPACE)
    paths = [folder / f"{STEM}{suffix}" for suffix in suffixes]
    for path in paths:
        path.write_bytes(bytes(20_000))
    return paths


@pytest.mark.parametrize("suffixes", [(".new", ".index"), (".index",), (".index.tmp",), (".new",)])
def test_what_is_left_of_a_pack_is_removed_when_one_is_made(root: Path, suffixes: tuple[str, ...]) -> None:
    directory = make_directory(root)
    paths = plant(directory, *suffixes)
    create(directory).close()
    assert not any(path.exists() for path in paths)


def test_the_journal_of_a_pack_stays_that_got_its_name_since_the_folder_was_listed(root: Path) -> None:
    directory = make_directory(root)
    pack = create(directory)
    (listed,) = list_packs(directory.folder_of(NAMESPACE))
    journal_alone = FoundPack(listed.folder, listed.stem, {".index": listed.files[".index"]})
    assert not directory._is_abandoned(journal_alone)
    assert pack.path.with_suffix(".index").exists()
    pack.close()


def test_a_pack_that_is_replaced_while_it_is_locked_is_not_owned(root: Path) -> None:
    create(make_directory(root)).close()
    (path,) = make_directory(root).folder_of(NAMESPACE).glob("*.pack")

    def replace_and_lock(fd: int) -> bool:
        if Path(f"/proc/self/fd/{fd}").readlink() == path:
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data)
        return try_lock(fd)

    directory = make_directory(root, calls=SystemCalls(try_lock=replace_and_lock))
    assert directory.adopt(NAMESPACE, path.name) is None


def test_a_pack_that_is_being_made_counts_and_stays(root: Path) -> None:
    directory = make_directory(root)
    path, index = plant(directory, ".new", ".index")
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        packs = fill(directory, may_remove=True)
        assert path.exists()
        assert index.exists()
        assert directory.used_bytes() == len(packs) * disk_bytes_of(directory.geometry) + 2 * 20480
        assert directory.used_bytes() <= CAPACITY_BYTES
    close_all(packs)


def test_names_that_are_not_ours_are_neither_counted_nor_removed(root: Path) -> None:
    directory = make_directory(root)
    folder = directory.make_folder(NAMESPACE)
    others = [
        folder / "letter.pack",
        folder / "x.new",
        root / "letter",
        root / "letters",
        folder / f"{STEM}.pack.old",
    ]
    for path in others:
        path.write_bytes(bytes(10_000))
    packs = fill(directory)
    close_all(packs)
    close_all(fill(directory, may_remove=True))
    assert all(path.exists() for path in others)
    assert directory.used_bytes() <= CAPACITY_BYTES


# Listing


def test_packs_are_listed_with_their_use_and_their_owner(root: Path) -> None:
    directory = make_directory(root)
    owned, free = create(directory), create(directory, OTHER_NAMESPACE)
    close_all([free])
    found = {one.namespace_name: one for one in directory.list_packs()}
    assert (found[NAMESPACE].name, found[NAMESPACE].is_owned) == (owned.name, True)
    assert found[OTHER_NAMESPACE][1:2] + found[OTHER_NAMESPACE][3:] == (free.name, 1000, False)
    assert sum(one.num_bytes for one in found.values()) == directory.used_bytes()
    assert directory.names(NAMESPACE) == {owned.name}
    assert directory.names("f" * 32) == set()
    owned.close()


def test_a_folder_is_looked_into_again_only_after_a_change(root: Path) -> None:
    directory = make_directory(root)
    assert directory.changed(NAMESPACE)
    create(directory).close()
    folder = directory.folder_of(NAMESPACE)
    os.utime(folder, (1000, 1000))
    assert [directory.changed(NAMESPACE) for _ in range(3)] == [True, False, False]
    create(directory).close()
    # Another change may follow within the same tick of the file system's clock.
    assert [directory.changed(NAMESPACE) for _ in range(2)] == [True, True]
    assert directory.changed(OTHER_NAMESPACE)


@pytest.mark.parametrize(
    "name", ["../x.pack", "x.pack", f"{STEM}.index", f"{STEM}.pack\0", "", "/etc/passwd"]
)
def test_no_file_is_opened_whose_name_is_not_that_of_a_pack(root: Path, name: str) -> None:
    directory = make_directory(root)
    directory.make_folder(NAMESPACE)
    assert directory.open(NAMESPACE, name) is None
    assert directory.adopt(NAMESPACE, name) is None


# Each call fails once


def use(root: Path, calls: SystemCalls) -> list[str]:
    """Use a directory as a tier does, each step twice where it fails; return the packs it has made."""
    directory = make_directory(root, is_ready=False, calls=calls, pack_bytes=CAPACITY_BYTES // 2)
    twice(partial(make_ready, directory))
    packs = []
    for _ in range(2):
        made = twice(lambda: directory.create(NAMESPACE, CAPACITY_BYTES, may_remove=True))
        assert made is not None
        twice(partial(store, made))
        packs.append(made)
    assert directory.used_bytes() <= CAPACITY_BYTES
    close_all(packs)
    again = twice(lambda: directory.adopt(NAMESPACE, packs[0].name))
    assert again is not None
    assert twice(lambda: changes_of(again.journal.tail().records)) == [stored(1)]
    made = twice(lambda: directory.create(NAMESPACE, CAPACITY_BYTES, may_remove=True))
    assert made is not None
    close_all([again, made])
    return sorted(directory.names(NAMESPACE))


def make_ready(directory: PackDirectory) -> bool:
    """Make a directory ready."""
    directory.make_ready()
    return True


def store(pack: Pack) -> bool:
    """Write a block and its record."""
    pack.write(1, slot_of(b"block"))
    pack.journal.append([stored(1)])
    return True


def twice(call: Callable[[], T | None]) -> T | None:
    """Call again where the first call fails, or gives nothing."""
    try:
        found = call()
    except (OSError, PlaceError):
        found = None
    return call() if found is None else found


@pytest.mark.slow
def test_each_call_may_fail_once(tmp_path: Path) -> None:
    def lives_with(faults: Faults, number: int) -> None:
        root = tmp_path / str(number)
        with no_file_stays_open(tmp_path):
            names = use(root, faults.calls)
        clean = make_directory(root)
        assert names, faults.failed
        assert used_on_disk(root) <= CAPACITY_BYTES, faults.failed
        for name in names:
            adopted = clean.adopt(NAMESPACE, name)
            if adopted is None:  # it was emptied, and then could not be removed
                assert faults.failed == "unlink"
                assert (clean.folder_of(NAMESPACE) / name).stat().st_size == 0
                continue
            assert {change.slot for change in changes_of(adopted.journal.tail().records)} <= {1}
            adopted.close()
        create(make_directory(root, capacity_bytes=16 * CAPACITY_BYTES)).close()
        left = [path.suffix for path in clean.folder_of(NAMESPACE).iterdir()]
        assert sorted(left) == [".index"] * (len(left) // 2) + [".pack"] * (len(left) // 2), faults.failed
        assert all(one.num_bytes > 2**16 for one in clean.list_packs())

    faults = Faults()
    lives_with(faults, -1)
    for at in range(faults.num_calls):
        broken = Faults(at)
        lives_with(broken, at)
        assert broken.failed
