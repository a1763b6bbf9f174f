"""One environment variable gives a server of SGLang's kvtier as its storage, through SGLang's own plug-ins."""

import importlib
import json
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt.plugins", reason="needs SGLang: make test-sglang")

from sglang.srt import plugins
from sglang.srt.plugins.hook_registry import HookRegistry

from kvtier.engines import sglang_plugin
from kvtier.errors import ConfigError, UnknownNameError

ROOT = Path(__file__).parents[3]


class ServerArgs:
    """Stands for SGLang's, whose module imports what only a server has; made and unresolved like it."""

    def __init__(self, **given: Any) -> None:
        self.enable_hierarchical_cache = given.get("enable_hierarchical_cache", False)
        self.hicache_storage_backend = given.get("hicache_storage_backend")
        self.hicache_storage_backend_extra_config = None
        self.__post_init__()

    def __post_init__(self) -> None:
        """Leave it unresolved."""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], type[ServerArgs]]]:
    """Return what loads the plug-ins as SGLang does and returns the arguments' class."""
    own = type("ServerArgs", (ServerArgs,), {"__post_init__": ServerArgs.__post_init__})
    module = types.ModuleType("sglang.srt.server_args")
    module.ServerArgs = own  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", module)
    monkeypatch.setattr("sglang.srt.server_args", module, raising=False)

    def load_plugins() -> type[ServerArgs]:
        sglang_plugin.register()
        HookRegistry.apply_hooks()
        return own

    yield load_plugins
    HookRegistry.reset()


def settings_of(folder: Path, **more: object) -> dict[str, object]:
    return {"tier": {"type": "fs", "root_dir": str(folder), "capacity_bytes": "1GiB"}, **more}


@pytest.mark.parametrize("in_file", [False, True])
def test_the_variable_alone_switches_hicache_on_with_kvtier(
    load: Callable[[], type[ServerArgs]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_file: bool
) -> None:
    text = json.dumps(settings_of(tmp_path / "kv"))
    (tmp_path / "kvtier.json").write_text(text)
    monkeypatch.setenv("KVTIER_SGLANG", f"@{tmp_path / 'kvtier.json'}" if in_file else text)

    made = load()()

    assert made.enable_hierarchical_cache
    assert made.hicache_storage_backend == "dynamic"
    assert made.hicache_storage_backend_extra_config is not None
    extra = json.loads(made.hicache_storage_backend_extra_config)
    found = importlib.import_module(extra["module_path"])
    assert getattr(found, extra["class_name"]).__name__ == "KVTierStorage"
    assert extra["tier"]["type"] == "fs"
    assert extra["interface_v1"] == 1


def test_without_the_variable_nothing_is_changed(
    load: Callable[[], type[ServerArgs]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVTIER_SGLANG", raising=False)

    made = load()()

    assert not made.enable_hierarchical_cache
    assert made.hicache_storage_backend is None


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ("not json", ConfigError, "KVTIER_SGLANG.*must be settings"),
        ("[]", ConfigError, "KVTIER_SGLANG.*must be settings"),
        ("@/no/such/file", ConfigError, "KVTIER_SGLANG"),
        ("{}", ConfigError, "tier"),
        ('{"tier": {"type": "ffs"}}', UnknownNameError, "did you mean 'fs'"),
        ('{"tire": {"type": "fs"}}', UnknownNameError, "did you mean 'tier'"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(
    load: Callable[[], type[ServerArgs]],
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    error: type[Exception],
    words: str,
) -> None:
    monkeypatch.setenv("KVTIER_SGLANG", value)
    server_args = load()

    with pytest.raises(error, match=words):
        server_args()


def test_a_second_backend_is_refused_by_the_name_of_both(
    load: Callable[[], type[ServerArgs]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVTIER_SGLANG", json.dumps(settings_of(tmp_path)))
    server_args = load()

    with pytest.raises(ConfigError, match=r"KVTIER_SGLANG.*--hicache-storage-backend file"):
        server_args(hicache_storage_backend="file")


def test_sglang_finds_the_entry_point_and_it_imports_nothing_else_of_kvtier(tmp_path: Path) -> None:
    group = plugins.GENERAL_PLUGINS_GROUP
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = tmp_path / "kvtier_checkout-0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier-checkout\nVersion: 0\n")
    lines = [f"{name} = {target}" for name, target in project["entry-points"][group].items()]
    (found / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from sglang.srt import plugins\n"
        "found = plugins.load_plugins_by_group(plugins.GENERAL_PLUGINS_GROUP)\n"
        "found['kvtier'][0]()\n"
        "heavy = ('kvtier.engines.', 'kvtier.tiering', 'kvtier.cpu', 'kvtier.connector', 'torch')\n"
        "print(sorted(name for name in sys.modules if name.startswith(heavy)))"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "['kvtier.engines.sglang_plugin']"
