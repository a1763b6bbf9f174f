"""``--tier-setting``: a setting that every tier has, for one tier of the simulation, read by the production parser."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from kvtier.cli.option_names import said_of
from kvtier.cpu.policies.registry import CACHE_POLICIES
from kvtier.errors import ConfigError, UnknownNameError
from kvtier.sim.tier import TierModel
from kvtier.tiering.admission import TierAdmission
from kvtier.tiering.base import parse_tier_settings

TIER_SETTING_FORM = "NAME.SETTING=VALUE such as fs.cascade=on_evict or fs.store_threshold=2"

SIMULATED_SETTINGS = (
    "admission",
    "cascade",
    "fill",
    "job_timeout_s",
    "max_in_flight_store_bytes",
    "policy",
    "store_threshold",
)
"""Those of ``TierSettings`` that make a difference on simulated time."""

PARSED_NAMES = {
    **{
        name: name
        for name in (*SIMULATED_SETTINGS, *(f"admission.{field.name}" for field in fields(TierAdmission)))
    },
    "name in 'admission'": "admission",
}
"""What the production parser calls what it refuses -> the setting's name."""


def apply_tier_settings(
    tiers: Sequence[TierModel], texts: Iterable[str], block_bytes: int
) -> list[TierModel]:
    """Return ``tiers`` with the settings that ``texts`` give them, see TIER_SETTING_FORM. Pure.

    Raises:
        ConfigError: the form or a value is wrong, or a setting is given twice.
        UnknownNameError: there is no such tier, setting or policy.
    """
    values: dict[str, dict[str, Any]] = {tier.name: {} for tier in tiers}  # Any: the parser gives them types
    for text in texts:
        place, equals, value = text.partition("=")
        name, dot, setting = (part.strip() for part in place.partition("."))
        if not equals or not dot:
            raise ConfigError("--tier-setting", text, f"must be {TIER_SETTING_FORM}")
        if name not in values:
            raise UnknownNameError("tier for --tier-setting", name, values)
        if setting not in SIMULATED_SETTINGS:
            raise UnknownNameError("simulated setting for --tier-setting", setting, SIMULATED_SETTINGS)
        if setting in values[name]:
            raise ConfigError("--tier-setting", text, f"{name}.{setting} is given twice: give it once")
        values[name][setting] = _parse_value(value.strip())
    return [_apply(tier, values[tier.name], block_bytes) for tier in tiers]


def _apply(tier: TierModel, values: dict[str, Any], block_bytes: int) -> TierModel:  # Any: as above
    option = f"--tier-setting {tier.name}."
    with said_of({parsed: option + name for parsed, name in PARSED_NAMES.items()}):
        settings = parse_tier_settings(values)
    policy = settings.policy or tier.cache_policy
    if policy not in CACHE_POLICIES:
        raise UnknownNameError(f"eviction policy for {option}policy", policy, CACHE_POLICIES.names())
    if settings.max_in_flight_store_bytes is not None:
        # A simulated block has one byte.
        num_blocks = max(1, settings.max_in_flight_store_bytes // block_bytes)
        settings = replace(settings, max_in_flight_store_bytes=num_blocks)
    return replace(tier, cache_policy=policy, settings=settings)


def _parse_value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
