"""What an engine's settings must satisfy before a model is loaded, and that the doctor says the same."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import config_checks
from kvtier.cli.output import Check, CheckResult
from kvtier.config import HostSize
from kvtier.cpu.region_file import make_region_path
from kvtier.errors import KVTierError
from kvtier.tiering.start_checks import check_start

GIB = 2**30
HOST = {"cpu_bytes_to_use": "1MiB"}


def machine(root: Path, num_bytes: int, num_left_bytes: int | None = None) -> Path:
    """Return the root of a machine with so much memory and a mount of shared memory as large as this one's disk."""
    num_left_bytes = num_bytes if num_left_bytes is None else num_left_bytes
    (root / "proc").mkdir()
    sizes = f"MemTotal: {num_bytes // 1024} kB\nMemAvailable: {num_left_bytes // 1024} kB\n"
    (root / "proc/meminfo").write_text(sizes)
    (root / "dev/shm").mkdir(parents=True)
    return root


def with_tier(**tier: object) -> dict[str, object]:
    return HOST | {"secondary_tiers": [{"type": "fs", "root_dir": "/tmp", "capacity_bytes": "1MiB"} | tier]}  # noqa: S108


def host_memory_of(config: Mapping[str, object], root: Path) -> list[Check]:
    """Return what the doctor says of host memory."""
    checks = config_checks.check_config(config, root=root)
    return [one for one in checks if one.subject == "cpu_bytes_to_use"]


