"""What an engine's settings must satisfy before a model is loaded, and that the doctor says the same."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import config_checks
from kvtier.cli.output import CheckResult
from kvtier.config import HostSize
from kvtier.errors import KVTierError
from kvtier.tiering.start_checks import check_start

GIB = 2**30
HOST = {"cpu_bytes_to_use": "1MiB"}


def machine(root: Path, num_bytes: int) -> Path:
    """Return the root of a machine with so much memory and a mount of shared memory as large as this one's disk."""
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemTotal: {num_bytes // 1024} kB\nMemAvailable: 1 kB\n")
    (root / "dev/shm").mkdir(parents=True)
    return root


def with_tier(**tier: object) -> dict[str, object]:
    return HOST | {"secondary_tiers": [{"type": "fs", "root_dir": "/tmp", "capacity_bytes": "1MiB"} | tier]}  # noqa: S108


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
    checks = list(config_checks.check_config(extra_config, tmp_path))
    broken = [one.found for one in checks if one.result is CheckResult.BROKEN]
    assert words in broken[0]


def test_host_memory_beyond_the_machine_is_refused_in_units_of_people(tmp_path: Path) -> None:
    root = machine(tmp_path, 24 * GIB)
    words = r"cpu_bytes_to_use='32.0 GiB': is more than this machine has, 24.0 GiB of memory .*meminfo"
    with pytest.raises(KVTierError, match=words):
        check_start({"cpu_bytes_to_use": "32GiB"}, root=root)
    assert check_start({"cpu_bytes_to_use": "23GiB"}, root=root).cpu_bytes_to_use == 23 * GIB


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


def test_a_directory_of_an_optional_tier_ends_no_start(tmp_path: Path) -> None:
    assert check_start(with_tier(root_dir="/proc/kv"))
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
