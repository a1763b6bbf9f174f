"""Notices that somebody has removed, moved or replaced the tier's folders under it.

Every call of the tier names a path, so after ``rm -rf`` it would work in other folders than it knows blocks of. A
folder is the same as long as its path leads to the inode that was found there before. The watch keeps that inode open:
the file system gives its number to no other folder meanwhile. Used by one thread, the evictor's.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvtier.tiering.fs.folders import FOLDER_PATTERNS, TEMPORARY_NAME, USAGE_NAME


class WatchedFolder:
    """One folder, and whether it is still the one that was there.

    Args:
        path: the folder; it need not exist yet.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd: int | None = None

    def take_loss(self, *, must_exist: bool = False) -> bool:
        """Return whether the folder has gone, or has become another one, since the last call.

        Args:
            must_exist: whether it counts as gone when it is missing and was never seen.
        """
        try:
            found = os.stat(self.path)  # noqa: PTH116 - once a second, beside others
        except (FileNotFoundError, NotADirectoryError):
            found = None
        except OSError:
            return False  # the disk does not say: what is there may be the same
        if self._fd is None:
            self._pin()
            return must_exist and found is None
        if found is not None and os.path.samestat(found, os.fstat(self._fd)):
            return False
        self.close()
        self._pin()
        return True

    def close(self) -> None:
        """Let go of the folder; idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _pin(self) -> None:
        with suppress(OSError):
            self._fd = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


class Losses(NamedTuple):
    """What somebody has removed.

    Attributes:
        paths: what was known to be in use, outermost first.
        is_namespace_lost: whether blocks of the namespace that is served now are among it.
        is_count_wrong: whether the count of bytes has to be made anew.
    """

    paths: list[str]
    is_namespace_lost: bool
    is_count_wrong: bool


class FolderWatch:
    """The folders of a tier: its directory, that of temporary files, those of namespaces; and the shared count.

    Args:
        root: the directory.
    """

    def __init__(self, root: Path) -> None:
        self._root_path = root
        self._root = WatchedFolder(str(root))
        self._temporaries = WatchedFolder(str(root / TEMPORARY_NAME))
        self._served: WatchedFolder | None = None
        self._usage_path = str(root / USAGE_NAME)
        self._root_mtime_ns: int | None = None
        self._namespaces: frozenset[str] = frozenset()

    def take_losses(self, namespace_path: str, *, has_blocks: bool) -> Losses:
        """Return what somebody has removed since the last call.

        Args:
            namespace_path: the folder of the namespace that is served now.
            has_blocks: whether blocks of it are known, so that its folder must be there.
        """
        if self._served is None or self._served.path != namespace_path:
            if self._served is not None:
                self._served.close()
            self._served = WatchedFolder(namespace_path)
        is_root_lost = self._root.take_loss()
        paths = [self._root.path] if is_root_lost else []
        if self._temporaries.take_loss():
            paths.append(self._temporaries.path)
        is_served_lost = self._served.take_loss(must_exist=has_blocks)
        if is_served_lost and has_blocks:
            paths.append(namespace_path)
        if self._root_path.is_dir() and not os.path.lexists(self._usage_path):
            paths.append(self._usage_path)
        # Of a namespace that nobody serves here only its bytes are missing; another process may have tidied it up.
        is_count_wrong = self._has_lost_namespace() or is_served_lost or bool(paths)
        return Losses(paths, is_root_lost or is_served_lost, is_count_wrong)

    def close(self) -> None:
        """Let go of every folder; idempotent."""
        for folder in (self._root, self._temporaries, self._served):
            if folder is not None:
                folder.close()

    def _has_lost_namespace(self) -> bool:
        """Return whether a namespace's folder has gone; looks only where the directory has changed."""
        try:
            mtime_ns = self._root_path.stat().st_mtime_ns
            if mtime_ns == self._root_mtime_ns:
                return False
            names = frozenset(path.name for path in self._root_path.iterdir())
        except OSError:
            return False  # gone, which is seen elsewhere, or the disk does not say
        self._root_mtime_ns = mtime_ns
        names = frozenset(name for name in names if FOLDER_PATTERNS[0].fullmatch(name))
        before, self._namespaces = self._namespaces, names
        return not before <= names
