"""What the tests of SGLang's backend share. They need SGLang's wheel, unpacked: ``make test-sglang``."""

import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from kvtier.engines.sglang import KVTierStorage

pytest.register_assert_rewrite("tests.engines.sglang.pools")

CONFIG = {
    "model_type": "llama",
    "rope_theta": 10_000.0,
    "rope_scaling": {"factor": 2.0},
    "num_hidden_layers": 3,
}

MakeConfig = Callable[..., "HiCacheStorageConfig"]
MakeStorage = Callable[..., "KVTierStorage"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the folder of a small model."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def make_config(model: Path, tmp_path: Path) -> MakeConfig:
    """Return what makes SGLang's description of a backend, with kvtier's settings."""

    def make(tier: dict[str, Any] | None = None, **changes: Any) -> "HiCacheStorageConfig":
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

        fs = {"type": "fs", "root_dir": str(tmp_path / "kv"), "capacity_bytes": "256MiB"}
        extra_config = {
            "backend_name": "kvtier", "module_path": "kvtier.engines.sglang", "class_name": "KVTierStorage",
            "interface_v1": 1, "tier": tier or fs,
        } | changes.pop("extra_config", {})  # fmt: skip
        values: dict[str, Any] = {
            "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
            "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True,
            "model_name": str(model), "extra_config": extra_config,
        }  # fmt: skip
        return HiCacheStorageConfig(**(values | changes))

    return make


@pytest.fixture
def make_storage(make_config: MakeConfig) -> Iterator[MakeStorage]:
    """Return what opens a backend, as SGLang's factory does; all are closed at the end."""
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    opened: list[Any] = []

    def make(pool: Any = None, tier: dict[str, Any] | None = None, **changes: Any) -> "KVTierStorage":
        storage: KVTierStorage = StorageBackendFactory.create_backend(
            "dynamic", make_config(tier, **changes), pool
        )
        opened.append(storage)
        if pool is not None:
            storage.register_mem_pool_host(pool)
        storage.on_host_pools_registered()
        return storage

    yield make
    for storage in opened:
        storage.close()


@pytest.fixture
def oracle_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for SGLang's own backend of files; its evictor imports a function beside CUDA kernels."""
    stub = types.ModuleType("sglang.srt.utils.common")
    stub.human_readable_int = int  # type: ignore[attr-defined]
    utils = types.ModuleType("sglang.srt.utils")
    utils.__path__ = []
    monkeypatch.setitem(sys.modules, "sglang.srt.utils", utils)
    monkeypatch.setitem(sys.modules, "sglang.srt.utils.common", stub)
    return tmp_path / "oracle"


def key_of(number: int) -> str:
    """Return a key as SGLang makes them: 64 hexadecimal digits."""
    import hashlib

    return hashlib.sha256(str(number).encode()).hexdigest()


def flat_page(pool: Any, number: int) -> torch.Tensor:
    """Return a page of a pool as a tensor."""
    page: torch.Tensor = pool.get_data_page(number * pool.page_size, flat=True).clone()
    return page
