"""What an engine's settings must satisfy before it loads a model: one code for engines and for ``kvtier doctor``.

An engine reads gigabytes before it builds its tiers. So whatever its settings and the machine's memory show is refused
here, within milliseconds. What needs the model's page sizes or a tier's backend shows when the tiers are built.
"""

import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.config import EncryptionSettings, Settings, parse_settings
from kvtier.conflicts import DEFAULT_SPEC, TIERING_SPEC
from kvtier.cpu.instance_lock import remove_dead_regions
from kvtier.cpu.policies import create_cache_policy
from kvtier.cpu.region_file import SHARED_MEMORY_DIRECTORY
from kvtier.errors import ConfigError, MissingExtraError, PlaceError
from kvtier.factory import OffloadingSpecFactory
from kvtier.limits import find_memory_limit, find_memory_size, find_mount_size
from kvtier.quantities import size_in_words
from kvtier.settings import parse_settings as parse_own_settings
from kvtier.tenants import make_tenants
from kvtier.tiering.factory import CheckedTier, check_tier_config, require_encryption, require_quotas
from kvtier.tiering.kit.key_ring import KeyRing, read_ring, require_entry

logger = logging.getLogger(__name__)

HOST_SIZE = "cpu_bytes_to_use"

LEFT_OUT = "kvtier: a secondary tier is left out, the engine starts without it: %s"
"""The line of a tier that cannot start and is not required."""


def check_start(
    extra_config: Mapping[str, Any],
    num_engines: int = 1,
    root: Path = Path("/"),
    *,
    is_before_engines: bool = True,
) -> Settings:
    """Refuse settings that cannot work, as far as they and the machine show it; return them, parsed.

    A tier whose library is missing or whose path cannot be made is refused only where it is ``required``: the start
    goes on without it, and says so.

    Args:
        extra_config: the settings, JSON of the user.
        num_engines: engines with these settings that share this machine; 0: they are on others, so that only the
            settings are checked.
        root: the folder that holds /proc, /sys and /dev.
        is_before_engines: whether none of these engines has started, so that memory in use is that of others.

    Raises:
        ConfigError: a setting cannot work.
        UnknownNameError: an unknown setting, spec, tier or policy.
        NamedClassError: a class of the user's own cannot be imported.
        PlaceError: the path of a required tier cannot be made.
        MissingExtraError: the client library of a required tier is not installed.
    """
    settings = check_settings(extra_config)
    if is_own_spec(settings):
        return settings  # what else it has is that spec's own
    if num_engines:
        check_host_size(settings, num_engines, root)
    if num_engines and is_before_engines:
        _check_room_after_dead(settings, num_engines, root)
    if num_engines and settings.encryption is not None:
        check_key_ring(settings.encryption)
    for entry in settings.secondary_tiers:
        try:
            checked = check_tier(entry, settings)
            if num_engines:
                check_place(checked)
        except (MissingExtraError, PlaceError) as error:
            if entry.get("required"):
                raise
            logger.warning(LEFT_OUT, error)
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
        remedy = f"{each}is more than {mount.source} holds, {size_in_words(mount.num_bytes)}, {_grow(mount.source)}"
        raise ConfigError(HOST_SIZE, size_in_words(wanted), remedy)


def check_host_room(settings: Settings, num_engines: int = 1, root: Path = Path("/")) -> None:
    """Refuse host memory that others have taken: what an engine would be refused once it has loaded its model.

    Raises:
        ConfigError: more than is left.
    """
    wanted = settings.cpu_bytes_to_use
    if not isinstance(wanted, int):
        return
    each = f"for each of {num_engines} engines " if num_engines > 1 else ""
    limit = find_memory_limit(root)
    if limit is not None and wanted * num_engines > limit.available_bytes:
        left = size_in_words(limit.available_bytes)
        remedy = f"{each}is more than {limit.source} leaves, {left}: give less, or end what uses the rest"
        raise ConfigError(HOST_SIZE, size_in_words(wanted), remedy)
    mount = root / SHARED_MEMORY_DIRECTORY.relative_to("/")
    if settings.secondary_tiers and mount.is_dir():
        free_bytes = shutil.disk_usage(mount).free
        if wanted * num_engines > free_bytes:
            remedy = f"{each}is more than {mount} has free, {size_in_words(free_bytes)}, {_grow(str(mount))}"
            raise ConfigError(HOST_SIZE, size_in_words(wanted), remedy)


def _check_room_after_dead(settings: Settings, num_engines: int, root: Path) -> None:
    """Do the same at a start, which takes over what engines have left that were killed while they started."""
    try:
        check_host_room(settings, num_engines, root)
    except ConfigError:
        if not remove_dead_regions(root / SHARED_MEMORY_DIRECTORY.relative_to("/")):
            raise
        check_host_room(settings, num_engines, root)


def _grow(mount: str) -> str:
    return (
        "and with tiers host memory is kept there: run the container with a larger --shm-size, mount -o "
        f"remount,size=... {mount}, or give less"
    )


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
