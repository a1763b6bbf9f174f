"""What an engine tells us, and the settings: typed at construction, refused with a remedy."""

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from kvtier.config import (
    CudaCopier,
    EncryptionSettings,
    GroupKind,
    KVGroup,
    LoadIf,
    ModelIdentity,
    OffloadingConfig,
    Settings,
    SettingsReader,
    StatePart,
    parse_encryption,
    parse_settings,
)
from kvtier.errors import ConfigError, UnknownNameError
from kvtier.quantities import parse_bytes

GROUP = KVGroup(block_size_tokens=16, layer_names=("layer.0",), page_size_bytes=1024)


def make_config(groups: tuple[KVGroup, ...] = (GROUP,), **extra_config: object) -> OffloadingConfig:
    return OffloadingConfig(
        engine_id="engine",
        model=ModelIdentity("model"),
        groups=groups,
        hash_block_size=16,
        extra_config=extra_config,
    )


def test_no_settings_are_the_defaults() -> None:
    assert parse_settings({}) == Settings()


def test_an_unknown_way_to_copy_is_refused_naming_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"cuda_copier='dma'.*'auto', 'batch', 'runs', 'staged', 'kernel'"):
        parse_settings({"cuda_copier": "dma"})


EVERY_SETTING: Mapping[str, Any] = {
    "cpu_bytes_to_use": "2 GiB",
    "eviction_policy": "arc",
    "store_threshold": 2,
    "max_tracker_size": 10,
    "block_size": 64,
    "offload_prompt_only": True,
    "spec_name": "Mine",
    "spec_module_path": "my.module",
    "lookup_deadline_s": 1,
    "load_if": "faster",
    "audit_ratio": 0.25,
    "audit_limit": 0,
    "audit_seed": 7,
    "cuda_copier": "kernel",
    "instance_id": "one",
    "tenant_salt": "salt",
    "trust_multi_modal_uuids": True,
    "tenants": {"alice": {}},
    "ttl_s": 60,
    "record_trace": "/traces/engine.jsonl",
    "record_max_bytes": "2 MB",
    "record_salt_file": "/secrets/salt",
    "control_socket": False,
    "metrics_port": 9464,
    "metrics_host": "0.0.0.0",  # noqa: S104 - a user's choice
    "encryption": {"key_file": "/secrets/ring", "tenant": "acme"},
    "secondary_tiers": [{"type": "fs"}],
}
"""A value of each setting that is not the default."""


def test_every_setting_is_read() -> None:
    assert set(EVERY_SETTING) == set(Settings.__dataclass_fields__)
    assert parse_settings(EVERY_SETTING) == Settings(
        cpu_bytes_to_use=2 * 2**30,
        eviction_policy="arc",
        store_threshold=2,
        max_tracker_size=10,
        block_size=64,
        offload_prompt_only=True,
        spec_name="Mine",
        spec_module_path="my.module",
        lookup_deadline_s=1.0,
        load_if=LoadIf.FASTER,
        audit_ratio=0.25,
        audit_limit=0,
        audit_seed=7,
        cuda_copier=CudaCopier.KERNEL,
        instance_id="one",
        tenant_salt="salt",
        trust_multi_modal_uuids=True,
        tenants={"alice": {}},
        ttl_s=60.0,
        record_trace="/traces/engine.jsonl",
        record_max_bytes=2_000_000,
        record_salt_file="/secrets/salt",
        control_socket=False,
        metrics_port=9464,
        metrics_host="0.0.0.0",  # noqa: S104 - as above
        encryption=EncryptionSettings("/secrets/ring", "acme"),
        secondary_tiers=({"type": "fs"},),
    )


@pytest.mark.parametrize("value", [-0.1, 1.1, "0.001", True, float("nan")])
def test_a_share_outside_0_to_1_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"audit_ratio=.*share of the requests"):
        parse_settings({"audit_ratio": value})


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'cpu_bytes_to_use'"):
        parse_settings({"cpu_byte_to_use": 1})


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("others", [{}, {"spec_module_path": "my.module"}])
def test_a_setting_that_was_removed_is_refused_with_its_value(
    value: object, others: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=rf"layerwise_load={value}: was removed .* leave it out"):
        parse_settings({"layerwise_load": value, **others})


