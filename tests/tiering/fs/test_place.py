"""The directory of the fs tier, seen, checked and emptied without an engine."""

import errno
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from tests.tiering.forged_blocks import AnyOpener, forge_header
from tests.tiering.fs.conftest import StartTier

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.errors import ConfigError, TierError
from kvtier.testing.damage import flip_bit_in_files
from kvtier.testing.place_suite import MODELS, PlaceSuite, name_of
from kvtier.testing.tier_suite import ROW_BYTES
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.place import FSPlace, open_fs_place, probe_fs_place
from kvtier.tiering.fs.shared_usage import unpack_record
from kvtier.tiering.kit import block_pieces
from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES
from kvtier.tiering.kit.place import Amount, BlockState

BLOCK_BYTES = HEADER_PAGE_BYTES + ROW_BYTES


class TestFSPlace(PlaceSuite):
    """The contract of every place."""

    tier_class = FSTier
    settings: ClassVar[dict[str, object]] = {"capacity_bytes": "4MiB"}

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return FSTier(config, rows, **self.own_settings(directory))  # type: ignore[arg-type]  # a test's own

    def own_settings(self, directory: Path) -> Mapping[str, object]:
        return {"root_dir": str(directory), **self.settings}

    def damage(self, directory: Path, key: OffloadKey) -> None:
        assert flip_bit_in_files(directory, key)


class TestBuffered(TestFSPlace):
    """Through the page cache."""

    settings: ClassVar[dict[str, object]] = {"capacity_bytes": "4MiB", "direct_io": False}


def used_bytes(root: Path) -> int:
    return unpack_record((root / ".usage").read_bytes()).used_bytes


def test_the_shared_count_is_right_after_a_removal_and_the_engines_capacity_still_counts(
    root: Path, start_tier: StartTier
) -> None:
    driver = start_tier()
    driver.store([1, 2, 3, 4])
    place = open_fs_place({"root_dir": str(root)})
    place.begin_removal()
    assert place.remove(list(place.blocks())[:3], unless_changed=False) == Amount(3, 3 * BLOCK_BYTES)
    place.end_removal(())
    assert used_bytes(root) == BLOCK_BYTES
    record = unpack_record((root / ".usage").read_bytes())
    assert record.limit_bytes == 4 * 2**20
    assert len(record.members) == 1, "the purge has left"
    assert record.in_flight_bytes == 0


def test_an_engine_replaces_the_description_that_an_older_version_left(
    root: Path, start_tier: StartTier
) -> None:
    start_tier().store([1])
    place = open_fs_place({"root_dir": str(root)})
    (fresh,) = place.namespaces()
    (root / fresh.name / "namespace.json").write_text('{"layout_version": 1, "tenant_salt": "a digest"}')
    start_tier()
    assert place.namespaces() == [fresh]


def test_what_is_there_beside_blocks_is_counted_and_left_alone(root: Path, start_tier: StartTier) -> None:
    start_tier().store([1])
    (root / "notes.txt").write_bytes(b"12345")
    (root / "tmp" / "left-over").write_bytes(b"123")
    place = open_fs_place({"root_dir": str(root)})
    summary = place.summary()
    assert summary.foreign == Amount(1, 5)
    assert summary.temporary == Amount(1, 3)
    assert summary.capacity_bytes == 4 * 2**20
    assert summary.users == (f"process {os.getpid()}",)
    place.begin_removal()
    place.remove(list(place.blocks()), unless_changed=False)
    place.end_removal([name_of(MODELS[0])])
    assert {path.name for path in root.iterdir()} == {".lock", ".usage", "tmp", "notes.txt"}


def test_a_block_that_was_used_since_it_was_listed_stays_where_only_old_ones_go(
    root: Path, start_tier: StartTier
) -> None:
    start_tier().store([1, 2])
    place = open_fs_place({"root_dir": str(root)})
    listed = sorted(place.blocks(), key=lambda block: block.address)
    os.utime(listed[0].address)
    place.begin_removal()
    assert place.remove(listed, unless_changed=True).num == 1
    place.end_removal(())
    assert [block.address for block in place.blocks()] == [listed[0].address]


@pytest.mark.parametrize("num_kept_bytes", [HEADER_PAGE_BYTES, 0], ids=["its header", "nothing"])
def test_a_file_of_holes_that_is_longer_than_memory_is_damaged_and_not_read(
    root: Path, start_tier: StartTier, num_kept_bytes: int
) -> None:
    start_tier().store([1])
    place = open_fs_place({"root_dir": str(root)})
    (block,) = place.blocks()
    os.truncate(block.address, num_kept_bytes)
    os.truncate(block.address, 2**40)
    assert place.check(block) is BlockState.DAMAGED


