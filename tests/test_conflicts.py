"""Settings that name one thing, or that leave each other without an effect, are refused by the name of both."""

from dataclasses import fields

import pytest

from kvtier.config import TRACE_VARIABLE, OffloadingConfig, Settings, parse_settings
from kvtier.conflicts import IDLE, refuse_conflicts
from kvtier.errors import ConfigError
from kvtier.factory import OffloadingSpecFactory
from kvtier.testing.tier_suite import make_config

FS = {"type": "fs", "root_dir": "/kv", "capacity_bytes": "1GiB"}
OBJ = {"type": "obj", "url": "s3://bucket", "prefix": "a"}
KEYS = {"key_file": "/keys"}

REFUSED: dict[str, tuple[dict[str, object], tuple[str, str, str]]] = {
    "a spec without tiers": (
        {"spec_name": "CPUOffloadingSpec", "secondary_tiers": [FS, OBJ]},
        ("secondary_tiers=['fs', 'obj']", "spec_name='CPUOffloadingSpec'", "write 'TieringOffloadingSpec'"),
    ),
    "a module for a spec of kvtier's": (
        {"spec_module_path": "mine", "spec_name": "TieringOffloadingSpec", "secondary_tiers": []},
        ("spec_module_path='mine'", "spec_name='TieringOffloadingSpec'", "the name of your class"),
    ),
    "a module for no spec": (
        {"spec_module_path": "mine"},
        ("spec_module_path='mine'", "spec_name=None", "the name of your class"),
    ),
    "counts for no filter": (
        {"max_tracker_size": 5},
        ("max_tracker_size=5", "store_threshold=0", "a store_threshold of 2 or more"),
    ),
    "a choice without tiers": (
        {"load_if": "faster"},
        ("load_if='faster'", "secondary_tiers=[]", "leave load_if out"),
    ),
    "keys without tiers": (
        {"encryption": KEYS},
        ("encryption=", "secondary_tiers=[]", "leave encryption out"),
    ),
    "keys for tiers that all leave it": (
        {"encryption": KEYS, "secondary_tiers": [FS | {"encryption": False}]},
        ("encryption=", "secondary_tiers=['fs']", 'without "encryption": false'),
    ),
    "a tier that wants keys of no engine": (
        {"secondary_tiers": [FS | {"encryption": True}]},
        ("encryption=True", "of tier 'fs'", '"encryption": {"key_file"'),
    ),
    "a limit of no audit": (
        {"audit_ratio": 0, "audit_limit": 1},
        ("audit_limit=1", "audit_ratio=0", "leave"),
    ),
    "a seed of no audit": ({"audit_ratio": 0, "audit_seed": 1}, ("audit_seed=1", "audit_ratio=0", "leave")),
    "an address of no page": (
        {"metrics_host": "0.0.0.0"},  # noqa: S104 - a setting, nothing listens
        ("metrics_host='0.0.0.0'", "metrics_port=None", "write a port"),
    ),
    "a limit of no recording": (
        {"record_max_bytes": "1MiB"},
        ("record_max_bytes=1048576", "record_trace=None", TRACE_VARIABLE),
    ),
    "a salt of no recording": (
        {"record_salt_file": "/salt"},
        ("record_salt_file='/salt'", "record_trace=None", TRACE_VARIABLE),
    ),
    "a last tier that copies from later ones": (
        {"secondary_tiers": [OBJ, FS | {"fill": True}]},
        ("fill=True", "the last of secondary_tiers (fs)", "name this tier earlier"),
    ),
    "one directory twice": (
        {"secondary_tiers": [FS, OBJ, FS | {"root_dir": "/kv/", "capacity_bytes": "2GiB"}]},
        ("secondary_tiers=", "in tiers 0 and 2 (fs)", "a place of its own"),
    ),
    "one bucket twice": (
        {"secondary_tiers": [OBJ, {"prefix": "a", "url": "s3://bucket/", "type": "obj"}]},
        ("secondary_tiers=", "in tiers 0 and 1 (obj)", "a place of its own"),
    ),
}


def with_settings(settings: dict[str, object]) -> OffloadingConfig:
    config = make_config()
    return OffloadingConfig(
        config.engine_id,
        config.model,
        config.groups,
        config.hash_block_size,
        extra_config={"cpu_bytes_to_use": "1MiB"} | settings,
    )


@pytest.mark.parametrize("case", REFUSED)
def test_a_start_is_refused_by_the_name_of_both(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRACE_VARIABLE, raising=False)
    settings, parts = REFUSED[case]

    with pytest.raises(ConfigError) as refusal:
        OffloadingSpecFactory.create_spec(with_settings(settings))

    assert [part for part in parts if part not in str(refusal.value)] == []


ALLOWED: tuple[dict[str, object], ...] = (
    {},
    {"spec_name": "CPUOffloadingSpec", "secondary_tiers": []},
    {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [FS]},
    {"secondary_tiers": [FS, FS | {"root_dir": "/other"}, OBJ, OBJ | {"prefix": "b"}]},
    {"secondary_tiers": [{"type": "example"}, {"type": "example"}]},
    {"secondary_tiers": [FS | {"fill": True}, OBJ]},
    {"secondary_tiers": [FS | {"encryption": False}, OBJ], "encryption": KEYS},
    {"secondary_tiers": [FS], "load_if": "faster"},
    {"max_tracker_size": 5, "store_threshold": 2},
    {"metrics_host": "::1", "metrics_port": 0},
    {"record_trace": "/trace", "record_max_bytes": "1MiB", "record_salt_file": "/salt"},
    {"audit_ratio": 0.5, "audit_limit": 0, "audit_seed": 7},
    # Nothing is asked for by a default that is written out.
    {"max_tracker_size": 64_000, "audit_ratio": 0, "audit_limit": 3, "audit_seed": 0, "load_if": "always"},
    # A spec of the user's own may have a use for what kvtier's own do not use.
    {
        "spec_name": "Mine",
        "spec_module_path": "mine",
        "max_tracker_size": 5,
        "load_if": "faster",
        "encryption": KEYS,
    },
)


@pytest.mark.parametrize("settings", ALLOWED)
def test_settings_that_all_have_an_effect_are_not_refused(settings: dict[str, object]) -> None:
    refuse_conflicts(parse_settings(settings))


def test_the_environment_names_a_recording_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACE_VARIABLE, "/trace")

    refuse_conflicts(parse_settings({"record_max_bytes": "1MiB"}))


def test_a_password_in_a_tier_is_not_shown() -> None:
    tier = {"type": "valkey", "url": "redis://me:secret@host"}

    for settings in ({"spec_name": "CPUOffloadingSpec"}, {"secondary_tiers": [tier, tier]}):
        with pytest.raises(ConfigError) as refusal:
            refuse_conflicts(parse_settings({"secondary_tiers": [tier]} | settings))
        assert "secret" not in str(refusal.value) + repr(refusal.value.value)


def test_both_settings_of_each_pair_exist() -> None:
    names = {one.name for one in fields(Settings)}

    assert {name for idle in IDLE for name in (idle.setting, idle.cause)} <= names
