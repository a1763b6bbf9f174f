"""A directory that others may change, or of another user, is refused with what to do; so is a sudden shrinking."""

import os
import stat
from pathlib import Path

import pytest
from tests.tiering.fs.conftest import HANG_GUARD_S, StartTier
from tests.tiering.fs.peer import Peer

from kvtier.errors import ConfigError
from kvtier.testing.tier_suite import ROW_BYTES
from kvtier.tiering.fs.place import probe_fs_place
from kvtier.tiering.kit.private_folders import judge

BLOCK_BYTES = ROW_BYTES + 4096
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


@pytest.mark.parametrize("folder", ["", "tmp"])
def test_an_open_directory_is_refused_at_the_start_and_doctor_names_it(
    start_tier: StartTier, root: Path, folder: str
) -> None:
    assert start_tier().tier.shutdown(HANG_GUARD_S)
    (root / folder).chmod(0o777)
    with pytest.raises(ConfigError, match="every user may write to it") as caught:
        start_tier()
    assert caught.value.setting == "root_dir"
    if not folder:
        (finding,) = probe_fs_place({"root_dir": str(root), "capacity_bytes": "1MiB"})
        assert not finding.is_good
        assert "every user may write" in finding.text
    (root / folder).chmod(0o700)
    assert start_tier().store([1]).success


def test_doctor_names_a_namespace_that_is_a_link(start_tier: StartTier, root: Path, tmp_path: Path) -> None:
    start_tier()
    (root / ("a" * 32)).symlink_to(tmp_path)
    (finding,) = probe_fs_place({"root_dir": str(root), "capacity_bytes": "4MiB"})
    assert (finding.is_good, "symbolic link" in finding.text) == (False, True)


def test_a_directory_that_is_opened_under_a_living_tier_is_left_alone_until_it_is_private(
    start_tier: StartTier, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = start_tier(negative_ttl_s=0.0)
    driver.store([1])
    root.chmod(0o777)
    driver.poll_until(lambda: not driver.lookup(1) or not driver.load([1]).success)
    assert driver.store([2]).is_fault
    root.chmod(0o700)
    driver.poll_until(lambda: driver.store([2]).success)
    driver.poll_until(lambda: driver.load_right([1, 2]) == {1, 2})
    assert ["every user may write" in record.message for record in caplog.records] == [True, False]


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


def test_a_joiner_cannot_empty_a_directory_by_its_capacity(start_tier: StartTier, root: Path) -> None:
    driver = start_tier(capacity_bytes=100 * BLOCK_BYTES)
    with pytest.raises(
        ConfigError, match=f"half of the {100 * BLOCK_BYTES} bytes that other engines"
    ) as caught:
        start_tier(capacity_bytes=49 * BLOCK_BYTES)
    assert '"allow_shrink": true' in str(caught.value)
    findings = probe_fs_place({"root_dir": str(root), "capacity_bytes": 49 * BLOCK_BYTES})
    assert [finding.is_good for finding in findings] == [True, False]
    assert start_tier(capacity_bytes=50 * BLOCK_BYTES).store([1]).success
    assert driver.load_right([1]) == {1}


def test_a_restart_cannot_either_unless_it_says_so(
    start_tier: StartTier, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = start_tier(capacity_bytes=20 * BLOCK_BYTES)
    driver.store(list(range(10)))
    assert driver.tier.shutdown(HANG_GUARD_S)
    with pytest.raises(ConfigError, match=f"half of the {10 * BLOCK_BYTES} bytes that it holds"):
        start_tier(capacity_bytes=4 * BLOCK_BYTES)
    assert len(list(root.rglob("*.kv"))) == 10
    shrunk = start_tier(capacity_bytes=4 * BLOCK_BYTES, allow_shrink=True)
    assert shrunk.store([20]).success
    assert len(list(root.rglob("*.kv"))) == 4
    (line,) = [record.message for record in caplog.records]
    assert line.startswith(
        f"tier fs: {root} holds {10 * BLOCK_BYTES} bytes and capacity_bytes is {4 * BLOCK_BYTES}"
    )


def test_what_a_killed_engine_had_in_flight_is_not_held(start_tier: StartTier, root: Path) -> None:
    peer = Peer(root, 1000 * BLOCK_BYTES)
    peer.kill()
    assert start_tier(capacity_bytes=4 * BLOCK_BYTES).store([1]).success
