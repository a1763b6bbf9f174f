"""Names of secondary tiers, and the construction of one from an entry of the configuration."""

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from kvtier.config import OffloadingConfig, Settings
from kvtier.errors import ConfigError, KVTierError, TierError, UnknownNameError, describe_foreign
from kvtier.registry import CLASS_FORM, Registry
from kvtier.settings import REMOVED_SETTINGS, settings_of
from kvtier.tenants import make_tenants
from kvtier.tiering.base import COMMON_SETTINGS, SecondaryTierManager, TierSettings, parse_tier_settings

TIER = "secondary tier"
"""The kind of its errors."""

SLAB_REMEDY = (
    'no longer comes with kvtier: write {"type": "fs", "root_dir": "/a/directory", "capacity_bytes": ...}, which '
    "engines may share; what the file of the slab holds is not read"
)

TIERS: Registry[type[SecondaryTierManager]] = Registry(
    TIER,
    {
        "example": "kvtier.tiering.example:ExampleSecondaryTier",
        "fs": "kvtier.tiering.fs:FSTier",
        "obj": "kvtier.tiering.obj:ObjTier",
        "valkey": "kvtier.tiering.valkey:ValkeyTier",
        "mooncake": "kvtier.tiering.mooncake:MooncakeTier",
    },
    contract=SecondaryTierManager,
    entry_points="kvtier.tiers",
    meant={
        **dict.fromkeys(("redis", "keydb", "dragonfly"), ("valkey",)),
        **dict.fromkeys(("s3", "minio", "gcs", "gs", "azure", "az", "object", "bucket"), ("obj",)),
        **dict.fromkeys(("nfs", "smb", "cifs", "lustre"), ("obj",)),
        **dict.fromkeys(("disk", "file", "files", "filesystem", "ssd", "nvme", "packs"), ("fs",)),
    },
    removed={"slab": SLAB_REMEDY},
)
"""A tier of your own is named ``"package.module:MyTier"``, or by a package's entry point in ``kvtier.tiers``."""

NOT_SETTINGS = frozenset({"config", "primary_kv_view", "settings", "clock"})
"""Arguments of a tier without ``own_settings`` that code passes and a user's JSON cannot."""

SPECIAL_SETTINGS = frozenset({"policy"})
"""Common settings that only some tiers support: refused elsewhere rather than silently without effect."""


class CheckedTier(NamedTuple):
    """A configuration entry that has been looked through.

    Attributes:
        name: its ``type``.
        tier_class: what that stands for.
        settings: those that every tier has.
        own: the arguments of the constructor.
    """

    name: str
    tier_class: type[SecondaryTierManager]
    settings: TierSettings
    own: dict[str, Any]  # Any: each constructor checks its own


def create_secondary_tier(
    tier_config: Mapping[str, Any],  # Any: JSON of the user; each constructor checks its own
    primary_kv_view: memoryview,
    config: OffloadingConfig,
) -> SecondaryTierManager:
    """Build the tier that ``tier_config`` describes.

    Args:
        tier_config: ``type``, the settings that every tier has, and the tier's own; not changed.
        primary_kv_view: the primary's rows, shape (num_blocks, row_stride), format 'b'.
        config: what the engine said of itself.

    Raises:
        UnknownNameError: no such tier, or no such setting of this tier; names the known ones.
        NamedClassError: the class that ``type`` names cannot be imported, or is no tier.
        ConfigError: ``type`` is missing, or a value cannot work.
        TierError: the tier cannot start, for whatever reason.
        MissingExtraError: the tier's client library is not installed.
    """
    name, tier_class, settings, own = check_tier_config(tier_config)
    if config.settings.encryption is not None:
        require_encryption(name, tier_class, settings)
    if config.settings.tenants is not None:
        require_quotas(name, tier_class, config.settings)
    try:
        if takes_settings(tier_class):
            return tier_class(config, primary_kv_view, settings=settings, **own)
        tier = tier_class(config, primary_kv_view, **own)
        tier.settings = settings  # the manager reads them there, also of a tier that knows of none
        return tier
    except KVTierError:
        raise
    except Exception as error:  # noqa: BLE001  # foreign: it may raise anything, and cannot start
        # Neither its text nor its causes: they may quote a setting, and a setting may be a password.
        raise TierError(name, f"cannot start: {describe_foreign(error)}") from None


