"""The settings of every tier over named bytes; a tier's own dataclass inherits them and says where its server is."""

from dataclasses import MISSING, dataclass, field, fields
from enum import Enum

from kvtier.errors import ConfigError
from kvtier.settings import seconds, setting, settings_of, size_bytes, whole
from kvtier.tiering.kit.lifetime import TTL

DEFAULT_NUM_THREADS = 16
"""Requests in flight. A store far away answers each of them slowly and many at once: fewer leave the link idle, many
more hold as many blocks in buffers of the client."""

DEFAULT_TIMEOUT_S = 5.0
"""Seconds for a request from its start to the last byte. Shorter fails large blocks on a slow link; longer keeps slots
and threads that much longer when a server hangs."""

MAX_THREADS = 128
MIN_CAPACITY_BLOCKS = 64
"""Blocks below which capacity cannot be kept by passes over a listing that each free an eighth."""


def parse_timeout(name: str, value: object) -> float:
    """Return the seconds for a request. Pure.

    Raises:
        ConfigError: not a number of seconds above zero.
    """
    timeout_s = seconds(name, value)
    if timeout_s == 0:
        raise ConfigError(name, value, "must be above zero: no request ends at once")
    return timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobSettings:
    """What users set for every tier over named bytes; each field says what it is."""

    capacity_bytes: int | None = field(
        default=None,
        metadata=setting(
            size_bytes,
            "left to the store's own lifecycle rules; a number, at least 64 blocks, makes kvtier delete the oldest in "
            "bulk",
            unit="bytes",
        ),
    )
    ttl_s: float | None = field(default=None, metadata=TTL)
    timeout_s: float = field(
        default=DEFAULT_TIMEOUT_S,
        metadata=setting(
            parse_timeout,
            "for one request up to its last byte; connecting may take one second of it",
            unit="seconds",
        ),
    )
    num_threads: int = field(
        default=DEFAULT_NUM_THREADS,
        metadata=setting(
            whole(1, MAX_THREADS),
            "requests in flight: a single connection to a store is slow",
            unit=f"1 to {MAX_THREADS}",
        ),
    )

    def list_reach(self) -> dict[str, object]:
        """Return the settings that it takes to reach the blobs, without those that have their default. Pure."""
        defaults = {one.name: one.default for one in fields(self)}
        common = {one.name for one in fields(BlobSettings)}
        values = {name: getattr(self, name) for name in settings_of(type(self)) if name not in common}
        return {
            name: value.value if isinstance(value, Enum) else value
            for name, value in values.items()
            if defaults[name] is MISSING or value != defaults[name]
        }


def require_capacity(settings: BlobSettings, block_bytes: int) -> None:
    """Refuse a capacity that cannot be kept.

    Raises:
        ConfigError: it is too small; the message has the least.
    """
    capacity_bytes = settings.capacity_bytes
    if capacity_bytes is not None and capacity_bytes < MIN_CAPACITY_BLOCKS * block_bytes:
        remedy = f"must be at least {MIN_CAPACITY_BLOCKS} blocks of {block_bytes} bytes, or left out"
        raise ConfigError("capacity_bytes", capacity_bytes, remedy)


def require_listing(settings: BlobSettings, *, expires_itself: bool, has_quotas: bool, tier: str) -> None:
    """Refuse what cannot be kept where nothing can be listed.

    Raises:
        ConfigError: a capacity, a time to live or quotas of tenants are set.
    """
    remedy = "cannot be kept where nothing can be listed: leave it out, or use the server's own life cycle"
    for name in ("capacity_bytes",) if expires_itself else ("capacity_bytes", "ttl_s"):
        if getattr(settings, name) is not None:
            raise ConfigError(name, getattr(settings, name), remedy)
    if has_quotas:
        remedy = "cannot be kept where nothing can be listed: leave it out, or use another service"
        raise ConfigError("quota_bytes", tier, remedy)
