"""The files of blocks: published whole or not at all, read, touched, unpublished and removed."""

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtier.tiering.fs.file_support import FileSupport
from kvtier.tiering.fs.system import (
    STOPPED,
    Buffers,
    FileStatus,
    Owner,
    SystemCalls,
    set_file_mode,
    status_of,
)
from kvtier.tiering.kit.disk import rest_of, sync_folder

TOUCH_INTERVAL_S = 60.0
"""Seconds for which a file counts as just used. Shorter writes an inode for every load of a popular block;
longer blurs the order in which blocks are evicted."""

BATCH_BYTES = 2**20
MAX_BATCH_FILES = 32
"""Files that one call moves, as many as make up a megabyte: the checksums of so much fit into a core's cache between
their computation and the copy, and the interpreter's lock is given away seldom enough."""

SHORTER = "the file ended before its length"
TAKEN_IN_PART = "the file system took only a part of the block"

UNLINKABLE = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS})
"""What file systems without hard links answer."""


NewFile = tuple[str, Buffers, str | None]
"""A file that is to appear: its name, in a folder that exists; its bytes, format 'B', contiguous, eight buffers at
most; None, or the name of a file of the same length that was unpublished and may be written over. That still has its
name when this fails, and when the other name was taken."""

OldFile = tuple[str, Buffers]
"""A file that is to be read: its name, and where its beginning goes, format 'B', contiguous and writable, eight buffers
at most."""


