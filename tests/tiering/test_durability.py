"""With ``fdatasync`` a store is reported only after its bytes and its names were synced; without, nothing is."""

import errno
import os
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.testing.tier_suite import ROW_BYTES, TierDriver, make_config, make_rows
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.system import REAL_CALLS, SystemCalls
from kvtier.tiering.slab import SlabTier
from kvtier.tiering.slab.slab_file import SystemCalls as SlabCalls

HANG_GUARD_S = 60.0
BLOCK_BYTES = ROW_BYTES + 4096


class Syncs:
    """Notes what is synced: folders by name, files as such."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.error: OSError | None = None
        self._real = {"fsync": os.fsync, "fdatasync": os.fdatasync}
        monkeypatch.setattr(os, "fsync", lambda fd: self._sync("fsync", fd))
        monkeypatch.setattr(os, "fdatasync", lambda fd: self._sync("fdatasync", fd))

    def _sync(self, call: str, fd: int) -> None:
        if self.error is not None:
            raise self.error
        self.names.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        self._real[call](fd)


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> Syncs:
    """What is synced from now on."""
    return Syncs(monkeypatch)


def start_fs(root: Path, durability: str, calls: SystemCalls = REAL_CALLS) -> TierDriver:
    """Return an fs tier."""
    rows = make_rows()
    tier = FSTier(
        make_config(), rows, root_dir=root, capacity_bytes="8MiB", durability=durability, calls=calls
    )
    assert tier.wait_indexed(HANG_GUARD_S)
    return TierDriver(tier, rows)


def end(driver: TierDriver) -> None:
    """End a tier."""
    assert driver.tier.shutdown(HANG_GUARD_S)


@pytest.mark.parametrize("calls", [REAL_CALLS, SystemCalls()], ids=["compiled", "stepwise"])
def test_fs_syncs_names_and_every_folder_above_them_before_it_reports(
    tmp_path: Path, syncs: Syncs, calls: SystemCalls
) -> None:
    root = tmp_path / "fs"
    driver = start_fs(root, "fdatasync", calls)
    assert driver.store([1, 2]).success
    (block, _) = root.glob("*/*/*/*.kv")
    assert set(syncs.names) == {str(folder) for folder in list(block.parents)[:5]}
    syncs.names.clear()
    assert driver.store([3]).success
    assert syncs.names == [str(block.parent)]
    syncs.names.clear()
    assert driver.store([3]).success  # held: whoever has written it
    assert sorted(syncs.names) == sorted([str(block.parent), str(max(root.glob("*/*/*/*.kv")))])
    assert driver.load_right([1, 2, 3]) == {1, 2, 3}
    end(driver)


def test_files_are_written_with_what_makes_each_write_durable(tmp_path: Path) -> None:
    flags_of: dict[str, set[int]] = {"none": set(), "fdatasync": set()}
    for durability, flags in flags_of.items():

        def note(path: str, found: int, mode: int, flags: set[int] = flags) -> int:
            if found & os.O_TMPFILE == os.O_TMPFILE:
                flags.add(found & os.O_DSYNC)
            return os.open(path, found, mode)

        driver = start_fs(tmp_path / durability, durability, SystemCalls(open=note))
        flags.clear()
        assert driver.store([1]).success
        end(driver)
    assert flags_of == {"none": {0}, "fdatasync": {os.O_DSYNC}}


def test_a_name_that_cannot_be_synced_is_no_block(tmp_path: Path, syncs: Syncs) -> None:
    root = tmp_path / "fs"
    driver = start_fs(root, "fdatasync")
    assert driver.store([1]).success
    syncs.error = OSError(errno.EIO, "Input/output error")
    result = driver.store([2])
    assert (result.success, result.is_fault) == (False, True)
    assert len(list(root.glob("*/*/*/*.kv"))) == 1
    assert not driver.store([1]).success
    syncs.error = None
    assert driver.store([1, 2]).success
    assert driver.load_right([1, 2]) == {1, 2}
    end(driver)


def test_without_it_nothing_is_synced(tmp_path: Path, syncs: Syncs) -> None:
    driver = start_fs(tmp_path / "fs", "none")
    assert driver.store([1, 2]).success
    end(driver)
    assert syncs.names == []


@pytest.mark.parametrize("durability", ["none", "fdatasync"])
@pytest.mark.parametrize("direct_io", [False, "auto"])
def test_the_slab_is_open_for_durable_writes(tmp_path: Path, durability: str, direct_io: object) -> None:
    found: set[int] = set()

    def write(fd: int, buffers: list[memoryview], offset: int) -> int:
        text = Path(f"/proc/self/fdinfo/{fd}").read_text()
        found.add(int(text.partition("flags:")[2].split()[0], 8) & os.O_DSYNC)
        return os.pwritev(fd, buffers, offset)

    rows = make_rows()
    own = {
        "path": tmp_path / "slab",
        "capacity_bytes": "8MiB",
        "durability": durability,
        "direct_io": direct_io,
    }
    driver = TierDriver(SlabTier(make_config(), rows, calls=SlabCalls(pwritev=write), **own), rows)  # type: ignore[arg-type]  # settings
    assert driver.store([1, 2]).success
    assert found == {os.O_DSYNC if durability == "fdatasync" else 0}
    assert driver.load_right([1, 2]) == {1, 2}
    end(driver)


def test_another_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="durability"):
        start_fs(tmp_path, "always")
