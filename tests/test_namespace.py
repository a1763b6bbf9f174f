"""The namespace: equal bytes, equal digest; whatever changes the bytes changes it; ranks and hosts do not."""

import hashlib
import json
from dataclasses import fields, replace
from typing import Any

import pytest

from kvtier.config import GroupKind, KVGroup, ModelIdentity, OffloadingConfig, StatePart
from kvtier.errors import ConfigError, NamespaceDocumentError
from kvtier.namespace import (
    ABSENT,
    RANDOM_SEED,
    Difference,
    NamespacePage,
    ProbedModel,
    differences,
    make_namespace,
    parse_document,
    require_stable_hash,
    tag_tenant,
)

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
    "model": [
        replace(MODEL, **{part.name: "other"}) for part in fields(ModelIdentity) if part.name != "config_json"
    ],
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
    "engine_host_bytes": [1],
    "engines_per_host": [2],
    "computes_last_token": [True],
    "audits_first_hits": [True],
    "has_local_workers": [False],
    "extra_config": [{"cpu_bytes_to_use": 1024}, {"eviction_policy": "arc"}, {"instance_id": "i"}],
}

CHANGES = [{name: value} for name, values in DECIDES_THE_BYTES.items() for value in values]
NO_CHANGES = [{name: value} for name, values in DOES_NOT.items() for value in values]


def test_what_a_model_computed_is_no_other_namespace_and_in_no_document() -> None:
    values = {one.name: getattr(CONFIG.model, one.name) for one in fields(CONFIG.model)}
    probed = ProbedModel(**values, page=NamespacePage(b"12345", lambda _: ""))

    assert make_namespace(replace(CONFIG, model=probed), 4096) == make_namespace(CONFIG, 4096)


def test_how_states_are_compared_is_no_other_namespace() -> None:
    states = replace(GROUP, kind=GroupKind.STATE)
    known = replace(states, state_parts=(StatePart("float32", GROUP.page_size_bytes),))

    assert make_namespace(replace(CONFIG, groups=(states,)), 4096) == make_namespace(
        replace(CONFIG, groups=(known,)), 4096
    )


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


def of_tenant(salt: str, kv_dtype: str = "float16") -> OffloadingConfig:
    return replace(CONFIG, extra_config={"tenant_salt": salt}, kv_dtype=kv_dtype)


def with_config(**settings: object) -> OffloadingConfig:
    text = json.dumps(settings)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return replace(CONFIG, model=replace(MODEL, config_digest=digest, config_json=text))


def documents(*configs: OffloadingConfig) -> list[str]:
    return [make_namespace(config, 4096).document for config in configs]


def test_the_document_says_which_model_and_how_it_is_configured() -> None:
    config = with_config(rope_scaling={"rope_type": "yarn", "factor": 4.0}, sliding_window=4096)
    model = json.loads(make_namespace(config, 4096).document)["model"]
    assert model["name"] == "model"
    assert model["config"] == {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "sliding_window": 4096}


def test_words_for_the_configuration_do_not_change_the_digest() -> None:
    in_words = replace(CONFIG, model=replace(MODEL, config_json='{"sliding_window": 4096}'))
    assert make_namespace(in_words, 4096).digest == make_namespace(CONFIG, 4096).digest


def test_a_configuration_that_is_no_object_has_no_words() -> None:
    for text in ("nonsense", "[1]", "[" * 100_000):
        namespace = make_namespace(replace(CONFIG, model=replace(MODEL, config_json=text)), 4096)
        assert "config" not in json.loads(namespace.document)["model"]


def test_neither_a_salt_nor_a_quick_digest_of_it_is_in_the_document_or_makes_the_name() -> None:
    """Whoever reads a place has its documents and names: none may confirm a guess at the speed of SHA-256."""
    namespace = make_namespace(of_tenant("hunter2"), 4096)
    quick = hashlib.sha256(b"hunter2").hexdigest()
    assert "hunter2" not in namespace.document
    assert not any(quick[at : at + 8] in namespace.document for at in range(0, len(quick), 8))
    guess = json.loads(namespace.document)
    del guess["tenant"]
    guess["tenant_salt"] = quick
    text = json.dumps(guess, sort_keys=True, indent=1)
    assert hashlib.sha256(text.encode()).digest() != namespace.digest


def test_a_tenant_has_one_tag_in_all_its_namespaces_and_no_other_tenant_has_it() -> None:
    tags = [
        json.loads(document)["tenant"]
        for document in documents(
            of_tenant("one"), of_tenant("one", kv_dtype="float8"), of_tenant("two"), CONFIG
        )
    ]
    assert tags == [tag_tenant("one"), tag_tenant("one"), tag_tenant("two"), ""]
    assert tag_tenant("one") != tag_tenant("two")