class BlockFiles:
    """The files of a directory; immutable, so any thread may use it.

    Args:
        support: what the file system can do.
        temporary_path: folder for files that are being written under a name.
        owner: this process.
        file_mode: permissions of files; folders get search permission where files may be read.
        calls: the system.
        wall_clock: seconds since 1970.
        keeps_modified: whether a use changes the time of access alone, so that the other stays that of the store.

    Attributes:
        is_durable: whether what is published outlives a loss of power.
    """

    def __init__(
        self,
        support: FileSupport,
        temporary_path: Path,
        owner: Owner,
        file_mode: int,
        calls: SystemCalls,
        wall_clock: Callable[[], float],
        *,
        keeps_modified: bool = False,
    ) -> None:
        self._keeps_modified = keeps_modified
        self._flags = support.flags
        self._write_flags = support.write_flags
        self.is_durable = support.is_durable
        self._has_unnamed_files = support.has_unnamed_files
        self._temporary_path = temporary_path
        self._owner = owner
        self._file_mode = file_mode
        self._calls = calls
        self._wall_clock = wall_clock

    def publish(self, files: Sequence[NewFile]) -> list[bool | OSError]:
        """Make files appear under their names, each whole or not at all.

        Returns:
            For each True, or False when the name was taken; nothing has changed then. Or what the system refused it
            with, for want of room or of a folder for example: an error that names the file, and nothing new is left.
        """
        whole_files = self._calls.whole_files
        answers: list[bool | OSError]
        if whole_files is None or not self._has_unnamed_files:
            answers = [self._publish_stepwise(file) for file in files]
        else:
            errors = whole_files.publish(files, self._write_flags, self._file_mode)
            answers = [
                # The name was taken with EEXIST.
                error != errno.EEXIST
                and (not error or _error_of(error, file[0], errno.ENOSPC, TAKEN_IN_PART))
                for error, file in zip(errors, files, strict=True)
            ]
        if self.is_durable:
            lost = self._find_lost([file[0] for file in files], answers)
            answers = [lost.get(file[0], answer) for file, answer in zip(files, answers, strict=True)]
        return answers

    def _find_lost(self, paths: Sequence[str], answers: Sequence[bool | OSError]) -> dict[str, OSError]:
        """Sync names, and files that were there; return what failed, and remove its name if it is a new one."""
        lost: dict[str, OSError] = {}
        folders: dict[str, list[tuple[str, bool]]] = {}
        for path, answer in zip(paths, answers, strict=True):
            if isinstance(answer, OSError):
                continue
            folders.setdefault(path.rpartition("/")[0], []).append((path, answer))
            if answer is False and not self.sync(path):
                lost[path] = OSError(errno.EIO, "the block that was there cannot be synced", path)
        for folder, inside in folders.items():
            try:
                sync_folder(folder)
            except OSError as error:
                for path, is_new in inside:
                    lost[path] = _named(error, path)
                    if is_new:
                        with suppress(OSError):
                            Path(path).unlink()
        return lost

    def sync(self, path: str) -> bool:
        """Have a file's bytes outlive a loss of power, written by any process; False when they may not."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            os.fdatasync(fd)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def read(self, files: Sequence[OldFile]) -> list[FileStatus | OSError]:
        """Fill the buffers of each file from its beginning.

        Returns:
            What each file is; it is too short for its buffers when its length says so, and then nothing is read. Or why
            the system could not read it, an error that names the file; some of the bytes may be in the buffers.
        """
        whole_files = self._calls.whole_files
        if whole_files is None:
            return [self._read_stepwise(file) for file in files]
        # In this call a use would change both times: no file is from before 1970.
        touch_before_s = 0.0 if self._keeps_modified else self._wall_clock() - TOUCH_INTERVAL_S
        found = whole_files.read(files, self._flags, touch_before_s)
        if self._keeps_modified:
            for (path, _), answer in zip(files, found, strict=True):
                if isinstance(answer, tuple):
                    self._touch_access(path)
        return [
            FileStatus(*status)
            if isinstance(status, tuple)
            else _error_of(status, file[0], errno.EIO, SHORTER)
            for file, status in zip(files, found, strict=True)
        ]

    def touch(self, path: str) -> bool:
        """Note a use of the file, once a minute at most; False when there is no such file, or it is not to last."""
        try:
            self._touch(path, Path(path).lstat().st_mtime)
            if self.is_durable:
                sync_folder(path.rpartition("/")[0])
        except OSError:
            return False
        return not self.is_durable or self.sync(path)

    def sync_folders(self, path: str, num_levels: int) -> None:
        """Have the names of the folders above a file outlive a loss of power, where that is asked for.

        Args:
            path: the file.
            num_levels: how many folders above the one that it is in.

        Raises:
            OSError: the system refused.
        """
        if self.is_durable:
            for folder in list(Path(path).parents)[1:num_levels]:
                sync_folder(str(folder))
            with suppress(PermissionError):  # the folder that the directory is in may be another user's
                sync_folder(str(Path(path).parents[num_levels]))

    def remove(self, path: str, status: FileStatus | None = None) -> int:
        """Remove a file and return its length, 0 when it was gone.

        Args:
            path: the file.
            status: remove it only when it is still this one; None removes whatever is there.

        Raises:
            OSError: the system refused.
        """
        try:
            found = status_of(Path(path).lstat())
            if status is not None and not _is_same(found, status):
                return 0
            Path(path).unlink()
        except FileNotFoundError:
            return 0
        return found.num_bytes

    def unpublish(self, path: str) -> str:
        """Give a file a temporary name instead of its own, and the time of now; return the name. Readers keep it open.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: the system refused.
        """
        temporary = str(self._new_temporary())
        os.rename(path, temporary)  # noqa: PTH104 - a third of what it takes with a Path, once for each block that leaves
        with suppress(OSError):  # another host may then take it for a dead process's, and remove it
            os.utime(temporary, follow_symlinks=False)
        return temporary

    def is_still(self, path: str, status: FileStatus) -> bool:
        """Return whether a name is still that of the file that was read."""
        try:
            return _is_same(status_of(Path(path).lstat()), status)
        except OSError:
            return False

    def is_irregular(self, path: str) -> bool:
        """Return whether a name is that of a link, a pipe, a socket, a device or a folder."""
        try:
            return not stat.S_ISREG(Path(path).lstat().st_mode)
        except OSError:
            return False

    def _read_stepwise(self, file: OldFile) -> FileStatus | OSError:
        path, buffers = file
        try:
            return self._read_opened(path, buffers)
        except OSError as error:
            return _named(error, path)

    def _read_opened(self, path: str, buffers: Buffers) -> FileStatus:
        # Without O_NONBLOCK a pipe under a block's name would keep this thread until another process writes to it.
        fd = self._calls.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | self._flags, 0)
        try:
            status = status_of(require_regular(fd))
            if status.num_bytes >= sum(map(len, buffers)):
                if not _transfer(self._calls.preadv, fd, buffers):
                    raise OSError(errno.EIO, SHORTER)
                self._touch(fd, status.modified_s)
            return status
        finally:
            with suppress(OSError):  # of a file that was only read it is of no use: its bytes are there
                os.close(fd)

    def _publish_stepwise(self, file: NewFile) -> bool | OSError:
        path, buffers, recycled_file = file
        try:
            if recycled_file is not None:
                return self._publish_over(Path(recycled_file), path, buffers)
            if self._has_unnamed_files:
                return self._publish_unnamed(path, buffers)
            return self._publish_named(path, buffers)
        except OSError as error:
            return _named(error, path)

    def _publish_unnamed(self, path: str, buffers: Buffers) -> bool:
        fd = self._open_new(path.rpartition("/")[0], os.O_TMPFILE | os.O_NOFOLLOW)
        is_linked = False
        try:
            with _closing(fd):
                self._fill(fd, buffers)
                self._calls.link(fd, path)
                is_linked = True
        except FileExistsError:
            return False
        except OSError:
            if is_linked:
                Path(path).unlink(missing_ok=True)
            raise
        return True

    def _publish_named(self, path: str, buffers: Buffers) -> bool:
        if Path(path).exists():
            return False
        _require_folder(path)
        temporary = self._new_temporary()
        try:
            return self._write_and_name(temporary, os.O_CREAT | os.O_EXCL, path, buffers)
        finally:
            temporary.unlink(missing_ok=True)

    def _publish_over(self, recycled_file: Path, path: str, buffers: Buffers) -> bool:
        if Path(path).exists():
            return False
        _require_folder(path)
        is_new = self._write_and_name(recycled_file, os.O_NOFOLLOW | os.O_NONBLOCK, path, buffers)
        if is_new:
            recycled_file.unlink(missing_ok=True)
        return is_new

    def _write_and_name(self, temporary: Path, flags: int, path: str, buffers: Buffers) -> bool:
        fd = self._open_new(str(temporary), flags)
        with _closing(fd):
            require_regular(fd)
            self._fill(fd, buffers)
        return name_file(temporary, Path(path))

    def _new_temporary(self) -> Path:
        return self._temporary_path / f"{self._owner}-{secrets.token_hex(8)}"

    def _open_new(self, path: str, flags: int) -> int:
        fd = self._calls.open(path, os.O_RDWR | flags | self._write_flags, self._file_mode)
        try:
            set_file_mode(fd, self._file_mode)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _fill(self, fd: int, buffers: Buffers) -> None:
        if not _transfer(self._calls.pwritev, fd, buffers):
            raise OSError(errno.ENOSPC, TAKEN_IN_PART)

    def _touch_access(self, file: int | str) -> None:
        try:
            status = os.fstat(file) if isinstance(file, int) else os.lstat(file)
            if self._wall_clock() - max(status.st_atime, status.st_mtime) > TOUCH_INTERVAL_S:
                times = (int(self._wall_clock() * 10**9), status.st_mtime_ns)
                if isinstance(file, int):
                    os.utime(file, ns=times)
                else:
                    os.utime(file, ns=times, follow_symlinks=False)
        except OSError:
            return  # as below

    def _touch(self, file: int | str, modified_s: float) -> None:
        if self._keeps_modified:
            self._touch_access(file)
            return
        if self._wall_clock() - modified_s <= TOUCH_INTERVAL_S:
            return
        try:
            if isinstance(file, int):
                os.utime(file)
            else:
                os.utime(file, follow_symlinks=False)
        except OSError:
            return  # another user's, or a disk that takes no change: the bytes are right all the same


def plan_batch_files(block_bytes: int) -> int:
    """Return how many files of such blocks are moved by one call, at least one. Pure."""
    return max(1, min(MAX_BATCH_FILES, BATCH_BYTES // max(1, block_bytes)))


@contextmanager
def _closing(fd: int) -> Iterator[None]:
    """Close a file that is written in between; an error of that counts unless there was one before.

    Some file systems report only when a file is closed that they could not keep what was written.
    """
    try:
        yield
    except BaseException:
        with suppress(OSError):
            os.close(fd)
        raise
    with suppress(InterruptedError):  # Linux has closed it all the same
        os.close(fd)


def require_regular(fd: int) -> os.stat_result:
    """Return the status of an open file.

    Raises:
        OSError: it is a pipe, a socket, a device or a folder.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return status


def _error_of(error: int, path: str, number_if_stopped: int, reason_if_stopped: str) -> OSError:
    if error == STOPPED:
        return OSError(number_if_stopped, reason_if_stopped, path)
    return OSError(error, os.strerror(error), path)


def _named(error: OSError, path: str) -> OSError:
    return OSError(error.errno, error.strerror, path)


def _is_same(found: FileStatus, status: FileStatus) -> bool:
    return (found.device, found.inode) == (status.device, status.inode)


def _require_folder(path: str) -> None:
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no folder for the block", path)


def name_file(temporary: Path, path: Path) -> bool:
    """Give a file that is whole its name; False when another has it.

    Raises:
        OSError: the system refused.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in UNLINKABLE:
            raise
        # Without hard links the name is taken over, at worst from an equal file that came meanwhile.
        temporary.rename(path)
    return True


def _transfer(call: Callable[[int, Buffers, int], int], fd: int, buffers: Buffers) -> bool:
    """Read or write all of ``buffers``, in one call unless the system stops early; False at its end."""
    total = sum(map(len, buffers))
    done = call(fd, buffers, 0)
    while 0 < done < total:
        more = call(fd, rest_of(buffers, done), done)
        if more == 0:
            return False
        done += more
    return done == total
