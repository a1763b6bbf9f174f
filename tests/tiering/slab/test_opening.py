"""A slab is made, kept, emptied or refused; whatever is not ours stays as it is."""

import errno
import fcntl
import hashlib
import logging
import os
import stat
from pathlib import Path

import pytest
from tests.tiering.slab.conftest import StartTier, capacity_of, end
from tests.tiering.slab.test_tier_suite import refuse_direct_io

from kvtier.errors import ConfigError, TierError
from kvtier.testing.tier_suite import ROW_BYTES, TierDriver, make_config, make_rows
from kvtier.tiering.slab import SlabTier
from kvtier.tiering.slab.slab_file import Buffers, SystemCalls
from kvtier.tiering.slab.superblock import MAGIC, SlabGeometry, pack_superblock


def open_fds(path: Path) -> int:
    """Return how many descriptors of this process are open on ``path``."""
    links = list(Path("/proc/self/fd").iterdir())
    return sum(link.is_symlink() and link.readlink() == path for link in links)


def test_a_new_file_has_its_whole_length_reserved_and_is_private(start_tier: StartTier, path: Path) -> None:
    start_tier()
    status = path.stat()
    assert status.st_size == capacity_of(64)
    assert status.st_blocks * 512 >= capacity_of(64)
    assert stat.S_IMODE(status.st_mode) == 0o600


def test_a_file_that_others_may_read_becomes_private(start_tier: StartTier, path: Path) -> None:
    path.touch(0o644)
    start_tier()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_second_owner_is_refused_and_the_first_goes_on(start_tier: StartTier, path: Path) -> None:
    driver = start_tier()
    driver.store([1])
    for _ in range(2):
        with pytest.raises(TierError, match=f"{path} belongs to an engine that is running"):
            start_tier()
    assert driver.load([1]).success
    assert open_fds(path) == 1


def test_the_file_is_free_after_shutdown(start_tier: StartTier, path: Path) -> None:
    end(start_tier())
    assert open_fds(path) == 0
    assert start_tier().store([1]).success


@pytest.mark.parametrize("content", [b"a letter to a friend", b"\0" * 100_000, MAGIC[:-1] + b"x" * 10_000])
def test_a_file_of_somebody_else_is_refused_and_not_touched(
    start_tier: StartTier, path: Path, content: bytes
) -> None:
    path.write_bytes(content)
    path.chmod(0o644)
    before = path.stat()
    with pytest.raises(ConfigError, match="holds something else and was left as it is"):
        start_tier()
    after = path.stat()
    assert path.read_bytes() == content
    assert (after.st_mtime_ns, after.st_mode) == (before.st_mtime_ns, before.st_mode)
    assert open_fds(path) == 0


