"""The namespace: equal bytes, equal digest; whatever changes the bytes changes it; ranks and hosts do not."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.errors import ConfigError
from kvtier.namespace import RANDOM_SEED, make_namespace, require_stable_hash

GROUP = KVGroup(block_size_tokens=16, layer_names=("layer.0", "layer.1"), page_size_bytes=1024)
MODEL = ModelIdentity("model", "r1", "float16", "digest")
CONFIG = OffloadingConfig(
    engine_id="engine",
    model=MODEL,
    groups=(GROUP,),
    hash_block_size=16,
    hash_seed="0",
    kv_layout="NHD",
    kv_dtype="float16",
    engine_kind="transformers",
)

DECIDES_THE_BYTES: dict[str, list[Any]] = {  # Any: fields of the configuration
    "model": [replace(MODEL, **{part.name: "other"}) for part in fields(ModelIdentity)],
    "groups": [
        (replace(GROUP, layer_names=("layer.1", "layer.0")),),
        (replace(GROUP, page_size_bytes=2048),),
        (replace(GROUP, block_size_tokens=32),),
        (GROUP, GROUP),
    ],
    "hash_block_size": [8],
    "hash_algorithm": ["blake3"],
    "hash_seed": ["1"],
    "kv_layout": ["HND"],
    "kv_dtype": ["float8"],
    "world_size": [2],
    "tensor_parallel_size": [2],
    "pipeline_parallel_size": [2],
    "context_parallel_size": [2],
    "engine_kind": ["vllm"],
    "extra_config": [{"block_size": 32}, {"tenant_salt": "tenant"}],
}

DOES_NOT: dict[str, list[Any]] = {  # Any: as above
    "engine_id": ["other"],
    "rank": [3],
    "enable_events": [True],
    "extra_config": [{"cpu_bytes_to_use": 1}, {"eviction_policy": "arc"}, {"instance_id": "i"}],
}

CHANGES = [{name: value} for name, values in DECIDES_THE_BYTES.items() for value in values]
NO_CHANGES = [{name: value} for name, values in DOES_NOT.items() for value in values]


@pytest.mark.parametrize("change", CHANGES)
def test_what_decides_the_bytes_is_another_namespace(change: dict[str, Any]) -> None:
    changed = make_namespace(replace(CONFIG, **change), 4096)
    assert changed.digest != make_namespace(CONFIG, 4096).digest


@pytest.mark.parametrize("change", NO_CHANGES)
def test_what_does_not_is_the_same_namespace(change: dict[str, Any]) -> None:
    assert make_namespace(replace(CONFIG, **change), 4096) == make_namespace(CONFIG, 4096)


def test_every_field_of_the_configuration_is_decided_about() -> None:
    derived = {"settings", "num_hosts"}
    assert {part.name for part in fields(OffloadingConfig)} - derived == set(DECIDES_THE_BYTES) | set(
        DOES_NOT
    )


def test_row_stride_and_epoch_are_part_of_it() -> None:
    namespaces = [
        make_namespace(CONFIG, 4096),
        make_namespace(CONFIG, 8192),
        make_namespace(CONFIG, 4096, epoch=bytes(16)),
        make_namespace(CONFIG, 4096, epoch=bytes(15) + b"\x01"),
    ]
    assert len({namespace.digest for namespace in namespaces}) == 4


def test_the_document_is_readable_and_keeps_the_salt_to_itself() -> None:
    namespace = make_namespace(replace(CONFIG, extra_config={"tenant_salt": "hunter2"}), 4096)
    document = json.loads(namespace.document)
    assert document["model"]["name"] == "model"
    assert "hunter2" not in namespace.document


def test_the_name_is_the_first_half_of_the_digest() -> None:
    namespace = make_namespace(CONFIG, 4096)
    assert len(namespace.digest) == 32
    assert namespace.name == namespace.digest.hex()[:32]


def test_the_digest_is_the_same_in_every_process() -> None:
    """Changed on purpose only, together with LAYOUT_VERSION: persistent tiers find nothing under another."""
    assert make_namespace(CONFIG, 4096).name == "22c5ea3508899e8def4c632b0f2bda67"


def test_a_random_hash_seed_is_refused_where_blocks_outlive_the_process() -> None:
    require_stable_hash(CONFIG, "fs")
    with pytest.raises(ConfigError, match="PYTHONHASHSEED") as caught:
        require_stable_hash(replace(CONFIG, hash_seed=RANDOM_SEED), "fs")
    assert caught.value.setting == "hash_seed"
