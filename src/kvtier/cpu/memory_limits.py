"""How much memory this process could still take, as the kernel tells it.

It reserves nothing. Reserving more than the machine or its container has does not fail: the kernel kills a
process instead. So the size is compared with what is left before anything is asked for.

Source: proc_meminfo(5); the kernel's Documentation/admin-guide/cgroup-v2.rst.
"""

from pathlib import Path
from typing import NamedTuple

from kvtier.cgroups import find_cgroup_folders

CGROUP_FILES = {
    "v2": ("memory.max", "memory.current", "inactive_file", "active_file"),
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"),
}
"""Names of limit, usage and the two counters of reclaimable page cache."""


class MemoryLimit(NamedTuple):
    """Room for more memory, and what sets it.

    Attributes:
        available_bytes: bytes that can still be taken.
        source: the file that says so.
    """

    available_bytes: int
    source: str


def find_memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Return the tightest limit on this process; None when the kernel tells nothing.

    Args:
        root: where /proc and /sys are.
    """
    limits = [_read_meminfo(root / "proc/meminfo"), *_read_cgroups(root)]
    return min((limit for limit in limits if limit is not None), default=None)


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
