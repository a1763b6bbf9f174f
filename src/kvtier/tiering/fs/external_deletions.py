"""What the tier does about folders that another program deletes, moves or replaces under it.

Every call of the tier names a path, so after ``rm -rf`` it would work in other folders than it knows blocks of. A
folder is the same as long as its path leads to the inode that was found there before.

What was known of deleted blocks is forgotten, and the evictor counts and indexes what is left. One line in the log says
so, not one for each block. A tier that has nothing to store waits until nothing more is deleted, and does not make the
directory again: an ``rm -rf`` must not find new files where it has deleted the old.
"""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvtier.tiering.fs.directory import FSDirectory
from kvtier.tiering.fs.folders import FOLDER_PATTERNS, TEMPORARY_NAME, USAGE_NAME, FSNamespace, make_root
from kvtier.tiering.fs.permissions import find_link
from kvtier.tiering.fs.recycled_files import RecycledFiles

logger = logging.getLogger(__name__)

LOG_AGAIN_S = 60.0
"""Seconds for which further deletions are not logged: to delete a large directory takes long. Zero logs each of them;
longer hides that a program deletes files again and again."""


def forget_missing(namespace: FSNamespace, prefix: bytes = b"") -> int:
    """Forget the blocks whose names begin with ``prefix`` and whose files are gone; return their number. Blocks.

    What was stored since the removal stays. So the files are looked at last: whatever is stored after that look is
    added by its own store. A file behind a link is gone: nothing reads it there.
    """
    known = namespace.index.find_prefix(prefix, namespace.format.name)
    namespace.index.forget(known)
    there = [
        key
        for key in known
        if find_link(namespace, key) is None and os.access(namespace.block_path(key), os.F_OK)
    ]
    namespace.index.add(there)
    return len(known) - len(there)


class ExternalDeletions:
    """Deletions by other programs that were seen, and whether a recount is due for one.

    Mutable for several threads are the number of deletions, whether a recount is due and when the last was logged;
    ``_lock`` guards them. The watch belongs to the evictor's thread.

    Args:
        directory: what is watched.
        current_namespace: returns the namespace of the tier's present jobs.
        recycled: files that may have been deleted too.

    Attributes:
        num_seen: how many have been seen; any thread may read it.
        is_recount_due: whether what is in the directory has to be counted and indexed; likewise.
        refusal: why the directory must not be used now, None where it may; likewise.
    """

    def __init__(
        self, directory: FSDirectory, current_namespace: Callable[[], FSNamespace], recycled: RecycledFiles
    ) -> None:
        self._directory = directory
        self._current_namespace = current_namespace
        self._recycled = recycled
        self._watch = FolderWatch(directory.root)
        self._lock = threading.Lock()
        self.num_seen = 0
        self.is_recount_due = False
        self._logged_s: float | None = None
        self.refusal: str | None = None

    @property
    def has_root(self) -> bool:
        """Whether the directory is there and may be used."""
        return self._directory.root.is_dir() and self._directory.find_refusal() is None

    def on_deleted(self, path: str | None) -> None:
        """Record that another program has deleted ``path``; None needs no line in the log. Thread: any."""
        now_s = self._directory.clock()
        if path is not None and self._directory.find_refusal() is not None:
            path = None  # nothing was deleted: the directory as a whole is away, which the next check says
        with self._lock:
            self.num_seen += 1
            self.is_recount_due = True
            is_recent = self._logged_s is not None and now_s - self._logged_s < LOG_AGAIN_S
            if path is None or is_recent:
                return
            self._logged_s = now_s
        logger.warning(
            "tier fs: %s was deleted by another program: its blocks are misses, new ones are stored as before",
            path,
        )

    def request_recount(self) -> None:
        """Have what is in the directory counted once more. Thread: any."""
        with self._lock:
            self.is_recount_due = True

    def claim_recount(self) -> bool:
        """Return whether a recount is due, which the caller makes now. Thread: the evictor's."""
        with self._lock:
            is_due, self.is_recount_due = self.is_recount_due, False
        return is_due

    def begin(self) -> None:
        """Note which folders are there, for ``check`` to miss. Thread: the evictor's; blocks."""
        self._watch.find_deleted(self._current_namespace().path, has_blocks=False)

    def check(self) -> bool:
        """Find what has been deleted since the last check, and forget it; return whether there was anything.

        Thread: the evictor's; blocks.
        """
        namespace = self._current_namespace()
        if self._is_unusable(namespace):
            return False
        namespace.unlinked_folders.clear()  # a link may have taken a folder's place: the next store looks again
        deleted = self._watch.find_deleted(namespace.path, has_blocks=len(namespace.index) > 0)
        if not deleted.is_count_wrong:
            return False
        if deleted.has_namespace:
            forget_missing(namespace)
            namespace.forget_folders()
        self._recycled.drop_missing()
        self.on_deleted(deleted.paths[0] if deleted.paths else None)
        return True

    def restore_root(self) -> bool:
        """Make the directory again if it is gone; False when that is impossible. Thread: the evictor's; blocks."""
        if self.has_root:
            return True
        directory = self._directory
        if directory.find_refusal() is not None:
            return False
        try:
            make_root(directory.root, directory.file_mode)
            next(directory.root.iterdir())
        except OSError as error:
            directory.outage.on_failure("root", f"it is gone and cannot be made again: {error}")
            return False
        directory.outage.on_success("root")
        return True

    def close(self) -> None:
        """End the watch; idempotent."""
        self._watch.close()

    def _is_unusable(self, namespace: FSNamespace) -> bool:
        """Return whether the directory must not be used; forget what was in it, and look anew when it may be again."""
        directory = self._directory
        refusal = directory.find_refusal()
        if refusal is not None:
            if self.refusal is None:
                self._watch.close()  # an open folder would keep a file system busy that is to be mounted again
                namespace.index.forget_prefix()
                namespace.forget_folders()
                self._recycled.drop_missing()
            self.refusal = refusal
            directory.outage.on_failure("place", refusal)
            return True
        if self.refusal is not None:
            self.refusal = None
            directory.outage.on_success("place")
            with self._lock:
                self.num_seen += 1
                self.is_recount_due = True
        return False


