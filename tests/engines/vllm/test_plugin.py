"""The plug-in makes the connector's name enough, and refuses what cannot work before a model is loaded."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from copy import copy
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from tests.engines.vllm.entry_points import install_entry_points
from tests.engines.vllm.stock_engine import HAS_DOOR, NO_DOOR, StockEngine
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvtier.engines import vllm_plugin
from kvtier.engines.vllm import KVTierConnector
from kvtier.errors import MissingExtraError
from kvtier.tiering import factory

SETTINGS: dict[str, object] = {"cpu_bytes_to_use": "1MiB"}

TINY_MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 256,
}


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the plug-in as vLLM does, and take it back afterwards."""
    for factory_class in (KVConnectorFactory, SecondaryTierFactory, CachePolicyFactory):
        others = {name: one for name, one in factory_class._registry.items() if not name.startswith("kvtier")}
        monkeypatch.setattr(factory_class, "_registry", others)
    monkeypatch.setattr(KVConnectorFactory, "create_connector", KVConnectorFactory.create_connector)
    monkeypatch.setattr(VllmConfig, "__post_init__", VllmConfig.__post_init__)
    vllm_plugin.register()


def make_config(
    model_folder: Path,
    settings: Mapping[str, object],
    connector: str = "KVTierConnector",
    kv_role: str = "kv_both",
    **arguments: object,
) -> VllmConfig:
    """Make an engine's configuration as the API server does, with more ``arguments`` of vLLM."""
    return EngineArgs(
        model=str(model_folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        block_size=16,
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector, kv_role=kv_role, kv_connector_extra_config=dict(settings)
        ),
        **arguments,
    ).create_engine_config()


@pytest.mark.usefixtures("plugin")
def test_the_name_alone_finds_the_connector_and_loading_twice_is_loading_once(model_folder: Path) -> None:
    vllm_plugin.register()

    config = make_config(model_folder, SETTINGS)

    assert KVConnectorFactory.get_connector_class(config.kv_transfer_config) is KVTierConnector


@pytest.mark.usefixtures("plugin")
def test_names_alone_find_every_tier_and_policy_in_vllms_own_factories() -> None:
    vllm_plugin.register()

    tiers = {name: SecondaryTierFactory.get_tier_class({"type": name}) for name in vllm_plugin.TIERS}
    policies = {name: CachePolicyFactory.get_cache_policy_cls(name) for name in vllm_plugin.POLICIES}

    assert {name: f"kvtier-{one.kvtier_type}" for name, one in tiers.items()} == {
        name: name for name in tiers
    }
    assert {name: one.__name__ for name, one in policies.items()} == vllm_plugin.POLICIES


@pytest.mark.usefixtures("plugin")
@pytest.mark.skipif(not HAS_DOOR, reason=NO_DOOR)
def test_an_engine_with_plain_names_finds_its_blocks_and_names_its_weights_itself(
    vllm_config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = {"type": "kvtier-fs", "root_dir": str(tmp_path), "capacity_bytes": "64MiB"}
    built: list[StockEngine] = []

    def build(config: VllmConfig) -> None:
        """Do what vLLM's own connector does of it."""
        built.append(StockEngine([tier], extra_config={"eviction_policy": "kvtier-hazard"}))

    monkeypatch.setattr(KVConnectorFactory, "get_connector_class", lambda _: lambda config, *_: build(config))
    monkeypatch.setattr(KVConnectorFactory, "supports_hma_config", lambda _: True, raising=False)
    for seed, num_hits in ((0, 0), (0, 2), (1, 0)):
        config = copy(vllm_config)
        config.model_config = copy(vllm_config.model_config)
        config.model_config.seed = seed  # of random weights: other ones
        config.kv_transfer_config = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")
        KVConnectorFactory.create_connector(
            config=config, role=KVConnectorRole.SCHEDULER, kv_cache_config=None
        )
        with built[-1] as engine:
            assert engine.load([1, 2]) == num_hits
            engine.store([1, 2])
    assert vllm_plugin.config_of_engine() is None


def test_what_the_plug_in_calls_at_its_start_imports_nothing_of_kvtier() -> None:
    tree = ast.parse(Path(vllm_plugin.__file__).read_text())
    importing = {
        owner.name if isinstance(owner, ast.FunctionDef) else "module"
        for owner in tree.body
        for node in ast.walk(owner)
        if isinstance(node, ast.Import | ast.ImportFrom) and "kvtier" in ast.unparse(node)
    }

    assert importing == {"check_before_start", "check_tiers", "refuse_replaced", "refuse_idle_tiers"}


BAD_SETTINGS: dict[str, tuple[dict[str, object], str]] = {
    "a misspelled setting": ({"cpu_byte_to_use": "1MiB"}, "did you mean 'cpu_bytes_to_use'"),
    "a wrong value": (SETTINGS | {"load_if": "slower"}, "load_if='slower'"),
    "no host memory": ({"store_threshold": 2}, "cpu_bytes_to_use=None: is required"),
    "an unknown policy": (SETTINGS | {"eviction_policy": "lruu"}, "did you mean 'lru'"),
    "an unknown tier": (SETTINGS | {"secondary_tiers": [{"type": "ffs"}]}, "did you mean 'fs'"),
    "a tier's misspelled setting": (
        SETTINGS | {"secondary_tiers": [{"type": "fs", "root_dirs": "/x"}]},
        "did you mean 'root_dir'",
    ),
    "more host memory than the machine has": ({"cpu_bytes_to_use": "9999TiB"}, "more than this machine has"),
    "a size without its unit": ({"cpu_bytes_to_use": 32}, 'did you mean "32GiB"'),
    "no list of tiers": (SETTINGS | {"secondary_tiers": "fs"}, "must be a list"),
}


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_settings_are_refused_when_the_configuration_is_made(model_folder: Path, case: str) -> None:
    settings, message = BAD_SETTINGS[case]

    with pytest.raises(ValueError, match=message):
        make_config(model_folder, settings)


@pytest.mark.usefixtures("plugin")
def test_settings_within_vllms_connector_of_connectors_are_checked_too(model_folder: Path) -> None:
    one = {
        "kv_connector": "KVTierConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes": 1},
    }

    with pytest.raises(ValueError, match="did you mean 'cpu_bytes_to_use'"):
        make_config(model_folder, {"connectors": [one]}, "MultiConnector")