def test_a_foreign_spec_may_have_settings_of_its_own() -> None:
    assert parse_settings({"spec_module_path": "my.module", "my_setting": 1}).spec_module_path == "my.module"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cpu_bytes_to_use", 0),
        ("cpu_bytes_to_use", -5),
        ("cpu_bytes_to_use", "8 gallons"),
        ("cpu_bytes_to_use", True),
        ("cpu_bytes_to_use", "0.1"),
        ("eviction_policy", 3),
        ("store_threshold", -1),
        ("store_threshold", True),
        ("store_threshold", 1.5),
        ("max_tracker_size", 0),
        ("block_size", "16"),
        ("offload_prompt_only", 1),
        ("offload_prompt_only", "true"),
        ("lookup_deadline_s", -1),
        ("lookup_deadline_s", float("inf")),
        ("lookup_deadline_s", float("nan")),
        ("lookup_deadline_s", False),
        ("lookup_deadline_s", 10**400),
        ("load_if", "sometimes"),
        ("secondary_tiers", {"type": "fs"}),
        ("secondary_tiers", "fs"),
        ("secondary_tiers", ["fs"]),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings({name: value})
    assert (caught.value.setting, caught.value.value) == (name, pytest.approx(value, nan_ok=True))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1, 1),
        ("1", 1),
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("2 GB", 2 * 10**9),
        ("8Gi", 8 * 2**30),
        ("8gib", 8 * 2**30),
        ("32G", 32 * 10**9),
        ("512Mi", 512 * 2**20),
        ("4ki", 4096),
        ("1T", 10**12),
        ("3k", 3000),
        ("2Ti", 2 * 2**40),
        ("1.001K", 1001),
        ("8388607TiB", 8388607 * 2**40),
        (2**63 - 1, 2**63 - 1),
        (8.0, 8),
        (np.int64(8), 8),
        ("1.5KiB", 1536),
        (" 64MiB ", 64 * 2**20),
        ("1TB", 10**12),
        ("9007199254740993", 9_007_199_254_740_993),
    ],
)
def test_sizes_are_understood_with_their_units(text: object, expected: int) -> None:
    assert parse_bytes("size", text) == expected


