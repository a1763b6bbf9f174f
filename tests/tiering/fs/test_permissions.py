"""A directory that others may change, or of another user, is refused with what to do; so is a sudden shrinking."""

import os
import stat
from pathlib import Path

import pytest
from tests.tiering.fs.conftest import StartTier
from tests.tiering.fs.engine import HANG_GUARD_S, bytes_of_packs, tick
from tests.tiering.fs.slots import stored_blocks

from kvtier.errors import ConfigError
from kvtier.tiering.kit.private_folders import judge

UID, GID = 1000, 1000


def status_of(mode: int, uid: int = UID, gid: int = GID) -> os.stat_result:
    """Return what the system would say of a folder."""
    return os.stat_result((stat.S_IFDIR | mode, 1, 1, 1, uid, gid, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("status", "file_mode"),
    [
        (status_of(0o700), 0o600),
        (status_of(0o755), 0o600),
        (status_of(0o775), 0o600),  # of the engine's own group
        (status_of(0o2775, uid=0), 0o600),  # a volume of Kubernetes, with fsGroup
        (status_of(0o770, uid=2000, gid=500), 0o660),
        (status_of(0o777, uid=2000, gid=500), 0o666),
    ],
)
def test_a_directory_of_ones_own_or_one_that_is_shared_on_purpose_is_used(
    status: os.stat_result, file_mode: int
) -> None:
    assert judge(status, file_mode, UID, GID) is None


@pytest.mark.parametrize(
    ("status", "file_mode", "text"),
    [
        (status_of(0o777), 0o600, "every user may write to it (mode 0777)"),
        (status_of(0o1777), 0o660, "every user may write to it (mode 1777)"),
        (status_of(0o770, gid=500), 0o600, "group 500 may write to it"),
        (status_of(0o700, uid=2000), 0o600, "it belongs to user 2000 and this is user 1000"),
    ],
)
def test_one_that_others_may_change_is_refused(status: os.stat_result, file_mode: int, text: str) -> None:
    assert text in (judge(status, file_mode, UID, GID) or "")


def test_an_open_directory_is_refused_at_the_start(start_tier: StartTier, root: Path) -> None:
    assert start_tier().tier.shutdown(HANG_GUARD_S)
    root.chmod(0o777)
    with pytest.raises(ConfigError, match="every user may write to it") as caught:
        start_tier()
    assert caught.value.setting == "root_dir"
    root.chmod(0o700)
    assert start_tier().store([1]).success


def test_a_namespace_that_others_may_change_is_not_read(start_tier: StartTier, root: Path) -> None:
    driver = start_tier()
    assert driver.store([1]).success
    assert driver.tier.shutdown(HANG_GUARD_S)
    (pack,) = root.rglob("*.pack")
    pack.parent.chmod(0o777)
    again = start_tier()
    assert not again.lookup(1)
    assert again.tier.shutdown(HANG_GUARD_S)
    pack.parent.chmod(0o700)
    assert start_tier().load_right([1]) == {1}


def test_a_directory_that_is_opened_under_a_living_tier_is_left_alone_until_it_is_private(
    start_tier: StartTier, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = start_tier()
    assert driver.store([1]).success
    root.chmod(0o777)
    driver.tier.keeper.tick(is_due=True)  # type: ignore[attr-defined]  # a disk tier
    assert driver.load_right([1]) == set()
    assert driver.store([2]).is_fault
    root.chmod(0o700)
    driver.tier.keeper.tick(is_due=True)  # type: ignore[attr-defined]
    tick([driver])
    driver.poll_until(lambda: driver.store([2]).success)
    driver.poll_until(lambda: driver.load_right([1, 2]) == {1, 2})
    said = [record.getMessage() for record in caplog.records]
    assert ["every user may write" in line for line in said] == [True, False], said


def test_a_parent_that_everybody_may_write_to_is_fine_when_it_is_sticky(
    start_tier: StartTier, tmp_path: Path
) -> None:
    parent = tmp_path / "tmp"
    parent.mkdir()
    parent.chmod(0o1777)
    assert start_tier(root_dir=parent / "kvtier").store([1]).success


@pytest.mark.parametrize(("file_mode", "mode"), [("0600", 0o700), ("0660", 0o750)])
def test_missing_parents_are_made_private(
    start_tier: StartTier, tmp_path: Path, file_mode: str, mode: int
) -> None:
    before = os.umask(0)
    try:
        start_tier(root_dir=tmp_path / "a" / "b" / "c", file_mode=file_mode)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", tmp_path / "a" / "b")} == {mode}


@pytest.mark.parametrize(
    ("file_mode", "file_bits", "folder_bits"), [("0600", 0o600, 0o700), ("0660", 0o660, 0o770)]
)
@pytest.mark.parametrize("umask", [0, 0o77])
def test_every_file_has_the_permissions_asked_for_whatever_the_umask(
    start_tier: StartTier, root: Path, file_mode: str, file_bits: int, folder_bits: int, umask: int
) -> None:
    before = os.umask(umask)
    try:
        driver = start_tier(file_mode=file_mode)
        assert driver.store([1]).success
        tick([driver])
        paths = [root, *root.rglob("*")]
        found = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    finally:
        os.umask(before)
    assert {path.suffix for path in paths if path.is_file()} >= {".pack", ".index", ".json", ".notes"}
    assert {path: mode for path, mode in found.items() if path.is_file() and mode != file_bits} == {}
    assert {path: mode for path, mode in found.items() if path.is_dir() and mode != folder_bits} == {}


def test_a_restart_cannot_empty_a_directory_by_its_capacity_unless_it_says_so(
    start_tier: StartTier, root: Path
) -> None:
    driver = start_tier(capacity_bytes=bytes_of_packs(8))
    for number in range(32):
        assert driver.store([number]).success
    assert driver.tier.shutdown(HANG_GUARD_S)
    with pytest.raises(ConfigError, match=f"half of the {bytes_of_packs(8)} bytes") as caught:
        start_tier(capacity_bytes=bytes_of_packs(3))
    assert '"allow_shrink": true' in str(caught.value)
    assert len(stored_blocks(root)) == 32
    shrunk = start_tier(capacity_bytes=bytes_of_packs(3), allow_shrink=True)
    assert shrunk.store([100]).success


def test_a_joiner_cannot_either(start_tier: StartTier) -> None:
    driver = start_tier(capacity_bytes=bytes_of_packs(8))
    for number in range(32):
        assert driver.store([number]).success
    with pytest.raises(ConfigError, match="allow_shrink"):
        start_tier(capacity_bytes=bytes_of_packs(3))
    assert start_tier(capacity_bytes=bytes_of_packs(4)).lookup(1)
    assert driver.load_right([1]) == {1}
