"""Which folders hold the limits of this process's control groups, its own group first, then those above it.

It reads no limit. A process is in one group of every hierarchy: of the second version's single one, and of each of the
first version's. What limits a group above it limits it too. A container sees a part of the tree, and the mount's root
says which. A group outside that part is taken for the mount itself, whose limits are most likely the container's.

Source: cgroups(7), proc_pid_mountinfo(5).
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

SECOND_VERSION = "cgroup2"
FIRST_VERSION = "cgroup"
CGROUP_MOUNT = "/sys/fs/cgroup"
"""Where groups are by custom, each controller of the first version in a folder of its own."""

ESCAPED = re.compile(r"\\([0-7]{3})")
"""How mountinfo writes blanks and backslashes of a path."""


class CgroupFolder(NamedTuple):
    """A group's folder.

    Attributes:
        is_second_version: which version's names its files have.
        path: where; it need not exist.
    """

    is_second_version: bool
    path: Path


class _Mount(NamedTuple):
    """Where a hierarchy is mounted, and which part of it."""

    kind: str
    options: Sequence[str]
    shown_root: PurePosixPath
    place: str


def find_cgroup_folders(controller: str, root: Path = Path("/")) -> list[CgroupFolder]:
    """Return the folders whose limits hold for this process; empty where the kernel tells of no group.

    Args:
        controller: "cpu" or "memory", for example.
        root: where /proc and the mounts are.
    """
    mounts = _read_mounts(root)
    return [
        CgroupFolder(kind == SECOND_VERSION, root / mount.place.lstrip("/") / below)
        for kind, group in _read_groups(root, controller)
        for mount in _choose_mounts(mounts, kind, controller, group)
        for below in _walk_up(group, mount.shown_root)
    ]


def _read_groups(root: Path, controller: str) -> Iterator[tuple[str, PurePosixPath]]:
    for line in _read_lines(root / "proc/self/cgroup"):
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        if not controllers:
            yield SECOND_VERSION, PurePosixPath(path)
        elif controller in controllers.split(","):
            yield FIRST_VERSION, PurePosixPath(path)


def _read_mounts(root: Path) -> list[_Mount] | None:
    """Return the mounts of groups; None when the kernel tells of no mount at all."""
    lines = _read_lines(root / "proc/self/mountinfo")
    mounts = []
    for line in lines:
        place, _, source = line.partition(" - ")
        of_place, of_source = place.split(" "), source.split(" ")
        if len(of_place) > 4 and len(of_source) > 2 and of_source[0] in (FIRST_VERSION, SECOND_VERSION):
            shown_root, mount_point = (_unescape(text) for text in of_place[3:5])
            mounts.append(
                _Mount(of_source[0], of_source[2].split(","), PurePosixPath(shown_root), mount_point)
            )
    return mounts if lines else None


def _choose_mounts(
    mounts: Sequence[_Mount] | None, kind: str, controller: str, group: PurePosixPath
) -> Sequence[_Mount]:
    """Return the mounts that show the group, else the first of its hierarchy. Pure."""
    is_second = kind == SECOND_VERSION
    if mounts is None:
        place = CGROUP_MOUNT if is_second else f"{CGROUP_MOUNT}/{controller}"
        return [_Mount(kind, (), PurePosixPath("/"), place)]
    fitting = [mount for mount in mounts if mount.kind == kind and (is_second or controller in mount.options)]
    return [mount for mount in fitting if _is_shown(group, mount.shown_root)] or fitting[:1]


def _is_shown(group: PurePosixPath, shown_root: PurePosixPath) -> bool:
    return ".." not in group.parts and group.is_relative_to(shown_root)


def _walk_up(group: PurePosixPath, shown_root: PurePosixPath) -> Sequence[PurePosixPath]:
    """Return the group and those above it as paths in the mount, which comes last. Pure."""
    own = group.relative_to(shown_root) if _is_shown(group, shown_root) else PurePosixPath()
    return [own, *own.parents]


def _unescape(text: str) -> str:
    return ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)


def _read_lines(path: Path) -> list[str]:
    """Return a file's lines; unreadable means empty."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