class Deleted(NamedTuple):
    """What another program has deleted.

    Attributes:
        paths: what was known to be in use, outermost first.
        has_namespace: whether blocks of the current namespace are among it.
        is_count_wrong: whether a recount is needed.
    """

    paths: list[str]
    has_namespace: bool
    is_count_wrong: bool


class FolderWatch:
    """The folders of a tier: its directory, that of temporary files, those of namespaces; and the usage record.

    Used by one thread.

    Args:
        root: the directory.
    """

    def __init__(self, root: Path) -> None:
        self._root_path = root
        self._root = WatchedFolder(str(root), follows_links=True)
        self._temporaries = WatchedFolder(str(root / TEMPORARY_NAME))
        self._namespace: WatchedFolder | None = None
        self._usage_path = str(root / USAGE_NAME)
        self._root_mtime_ns: int | None = None
        self._namespace_names: frozenset[str] = frozenset()

    def find_deleted(self, namespace_path: str, *, has_blocks: bool) -> Deleted:
        """Return what has been deleted since the last call.

        Args:
            namespace_path: the folder of the current namespace.
            has_blocks: whether blocks of it are known, so that its folder must be there.
        """
        if self._namespace is None or self._namespace.path != namespace_path:
            if self._namespace is not None:
                self._namespace.close()
            self._namespace = WatchedFolder(namespace_path)
        is_root_deleted = self._root.find_deletion()
        paths = [self._root.path] if is_root_deleted else []
        if self._temporaries.find_deletion():
            paths.append(self._temporaries.path)
        is_namespace_deleted = self._namespace.find_deletion(must_exist=has_blocks)
        if is_namespace_deleted and has_blocks:
            paths.append(namespace_path)
        if self._root_path.is_dir() and not os.path.lexists(self._usage_path):
            paths.append(self._usage_path)
        # Of another namespace only the bytes are missing; and another process may have deleted it because it was empty.
        is_count_wrong = self._has_lost_namespace() or is_namespace_deleted or bool(paths)
        return Deleted(paths, is_root_deleted or is_namespace_deleted, is_count_wrong)

    def close(self) -> None:
        """Close every folder; idempotent."""
        for folder in (self._root, self._temporaries, self._namespace):
            if folder is not None:
                folder.close()

    def _has_lost_namespace(self) -> bool:
        """Return whether any namespace's folder has gone; lists the directory only when that has changed."""
        try:
            mtime_ns = self._root_path.stat().st_mtime_ns
            if mtime_ns == self._root_mtime_ns:
                return False
            names = frozenset(path.name for path in self._root_path.iterdir())
        except OSError:
            return False  # gone, which find_deleted sees, or the disk does not answer
        self._root_mtime_ns = mtime_ns
        names = frozenset(name for name in names if FOLDER_PATTERNS[0].fullmatch(name))
        before, self._namespace_names = self._namespace_names, names
        return not before <= names


class WatchedFolder:
    """One folder, and whether it is still the one that was there.

    It keeps the folder's inode open: the file system gives its number to no other folder meanwhile.

    Args:
        path: the folder; it need not exist yet.
        follows_links: whether it may be a symbolic link to a folder, as its operator's choice; no other may.
    """

    def __init__(self, path: str, *, follows_links: bool = False) -> None:
        self.path = path
        self._follows = follows_links
        self._fd: int | None = None

    def find_deletion(self, *, must_exist: bool = False) -> bool:
        """Return whether the folder has gone, or has become another one, since the last call.

        Args:
            must_exist: whether it counts as gone when it is missing and was never seen.
        """
        try:
            found = os.stat(self.path, follow_symlinks=self._follows)  # noqa: PTH116 - once a second, beside others
        except (FileNotFoundError, NotADirectoryError):
            found = None
        except OSError:
            return False  # the disk does not answer: what is there may be the same
        if self._fd is None:
            self._open()
            # It cannot be opened either where a link has taken its place.
            return must_exist and (found is None or self._fd is None)
        if found is not None and os.path.samestat(found, os.fstat(self._fd)):
            return False
        self.close()
        self._open()
        return True

    def close(self) -> None:
        """Close the folder; idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> None:
        with suppress(OSError):
            no_follow = 0 if self._follows else os.O_NOFOLLOW
            self._fd = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | no_follow)