@pytest.mark.usefixtures("plugin")
def test_what_vllm_is_told_is_refused_as_early(model_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"enable_prefix_caching=False: must be true: .* from a tier \["):
        make_config(model_folder, SETTINGS, enable_prefix_caching=False)
    with pytest.raises(ValueError, match="kv_role='kv_producer': must be"):
        make_config(model_folder, SETTINGS, kv_role="kv_producer")


@pytest.mark.usefixtures("plugin")
def test_other_connectors_are_left_alone(model_folder: Path) -> None:
    config = make_config(model_folder, {"shared_storage_path": "/nowhere"}, "ExampleConnector")

    assert config.kv_transfer_config.kv_connector == "ExampleConnector"


@pytest.mark.usefixtures("plugin")
def test_a_missing_client_library_is_refused_only_for_a_required_tier(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise MissingExtraError("redis", "valkey")

    monkeypatch.setattr(factory.TIERS, "resolve", missing)
    tier = {"type": "valkey", "url": "redis://127.0.0.1:1"}

    make_config(model_folder, SETTINGS | {"secondary_tiers": [tier]})
    with pytest.raises(MissingExtraError, match=r"pip install '.\[valkey\]'"):
        make_config(model_folder, SETTINGS | {"secondary_tiers": [tier | {"required": True}]})


REPLACED: dict[str, tuple[str, dict[str, object], str]] = {
    "kvtier's connector": (
        "KVTierConnector",
        SETTINGS,
        "replace kv_connector='KVTierConnector' by 'OffloadingConnector'",
    ),
    "within a connector of connectors": (
        "MultiConnector",
        {"connectors": [{"kv_connector": "KVTierConnector", "kv_connector_extra_config": SETTINGS}]},
        "replace kv_connector='MultiConnector' by 'OffloadingConnector'",
    ),
    "a size beside kvtier's tiers in vLLM's": (
        "OffloadingConnector",
        SETTINGS
        | {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"module_path": "kvtier.engines.vllm"}]},
        "replace cpu_bytes_to_use='1MiB' by 2147483648",
    ),
}


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("case", REPLACED)
def test_a_size_of_vllms_that_replaces_kvtier_is_refused_by_the_name_of_both(
    model_folder: Path, case: str
) -> None:
    connector, settings, what = REPLACED[case]

    with pytest.raises(ValueError, match=rf"kv_offloading_size=2.*{what}.*\"cpu_bytes_to_use\": \"2GiB\""):
        make_config(model_folder, settings, connector, kv_offloading_size=2)


