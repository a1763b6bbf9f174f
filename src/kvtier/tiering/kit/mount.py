"""The mount that a tier's place is on: whether it is still there.

Below a mount point that was unmounted lies a folder of another file system. A tier that went on there would fill a disk
that its operator has not given it, and would not find its blocks when the mount comes back.
"""

import os
from pathlib import Path


class MountPoint:
    """Where the file system of a path was mounted when its tier was built; immutable.

    A bind mount of a file system onto itself is not told from a folder, and the file system of ``/`` cannot go.

    Args:
        path: an absolute path; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        place = Path(os.path.realpath(path))
        while place != place.parent and not is_mounted(place):
            place = place.parent
        self.path = place

    def is_away(self) -> bool:
        """Return whether nothing is mounted there any more; two calls of ``lstat``. Thread: any."""
        return self.path != self.path.parent and not is_mounted(self.path)


def is_mounted(path: Path) -> bool:
    """Return whether another file system begins at a folder; False where there is none or it does not answer."""
    try:
        return path.lstat().st_dev != Path(f"{path}/..").lstat().st_dev
    except OSError:
        return False
