"""What an engine's settings must satisfy before it loads a model: one code for engines and for ``kvtier doctor``.

An engine reads gigabytes before it builds its tiers. So whatever its settings and the machine's fixed sizes show is
refused here, within milliseconds. What needs the model's page sizes or a tier's backend shows when the tiers are built.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.config import EncryptionSettings, Settings, parse_settings
from kvtier.conflicts import DEFAULT_SPEC, TIERING_SPEC
from kvtier.cpu.policies import create_cache_policy
from kvtier.cpu.region_file import SHARED_MEMORY_DIRECTORY
from kvtier.errors import ConfigError, MissingExtraError, PlaceError
from kvtier.factory import OffloadingSpecFactory
from kvtier.limits import find_memory_size, find_mount_size
from kvtier.quantities import size_in_words
from kvtier.settings import parse_settings as parse_own_settings
from kvtier.tenants import make_tenants
from kvtier.tiering.factory import CheckedTier, check_tier_config, require_encryption, require_quotas
from kvtier.tiering.kit.key_ring import KeyRing, read_ring, require_entry

HOST_SIZE = "cpu_bytes_to_use"


def check_start(extra_config: Mapping[str, Any], num_engines: int = 1, root: Path = Path("/")) -> Settings:
    """Refuse settings that cannot work, as far as they and the machine show it; return them, parsed.

    A tier whose library is missing is refused only where it is ``required``: the start goes on without it, and says so.

    Args:
        extra_config: the settings, JSON of the user.
        num_engines: engines with these settings that share this machine; 0: they are on others, so that only the
            settings are checked.
        root: the folder that holds /proc, /sys and /dev.

    Raises:
        ConfigError: a setting cannot work.
        UnknownNameError: an unknown setting, spec, tier or policy.
        NamedClassError: a class of the user's own cannot be imported.
        MissingExtraError: the client library of a required tier is not installed.
    """
    settings = check_settings(extra_config)
    if is_own_spec(settings):
        return settings  # what else it has is that spec's own
    if num_engines:
        check_host_size(settings, num_engines, root)
    if num_engines and settings.encryption is not None:
        check_key_ring(settings.encryption)
    for entry in settings.secondary_tiers:
        try:
            checked = check_tier(entry, settings)
        except MissingExtraError:
            if entry.get("required"):
                raise
            continue
        if num_engines and checked.settings.required:
            check_place(checked)
    return settings


def check_settings(extra_config: Mapping[str, Any]) -> Settings:  # Any: as above
    """Refuse what is wrong with the settings of the engine as a whole.

    Raises:
        KVTierError: as ``check_start``.
    """
    settings = parse_settings(extra_config)
    OffloadingSpecFactory.check_spec(settings)
    create_cache_policy(settings.eviction_policy, 1)
    make_tenants(settings)
    return settings


def check_host_size(settings: Settings, num_engines: int = 1, root: Path = Path("/")) -> None:
    """Refuse host memory that is missing, or more than this machine could ever give.

    Raises:
        ConfigError: it is.
    """
    wanted = settings.cpu_bytes_to_use
    if wanted is None:
        raise ConfigError(
            HOST_SIZE, wanted, 'is required: host memory over all workers, such as "8GiB", or "auto"'
        )
    if not isinstance(wanted, int):
        return
    each = f"for each of {num_engines} engines " if num_engines > 1 else ""
    memory = find_memory_size(root)
    if memory is not None and wanted * num_engines > memory.num_bytes:
        there = f"{size_in_words(memory.num_bytes)} of memory ({memory.source})"
        remedy = f'{each}is more than this machine has, {there}: give less, or "auto" for what it can spare'
        raise ConfigError(HOST_SIZE, size_in_words(wanted), remedy)
    mount = find_mount_size(root / SHARED_MEMORY_DIRECTORY.relative_to("/"))
    if settings.secondary_tiers and mount is not None and wanted * num_engines > mount.num_bytes:
        remedy = (
            f"{each}is more than {mount.source} holds, {size_in_words(mount.num_bytes)}, and with tiers host memory is "
            f"kept there: run the container with a larger --shm-size, mount -o remount,size=... {mount.source}, or "
            "give less"
        )
        raise ConfigError(HOST_SIZE, size_in_words(wanted), remedy)


def check_tier(entry: Mapping[str, Any], settings: Settings) -> CheckedTier:  # Any: as above
    """Refuse a tier whose settings cannot work beside the engine's.

    Raises:
        KVTierError: as ``check_start``.
    """
    checked = check_tier_config(entry)
    own_settings = checked.tier_class.own_settings
    if own_settings is not None:
        parse_own_settings(own_settings, checked.own, f"tier {checked.name!r}")
    if checked.settings.policy is not None:
        create_cache_policy(checked.settings.policy, 1)
    if settings.encryption is not None:
        require_encryption(checked.name, checked.tier_class, checked.settings)
    if settings.tenants is not None:
        require_quotas(checked.name, checked.tier_class, settings)
    return checked


def check_key_ring(settings: EncryptionSettings) -> KeyRing:
    """Return the key ring of an engine.

    Raises:
        ConfigError: it cannot be read, or lacks the entry that is asked for.
    """
    ring = read_ring(Path(settings.key_file))
    require_entry(ring, settings.tenant)
    return ring


def check_place(checked: CheckedTier) -> None:
    """Refuse a path of a tier that cannot be made, by making a folder next to it and removing that again.

    The permissions of a folder do not tell: a superuser may write to /proc, which takes no file.

    Raises:
        PlaceError: the system refuses.
    """
    setting = checked.tier_class.place_setting
    value = checked.own.get(setting or "")
    if setting is None or not isinstance(value, str) or not value.startswith(("/", "~")):
        return
    path = Path(value).expanduser()
    parent = next((folder for folder in (path, *path.parents) if folder.exists()), path)
    if parent == path or not parent.is_dir():
        return  # what is there is looked at by the tier itself
    try:
        Path(tempfile.mkdtemp(prefix=".kvtier-", dir=parent)).rmdir()
    except OSError as error:
        remedy = f"cannot be made, {parent} takes no new files ({error.strerror}): choose another"
        raise PlaceError(setting, value, remedy) from None


def is_own_spec(settings: Settings) -> bool:
    """Return whether a spec of the user's own reads these settings. Pure."""
    return settings.spec_name not in (None, DEFAULT_SPEC, TIERING_SPEC)