@pytest.mark.usefixtures("plugin")
def test_the_simple_connector_of_vllm_is_named_too(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", "1")

    with pytest.raises(ValueError, match="kv_connector='KVTierConnector' by 'SimpleCPUOffloadConnector'"):
        make_config(model_folder, SETTINGS, kv_offloading_size=2)


@pytest.mark.usefixtures("plugin")
def test_the_same_size_without_kvtier_is_vllms_own_affair(model_folder: Path) -> None:
    config = make_config(model_folder, {}, "OffloadingConnector", kv_offloading_size=2)

    assert config.kv_transfer_config.kv_connector_extra_config == {"cpu_bytes_to_use": 2 * 2**30}


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("spec", [{}, {"spec_name": "CPUOffloadingSpec"}])
@pytest.mark.parametrize("connector", ["KVTierConnector", "OffloadingConnector"])
def test_a_spec_that_knows_no_tiers_is_refused_beside_tiers_of_kvtier(
    model_folder: Path, connector: str, spec: dict[str, object]
) -> None:
    tiers = {
        "KVTierConnector": [{"type": "fs", "root_dir": "/kv", "capacity_bytes": "1GiB"}],
        "OffloadingConnector": [{"type": "FS", "module_path": "kvtier.engines.vllm.tiers"}],
    }
    settings = SETTINGS | spec | {"secondary_tiers": tiers[connector]}
    if connector == "KVTierConnector" and not spec:
        make_config(model_folder, settings, connector)  # the tiers imply the spec
        return

    with pytest.raises(ValueError, match=r"spec_name='CPUOffloadingSpec'.*TieringOffloadingSpec"):
        make_config(model_folder, settings, connector)


STOCK_REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "an unknown tier": ({"secondary_tiers": [{"type": "kvtier-ffs"}]}, "did you mean 'kvtier-fs'"),
    "a wrong value": (
        {"secondary_tiers": [{"type": "kvtier-fs", "root_dir": "relative", "capacity_bytes": "1GiB"}]},
        "root_dir='relative'",
    ),
    "the same by its class": (
        {
            "secondary_tiers": [
                {"type": "KVTierFS", "module_path": "kvtier.engines.vllm.tiers", "root_dir": "relative"}
            ]
        },
        "root_dir='relative'",
    ),
    "an unknown policy": ({"eviction_policy": "kvtier-lruu"}, "did you mean 'lru'"),
    "a size with a unit": (
        {"cpu_bytes_to_use": "1MiB", "eviction_policy": "kvtier-lru"},
        "a number of bytes",
    ),
}


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("case", STOCK_REFUSED)
def test_tiers_behind_vllms_own_connector_are_refused_as_early(model_folder: Path, case: str) -> None:
    settings, message = STOCK_REFUSED[case]
    common = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 2**20}

    with pytest.raises(ValueError, match=message):
        make_config(model_folder, common | settings, "OffloadingConnector")


@pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM does so on CPUs")
@pytest.mark.usefixtures("plugin")
def test_where_vllm_has_switched_prefix_caching_off_the_refusal_says_so(tmp_path: Path) -> None:
    if torch.cpu._is_amx_tile_supported():
        pytest.skip("on this CPU vLLM keeps it on")
    (tmp_path / "config.json").write_text(json.dumps(TINY_MLA))

    with pytest.raises(
        ValueError, match=r"enable_prefix_caching=False.*vLLM has switched it off by itself.*MLA on a CPU"
    ):
        make_config(tmp_path, SETTINGS)


START = """
import os
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM
try:
    LLM({model!r}, skip_tokenizer_init=True, dtype="float32", max_model_len=256, kv_transfer_config={config!r},
        **{more!r})
except Exception as error:
    print("REFUSED", type(error).__name__, error)
"""


ENDED: dict[str, tuple[dict[str, object], dict[str, object], str]] = {
    "a misspelled tier": ({"secondary_tiers": [{"type": "ffs"}]}, {}, "did you mean 'fs'"),
    "a size that replaces kvtier": ({}, {"kv_offloading_size": 2}, "replace kv_connector='KVTierConnector'"),
}


@pytest.mark.parametrize("case", ENDED)
def test_a_start_that_has_no_weights_to_read_ends_through_the_entry_point_alone(
    model_folder: Path, tmp_path: Path, case: str
) -> None:
    settings, more, message = ENDED[case]
    bare = tmp_path / "no-weights"
    bare.mkdir()
    (bare / "config.json").write_text((model_folder / "config.json").read_text())
    config = {
        "kv_connector": "KVTierConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": SETTINGS | settings,
    }
    program = START.format(model=str(bare), config=config, more=more)
    environment = os.environ | {
        "PYTHONPATH": install_entry_points(tmp_path / "installed"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }

    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )

    assert "REFUSED ValidationError" in ended.stdout
    assert message in ended.stdout
    assert "Loading weights" not in ended.stdout + ended.stderr
