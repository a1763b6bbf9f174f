"""Names of secondary tiers, and the construction of the one that a configuration entry asks for."""

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvtier.config import OffloadingConfig
from kvtier.errors import ConfigError, KVTierError, TierError, UnknownNameError
from kvtier.registry import Registry
from kvtier.tiering.base import COMMON_SETTINGS, SecondaryTierManager, TierSettings, parse_tier_settings

TIERS: Registry[type[SecondaryTierManager]] = Registry(
    "secondary tier",
    {
        "example": "kvtier.tiering.example:ExampleSecondaryTier",
        "fs": "kvtier.tiering.fs:FSTier",
        "slab": "kvtier.tiering.slab:SlabTier",
        "obj": "kvtier.tiering.obj:ObjTier",
        "valkey": "kvtier.tiering.valkey:ValkeyTier",
        "mooncake": "kvtier.tiering.mooncake:MooncakeTier",
    },
)

NOT_SETTINGS = frozenset({"config", "primary_kv_view", "clock", "wall_clock", "calls"})
"""Constructor arguments that code passes and a user's JSON cannot: collaborators, clocks and system calls."""

SPECIAL_SETTINGS = frozenset({"policy"})
"""Settings that a tier must support by itself: refused elsewhere rather than silently without effect."""


def create_secondary_tier(
    tier_config: Mapping[str, Any],  # Any: JSON of the user; each constructor checks its own
    primary_kv_view: memoryview,
    config: OffloadingConfig,
) -> SecondaryTierManager:
    """Build the tier that ``tier_config`` describes.

    Args:
        tier_config: ``type``, the settings that every tier has, and the constructor's arguments; not changed.
        primary_kv_view: the primary's rows, shape (num_blocks, row_stride), format 'b'.
        config: what the engine said of itself.

    Raises:
        UnknownNameError: no such tier, or no such setting of this tier; names the known ones.
        ConfigError: ``type`` is missing, or a value cannot work.
        TierError: the tier cannot start, for whatever reason.
        MissingExtraError: the tier's client library is not installed.
    """
    name = tier_config.get("type")
    if not isinstance(name, str):
        raise ConfigError("type", name, f"every secondary tier needs one of {', '.join(TIERS.names())}")
    tier_class = TIERS.resolve(name)
    settings = parse_tier_settings(tier_config)
    _refuse_unavailable(settings, name, tier_class.supported_settings)
    own = {key: value for key, value in tier_config.items() if key != "type" and key not in COMMON_SETTINGS}
    known = set(inspect.signature(tier_class).parameters) - NOT_SETTINGS
    unknown = sorted(set(own) - known)
    if unknown:
        raise UnknownNameError(f"setting of tier {name!r}", unknown[0], known | COMMON_SETTINGS)
    try:
        inspect.signature(tier_class).bind(config, primary_kv_view, **own)
    except TypeError as error:
        raise ConfigError("secondary_tiers", dict(tier_config), f"tier {name!r}: {error}") from error
    try:
        tier = tier_class(config, primary_kv_view, **own)
    except KVTierError:
        raise
    except Exception as error:  # a foreign tier may raise anything: it cannot start
        raise TierError(name, f"cannot start: {error}") from error
    tier.settings = settings
    return tier


def _refuse_unavailable(settings: TierSettings, name: str, supported_settings: frozenset[str]) -> None:
    for field in fields(TierSettings):
        value = getattr(settings, field.name)
        if field.name in SPECIAL_SETTINGS - supported_settings and value != field.default:
            remedy = f"tier {name!r} orders its blocks by itself: leave the setting out"
            raise ConfigError(field.name, value, remedy)
