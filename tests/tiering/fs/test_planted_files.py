"""What another program puts under the names of the tier, or beside them: nothing hangs, nothing outside is touched."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.tiering.fs.conftest import StartTier
from tests.tiering.fs.placed import NAMESPACE, Living, end, fill, remove, remove_all

from kvtier.errors import PlaceError
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.notes import NotesState
from kvtier.tiering.fs.place import PackPlace
from kvtier.tiering.fs.purge_requests import make_request, read_requests
from kvtier.tiering.kit.place import BlockState

NOBODY = 65534
STRANGE_PACK = f"{NAMESPACE}/{7:016x}.pack"

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


def plant_holes(path: Path) -> None:
    """Make a file that is longer than any memory."""
    path.touch(0o600)
    os.truncate(path, 2**42)


def plant_of_another_user(path: Path) -> None:
    path.write_bytes(b"[]")
    try:
        os.chown(path, NOBODY, NOBODY)
    except PermissionError:
        pytest.skip("only the superuser gives files away")


PLANTED: dict[str, Plant] = {
    "pipe": os.mkfifo,
    "socket": plant_socket,
    "device": plant_device,
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to("/dev/zero"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "holes": plant_holes,
    "another user's": plant_of_another_user,
}

NAMES = [
    STRANGE_PACK,
    f"{NAMESPACE}/{7:016x}.new",
    f"{NAMESPACE}/{7:016x}.index",
    f"{NAMESPACE}/namespace.json",
    f"{NAMESPACE}/probe.page",
    ".purge",
    ".purge.tmp",
    "7x7.notes",
    "7x7.notes.new",
    "7x7.new",
    "7" * 32,
]
"""Names that the tier makes, reads or opens."""


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
@pytest.mark.parametrize("name", NAMES)
def test_whatever_lies_under_a_name_engines_store_and_load_and_a_place_is_read(
    root: Path, start_tier: StartTier, place: PackPlace, living: Living, name: str, plant: Plant
) -> None:
    fill(start_tier, [1])
    (root / name).unlink(missing_ok=True)
    plant(root / name)
    driver = start_tier(allow_shrink=True)  # a file of holes counts as long as it is
    living.tiers.append(driver.tier)
    assert driver.store([2, 3, 4, 5]).success
    living.pause(1.0)
    assert driver.load_right([1, 2, 3, 4, 5]) == {1, 2, 3, 4, 5}
    assert {place.check(block) for block in place.blocks()} == {BlockState.WHOLE}
    place.summary()
    assert len(place.namespaces()) in {1, 2}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_whatever_takes_a_pack_s_place_is_a_miss_and_the_blocks_can_be_stored_again(
    root: Path, start_tier: StartTier, plant: Plant
) -> None:
    driver = start_tier()
    driver.store([1, 2])
    (path,) = root.glob("*/*.pack")
    path.unlink()
    plant(path)
    assert isinstance(driver.tier, FSTier)
    driver.tier.keeper.tick(is_due=True)
    assert driver.load_right([1, 2]) == set()
    assert driver.store([1, 2]).success
    assert driver.load_right([1, 2]) == {1, 2}
    end(driver)
    assert start_tier().load_right([1, 2]) == {1, 2}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_whatever_takes_a_journal_s_place_gives_no_wrong_block(
    root: Path, start_tier: StartTier, plant: Plant
) -> None:
    fill(start_tier, [1, 2])
    (path,) = root.glob("*/*.index")
    path.unlink()
    plant(path)
    driver = start_tier(allow_shrink=True)
    assert driver.load_right([1, 2]) <= {1, 2}
    assert driver.store([1, 2]).success
    assert driver.load_right([1, 2]) == {1, 2}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_a_lock_that_is_no_file_costs_stores_and_hangs_nothing(
    root: Path, start_tier: StartTier, plant: Plant
) -> None:
    fill(start_tier, [1])
    (root / ".lock").unlink()
    plant(root / ".lock")
    driver = start_tier()
    assert driver.load_right([1]) == {1}
    driver.store([2, 3, 4, 5, 6])


def test_blocks_are_not_stored_behind_a_link_where_nobody_would_count_them(
    root: Path, start_tier: StartTier, tmp_path: Path
) -> None:
    fill(start_tier, [1])
    elsewhere = tmp_path / "elsewhere"
    (root / NAMESPACE).rename(elsewhere)
    (root / NAMESPACE).symlink_to(elsewhere)
    before = _contents_of(elsewhere)
    driver = start_tier()
    assert not driver.store([2]).success
    assert not driver.lookup(1)
    assert _contents_of(elsewhere) == before
    (root / NAMESPACE).unlink()
    driver.poll_until(lambda: driver.store([2]).success)
    assert driver.load_right([2]) == {2}


def test_a_link_that_takes_a_namespace_s_place_under_a_living_tier_is_refused_too(
    root: Path, start_tier: StartTier, tmp_path: Path
) -> None:
    driver = start_tier()
    driver.store([1])
    elsewhere = tmp_path / "elsewhere"
    (root / NAMESPACE).rename(elsewhere)
    (root / NAMESPACE).symlink_to(elsewhere)
    num_packs = len(list(elsewhere.glob("*.pack")))
    driver.store([2, 3, 4, 5, 6, 7, 8, 9])
    assert len(list(elsewhere.glob("*.pack"))) == num_packs


def test_the_directory_itself_may_be_a_link(
    root: Path, start_tier: StartTier, place: PackPlace, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir(0o700)
    root.symlink_to(tmp_path / "disk")
    driver = start_tier()
    assert driver.store([1]).success
    assert driver.load_right([1]) == {1}
    end(driver)
    assert remove_all(place) == 1


def test_a_directory_of_another_user_or_open_to_all_is_refused(root: Path, start_tier: StartTier) -> None:
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(PlaceError, match="every user may write"):
        start_tier()


def test_packs_and_namespaces_of_another_user_are_not_read(
    root: Path, start_tier: StartTier, place: PackPlace
) -> None:
    fill(start_tier, [1, 2, 3, 4])
    (path,) = root.glob("*/*.pack")
    try:
        os.chown(path, NOBODY, NOBODY)
    except PermissionError:
        pytest.skip("only the superuser gives files away")
    assert list(place.blocks()) == []
    driver = start_tier()
    assert driver.load_right([1]) == set()
    assert driver.store([1]).success
    assert path.stat().st_uid == NOBODY


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[" * 10_000,
        b"\xff" * 1000,
        json.dumps([{"id": 1}, None, [None] * 5]).encode(),
        json.dumps([list(make_request(NAMESPACE, None)._replace(id="../../../x"))]).encode(),
        json.dumps([list(make_request("../" * 10 + "x" * 2, None))]).encode(),
        json.dumps([[*make_request(NAMESPACE, None)[:3], 10**400, None]]).encode(),
    ],
    ids=["empty", "deep", "no text", "of other kinds", "of a strange id", "of a strange namespace", "of no time"],
)  # fmt: skip
def test_requests_that_are_none_remove_nothing_and_end_no_keeper(
    root: Path, start_tier: StartTier, place: PackPlace, living: Living, data: bytes
) -> None:
    driver = start_tier()
    living.tiers.append(driver.tier)
    driver.store([1, 2])
    (root / ".purge").write_bytes(data)
    (root / ".purge").chmod(0o600)
    living.pause(1.0)
    assert driver.load_right([1, 2]) == {1, 2}
    assert remove(place, list(place.blocks())[:1]) == 1
    assert read_requests(root) == []


@pytest.mark.parametrize("length", [0, 100, 8192, 8200, 2**20])
def test_notes_of_no_process_count_for_nothing_and_go(
    root: Path, start_tier: StartTier, place: PackPlace, living: Living, length: int
) -> None:
    driver = start_tier()
    living.tiers.append(driver.tier)
    forged = NotesState(NAMESPACE, capacity_bytes=1, oldest_used_s=1.0, pid=1, host="elsewhere").pack()
    (root / "7x7.notes").write_bytes((forged + b"\xff" * 2**20)[:length])
    assert driver.store(list(range(12))).success
    living.pause(1.0)
    assert driver.load_right(list(range(12))) == set(range(12))
    assert place.summary().users == (f"process {os.getpid()}",)
    assert not (root / "7x7.notes").exists()


def test_names_that_are_not_ours_stay_where_they_are_and_as_they_are(
    root: Path, start_tier: StartTier, place: PackPlace, living: Living
) -> None:
    strange = [
        "readme", ".lock.old", "x.notes.d", f"{NAMESPACE}/readme", f"{NAMESPACE}/0.pack", f"{NAMESPACE}x/1.pack",
        f"{NAMESPACE}/{7:016X}.PACK", f"{NAMESPACE}/{7:016x}.pack.bak", f"{NAMESPACE}/{7:016x}.index.tmp.1",
    ]  # fmt: skip
    driver = start_tier()
    living.tiers.append(driver.tier)
    driver.store([1, 2])
    for name in strange:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(name)
    driver.store(list(range(3, 15)))
    place.begin_removal()
    place.remove(list(place.blocks()), unless_changed=False)
    end(driver)
    living.tiers.clear()
    place.end_removal([NAMESPACE])
    start_tier().store([1])
    assert [(root / name).read_text() for name in strange] == strange


def _contents_of(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}