@pytest.mark.parametrize(
    ("num_bytes", "is_encrypted"),
    [(2**40 - 1, False), (2**40 - 1, True), (2**27, True)],
    ids=["plain", "encrypted", "encrypted and short"],
)
def test_a_file_of_holes_whose_header_says_its_length_is_damaged_and_not_read(
    root: Path, start_tier: StartTier, monkeypatch: pytest.MonkeyPatch, num_bytes: int, *, is_encrypted: bool
) -> None:
    start_tier().store([1])
    place = open_fs_place({"root_dir": str(root)})
    place.unlock(AnyOpener())
    (block,) = place.blocks()
    forge_header(block.address, HEADER_PAGE_BYTES, num_bytes, is_encrypted=is_encrypted)
    real_pread, num_read = os.pread, 0

    def pread(fd: int, num_bytes: int, offset: int) -> bytes:
        nonlocal num_read
        num_read += num_bytes
        assert num_read <= 2 * HEADER_PAGE_BYTES, "the file is read"
        return real_pread(fd, num_bytes, offset)

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.delattr(os, "preadv")
    assert place.check(block) is BlockState.DAMAGED


def test_a_long_block_is_read_by_pieces(
    root: Path, start_tier: StartTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_tier().store([1])
    place = open_fs_place({"root_dir": str(root)})
    (block,) = place.blocks()
    real_pread, longest = os.pread, 0

    def pread(fd: int, num_bytes: int, offset: int) -> bytes:
        nonlocal longest
        longest = max(longest, num_bytes)
        return real_pread(fd, num_bytes, offset)

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(block_pieces, "PIECE_BYTES", 1000)
    assert place.check(block) is BlockState.WHOLE
    assert longest == HEADER_PAGE_BYTES
    with Path(block.address).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert place.check(block) is BlockState.DAMAGED


@pytest.mark.parametrize(
    ("num_bytes", "num_disk_blocks", "is_hollow"),
    [(2**30, 0, False), (2**30 + 1, 8, True), (2**40, 2**40 // 512, False), (2**40, 2**33 // 512, True)],
)
def test_only_long_files_of_holes_are_hollow(
    num_bytes: int, num_disk_blocks: int, *, is_hollow: bool
) -> None:
    assert block_pieces.is_hollow(num_bytes, num_disk_blocks) is is_hollow


@pytest.mark.parametrize(
    ("num_bytes", "num_disk_blocks", "is_hollow"),
    [(2**26, 0, False), (2**26 + 1, 8, True), (2**28, 2**26 // 512, True), (2**28, 2**27 // 512, False)],
)
def test_of_an_encrypted_block_half_must_be_on_the_disk(
    num_bytes: int, num_disk_blocks: int, *, is_hollow: bool
) -> None:
    assert block_pieces.is_hollow(num_bytes, num_disk_blocks, is_encrypted=True) is is_hollow


def test_nothing_is_removed_behind_a_link_in_place_of_a_folder(
    root: Path, start_tier: StartTier, tmp_path: Path
) -> None:
    start_tier().store([1])
    (tmp_path / "elsewhere" / "7").mkdir(parents=True)
    name = name_of(MODELS[0])
    (root / name / "f").symlink_to(tmp_path / "elsewhere")
    place = open_fs_place({"root_dir": str(root)})
    place.begin_removal()
    place.remove(list(place.blocks()), unless_changed=False)
    place.end_removal([name])
    assert (tmp_path / "elsewhere" / "7").is_dir()


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(
    root: Path, start_tier: StartTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_tier().store([1])
    place = open_fs_place({"root_dir": str(root)})
    (block,) = place.blocks()
    path = Path(block.address)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"\0" if whole[-1] else whole[:-1] + b"\1")
    assert place.check(block) is BlockState.DAMAGED
    real_pread = os.pread

    def replace_and_read(fd: int, num_bytes: int, offset: int) -> bytes:
        monkeypatch.setattr(os, "pread", real_pread)
        damaged = real_pread(fd, num_bytes, offset)
        fresh = path.with_suffix(".new")
        fresh.write_bytes(whole)
        fresh.rename(path)
        return damaged

    monkeypatch.setattr(os, "pread", replace_and_read)
    assert place.check(block) is BlockState.WHOLE


@pytest.mark.parametrize(
    ("spoil", "state"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), BlockState.DAMAGED),
        (lambda path: path.write_bytes(b""), BlockState.DAMAGED),
        (lambda path: path.write_bytes(b"KVTB\x09\0" + path.read_bytes()[6:]), BlockState.OTHER_FORMAT),
        (lambda path: path.unlink(), BlockState.GONE),
        (lambda path: (path.unlink(), path.mkdir()), BlockState.UNREADABLE),
        (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), BlockState.UNREADABLE),
    ],
    ids=["cut short", "empty", "another version", "removed", "a folder", "a link"],
)
def test_whatever_a_file_has_become_is_told_apart(
    root: Path, start_tier: StartTier, spoil: object, state: BlockState
) -> None:
    start_tier().store([1])
    place = open_fs_place({"root_dir": str(root)})
    (block,) = place.blocks()
    assert callable(spoil)
    spoil(Path(block.address))
    assert place.check(block) is state


def test_a_block_under_the_name_of_another_is_moved(root: Path, start_tier: StartTier) -> None:
    start_tier().store([1, 2])
    place = open_fs_place({"root_dir": str(root)})
    one, other = place.blocks()
    Path(one.address).write_bytes(Path(other.address).read_bytes())
    assert [place.check(one), place.check(other)] == [BlockState.MOVED, BlockState.WHOLE]


def test_a_link_to_other_folders_is_not_followed(root: Path, start_tier: StartTier, tmp_path: Path) -> None:
    start_tier().store([1])
    place = open_fs_place({"root_dir": str(root)})
    (block,) = place.blocks()
    elsewhere = tmp_path / "elsewhere"
    (root / block.namespace).rename(elsewhere)
    (root / block.namespace).symlink_to(elsewhere)
    assert [*place.blocks(), *place.blocks([block.namespace])] == []
    assert place.namespaces() == []
    place.begin_removal()
    place.end_removal([block.namespace])
    assert len(list(elsewhere.rglob("*.kv"))) == 1
    assert (elsewhere / "namespace.json").exists()


def test_while_an_engine_stores_and_others_purge_the_shared_count_ends_right(
    root: Path, start_tier: StartTier
) -> None:
    driver = start_tier()
    is_ended = threading.Event()
    errors: list[BaseException] = []

    def purge() -> None:
        try:
            while not is_ended.is_set():
                place = open_fs_place({"root_dir": str(root)})
                place.begin_removal()
                place.remove(list(place.blocks()), unless_changed=False)
                place.end_removal([namespace.name for namespace in place.namespaces()])
        except BaseException as error:  # noqa: BLE001  # thread top
            errors.append(error)

    purges = [threading.Thread(target=purge) for _ in range(2)]
    for thread in purges:
        thread.start()
    try:
        for begin in range(0, 800, 16):
            numbers = list(range(begin, begin + 16))
            driver.place(numbers, range(16))
            driver.wait(driver.submit(numbers, list(range(16)), is_promotion=False))
            driver.load_right(numbers)
    finally:
        is_ended.set()
        for thread in purges:
            thread.join(60.0)
    assert not errors
    assert driver.store([9000]).success
    assert driver.tier.shutdown(60.0)
    place = open_fs_place({"root_dir": str(root)})
    # A recount that ran beside a removal may count a block twice, and never misses one.
    assert used_bytes(root) >= sum(block.num_bytes for block in place.blocks())
    last = start_tier()
    assert last.store([9001]).success
    assert used_bytes(root) == sum(block.num_bytes for block in place.blocks())


def test_a_directory_that_no_tier_has_used_is_none(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").touch()
    with pytest.raises(ConfigError, match="no fs tier has used"):
        open_fs_place({"root_dir": str(tmp_path)})


def test_a_namespace_that_may_not_be_read_is_not_taken_for_an_empty_one(
    root: Path, start_tier: StartTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model in MODELS:
        start_tier(model).store([1])
    place = open_fs_place({"root_dir": str(root)})
    private = str(root / name_of(MODELS[0]))
    real_scandir = os.scandir

    def refuse_one(path: str) -> Iterator[os.DirEntry[str]]:
        if str(path) == private:
            raise PermissionError(errno.EACCES, "Permission denied", private)
        return real_scandir(path)

    monkeypatch.setattr(os, "scandir", refuse_one)
    with pytest.raises(TierError, match="may not be read"):
        list(place.blocks())
    assert len(list(place.blocks([name_of(MODELS[1])]))) == 1


@pytest.mark.skipif(os.getuid() == 0, reason="the superuser may write anywhere: run as another user")
def test_a_directory_without_leave_to_write_is_not_emptied(root: Path, start_tier: StartTier) -> None:
    start_tier().store([1])
    mode = stat.S_IMODE(root.stat().st_mode)
    root.chmod(0o500)
    try:
        with pytest.raises(TierError, match="not writable"):
            FSPlace(root).begin_removal()
    finally:
        root.chmod(mode)


def test_the_probe_says_what_is_wrong_and_makes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "er"
    (finding,) = probe_fs_place({"root_dir": str(root), "capacity_bytes": "1MiB"})
    assert finding.is_good
    assert not root.exists()
    (tmp_path / "file").touch()
    (finding,) = probe_fs_place({"root_dir": str(tmp_path / "file"), "capacity_bytes": "1MiB"})
    assert not finding.is_good
    *_, note = probe_fs_place({"root_dir": str(root), "capacity_bytes": "1000TiB"})
    assert note.is_note
    assert "capacity_bytes" in note.text
