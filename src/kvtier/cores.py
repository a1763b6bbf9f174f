"""How many cores this process may keep busy, as affinity and the CPU quotas of its control groups allow.

It starts no thread and binds none. A quota is time in each period, for all threads together: with more threads than it
pays for, all of them stand still for the rest of a period, the engine's too.

Source: sched_setaffinity(2); the kernel's Documentation/admin-guide/cgroup-v2.rst and scheduler/sched-bwc.rst.
"""

import os
from pathlib import Path
from typing import NamedTuple

from kvtier.cgroups import CgroupFolder, find_cgroup_folders

AFFINITY = "affinity"

QUOTA_FILE = "cpu.max"
FIRST_VERSION_FILES = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


class UsableCores(NamedTuple):
    """Cores, and what sets their number.

    Attributes:
        num_cores: at least 1; a quota of a part of a core counts as one.
        source: ``AFFINITY``, or the file that has the tightest quota.
    """

    num_cores: int
    source: str


def count_usable_cores() -> int:
    """Return how many threads of this process can run at the same time."""
    return find_usable_cores().num_cores


def find_usable_cores(root: Path = Path("/"), num_affine: int | None = None) -> UsableCores:
    """Return the smallest of affinity and quotas; a quota that cannot be read is none.

    Args:
        root: where /proc and /sys are.
        num_affine: cores that the calling thread may run on; None asks the system.
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
    if quota_us <= 0 or period_us <= 0:  # the first version's word for no quota is -1
        return None
    return UsableCores(-(-quota_us // period_us), str(path))
