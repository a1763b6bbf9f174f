"""The tightest of the machine's and the cgroups' limits is found, in trees of files like the kernel's."""

from pathlib import Path

from kvtier.limits import find_memory_limit


def write(root: Path, name: str, text: str) -> Path:
    """Write one of the kernel's files."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_machine_limits_when_there_is_no_cgroup(tmp_path: Path) -> None:
    path = write(tmp_path, "proc/meminfo", "MemTotal: 9 kB\nMemAvailable:    5 kB\n")

    assert find_memory_limit(tmp_path) == (5 * 1024, str(path))


def test_a_cgroup_above_the_own_one_limits_with_page_cache_counted_as_free(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemAvailable: 5000 kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/pod/container\n")
    write(tmp_path, "sys/fs/cgroup/pod/container/memory.max", "max\n")
    path = write(tmp_path, "sys/fs/cgroup/pod/memory.max", "1000\n")
    write(tmp_path, "sys/fs/cgroup/pod/memory.current", "900\n")
    write(tmp_path, "sys/fs/cgroup/pod/memory.stat", "anon 600\nactive_file 100\ninactive_file 50\n")

    assert find_memory_limit(tmp_path) == (250, str(path))


def test_the_first_version_of_cgroups_is_read_too(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:cpu:/job\n7:memory:/job\n")
    path = write(tmp_path, "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1000\n")
    write(tmp_path, "sys/fs/cgroup/memory/job/memory.usage_in_bytes", "1200\n")

    assert find_memory_limit(tmp_path) == (0, str(path))


def test_a_cgroup_is_found_where_the_container_mounts_its_part_of_the_tree(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "7:memory:/docker/a/job\n")
    mount = "30 20 0:9 /docker/a /cg/memory rw,nosuid master:1 - cgroup cgroup rw,memory\n"
    write(tmp_path, "proc/self/mountinfo", mount)
    path = write(tmp_path, "cg/memory/job/memory.limit_in_bytes", "1000\n")
    write(tmp_path, "cg/memory/job/memory.usage_in_bytes", "400\n")

    assert find_memory_limit(tmp_path) == (600, str(path))


def test_nothing_is_known_where_the_kernel_tells_nothing(tmp_path: Path) -> None:
    assert find_memory_limit(tmp_path) is None


def test_this_machine_says_something() -> None:
    limit = find_memory_limit()

    assert limit is not None
    assert limit.available_bytes > 0