@pytest.mark.parametrize(
    "value",
    [
        "9" * 400,
        "0." + "0" * 400 + "1",
        int("9" * 400),
        pytest.param(10**5000, id="5001 digits"),
        2**63,
        "8388608TiB",
        "1e9",
        float("inf"),
        float("nan"),
        float("-inf"),
        -1,
        "-8GiB",
        "8 GiBB",
        "8m i",
        "\u0663GiB",
        "",
        [8],
    ],
)
def test_what_is_no_size_is_one_short_line_with_the_forms_that_there_are(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes("size", value)

    message = str(caught.value)
    assert len(message) < 260
    assert "\n" not in message
    assert 'text with a unit: "8GiB" or "8Gi" (1024-based: Ki, Mi, Gi, Ti), "8GB" or "8G"' in message


def test_the_reader_leaves_out_what_is_not_given() -> None:
    read = SettingsReader({"on": True})
    assert read.flag("on", default=False)
    assert not read.flag("off", default=False)
    assert read.size_bytes("size", 7) == 7
    with pytest.raises(ConfigError, match="true or false"):
        SettingsReader({"on": 1}).flag("on", default=False)


def test_tiers_are_copied_from_the_callers_dictionary() -> None:
    tier = {"type": "fs"}
    parsed = parse_settings({"secondary_tiers": [tier]})
    tier["type"] = "obj"
    assert parsed.secondary_tiers == ({"type": "fs"},)


def test_the_configuration_parses_its_settings_once_and_is_frozen() -> None:
    config = make_config(eviction_policy="arc")
    assert config.settings.eviction_policy == "arc"
    with pytest.raises(FrozenInstanceError):
        config.engine_id = "other"  # type: ignore[misc] # that is what is proven


def test_block_size_makes_the_factor() -> None:
    assert make_config().block_size_factor == 1
    assert make_config(block_size=64).block_size_factor == 4


@pytest.mark.parametrize("block_size", [8, 24, 40])
def test_a_block_size_that_cuts_device_blocks_is_refused(block_size: int) -> None:
    with pytest.raises(ConfigError, match="multiple of the device block size, 16 tokens"):
        make_config(block_size=block_size)


def test_a_block_size_over_unequal_groups_is_refused() -> None:
    groups = (GROUP, replace(GROUP, block_size_tokens=32))
    assert make_config(groups).block_size_factor == 1
    with pytest.raises(ConfigError, match="different device block sizes"):
        make_config(groups, block_size=32)


def test_device_blocks_must_hold_whole_hash_blocks() -> None:
    with pytest.raises(ConfigError, match="multiple of the hash block size, 16 tokens"):
        make_config((replace(GROUP, block_size_tokens=24),))


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"groups": ()}, "groups"),
        ({"groups": (GROUP,) * 257}, "groups"),
        ({"hash_block_size": 0}, "hash_block_size"),
        ({"num_hosts": 2}, "num_hosts"),
    ],
)
def test_an_engine_that_cannot_be_served_is_refused(changes: dict[str, Any], setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace_config(changes)
    assert caught.value.setting == setting


def replace_config(changes: dict[str, Any]) -> OffloadingConfig:
    values: dict[str, Any] = {"groups": (GROUP,), "hash_block_size": 16} | changes
    return OffloadingConfig(engine_id="engine", model=ModelIdentity("model"), **values)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"block_size_tokens": 0}, "block_size_tokens"),
        ({"page_size_bytes": 0}, "page_size_bytes"),
        ({"window_tokens": 128}, "window_tokens"),
        ({"kind": GroupKind.WINDOW}, "window_tokens"),
        ({"state_parts": (StatePart("float32", 1024),)}, "state_parts"),
        ({"kind": GroupKind.STATE, "state_parts": (StatePart("float32", 1020),)}, "state_parts"),
    ],
)
def test_a_group_that_cannot_be_is_refused(changes: dict[str, Any], setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(GROUP, **changes)
    assert caught.value.setting == setting


def test_device_blocks_of_a_recurrent_state_are_not_joined() -> None:
    state = KVGroup(16, ("layer.1",), 1024, GroupKind.STATE)

    with pytest.raises(ConfigError, match="recurrent state"):
        make_config((GROUP, state), block_size=32)
    assert make_config((GROUP, state), block_size=16).block_size_factor == 1


def test_what_an_engine_says_of_itself_can_be_logged_without_a_password() -> None:
    tiers = [{"type": "valkey", "url": "redis://someone:hunter2@host"}]
    config = OffloadingConfig(
        "engine",
        ModelIdentity("m"),
        (KVGroup(16, ("layer",), 64),),
        16,
        extra_config={"secondary_tiers": tiers},
    )
    assert "hunter2" not in repr(config)


@pytest.mark.parametrize(
    ("value", "environ", "expected"),
    [
        (None, {}, None),
        (False, {"KVTIER_KEY_FILE": "/ring"}, None),
        (True, {"KVTIER_KEY_FILE": "/ring"}, EncryptionSettings("/ring")),
        ({"tenant": "a"}, {"KVTIER_KEY_FILE": "/ring"}, EncryptionSettings("/ring", "a")),
        ({"key_file": "/own"}, {"KVTIER_KEY_FILE": "/ring"}, EncryptionSettings("/own")),
    ],
)
def test_the_key_ring_is_named_by_the_setting_or_the_environment(
    value: object, environ: Mapping[str, str], expected: EncryptionSettings | None
) -> None:
    assert parse_encryption(value, environ) == expected


@pytest.mark.parametrize(
    "value",
    [True, {}, [], "/ring", 1, {"key_file": "ring"}, {"key_file": ""}, {"key_file": 5}, {"key_file": "/a\0b"},
     {"key_file": "/ring", "keys": 1}, {"key_file": "/ring", "tenant": ""}, {"key_file": "/ring", "tenant": 1}],
)  # fmt: skip
def test_what_names_no_key_ring_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="encryption="):
        parse_encryption(value, {})
