"""The folders of the own group and of those above it are found, in trees of files like the kernel's."""

from pathlib import Path

import pytest

from kvtier.limits import find_cgroup_folders

SECOND = "31 23 0:28 {root} {place} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
FIRST = "32 23 0:29 {root} {place} rw,relatime - cgroup cgroup rw,{controllers}\n"
OTHER = "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw,cpu\n"


def find(tmp_path: Path, groups: str, mounts: str | None) -> list[tuple[bool, str]]:
    """Return versions and folders for the contents of the kernel's two files."""
    folder = tmp_path / "proc/self"
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text(groups, encoding="utf-8", errors="surrogateescape")
    if mounts is not None:
        (folder / "mountinfo").write_text(mounts, encoding="utf-8", errors="surrogateescape")
    found = find_cgroup_folders("cpu", tmp_path)
    return [(is_second, str(path.relative_to(tmp_path))) for is_second, path in found]


@pytest.mark.parametrize(
    ("groups", "mounts", "expected"),
    [
        pytest.param(
            "0::/pod/container\n",
            OTHER + SECOND.format(root="/", place="/sys/fs/cgroup"),
            [
                (True, "sys/fs/cgroup/pod/container"),
                (True, "sys/fs/cgroup/pod"),
                (True, "sys/fs/cgroup"),
            ],
            id="a group of the second version and all above it",
        ),
        pytest.param(
            "0::/\n",
            SECOND.format(root="/", place="/sys/fs/cgroup"),
            [(True, "sys/fs/cgroup")],
            id="a container with a namespace of its own",
        ),
        pytest.param(
            "5:cpuset:/set\n4:cpu,cpuacct:/docker/a/job\n",
            FIRST.format(root="/docker/a", place="/cg/cpuset", controllers="cpuset")
            + FIRST.format(root="/docker/a", place="/cg/cpu,cpuacct", controllers="cpu,cpuacct"),
            [(False, "cg/cpu,cpuacct/job"), (False, "cg/cpu,cpuacct")],
            id="a container that sees its part of the first version's tree",
        ),
        pytest.param(
            "4:cpu:/job\n0::/job\n",
            FIRST.format(root="/", place="/sys/fs/cgroup/cpu", controllers="cpu")
            + SECOND.format(root="/", place="/sys/fs/cgroup/unified"),
            [
                (False, "sys/fs/cgroup/cpu/job"),
                (False, "sys/fs/cgroup/cpu"),
                (True, "sys/fs/cgroup/unified/job"),
                (True, "sys/fs/cgroup/unified"),
            ],
            id="both versions",
        ),
        pytest.param(
            "0::/../other\n",
            SECOND.format(root="/", place="/sys/fs/cgroup"),
            [(True, "sys/fs/cgroup")],
            id="a group outside what can be seen is taken for the mount",
        ),
        pytest.param(
            "4:cpu:/docker/a\n",
            FIRST.format(root="/docker/b", place="/other", controllers="cpu")
            + FIRST.format(root="/docker", place="/right", controllers="cpu"),
            [(False, "right/a"), (False, "right")],
            id="a mount that shows the group goes before one that does not",
        ),
        pytest.param(
            "0::/a b\n",
            SECOND.format(root="/", place="/sys/c\\040d\\134"),
            [(True, "sys/c d\\/a b"), (True, "sys/c d\\")],
            id="blanks and backslashes in paths",
        ),
        pytest.param(
            "4:cpu:/\udcff\n0::/\n",
            None,
            [(False, "sys/fs/cgroup/cpu/\udcff"), (False, "sys/fs/cgroup/cpu"), (True, "sys/fs/cgroup")],
            id="customary places where the kernel tells of no mount",
        ),
        pytest.param("0::/job\n", OTHER, [], id="no group is mounted"),
        pytest.param(
            "damaged\n\n4:cpu\n", "1 2 3\n - cgroup2\n- - -\n", [], id="files that make no sense tell nothing"
        ),
    ],
)
def test_folders_are_found(
    tmp_path: Path, groups: str, mounts: str | None, expected: list[tuple[bool, str]]
) -> None:
    assert find(tmp_path, groups, mounts) == expected


def test_nothing_is_found_where_the_kernel_tells_of_no_group(tmp_path: Path) -> None:
    assert find_cgroup_folders("cpu", tmp_path) == []
