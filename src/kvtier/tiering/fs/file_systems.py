"""What packs need of a file system: locks that exclude, room that can be reserved, and a page cache of one host alone.

Found out by trying once, when the tier is built, but for the page cache: there is a list of file systems that other
hosts may have mounted.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path

from kvtier.errors import PlaceError
from kvtier.tiering.fs.system_calls import NOT_SUPPORTED, SystemCalls, open_regular
from kvtier.tiering.kit.backend import allocate_page
from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES

SETTING = "root_dir"
REMEDY = "give a directory on a local disk, ext4 or xfs for example"

SHARED_FILE_SYSTEMS = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
        "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs", "wekafs",
        "fuse.alluxio-fuse", "fuse.blobfuse2", "fuse.ceph", "fuse.ceph-fuse", "fuse.curvefs", "fuse.cvmfs2",
        "fuse.dfuse", "fuse.gcsfuse", "fuse.glusterfs", "fuse.goofys", "fuse.juicefs", "fuse.mfs", "fuse.moosefs",
        "fuse.mount-s3", "fuse.mountpoint-s3", "fuse.rclone", "fuse.s3fs", "fuse.seaweedfs", "fuse.sshfs",
    }
)  # fmt: skip
"""File systems that other hosts may have mounted: there a lock may be the host's own, and a page cache is out of date
for seconds. A FUSE daemon for a local disk and an overlay are not among them."""


def require_unshared(root: Path, calls: SystemCalls) -> None:
    """Refuse a directory that other hosts may have mounted; it need not exist.

    Raises:
        PlaceError: they may.
    """
    kind = calls.file_system(str(root))
    if kind in SHARED_FILE_SYSTEMS:
        raise refusal(
            root,
            f"is on {kind}, which other hosts may have mounted, too: packs need locks and a page cache that are this "
            f'host\'s alone. Use {{"type": "obj", "url": "file://{root}"}} there',
        )


def try_file_system(path: Path, file_mode: int, calls: SystemCalls) -> bool:
    """Find out whether packs can be kept here; return whether they may bypass the page cache.

    Args:
        path: a name in the directory that is this process's, for a moment.
        file_mode: permissions of the file that is tried.
        calls: the system.

    Raises:
        PlaceError: they cannot; the message names the file system.
        OSError: no file can be made.
    """
    with suppress(FileNotFoundError):
        calls.unlink(str(path))
    fds = [open_regular(calls, path, os.O_RDWR | os.O_CREAT | os.O_EXCL, file_mode)]
    try:
        # It needs the name no more: a process that removes what dead ones left may take it.
        with suppress(FileNotFoundError):
            calls.unlink(str(path))
        unnamed = f"/proc/self/fd/{fds[0]}"
        fds.append(calls.open(unnamed, os.O_RDWR | os.O_CLOEXEC, 0))
        lack = _find_lack(fds, calls)
        if lack is not None:
            kind = calls.file_system(str(path.parent)) or "a file system"
            raise refusal(path.parent, f"is on {kind}, which {lack}: {REMEDY}")
        return _can_bypass_cache(unnamed, calls)
    finally:
        for fd in fds:
            with suppress(OSError):  # Linux closes it whatever it says
                os.close(fd)


def refusal(root: Path, remedy: str) -> PlaceError:
    """Return the error that a directory cannot be used."""
    return PlaceError(SETTING, str(root), remedy)


def _find_lack(fds: list[int], calls: SystemCalls) -> str | None:
    """Return what the file system of a file that is open twice cannot do, None where it can do all."""
    try:
        if not calls.try_lock(fds[0]) or calls.try_lock(fds[1]):
            return "has locks that do not exclude"
    except OSError as error:
        return f"has no locks ({error.strerror})"
    try:
        calls.fallocate(fds[0], 0, 0, HEADER_PAGE_BYTES)
    except OSError as error:
        if error.errno in NOT_SUPPORTED:
            return f"reserves no room ({error.strerror})"
        if error.errno != errno.ENOSPC:  # a full disk is one that the tier can start on
            raise
    return None


def _can_bypass_cache(path: str, calls: SystemCalls) -> bool:
    page = allocate_page()
    with suppress(OSError):
        fd = calls.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0)
        try:
            return calls.pwritev(fd, [page], 0) == calls.preadv(fd, [page], 0) == len(page)
        finally:
            os.close(fd)
    return False
