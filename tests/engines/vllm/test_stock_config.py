"""What vLLM's stock connector says of an engine decides the namespace, and what it leaves out is asked for."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytest.importorskip("vllm.v1.kv_offload.tiering.spec", reason="this vLLM has no secondary tiers")

from tests.engines.vllm.stock_engine import HAS_DOOR, NO_DOOR, key_of, make_stock_facts, make_stock_group

from kvtier.config import EncryptionSettings
from kvtier.engines.vllm.stock_config import is_reproducible, make_stock_config, require_same_keys
from kvtier.errors import ConfigError
from kvtier.namespace import make_namespace

pytestmark = pytest.mark.skipif(not HAS_DOOR, reason=NO_DOOR)


def namespace_of(model_identity: str = "main", tenant_salt: str = "", **facts: object) -> str:
    """Return the namespace of an engine that is as usual but for ``facts``."""
    config = make_stock_config(
        make_stock_facts(**facts), model_identity=model_identity, tenant_salt=tenant_salt
    )
    return make_namespace(config, row_stride_bytes=8192).name


@pytest.mark.parametrize(
    "facts",
    [
        {"model_identity": "main, fp8"},
        {"tenant_salt": "pepper"},
        {"name": "org/other"},
        {"dtype": "fp8"},
        {"kv_cache_layout": "HND"},
        {"worker_kv_bytes_per_block": 4096},
        {"blocks_per_chunk": 2},
        {"tokens_per_hash": 8},
        {"groups": (make_stock_group("layer.1"),)},
        {"groups": (make_stock_group(tokens_per_block=32),)},
        {"groups": (make_stock_group(), make_stock_group("layer.1"))},
        {"world_size": 2},
        {"tp_size": 2},
        {"pp_size": 2},
        {"pcp_size": 2},
        {"dcp_size": 2},
        {"replicated_layout": True},
        {"canonical_layout": True},
    ],
    ids=str,
)
def test_whatever_decides_the_bytes_is_another_namespace(facts: dict[str, Any]) -> None:
    assert namespace_of(**facts) != namespace_of()


@pytest.mark.parametrize(
    "facts",
    [{"engine_id": "another"}, {"rank": 1}, {"data_parallel_index": 1}, {"enable_kv_cache_events": True}],
)
def test_engines_that_differ_in_nothing_that_decides_the_bytes_share_blocks(facts: dict[str, Any]) -> None:
    assert namespace_of(**facts) == namespace_of()


def test_other_weights_under_the_same_path_are_another_namespace(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\x02\0\0\0\0\0\0\0{}first")
    first = namespace_of(name=str(tmp_path))
    assert namespace_of(name=str(tmp_path)) == first
    weights.write_bytes(b"\x02\0\0\0\0\0\0\0{} ")
    assert namespace_of(name=str(tmp_path)) != first


def test_the_same_weights_are_one_namespace_in_a_folder_that_was_moved(tmp_path: Path) -> None:
    found = set()
    for name in ("first", "renamed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"rope_theta": 10000}')
        (tmp_path / name / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}first")
        found.add(namespace_of(name=str(tmp_path / name)))

    assert len(found) == 1
    assert namespace_of("main, fp8", name=str(tmp_path / "first")) not in found


def test_a_models_url_loses_its_credentials() -> None:
    config = make_stock_config(make_stock_facts(name="s3://KEY:SECRET@bucket/model"), model_identity="main")
    assert config.model.name == "s3://bucket/model"


def test_other_weights_in_one_file_are_another_namespace(tmp_path: Path) -> None:
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"first")
    first = namespace_of(name=str(weights))
    weights.write_bytes(b"other weights")
    assert namespace_of(name=str(weights)) != first


def test_other_settings_of_a_local_model_are_another_namespace(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"rope_theta": 10000}')
    first = namespace_of(name=str(tmp_path))
    (tmp_path / "config.json").write_text('{"rope_theta": 20000}')
    assert namespace_of(name=str(tmp_path)) != first


@pytest.mark.parametrize(
    ("facts", "setting"),
    [
        ({"model_identity": ""}, "model_identity"),
        ({"kv_cache_layout": None}, "kv_cache_layout"),
        ({"worker_kv_bytes_per_block": 0}, "worker_kv_bytes_per_block"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(facts: dict[str, Any], setting: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        namespace_of(**facts)
    assert refusal.value.setting == setting


def test_the_seed_of_the_hashes_is_part_of_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    first = namespace_of()
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert namespace_of() != first


def test_short_hashes_are_reproducible_only_with_a_fixed_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert is_reproducible(key_of(1))
    assert not is_reproducible(key_of(1)[-20:])
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert is_reproducible(key_of(1)[-20:])


def test_keys_of_this_release_are_those_of_kvtier() -> None:
    require_same_keys()


def test_how_the_tier_encrypts_is_passed_on() -> None:
    config = make_stock_config(
        make_stock_facts(), model_identity="main", encryption={"key_file": "/etc/ring"}
    )
    assert config.settings.encryption == EncryptionSettings("/etc/ring")