@pytest.mark.parametrize("change", ["larger capacity", "smaller capacity", "rows", "version"])
def test_a_slab_of_another_geometry_is_emptied_with_one_line(
    start_tier: StartTier, path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    driver = start_tier()
    driver.store([1, 2])
    end(driver)
    options: dict[str, object] = {}
    if change == "larger capacity":
        options["capacity_bytes"] = capacity_of(65)
    elif change == "smaller capacity":
        options |= {"capacity_bytes": capacity_of(32), "allow_shrink": True}
    else:
        geometry = SlabGeometry(4096 if change == "rows" else ROW_BYTES, 64)
        page = pack_superblock(geometry)
        if change == "version":
            fields = page[: len(MAGIC)] + bytes([9]) + page[len(MAGIC) + 1 : -16]
            page = fields + hashlib.blake2b(fields, digest_size=16).digest()
        with path.open("r+b") as file:
            file.write(page)
        os.truncate(path, capacity_of(64) - 4096)
    with caplog.at_level(logging.WARNING, "kvtier"):
        driver = start_tier(**options)
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert f"{path} was made for other rows" in caplog.text
    assert driver.tier.stats()["indexed_blocks"] == 0
    assert not driver.load([1]).success
    assert driver.store([1]).success


@pytest.mark.parametrize("capacity_bytes", [capacity_of(63), capacity_of(1)])
def test_a_capacity_below_what_is_there_is_refused_and_the_blocks_stay(
    start_tier: StartTier, path: Path, capacity_bytes: int
) -> None:
    driver = start_tier()
    driver.store([1, 2])
    end(driver)
    with pytest.raises(ConfigError, match=f"the {capacity_of(64)} bytes of the slab that is there") as caught:
        start_tier(capacity_bytes=capacity_bytes)
    assert caught.value.setting == "capacity_bytes"
    assert '"allow_shrink": true' in str(caught.value)
    (finding,) = SlabTier.probe({"path": str(path), "capacity_bytes": capacity_bytes})
    assert not finding.is_good
    assert '"allow_shrink": true' in finding.text
    assert open_fds(path) == 0
    assert start_tier().load_right([1, 2]) == {1, 2}


def test_an_engine_with_other_rows_may_use_as_much_and_no_less(start_tier: StartTier, path: Path) -> None:
    end(start_tier())
    with pytest.raises(ConfigError, match="whose blocks would be lost"):
        start_tier(row_bytes=2 * ROW_BYTES, capacity_bytes=capacity_of(40))
    assert start_tier(row_bytes=2 * ROW_BYTES).store([1]).success


def test_a_joiner_with_a_small_capacity_is_refused_by_the_lock(start_tier: StartTier, path: Path) -> None:
    driver = start_tier()
    driver.store([1])
    with pytest.raises(TierError, match="belongs to an engine that is running"):
        start_tier(capacity_bytes=capacity_of(2), allow_shrink=True)
    assert driver.load_right([1]) == {1}


def test_a_slab_whose_room_was_not_all_reserved_gets_the_rest(start_tier: StartTier, path: Path) -> None:
    driver = start_tier()
    driver.store([1, 2])
    end(driver)
    os.truncate(path, capacity_of(1))
    driver = start_tier()
    assert path.stat().st_size == capacity_of(64)
    assert path.stat().st_blocks * 512 >= capacity_of(64)
    assert driver.load([1]).success
    assert not driver.lookup(2)


def full_disk(fd: int, offset: int, length: int) -> None:
    """Refuse to reserve room."""
    raise OSError(errno.ENOSPC, "No namespace left on device")


def test_a_disk_without_room_is_refused_and_nothing_is_left(start_tier: StartTier, path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{path} needs {capacity_of(64)} bytes on its disk") as caught:
        start_tier(calls=SystemCalls(allocate=full_disk))
    assert caught.value.setting == "capacity_bytes"
    assert not path.exists()


def test_a_capacity_beyond_the_disk_is_refused_and_a_slab_keeps_its_blocks(
    start_tier: StartTier, path: Path
) -> None:
    driver = start_tier()
    driver.store([1])
    end(driver)
    with pytest.raises(ConfigError, match="free some or give less"):
        start_tier(capacity_bytes="4000TB")
    assert start_tier().load([1]).success


def test_a_folder_that_is_missing_is_an_error_with_a_remedy(start_tier: StartTier, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in a folder that exists"):
        start_tier(path=tmp_path / "missing" / "slab")


def test_a_folder_a_link_and_a_pipe_are_refused(start_tier: StartTier, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="path="):
        start_tier(path=tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="path="):
        start_tier(path=tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        start_tier(path=tmp_path / "pipe")
    assert not (tmp_path / "target").exists()


def test_direct_io_that_is_insisted_on_and_refused_is_an_error(start_tier: StartTier, path: Path) -> None:
    with pytest.raises(ConfigError, match='say "auto"'):
        start_tier(direct_io=True, calls=SystemCalls(set_flags=refuse_direct_io))
    assert not path.exists()


def refuse_direct_write(fd: int, buffers: Buffers, offset: int) -> int:
    """Write like a file system that takes the flag and not the write."""
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return os.pwritev(fd, buffers, offset)


@pytest.mark.parametrize(
    "calls", [SystemCalls(set_flags=refuse_direct_io), SystemCalls(pwritev=refuse_direct_write)]
)
def test_without_direct_io_the_tier_says_so_once_and_works(
    start_tier: StartTier, caplog: pytest.LogCaptureFixture, calls: SystemCalls
) -> None:
    with caplog.at_level(logging.INFO, "kvtier"):
        driver = start_tier(calls=calls)
        driver.store([1, 2])
        assert driver.load([1, 2]).success
    assert len([record for record in caplog.records if "no direct I/O" in record.message]) == 1


def test_rows_that_direct_io_cannot_take_go_through_the_page_cache(path: Path) -> None:
    rows = make_rows(16, 1000)
    options = {"path": path, "capacity_bytes": "1MiB"}
    with pytest.raises(ConfigError, match="not multiples of 4096"):
        SlabTier(make_config(row_bytes=1000), rows, direct_io=True, **options)  # type: ignore[arg-type]
    driver = TierDriver(SlabTier(make_config(row_bytes=1000), rows, **options), rows)  # type: ignore[arg-type]
    assert driver.store([1, 2, 3]).success
    assert driver.load([1, 2, 3]).success
    end(driver)
