"""What the tier needs of the operating system: the calls that move a block, and which process owns a file.

The calls that publish and read a block are values that a test can replace by failing ones. Other calls of the tier are
not here: tests plant no fault in them.

The owner of a temporary file or of a reservation is a process, named by its host, its id and its start time, so that a
process which got a dead one's id is not mistaken for it. The host is a boot of a kernel and a process-id namespace:
process ids of another container mean nothing here, although its boot id is ours.
"""

import hashlib
import os
import re
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from kvtier.compiled import report_import_error

try:
    from kvtier.tiering.fs import _whole_files
except ImportError as error:  # installed where nothing could be compiled, as a rule
    _whole_files = None  # type: ignore[assignment]  # mypy knows modules, not their absence
    report_import_error("kvtier.tiering.fs._whole_files", error)

Buffers = Sequence[memoryview]

STOPPED = -1
"""Stands where compiled calls give the number of an error: the system moved no more, and called that none."""

PRIVATE_MODE = 0o600
"""Permissions that no usual umask changes."""

FOREIGN_OWNER_TIMEOUT_S = 3600.0
"""Seconds without a sign of life after which an owner on another host counts as dead. Shorter would take a
file from a stalled writer on a network file system; longer keeps the room of crashed ones."""

_NAME = re.compile(r"([0-9a-f]{16})-([0-9]{1,10})-([0-9]{1,19})")
_STARTTIME_FIELD = 19
"""Index of the start time behind the command's closing parenthesis. Source: proc_pid_stat(5), field 22."""


class Owner(NamedTuple):
    """A process, unmistakable among processes that share a directory.

    Attributes:
        host: 16 hex digits for this boot and process-id namespace.
        pid: its process id.
        start_ticks: its start time in clock ticks since boot.
    """

    host: str
    pid: int
    start_ticks: int

    def __str__(self) -> str:
        return f"{self.host}-{self.pid}-{self.start_ticks}"

    def is_dead(self, here: "Owner", silent_s: float) -> bool:
        """Return whether the process has certainly, or from another host presumably, ended.

        Args:
            here: any process of this host.
            silent_s: seconds since the owner's last sign of life; one far in the future, or at no time, is none.
        """
        if self.host != here.host:
            return not abs(silent_s) <= FOREIGN_OWNER_TIMEOUT_S
        return _start_ticks(self.pid) != self.start_ticks


def set_file_mode(fd: int, file_mode: int) -> None:
    """Give a file that this user made the permissions that sharing needs and a umask took away."""
    if file_mode != PRIVATE_MODE and stat.S_IMODE(os.fstat(fd).st_mode) != file_mode:
        # Another user's file was set when that user made it; a file system without modes needs none.
        with suppress(OSError):
            os.fchmod(fd, file_mode)


def link_open_file(fd: int, path: str) -> None:
    """Give the open file ``fd`` the name ``path``.

    Raises:
        FileExistsError: the name is taken.
    """
    # An absolute path makes src_dir_fd meaningless to the kernel, but without it Python 3.11 calls link(2),
    # which links the symbolic link in /proc itself and fails, instead of linkat(2), which follows it.
    os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)


class FileStatus(NamedTuple):
    """What a file is.

    Attributes:
        num_bytes: its length.
        device: of its file system.
        inode: its number there.
        modified_s: seconds since 1970.
    """

    num_bytes: int
    device: int
    inode: int
    modified_s: float


def status_of(found: os.stat_result) -> FileStatus:
    """Return what the system said of a file. Pure."""
    return FileStatus(found.st_size, found.st_dev, found.st_ino, found.st_mtime)


class WholeFileCalls(Protocol):
    """Some files written or read with one call, for which the interpreter's lock is released once.

    ``flags`` are more flags for ``open``, ``mode`` the permissions of new files; at most eight buffers a file.
    """

    def publish(
        self, files: Sequence[tuple[str, Buffers, str | None]], flags: int, mode: int, /
    ) -> list[int]:
        """Write files, each without a name and then linked, or over a recycled one.

        Args:
            files: the name, the bytes, the recycled file or None of each.
            flags: see above.
            mode: likewise.

        Returns:
            For each 0, the number of an error, which is EEXIST where the name was taken, or ``STOPPED``.
        """

    def read(
        self, files: Sequence[tuple[str, Buffers]], flags: int, touch_before_s: float, /
    ) -> list[tuple[int, int, int, float] | int]:
        """Fill buffers from the beginning of each file unless it is shorter, and note its use.

        Args:
            files: the name of each, and where its bytes go.
            flags: see above.
            touch_before_s: files that were read and are older get the time of now, where the system allows it;
                seconds since 1970.

        Returns:
            The fields of each file's status, or the number of an error, or ``STOPPED``.
        """


@dataclass(frozen=True, slots=True)
class SystemCalls:
    """What the kernel does with a block.

    Attributes:
        open: path, flags, mode -> file descriptor.
        pwritev: file descriptor, buffers, offset -> bytes written.
        preadv: file descriptor, buffers, offset -> bytes read.
        link: name an open file that has no name.
        whole_files: does what takes several of them; None has each made by itself.
    """

    open: Callable[[str, int, int], int] = os.open
    pwritev: Callable[[int, Buffers, int], int] = os.pwritev
    preadv: Callable[[int, Buffers, int], int] = os.preadv
    link: Callable[[int, str], None] = link_open_file
    whole_files: WholeFileCalls | None = None


REAL_CALLS = SystemCalls(whole_files=_whole_files)


def current_owner() -> Owner:
    """Return the calling process."""
    pid = os.getpid()
    return Owner(_host(), pid, _start_ticks(pid) or 0)


def parse_owner(text: str) -> Owner | None:
    """Return the owner that ``text`` begins with, None when it names none. Pure."""
    found = _NAME.match(text)
    return Owner(found[1], int(found[2]), int(found[3])) if found else None


def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        namespace = str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        boot, namespace = os.uname().nodename, ""
    return hashlib.sha256(f"{boot}{namespace}".encode()).hexdigest()[:16]


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, None when there is none or only a zombie is left of it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[_STARTTIME_FIELD])
