"""Who may change what is in a tier's directory: its owner, and those that ``file_mode`` shares it with.

Who may write into the directory can plant blocks whose checksums are right, or lead the tier elsewhere with a link. The
owner of the directory is who runs the engine, or root, who may do anything anyway. Of a group the engine's own one may
write although ``file_mode`` does not share with it: a volume of Kubernetes belongs to root and to ``fsGroup``.
Who may write into a parent folder can replace the directory, which is seen within a second: it is another user's then.
"""

import os
import stat
from pathlib import Path

GROUP_MAY_WRITE = 0o020
OTHERS_MAY_WRITE = 0o002


def find_refusal(folder: Path, file_mode: int) -> str | None:
    """Return why a folder of the tier must not be used and what to do, None where it may or is missing.

    Args:
        folder: the directory, or a folder in it.
        file_mode: permissions of files in it.
    """
    try:
        found = folder.stat()
    except OSError:
        return None  # who uses it meets the error
    return judge(found, file_mode, os.geteuid(), os.getegid())


def judge(found: os.stat_result, file_mode: int, uid: int, gid: int) -> str | None:
    """Return why a folder must not be used and what to do, None where it may. Pure.

    Args:
        found: its status.
        file_mode: permissions of files in it.
        uid: the user that runs the engine.
        gid: that user's group.
    """
    mode = stat.S_IMODE(found.st_mode)
    is_shared = bool(file_mode & GROUP_MAY_WRITE)
    if mode & OTHERS_MAY_WRITE and not file_mode & OTHERS_MAY_WRITE:
        return f"every user may write to it (mode {mode:04o}), who could plant blocks: chmod o-w"
    if mode & GROUP_MAY_WRITE and not is_shared and found.st_gid != gid:
        return (
            f"group {found.st_gid} may write to it (mode {mode:04o}), who could plant blocks: "
            'chmod g-w, or share with the group by "file_mode": "0660"'
        )
    if found.st_uid not in {uid, 0} and not is_shared:
        return (
            f"it belongs to user {found.st_uid} and this is user {uid}: give a directory of this user's, "
            'or share with the group by "file_mode": "0660"'
        )
    return None


def make_folder(path: Path, file_mode: int) -> bool:
    """Make a folder with the permissions that go with ``file_mode``; False when it exists. Its parent must be there.

    Raises:
        OSError: the system refused.
    """
    mode = file_mode | (file_mode & 0o444) >> 2  # search wherever files may be read
    try:
        path.mkdir(mode)
    except FileExistsError:
        return False
    if stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)
    return True


def make_folders(root: Path, file_mode: int) -> None:
    """Make a tier's directory and its missing parents, private but for those that ``file_mode`` lets read.

    Raises:
        OSError: the system refused.
    """
    for parent in reversed(root.parents):
        if not parent.is_dir():
            make_folder(parent, 0o600 | file_mode & 0o044)
    make_folder(root, file_mode)
