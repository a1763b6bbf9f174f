"""What "auto" stands for follows from limits alone, and is refused with its arithmetic when nothing is left."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.config import HostSize, KVGroup, ModelIdentity, OffloadingConfig
from kvtier.cpu.auto_size import AutoSize, find_auto_size
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.errors import ConfigError, RegionMemoryError
from kvtier.limits import MemorySize, find_memory_size, find_mount_size
from kvtier.tiering.spec import TieringOffloadingSpec

GIB = 2**30
ENGINE_BYTES = 6 * GIB
PAGE_BYTES = 2**20


def config_of(rank: int | None = None, **changes: object) -> OffloadingConfig:
    """Return an engine that takes 6 GiB for itself and leaves the size to kvtier."""
    config = OffloadingConfig(
        "engine-of-a-test",
        ModelIdentity("m"),
        (KVGroup(16, ("layer.0",), PAGE_BYTES),),
        16,
        rank=rank,
        engine_host_bytes=ENGINE_BYTES,
        extra_config={"cpu_bytes_to_use": "auto"},
    )
    return replace(config, **changes)  # type: ignore[arg-type]  # a test's own changes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a machine of 128 GiB whose container may use 64 GiB."""
    write(tmp_path, "proc/meminfo", f"MemTotal: {128 * 2**20} kB\nMemAvailable: {100 * 2**20} kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/pod\n")
    write(tmp_path, "sys/fs/cgroup/pod/memory.max", f"{64 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/pod/memory.current", f"{30 * GIB}\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    """Write one of the kernel's files."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def spec_class(root: Path) -> type[CPUOffloadingSpec]:
    """Return a spec on that machine."""

    class SpecThere(CPUOffloadingSpec):
        system_root = root

    return SpecThere


def size_of(memory_gib: int, mount_gib: int | None = None, num_engines: int = 1) -> AutoSize:
    """Return the size on a machine for engines that take 6 GiB each."""
    mount = None if mount_gib is None else MemorySize(mount_gib * GIB, "/dev/shm")  # noqa: S108  # a name
    return AutoSize(MemorySize(memory_gib * GIB, "limit"), ENGINE_BYTES, num_engines, mount)


@pytest.mark.parametrize(
    ("size", "expected_gib"),
    [
        (size_of(100), 100 - 10 - 6),
        (size_of(8), 8 - 1 - 6),
        (size_of(7), 0),
        (size_of(4), 0),
        (size_of(100, 1000), 84),
        (size_of(100, 50), 45),
        (size_of(100, num_engines=2), 90 / 2 - 6),
        (size_of(100, 40, num_engines=2), 18),
    ],
)
def test_the_size_is_memory_less_reserve_and_engine_shared_by_engines_within_the_mount(
    size: AutoSize, expected_gib: float
) -> None:
    assert size.num_bytes == expected_gib * GIB


def test_the_arithmetic_is_one_line_with_every_term() -> None:
    assert str(size_of(100, 50)) == (
        "45.0 GiB = 100.0 GiB (limit) - 10.0 GiB reserve - 6.0 GiB for the engine, "
        "at most 90 % of 50.0 GiB (/dev/shm) = 45.0 GiB"
    )
    assert str(size_of(100, num_engines=2)) == (
        "39.0 GiB = (100.0 GiB (limit) - 10.0 GiB reserve) / 2 engines - 6.0 GiB for the engine"
    )


def test_the_limit_of_the_control_group_counts_and_not_what_is_in_use(root: Path) -> None:
    found = find_auto_size(config_of(), None, root)
    write(root, "sys/fs/cgroup/pod/memory.current", f"{63 * GIB}\n")
    write(root, "proc/meminfo", f"MemTotal: {128 * 2**20} kB\nMemAvailable: 5 kB\n")

    assert found.memory == (64 * GIB, str(root / "sys/fs/cgroup/pod/memory.max"))
    assert find_auto_size(config_of(), None, root) == found


def test_without_a_limit_the_memory_of_the_machine_counts(root: Path) -> None:
    write(root, "sys/fs/cgroup/pod/memory.max", "max\n")

    assert find_memory_size(root) == (128 * GIB, str(root / "proc/meminfo"))


def test_the_tightest_limit_of_an_ancestor_of_the_first_version_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", f"MemTotal: {128 * 2**20} kB\n")
    write(tmp_path, "proc/self/cgroup", "7:memory:/pod/container\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    write(tmp_path, "sys/fs/cgroup/memory/pod/memory.limit_in_bytes", f"{16 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/memory/pod/container/memory.limit_in_bytes", f"{20 * GIB}\n")

    found = find_memory_size(tmp_path)

    assert found == (16 * GIB, str(tmp_path / "sys/fs/cgroup/memory/pod/memory.limit_in_bytes"))


def test_a_mount_has_its_size_however_full_it_is(tmp_path: Path) -> None:
    before = find_mount_size(tmp_path)
    (tmp_path / "file").write_bytes(bytes(2**20))

    assert before is not None
    assert find_mount_size(tmp_path) == before
    assert find_mount_size(tmp_path / "nothing") is None


def test_scheduler_and_workers_get_the_same_blocks_and_one_line_is_logged(
    spec_class: type[CPUOffloadingSpec], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvtier")

    specs = [spec_class(config_of(rank, world_size=2)) for rank in (None, 0, 1)]

    expected = (64 * GIB - 64 * GIB // 10 - ENGINE_BYTES) // (2 * PAGE_BYTES)
    assert [spec.num_blocks for spec in specs] == [expected] * 3
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "64.0 GiB" in record.getMessage()
    assert "6.0 GiB for the engine" in record.getMessage()


def test_a_region_is_bounded_by_its_mount(root: Path) -> None:
    class SpecThere(TieringOffloadingSpec):
        system_root = root

    (root / "dev/shm").mkdir(parents=True)
    config = config_of(extra_config={"cpu_bytes_to_use": "auto", "secondary_tiers": []})

    found = SpecThere(config).auto_size

    assert found is not None
    assert found.mount == find_mount_size(root / "dev/shm")


def test_too_little_memory_is_refused_with_the_arithmetic(
    root: Path, spec_class: type[CPUOffloadingSpec]
) -> None:
    write(root, "sys/fs/cgroup/pod/memory.max", f"{7 * GIB}\n")

    with pytest.raises(ConfigError, match=r"auto.*0\.0 GiB = 7\.0 GiB .* - 6\.0 GiB for the engine.*block"):
        spec_class(config_of())


def test_a_region_for_which_the_memory_is_missing_now_is_refused_with_the_arithmetic(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RegionMemoryError("no memory")

    class SpecThere(TieringOffloadingSpec):
        system_root = root

    monkeypatch.setattr("kvtier.cpu.spec.SharedOffloadRegion", refuse)
    spec = SpecThere(config_of(extra_config={"cpu_bytes_to_use": "auto", "secondary_tiers": []}))

    with pytest.raises(RegionMemoryError, match=r"no memory; now it is \"auto\", .* = 64\.0 GiB"):
        spec.make_region(None)


def test_an_engine_that_does_not_report_its_own_memory_is_refused(
    spec_class: type[CPUOffloadingSpec],
) -> None:
    with pytest.raises(ConfigError, match="does not report how much host memory it takes"):
        spec_class(config_of(engine_host_bytes=None))


def test_a_kernel_that_reports_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reports no memory size"):
        find_auto_size(config_of(), None, tmp_path)


def test_another_word_is_refused_and_auto_is_named() -> None:
    assert config_of().settings.cpu_bytes_to_use is HostSize.AUTO
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use='most'.*or 'auto'"):
        config_of(extra_config={"cpu_bytes_to_use": "most"})