def test_differences_name_the_field_and_both_values() -> None:
    other = replace(CONFIG, model=replace(MODEL, dtype="bfloat16"), hash_seed="1")
    assert differences(*documents(CONFIG, other)) == [
        Difference("model.dtype", "float16", "bfloat16"),
        Difference("hash_seed", "0", "1"),
    ]


def test_differences_of_the_models_configuration_are_in_words() -> None:
    one, other = (
        with_config(rope_scaling={"factor": factor}, vocab_size=100, **more)
        for factor, more in ((2.0, {}), (4.0, {"sliding_window": 4096}))
    )
    assert differences(*documents(one, other)) == [
        Difference("model.config.rope_scaling.factor", "2.0", "4.0"),
        Difference("model.config.sliding_window", ABSENT, "4096"),
    ]


def test_where_one_document_has_no_words_for_the_configuration_the_digests_are_compared() -> None:
    words = with_config(sliding_window=4096)
    older = replace(words, model=replace(words.model, config_json=""))
    assert differences(*documents(words, older)) == []
    assert [one.field for one in differences(*documents(words, CONFIG))] == ["model.config_digest"]


def test_of_groups_only_what_differs_is_named() -> None:
    longer = replace(CONFIG, groups=(replace(GROUP, layer_names=("layer.0", "layer.9", "layer.10")),))
    more = replace(CONFIG, groups=(GROUP, GROUP))
    assert differences(*documents(CONFIG, longer)) == [
        Difference("groups.0.layer_names.1", "layer.1", "layer.9")
    ]
    found = differences(*documents(CONFIG, more))
    assert [(one.field, one.value_a) for one in found] == [("groups.1", ABSENT)]


def test_another_tenant_differs_in_the_tenant_and_a_reset_in_the_epoch() -> None:
    found = differences(*documents(of_tenant("one"), of_tenant("two")))
    assert found == [Difference("tenant", tag_tenant("one"), tag_tenant("two"))]
    before, after = (make_namespace(CONFIG, 4096, epoch=epoch).document for epoch in (b"", b"\x01" * 16))
    assert differences(before, after) == [Difference("epoch", "", "01" * 16)]


def test_equal_namespaces_have_no_difference() -> None:
    assert differences(*documents(CONFIG, CONFIG)) == []


def older_form(config: OffloadingConfig, salt: str) -> str:
    document = json.loads(make_namespace(config, 4096).document)
    document["tenant_salt"] = hashlib.sha256(salt.encode()).hexdigest()
    del document["tenant"]
    return json.dumps(document)


def test_a_document_of_an_older_version_is_understood_and_its_digest_of_a_salt_not_passed_on() -> None:
    new = make_namespace(CONFIG, 4096).document
    assert differences(older_form(CONFIG, ""), new) == []
    found = differences(older_form(CONFIG, "hunter2"), new)
    assert [one.field for one in found] == ["tenant"]
    assert hashlib.sha256(b"hunter2").hexdigest() not in str(found)
    assert "tenant_salt" not in parse_document(older_form(CONFIG, "hunter2"))


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "{}", "[" * 100_000, '{"a": ' * 100_000])
def test_what_is_no_document_is_refused(text: str) -> None:
    with pytest.raises(NamespaceDocumentError, match=r"namespace\.json"):
        differences(text, make_namespace(CONFIG, 4096).document)


def test_the_name_is_the_first_half_of_the_digest() -> None:
    namespace = make_namespace(CONFIG, 4096)
    assert len(namespace.digest) == 32
    assert namespace.name == namespace.digest.hex()[:32]


def test_the_digest_is_the_same_in_every_process() -> None:
    """Changed on purpose only, together with LAYOUT_VERSION: persistent tiers find nothing under another."""
    assert make_namespace(CONFIG, 4096).name == "245e74bc7b2e32bef815288ccaf858d8"


def test_weights_that_are_named_by_their_bytes_are_found_under_any_name() -> None:
    named = replace(MODEL, weights="blake3:1")
    moved = replace(named, name="/elsewhere/model", revision="r2")
    here, there = (make_namespace(replace(CONFIG, model=model), 4096) for model in (named, moved))
    assert here.digest == there.digest
    assert json.loads(there.document)["model"]["name"] == "/elsewhere/model"
    assert not differences(here.document, there.document)
    others = make_namespace(replace(CONFIG, model=replace(moved, weights="blake3:2")), 4096)
    assert [one.field for one in differences(here.document, others.document)] == ["model.weights"]


def test_a_random_hash_seed_is_refused_where_blocks_outlive_the_process() -> None:
    require_stable_hash(CONFIG, "fs")
    with pytest.raises(ConfigError, match="PYTHONHASHSEED") as caught:
        require_stable_hash(replace(CONFIG, hash_seed=RANDOM_SEED), "fs")
    assert caught.value.setting == "hash_seed"
