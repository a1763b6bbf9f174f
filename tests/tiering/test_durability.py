"""With ``fdatasync`` a store is reported only after its bytes and its names were synced; without, nothing is."""

import errno
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import pytest
from tests.tiering.fs.engine import bytes_of_packs, start_driver

from kvtier.errors import ConfigError
from kvtier.testing.tier_driver import ROW_BYTES, TierDriver, make_config
from kvtier.tiering.fs.system_calls import REAL_CALLS, Buffers, SystemCalls

HANG_GUARD_S = 60.0

Result = TypeVar("Result")


@dataclass
class Disk:
    """Notes in which order files are written, synced and named; syncs fail when a test says so.

    Attributes:
        steps: what was done with which file: its suffix for packs and journals, its path for folders.
        error: what the next syncs say.
    """

    steps: list[tuple[str, str]] = field(default_factory=list)
    error: OSError | None = None

    def calls(self) -> SystemCalls:
        """Return what a tier gets for the system."""
        return replace(
            REAL_CALLS,
            write=self._write,
            pwritev=self._pwritev,
            sync=self._sync,
            sync_folder=self._sync_folder,
            rename=self._rename,
        )

    def _write(self, fd: int, data: bytes) -> int:
        return self._note("write", fd, lambda: REAL_CALLS.write(fd, data))

    def _pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        return self._note("write", fd, lambda: REAL_CALLS.pwritev(fd, buffers, offset))

    def _sync(self, fd: int) -> None:
        self._fail()
        self._note("sync", fd, lambda: REAL_CALLS.sync(fd))

    def _sync_folder(self, path: str) -> None:
        self._fail()
        REAL_CALLS.sync_folder(path)
        self.steps.append(("sync", path))

    def _rename(self, path: str, new_path: str) -> None:
        REAL_CALLS.rename(path, new_path)
        self.steps.append(("name", Path(new_path).suffix))

    def _note(self, what: str, fd: int, call: Callable[[], Result]) -> Result:
        suffix = Path(f"/proc/self/fd/{fd}").readlink().suffix
        result = call()
        self.steps.append((what, ".pack" if suffix == ".new" else suffix))
        return result

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


def start(root: Path, durability: str, disk: Disk, **options: object) -> TierDriver:
    """Return a tier of one pack at a time."""
    options = {"root_dir": root, "durability": durability, "calls": disk.calls()} | options
    driver = start_driver(make_config(row_bytes=ROW_BYTES), ROW_BYTES, **options)
    disk.steps.clear()
    return driver


def end(driver: TierDriver) -> None:
    """End a tier."""
    assert driver.tier.shutdown(HANG_GUARD_S)


@pytest.mark.parametrize("direct_io", [False, "auto"])
def test_bytes_and_records_are_synced_before_a_store_is_reported(tmp_path: Path, direct_io: object) -> None:
    disk = Disk()
    driver = start(tmp_path / "fs", "fdatasync", disk, direct_io=direct_io)
    assert driver.store([1]).success
    disk.steps.clear()
    assert driver.store([2, 3]).success
    assert disk.steps == [("write", ".pack"), ("write", ".index"), ("sync", ".pack"), ("sync", ".index")]
    assert driver.load_right([1, 2, 3]) == {1, 2, 3}
    end(driver)


def test_the_names_of_a_new_pack_and_its_journal_are_synced_before_its_first_block_is_reported(
    tmp_path: Path,
) -> None:
    disk, root = Disk(), tmp_path / "fs"
    driver = start(root, "fdatasync", disk)
    assert driver.store([1]).success
    (pack,) = root.rglob("*.pack")
    named = disk.steps.index(("name", ".pack"))
    assert ("sync", ".pack") in disk.steps[:named], "a pack is whole before it has its name"
    assert ("sync", str(pack.parent)) in disk.steps[named:]
    assert ("sync", str(root)) in disk.steps[named:]
    assert disk.steps[-1] == ("sync", ".index")
    end(driver)


def test_what_leaves_is_dropped_and_synced_before_its_slot_is_written(tmp_path: Path) -> None:
    disk = Disk()
    one_pack = bytes_of_packs(1)
    driver = start(tmp_path / "fs", "fdatasync", disk, capacity_bytes=one_pack, pack_bytes=one_pack)
    for number in range(4):
        assert driver.store([number]).success
    disk.steps.clear()
    assert driver.store([10]).success
    assert not driver.lookup(0)
    first_write = disk.steps.index(("write", ".pack"))
    assert disk.steps[:first_write] == [("write", ".index"), ("sync", ".pack"), ("sync", ".index")]
    end(driver)


def test_a_journal_that_is_written_again_is_synced_before_it_has_the_name_and_the_name_after(
    tmp_path: Path,
) -> None:
    disk, root = Disk(), tmp_path / "fs"
    one_pack = bytes_of_packs(1)
    driver = start(root, "fdatasync", disk, capacity_bytes=one_pack, pack_bytes=one_pack)
    number = 0
    while ("name", ".index") not in disk.steps:
        disk.steps.clear()
        assert number < 1000, "the journal is never written again"
        assert driver.store([number]).success
        number += 1
    named = disk.steps.index(("name", ".index"))
    assert disk.steps[named - 2 : named] == [("write", ".tmp"), ("sync", ".tmp")]
    (pack,) = root.rglob("*.pack")
    assert disk.steps[named + 1] == ("sync", str(pack.parent))
    end(driver)


def test_a_block_that_cannot_be_synced_is_no_block(tmp_path: Path) -> None:
    disk = Disk()
    driver = start(tmp_path / "fs", "fdatasync", disk)
    assert driver.store([1]).success
    disk.error = OSError(errno.EIO, "Input/output error")
    result = driver.store([2])
    assert (result.success, result.is_fault) == (False, True)
    assert not driver.lookup(2)
    disk.error = None
    assert driver.store([1, 2]).success
    assert driver.load_right([1, 2]) == {1, 2}
    end(driver)


def test_without_it_no_store_into_a_pack_syncs_anything(tmp_path: Path) -> None:
    disk = Disk()
    driver = start(tmp_path / "fs", "none", disk)
    assert driver.store([1]).success
    disk.steps.clear()
    assert driver.store([2, 3]).success
    assert disk.steps == [("write", ".pack"), ("write", ".index")]
    end(driver)


def test_another_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="durability"):
        start(tmp_path, "always", Disk())
