"""The smallest of affinity and quotas counts, in trees of files like the kernel's, and on this machine."""

import os
from pathlib import Path

import pytest

from kvtier.limits import AFFINITY, count_usable_cores, find_usable_cores

NUM_AFFINE = 8


def write(root: Path, files: dict[str, str]) -> None:
    """Write some of the kernel's files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("text", "num_cores"),
    [
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("50000 100000\n", 1),
        ("1000 1000000\n", 1),
        ("800000 100000\n", NUM_AFFINE),
        ("6400000 100000\n", NUM_AFFINE),
        ("max 100000\n", NUM_AFFINE),
        ("0 100000\n", NUM_AFFINE),
        ("100000 0\n", NUM_AFFINE),
        ("", NUM_AFFINE),
        ("100000\n", NUM_AFFINE),
        ("many 100000\n", NUM_AFFINE),
    ],
)
def test_a_quota_is_rounded_up_and_bounded_by_affinity(tmp_path: Path, text: str, num_cores: int) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": text})
    found = find_usable_cores(tmp_path, NUM_AFFINE)
    path = str(tmp_path / "sys/fs/cgroup/job/cpu.max")
    assert found == (num_cores, AFFINITY if num_cores == NUM_AFFINE else path)


def test_the_tightest_group_up_the_tree_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slice/pod/container\n",
        "sys/fs/cgroup/slice/cpu.max": "700000 100000\n",
        "sys/fs/cgroup/slice/pod/cpu.max": "300000 100000\n",
        "sys/fs/cgroup/slice/pod/container/cpu.max": "max 100000\n",
        "sys/fs/cgroup/slice/other/cpu.max": "100000 100000\n",
    }
    write(tmp_path, files)
    assert find_usable_cores(tmp_path, NUM_AFFINE) == (3, str(tmp_path / "sys/fs/cgroup/slice/pod/cpu.max"))


@pytest.mark.parametrize(
    ("quota", "period", "num_cores"),
    [
        ("250000\n", "100000\n", 3),
        ("-1\n", "100000\n", NUM_AFFINE),
        ("250000\n", None, NUM_AFFINE),
        ("250000\n", "0\n", NUM_AFFINE),
    ],
)
def test_the_first_version_s_quota_is_read(
    tmp_path: Path, quota: str, period: str | None, num_cores: int
) -> None:
    folder = "sys/fs/cgroup/cpu,cpuacct"
    mount = f"3 2 0:9 /docker/a /{folder} rw - cgroup cgroup rw,cpu,cpuacct\n"
    files = {
        "proc/self/cgroup": "4:memory:/elsewhere\n3:cpu,cpuacct:/docker/a\n",
        "proc/self/mountinfo": mount,
        f"{folder}/cpu.cfs_quota_us": quota,
    }
    write(tmp_path, files | ({} if period is None else {f"{folder}/cpu.cfs_period_us": period}))
    assert find_usable_cores(tmp_path, NUM_AFFINE).num_cores == num_cores


def test_affinity_alone_counts_where_nothing_can_be_read(tmp_path: Path) -> None:
    assert find_usable_cores(tmp_path, NUM_AFFINE) == (NUM_AFFINE, AFFINITY)
    (tmp_path / "proc/self/cgroup").mkdir(parents=True)
    assert find_usable_cores(tmp_path, NUM_AFFINE) == (NUM_AFFINE, AFFINITY)
    assert find_usable_cores(tmp_path) == (len(os.sched_getaffinity(0)), AFFINITY)


def test_this_machine_has_at_least_one_and_no_more_than_affinity_allows() -> None:
    assert 1 <= count_usable_cores() <= len(os.sched_getaffinity(0))