REFUSED: dict[str, tuple[dict[Any, Any], str]] = {  # Any: what a user may write
    "an unknown spec": (HOST | {"spec_name": "TieringSpec"}, "did you mean 'TieringOffloadingSpec'"),
    "an unknown module": (HOST | {"spec_name": "S", "spec_module_path": "no.such"}, "No module named 'no'"),
    "a module without the spec": (HOST | {"spec_name": "S", "spec_module_path": "json"}, "no attribute 'S'"),
    "gibibytes without their unit": ({"cpu_bytes_to_use": 32}, 'did you mean "32GiB"?'),
    "the same as text": ({"cpu_bytes_to_use": " 32 "}, 'did you mean "32GiB"?'),
    "the same of a tier": (with_tier(capacity_bytes=500), 'did you mean "500GiB"?'),
    "the same of a tenant": (HOST | {"tenants": {"a": {"quota_bytes": 8}}}, 'did you mean "8GiB"?'),
    "no host memory": ({}, "is required"),
    "more memory than there is": ({"cpu_bytes_to_use": "9999TiB"}, "more than this machine has"),
    "a directory that the kernel makes up": (with_tier(root_dir="/proc/kv", required=True), "cannot be made, /proc"),
    "a name that is no text": (HOST | {7: 1}, "is no name of a setting"),
    "a name without a character": (HOST | {"": 1}, "is no name of a setting"),
    "such a name of a tier": (with_tier(**{"": 1}), "is no name of a setting"),
    "half of a surrogate pair": (HOST | {"eviction_policy": "\ud800"}, "half of a surrogate pair"),
    "the same in a name": (HOST | {"\ud800": 1}, "half of a surrogate pair"),
    "the same in a path": (with_tier(root_dir="/kv/\ud800"), "half of a surrogate pair"),
    "the same deep in a setting": (HOST | {"tenants": {"a": [{"b": "\ud800"}]}}, "half of a surrogate pair"),
    "a list without an end": (HOST | {"tenants": json.loads("[" * 200 + "]" * 200)}, "nested deeper"),
    "a time-out in which nothing answers": (with_tier(job_timeout_s=1e-9), "from 0.001 to"),
    "no directory of a tier": (with_tier(root_dir="kv"), "absolute path"),
    "an unknown policy of a tier": (HOST | {"secondary_tiers": [{"type": "example", "policy": "lruu"}]}, "'lru'"),
    "no key ring": (with_tier() | {"encryption": {"key_file": "/no/such/ring"}}, "kvtier keys create"),
    "a key ring without a name": (with_tier() | {"encryption": {"key_file": ""}}, "absolute path of a key ring"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_the_start_and_the_doctor_refuse_it_with_the_same_words(case: str, tmp_path: Path) -> None:
    extra_config, words = REFUSED[case]
    with pytest.raises(KVTierError) as refused:
        check_start(extra_config)
    assert words in str(refused.value)
    checks = list(config_checks.check_config(extra_config))
    broken = [one.found for one in checks if one.result is CheckResult.BROKEN]
    assert words in broken[0]


def test_host_memory_beyond_the_machine_is_refused_in_units_of_people(tmp_path: Path) -> None:
    root = machine(tmp_path, 24 * GIB)
    words = r"cpu_bytes_to_use='32.0 GiB': is more than this machine has, 24.0 GiB of memory .*meminfo"
    with pytest.raises(KVTierError, match=words):
        check_start({"cpu_bytes_to_use": "32GiB"}, root=root)
    assert check_start({"cpu_bytes_to_use": "23GiB"}, root=root).cpu_bytes_to_use == 23 * GIB


def test_host_memory_that_others_have_taken_is_refused_as_the_doctor_refuses_it(tmp_path: Path) -> None:
    root = machine(tmp_path, 24 * GIB, 8 * GIB)
    assert check_start({"cpu_bytes_to_use": "8GiB"}, root=root)
    for wanted, num_engines in (("9GiB", 1), ("3GiB", 3)):
        with pytest.raises(KVTierError, match=r"more than .*meminfo leaves, 8.0 GiB: give less, or end"):
            check_start({"cpu_bytes_to_use": wanted}, num_engines, root)
    (found,) = host_memory_of({"cpu_bytes_to_use": "9GiB"}, root)
    assert found.result is CheckResult.BROKEN
    assert "meminfo leaves, 8.0 GiB: give less, or end" in found.found
    (found,) = host_memory_of({"cpu_bytes_to_use": "8GiB"}, root)
    assert found.result is CheckResult.GOOD


def test_a_control_group_limits_what_is_left(tmp_path: Path) -> None:
    root, group = machine(tmp_path, 24 * GIB), tmp_path / "sys/fs/cgroup/pod"
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text("0::/pod\n")
    group.mkdir(parents=True)
    (group / "memory.max").write_text(str(4 * GIB))
    (group / "memory.current").write_text(str(3 * GIB))
    assert check_start({"cpu_bytes_to_use": "1GiB"}, root=root)
    with pytest.raises(KVTierError, match=r"pod/memory.max leaves, 1.0 GiB"):
        check_start({"cpu_bytes_to_use": "2GiB"}, root=root)


def test_with_tiers_host_memory_must_fit_into_what_the_mount_has_free(tmp_path: Path) -> None:
    root = machine(tmp_path, 2**62)
    usage = shutil.disk_usage(tmp_path)
    if usage.free + GIB > usage.total:
        pytest.skip("the disk of this machine is empty")
    wanted = {"cpu_bytes_to_use": usage.total - GIB // 2}
    assert check_start(wanted, root=root)
    with pytest.raises(KVTierError, match=r"more than .*dev/shm has free, .*--shm-size"):
        check_start(with_tier() | wanted, root=root)
    (found,) = host_memory_of(with_tier() | wanted, root)
    assert "--shm-size" in found.found


def test_where_an_engine_has_its_memory_what_is_left_is_not_compared(tmp_path: Path) -> None:
    root = machine(tmp_path, 24 * GIB, GIB)
    assert check_start({"cpu_bytes_to_use": "20GiB"}, root=root, is_before_engines=False)


def test_memory_of_an_engine_that_was_killed_at_its_start_is_taken_over(tmp_path: Path) -> None:
    root = machine(tmp_path, 24 * GIB, 8 * GIB)
    left = make_region_path("killed", root / "dev/shm")
    left.write_bytes(b"rows")
    with pytest.raises(KVTierError, match="meminfo leaves"):
        check_start({"cpu_bytes_to_use": "9GiB"}, root=root)
    assert not left.exists()


def test_engines_of_one_machine_share_its_memory(tmp_path: Path) -> None:
    root = machine(tmp_path, 24 * GIB)
    with pytest.raises(KVTierError, match="for each of 4 engines is more"):
        check_start({"cpu_bytes_to_use": "8GiB"}, num_engines=4, root=root)
    assert check_start({"cpu_bytes_to_use": "8GiB"}, num_engines=3, root=root)


def test_where_engines_are_on_other_machines_only_settings_are_checked(tmp_path: Path) -> None:
    root = machine(tmp_path, GIB)
    wanted = with_tier(root_dir="/proc/kv", required=True) | {"cpu_bytes_to_use": "9999TiB"}
    assert check_start(wanted, num_engines=0, root=root)


def test_with_tiers_host_memory_beyond_the_mount_is_refused(tmp_path: Path) -> None:
    root = machine(tmp_path, 2**62)
    assert check_start({"cpu_bytes_to_use": 2**61}, root=root)
    with pytest.raises(KVTierError, match="shm-size"):
        check_start(with_tier() | {"cpu_bytes_to_use": 2**61}, root=root)


def test_a_size_that_the_engine_finds_itself_is_not_compared(tmp_path: Path) -> None:
    found = check_start({"cpu_bytes_to_use": "auto"}, root=machine(tmp_path, GIB))
    assert found.cpu_bytes_to_use is HostSize.AUTO


@pytest.mark.parametrize("is_required", [False, True])
def test_the_start_and_the_doctor_say_what_becomes_of_a_tier_whose_path_cannot_be_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_required: bool
) -> None:
    config, words = (
        with_tier(root_dir="/proc/kv", required=is_required),
        "root_dir='/proc/kv': cannot be made",
    )
    if is_required:
        with pytest.raises(KVTierError, match=words):
            check_start(config)
    else:
        assert check_start(config)
        (line,) = caplog.messages
        assert line.startswith(f"kvtier: a secondary tier is left out, the engine starts without it: {words}")
    (found,) = (one for one in config_checks.check_config(config) if one.subject == "tier 0 (fs)")
    assert found.result is CheckResult.BROKEN
    assert found.found.startswith(words)
    assert found.found.endswith("refuses to start" if is_required else "starts without this tier")


def test_a_directory_that_can_be_made_is_not_made_yet(tmp_path: Path) -> None:
    wanted = tmp_path / "below" / "kv"
    assert check_start(with_tier(root_dir=str(wanted), required=True))
    assert list(tmp_path.iterdir()) == []


def test_a_spec_of_the_users_own_reads_its_settings_itself() -> None:
    own = {"spec_name": "OwnSpec", "spec_module_path": __name__, "rows": 5}
    assert check_start(own).spec_name == "OwnSpec"


class OwnSpec:
    """Stands for a spec of the user's own."""


@pytest.mark.parametrize("config", [HOST, with_tier(), {"tier": with_tier()["secondary_tiers"][0]}])  # type: ignore[index]  # a list
def test_the_doctor_itself_imports_no_torch(config: Mapping[str, object], tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(config))
    program = (
        "import sys; sys.modules['torch'] = None; from kvtier.cli.main import main; "
        f"sys.exit(main(['doctor', '--config', {str(path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "settings are understood" in done.stdout, done.stderr
