"""The settings of ``--hicache-storage-backend-extra-config``: what SGLang reads of it, and what is kvtier's."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvtier.config import DEFAULT_METRICS_HOST, SettingsReader, parse_encryption
from kvtier.errors import ConfigError
from kvtier.settings import absolute_path, parse_settings, setting, size_bytes, text
from kvtier.tiering.base import TierSettings
from kvtier.tiering.factory import check_tier_config
from kvtier.tiering.kit.threaded_tier import ThreadedTier

MAX_BATCH_PAGES = 128
"""Pages that SGLang hands over at once; more rows than that stay unused."""

DEFAULT_STAGING_BYTES = 64 << 20
"""Bytes of the rows through which pages are copied where a pool's layout allows no other way. Fewer move a batch in
more calls; more take memory from the pool."""

ENGINE_KEYS = frozenset(
    {
        "backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size", "prefetch_threshold",
        "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
    }
)  # fmt: skip
"""What SGLang reads of the same JSON."""

TIER_SETTINGS_OF_USE = frozenset({"required", "job_timeout_s", "policy", "encryption"})
"""Settings of every tier that mean something here; the others are about kvtier's own host memory."""


def _tier(name: str, value: object) -> Mapping[str, Any]:  # Any: each tier checks its own
    if not isinstance(value, Mapping):
        raise ConfigError(name, value, 'must be a tier with its settings: {"type": "fs", "root_dir": ...}')
    checked = check_tier_config(value)
    if not issubclass(checked.tier_class, ThreadedTier):
        remedy = "has no threads that SGLang's could wait for: take fs, valkey or obj"
        raise ConfigError("type", value.get("type"), remedy)
    for one in fields(TierSettings):
        given = getattr(checked.settings, one.name)
        if one.name not in TIER_SETTINGS_OF_USE and given != one.default:
            remedy = "is about kvtier's own host memory, whose place SGLang's has: leave it out"
            raise ConfigError(one.name, given, remedy, max_value_chars=80)
    return dict(value)


def _arguments(name: str, value: object) -> Mapping[str, Any]:  # Any: JSON
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(name, value, 'must be a mapping such as {"kv_cache_dtype": "fp8_e4m3"}')
    return dict(value)


def _encryption(name: str, value: object) -> object:
    del name  # the parser knows its own
    parse_encryption(value, os.environ)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangSettings:
    """What the user set; each field says what it is."""

    tier: Mapping[str, Any] = field(
        metadata=setting(
            _tier,
            'where pages go: `{"type": "fs", "root_dir": "/kv", "capacity_bytes": "200GiB"}`',
            unit="mapping",
        )
    )
    model: str | None = field(
        default=None,
        metadata=setting(
            lambda name, value: str(absolute_path(name, value)),
            "the folder of the weights, needed where neither `--model-path` nor the model's name leads to it",
            unit="absolute path",
        ),
    )
    model_revision: str | None = field(
        default=None,
        metadata=setting(
            text,
            "names weights that no folder has, as in a bucket; other weights need another name",
        ),
    )
    adapters_revision: str | None = field(
        default=None,
        metadata=setting(
            text,
            "needed with LoRA: SGLang names an adapter by its name and path, so give another text when a file changes",
        ),
    )
    engine_arguments: Mapping[str, Any] | None = field(  # Any: as above
        default=None,
        metadata=setting(
            _arguments,
            "arguments of SGLang's that change bytes, where this release's cannot be read from the engine",
            unit="mapping",
            default_text="the engine's",
        ),
    )
    staging_bytes: int = field(
        default=DEFAULT_STAGING_BYTES,
        metadata=setting(
            size_bytes,
            "rows through which pages are copied where the layout is `layer_first`; page-first layouts need none",
            unit="bytes of each pool and rank",
            default_text='`"64MiB"`',
        ),
    )
    metrics_port: int | None = field(
        default=None,
        metadata=setting(
            lambda name, value: SettingsReader({name: value}).port(name),
            "serves kvtier's [metrics](monitoring.md) of each rank: rank r at this port plus r; 0 takes free ones",
        ),
    )
    metrics_host: str = field(
        default=DEFAULT_METRICS_HOST,
        metadata=setting(text, "the page has no authentication, so only this machine reads it"),
    )
    tenant_salt: str = field(
        default="", metadata=setting(text, "separates tenants that must not share pages"), repr=False
    )
    encryption: object = field(
        default=None,
        metadata=setting(
            _encryption,
            'encrypts what leaves the process: `{"key_file": "/path"}` ([how](encryption.md))',
            unit="mapping",
        ),
    )


def parse_extra_config(extra_config: Mapping[str, Any] | None) -> SGLangSettings:  # Any: JSON of the user
    """Return kvtier's settings of the JSON.

    Raises:
        UnknownNameError: a setting is unknown; the error names the most similar one.
        ConfigError: one is missing or cannot work.
    """
    own = {key: value for key, value in (extra_config or {}).items() if key not in ENGINE_KEYS}
    return parse_settings(SGLangSettings, own, "kvtier in --hicache-storage-backend-extra-config")
