"""What a configuration of vLLM's own connector says of kvtier's tiers and policies; checked without vLLM and a model.

One code for the start of an engine (``vllm_plugin``) and for ``kvtier doctor``. vLLM builds its tiers when the model
has been loaded and profiled, so a misspelled one would cost that much time. Only names and values that are kvtier's
are looked at: a later release of vLLM may pass a tier settings of its own.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from kvtier.config import Settings, parse_encryption
from kvtier.cpu.policies import create_cache_policy
from kvtier.errors import ConfigError, UnknownNameError
from kvtier.tiering.base import COMMON_SETTINGS
from kvtier.tiering.factory import TIERS, own_setting_names
from kvtier.tiering.start_checks import check_tier

PREFIX = "kvtier"
"""Begins the names of kvtier's tiers and policies, as ``kvtier-fs``, and of their classes, as ``KVTierFS``."""

SPEC = "TieringOffloadingSpec"
"""vLLM's spec that knows secondary tiers."""

REMEDY_OF_SIZE = "must be a number of bytes: vLLM's own connector reads no units"


def check_stock_settings(extra_config: Mapping[str, Any]) -> Settings:  # Any: JSON of the user
    """Return kvtier's part of the settings of vLLM's own connector, as kvtier's own would have it.

    Raises:
        ConfigError: a setting cannot work.
        UnknownNameError: there is no such tier or policy.
        MissingExtraError: the client library of a tier is not installed.
    """
    policy = extra_config.get("eviction_policy", "")
    if isinstance(policy, str) and policy.startswith(f"{PREFIX}-"):
        create_cache_policy(policy.removeprefix(f"{PREFIX}-"), 1)
    size = extra_config.get("cpu_bytes_to_use")
    try:
        num_bytes = int(size)  # type: ignore[arg-type]  # vLLM's own reading, which takes text and fractions too
    except (TypeError, ValueError):
        raise ConfigError("cpu_bytes_to_use", size, REMEDY_OF_SIZE) from None
    settings = Settings(cpu_bytes_to_use=num_bytes, secondary_tiers=tuple(own_tiers(extra_config)))
    for entry in settings.secondary_tiers:
        check_tier(entry, settings)
    entries = extra_config.get("secondary_tiers", ())
    for entry in entries if is_list(entries) else ():
        if isinstance(entry, Mapping) and entry.get("encryption") is not None:
            parse_encryption(entry["encryption"], os.environ)
    return settings


def names_kvtier(extra_config: Mapping[str, Any]) -> bool:  # Any: as above
    """Return whether a policy or a tier is named as kvtier's are. Pure."""
    entries = extra_config.get("secondary_tiers", ())
    kinds = [entry.get("type") for entry in entries if isinstance(entry, Mapping)] if is_list(entries) else []
    names = [extra_config.get("eviction_policy"), *kinds]
    return any(isinstance(name, str) and name.lower().startswith(PREFIX) for name in names)


def own_tiers(extra_config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:  # Any: as above
    """Yield the entries of kvtier's tiers, as kvtier's own settings have them: those of its adapter left out. Pure.

    Raises:
        UnknownNameError: a name begins as kvtier's, and there is no such tier.
    """
    entries = extra_config.get("secondary_tiers", ())
    for entry in entries if is_list(entries) else ():
        kind = entry.get("type") if isinstance(entry, Mapping) else None
        if not isinstance(kind, str) or not kind.lower().startswith(PREFIX):
            continue
        name = kind.lower().removeprefix(PREFIX).removeprefix("-")
        if name not in TIERS.names():
            if "module_path" in entry:  # a class of the user's own
                continue
            raise UnknownNameError("secondary tier", kind, [f"{PREFIX}-{one}" for one in TIERS.names()])
        known = (own_setting_names(TIERS.resolve(name)) | COMMON_SETTINGS) - {"encryption"}
        yield {"type": name, **{setting: value for setting, value in entry.items() if setting in known}}


def is_list(value: object) -> bool:
    """Return whether a JSON's value is a list. Pure."""
    return isinstance(value, list | tuple)