def require_encryption(name: str, tier_class: type[SecondaryTierManager], settings: TierSettings) -> None:
    """Refuse a tier that would keep plain blocks where the engine says that tiers encrypt.

    Raises:
        ConfigError: it cannot encrypt, and its settings do not say that it need not.
    """
    if settings.encryption and not tier_class.can_encrypt:
        remedy = f'tier {name!r} cannot encrypt: give it "encryption": false, or leave it out'
        raise ConfigError("encryption", value=True, remedy=remedy)


def require_quotas(name: str, tier_class: type[SecondaryTierManager], settings: Settings) -> None:
    """Refuse a quota of a tenant in a tier that would not keep to it.

    Raises:
        ConfigError: there is one, or the setting ``tenants`` cannot work otherwise.
    """
    tenants = make_tenants(settings)
    if tenants is not None and tenants.has_quota(name) and not tier_class.keeps_quotas:
        why = f", {tier_class.no_quotas_reason}" if tier_class.no_quotas_reason else ""
        remedy = f"tier {name!r} keeps no quotas of tenants{why}: leave it out, and bound the tier as a whole"
        raise ConfigError("quota_bytes", name, remedy)


def check_tier_config(tier_config: Mapping[str, Any]) -> CheckedTier:  # Any: as above
    """Return the tier's class and settings as far as they can be checked without an engine.

    Raises:
        KVTierError: as ``create_secondary_tier``, but for what only the tier itself can find wrong.
    """
    name = tier_config.get("type")
    if not isinstance(name, str):
        known = ", ".join(TIERS.names())
        raise ConfigError(
            "type", name, f"every secondary tier needs one of {known}, or a class, {CLASS_FORM}"
        )
    tier_class = TIERS.resolve(name)
    settings = parse_tier_settings(tier_config)
    _refuse_unsupported(settings, name, tier_class.supported_settings)
    own = {key: value for key, value in tier_config.items() if key != "type" and key not in COMMON_SETTINGS}
    known_settings = own_setting_names(tier_class)
    unknown = sorted(set(own) - known_settings)
    if unknown and unknown[0] in REMOVED_SETTINGS:
        raise ConfigError(unknown[0], own[unknown[0]], REMOVED_SETTINGS[unknown[0]])
    if unknown:
        raise UnknownNameError(f"setting of tier {name!r}", unknown[0], known_settings | COMMON_SETTINGS)
    try:
        common = {"settings": settings} if takes_settings(tier_class) else {}
        inspect.signature(tier_class).bind(None, None, **common, **own)
    except TypeError as error:
        remedy = f"tier {name!r}: {error}: its constructor takes config, primary_kv_view and its own settings"
        raise ConfigError("secondary_tiers", dict(tier_config), remedy) from error
    return CheckedTier(name, tier_class, settings, own)


def takes_settings(tier_class: type[SecondaryTierManager]) -> bool:
    """Return whether the constructor takes the settings that every tier has: the oldest contract has none. Pure."""
    parameters = inspect.signature(tier_class).parameters
    return "settings" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def own_setting_names(tier_class: type[SecondaryTierManager]) -> frozenset[str]:
    """Return the names of a tier's own settings. Pure."""
    if tier_class.own_settings is not None:
        return frozenset(settings_of(tier_class.own_settings))
    return frozenset(inspect.signature(tier_class).parameters) - NOT_SETTINGS


def _refuse_unsupported(settings: TierSettings, name: str, supported_settings: frozenset[str]) -> None:
    for field in fields(TierSettings):
        value = getattr(settings, field.name)
        if field.name in SPECIAL_SETTINGS - supported_settings and value != field.default:
            remedy = f"tier {name!r} orders its blocks by itself: leave the setting out"
            raise ConfigError(field.name, value, remedy)
