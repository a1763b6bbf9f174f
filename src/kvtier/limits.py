"""Cores and memory that this process may use: affinity, control groups and what the host has left.

Control groups of versions 1 and 2 are read, the process's own group first and then its ancestors, because each of them
limits it.
"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

SECOND_VERSION = "cgroup2"
FIRST_VERSION = "cgroup"
CGROUP_MOUNT = "/sys/fs/cgroup"
"""The usual mount of control groups; in version 1 each controller has its own folder."""

ESCAPED = re.compile(r"\\([0-7]{3})")
"""How mountinfo escapes blanks and backslashes of a path."""


class CgroupFolder(NamedTuple):
    """A group's folder.

    Attributes:
        is_second_version: whether its files have the names of version 2.
        path: the folder; it may not exist.
    """

    is_second_version: bool
    path: Path


class _Mount(NamedTuple):
    """The mount of a hierarchy, and the part of the hierarchy that it shows."""

    kind: str
    options: Sequence[str]
    shown_root: PurePosixPath
    place: str


def find_cgroup_folders(controller: str, root: Path = Path("/")) -> list[CgroupFolder]:
    """Return the folders whose limits apply to this process; empty where the kernel reports no group.

    Args:
        controller: "cpu" or "memory", for example.
        root: the folder that holds /proc and the mounts.
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
    """Return the mounts of groups; None when the kernel reports no mounts."""
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
    """Return the group and its ancestors as paths in the mount, which comes last. Pure."""
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


AFFINITY = "affinity"

QUOTA_FILE = "cpu.max"
FIRST_VERSION_FILES = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


class UsableCores(NamedTuple):
    """Number of usable cores, and the limit that sets it.

    Attributes:
        num_cores: at least 1; a quota below one core counts as one.
        source: ``AFFINITY``, or the file with the tightest quota.
    """

    num_cores: int
    source: str


def count_usable_cores() -> int:
    """Return how many threads of this process can run at the same time."""
    return find_usable_cores().num_cores


def find_usable_cores(root: Path = Path("/"), num_affine: int | None = None) -> UsableCores:
    """Return the smallest of affinity and quotas; unreadable quotas are ignored.

    Args:
        root: the folder that holds /proc and /sys.
        num_affine: cores that the calling thread may run on; None: from the system.
    """
    allowed = UsableCores(num_affine or len(os.sched_getaffinity(0)), AFFINITY)
    quotas = [_read_quota(folder) for folder in find_cgroup_folders("cpu", root)]
    return min(
        [allowed, *(quota for quota in quotas if quota is not None)], key=lambda cores: cores.num_cores
    )


def _read_quota(group: CgroupFolder) -> UsableCores | None:
    folder = group.path
    path = folder / (QUOTA_FILE if group.is_second_version else FIRST_VERSION_FILES[0])
    try:
        if group.is_second_version:
            quota, period = path.read_text(encoding="ascii").split()
        else:
            quota, period = ((folder / name).read_text(encoding="ascii") for name in FIRST_VERSION_FILES)
        quota_us, period_us = int(quota), int(period)
    except (OSError, ValueError):  # no such controller here, or "max"
        return None
    if quota_us <= 0 or period_us <= 0:  # version 1 writes -1 for no quota
        return None
    return UsableCores(-(-quota_us // period_us), str(path))


CGROUP_FILES = {
    "v2": ("memory.max", "memory.current", "inactive_file", "active_file"),
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"),
}
"""Names of the files with limit and usage, and of the two counters of reclaimable page cache."""


class MemoryLimit(NamedTuple):
    """Memory that is left, and the limit that sets it.

    Attributes:
        available_bytes: bytes that can still be allocated.
        source: the file with the limit.
    """

    available_bytes: int
    source: str


def find_memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Return the tightest limit on this process; None when the kernel reports none.

    Args:
        root: the folder that holds /proc and /sys.
    """
    limits = [_read_meminfo(root / "proc/meminfo"), *_read_cgroups(root)]
    return min((limit for limit in limits if limit is not None), default=None)


class MemorySize(NamedTuple):
    """Memory that exists or is allowed, in use or not, and what sets it.

    Attributes:
        num_bytes: bytes.
        source: the file or mount that says so.
    """

    num_bytes: int
    source: str


def find_memory_size(root: Path = Path("/")) -> MemorySize | None:
    """Return the smallest of the machine's memory and the limits on this process, however much is in use.

    Equal in all processes of a control group, at any time; None when the kernel reports nothing.

    Args:
        root: the folder that holds /proc and /sys.
    """
    meminfo = root / "proc/meminfo"
    total_kib = _read_fields(meminfo).get("MemTotal:")
    sizes = [] if total_kib is None else [MemorySize(total_kib * 1024, str(meminfo))]
    for is_second_version, folder in find_cgroup_folders("memory", root):
        path = folder / CGROUP_FILES["v2" if is_second_version else "v1"][0]
        try:
            sizes.append(MemorySize(int(path.read_text()), str(path)))
        except (OSError, ValueError):  # no such controller here, or "max"
            continue
    return min(sizes, default=None)


def find_mount_size(mount: Path) -> MemorySize | None:
    """Return the size of the file system at ``mount``, however full it is; None when it cannot be read."""
    try:
        found = os.statvfs(mount)
    except OSError:
        return None
    return MemorySize(found.f_blocks * found.f_frsize, str(mount))


def _read_meminfo(path: Path) -> MemoryLimit | None:
    fields = _read_fields(path)
    available_kib = fields.get("MemAvailable:")
    return None if available_kib is None else MemoryLimit(available_kib * 1024, str(path))


def _read_cgroups(root: Path) -> list[MemoryLimit | None]:
    return [
        _read_cgroup(folder, "v2" if is_second_version else "v1")
        for is_second_version, folder in find_cgroup_folders("memory", root)
    ]


def _read_cgroup(folder: Path, version: str) -> MemoryLimit | None:
    limit_name, usage_name, *cache_names = CGROUP_FILES[version]
    try:
        limit_bytes = int((folder / limit_name).read_text())
        usage_bytes = int((folder / usage_name).read_text())
    except (OSError, ValueError):  # no such controller here, or "max"
        return None
    cache = _read_fields(folder / "memory.stat")
    reclaimable_bytes = sum(cache.get(name, 0) for name in cache_names)
    return MemoryLimit(max(0, limit_bytes - usage_bytes + reclaimable_bytes), str(folder / limit_name))


def _read_fields(path: Path) -> dict[str, int]:
    """Read a file of lines "name number ..."; unreadable means empty."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}
