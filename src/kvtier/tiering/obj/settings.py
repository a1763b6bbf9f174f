"""The tier's own settings.

No connection is opened here and no credentials are read: the client takes those from the environment, and a setting
that carries some is refused without being repeated.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.settings import flag, seconds, setting, size_bytes, text, whole
from kvtier.tiering.kit.lifetime import TTL
from kvtier.tiering.obj.target import Service, StoreTarget, parse_server, parse_target, parse_url

DEFAULT_PREFIX = "kvtier"

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


def parse_region(name: str, value: object) -> str:
    """Return the name of a region. Pure.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9-]{1,64}", value):
        return value
    raise ConfigError(name, value, 'must be the name of a region, such as "eu-central-1"')


def parse_ca_file(name: str, value: object) -> Path:
    """Return the path of a file with certificates. Pure.

    Raises:
        ConfigError: it is no absolute path.
    """
    if not isinstance(value, str | Path) or not Path(value).is_absolute():
        raise ConfigError(name, value, "must be the absolute path of a PEM file")
    return Path(value)


@dataclass(frozen=True, slots=True)
class ObjSettings:
    """What the user set for the tier; each field says what it is.

    Attributes:
        target: where the objects are: what ``url`` and ``prefix`` say together.

    Raises:
        ConfigError: two settings do not fit together.
    """

    url: str = field(
        metadata=setting(
            parse_url,
            "`s3://bucket`, `gs://bucket`, `az://container`, `https://host`, and for tests `file:///folder` and "
            "`memory://`; credentials come from the environment or a named profile, never from here",
        )
    )
    prefix: str = field(
        default=DEFAULT_PREFIX,
        metadata=setting(text, "prefix of all names, so that a bucket may hold other objects"),
    )
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
    endpoint: str | None = field(
        default=None,
        metadata=setting(
            parse_url, "the service's own; a URL for other servers that speak S3 or Azure's protocol"
        ),
    )
    region: str | None = field(
        default=None, metadata=setting(parse_region, "taken from the environment; S3 only")
    )
    allow_http: bool = field(
        default=False, metadata=setting(flag, "without it no block crosses a network unencrypted")
    )
    ca_file: Path | None = field(
        default=None,
        metadata=setting(
            parse_ca_file, "the system's certificates; a PEM file adds others", unit="absolute path"
        ),
    )
    target: StoreTarget = field(init=False)

    def __post_init__(self) -> None:
        target = parse_target(self.url, self.prefix, is_http_allowed=self.allow_http)
        object.__setattr__(self, "target", target)
        if target.service not in (Service.S3, Service.AZURE) and self.endpoint is not None:
            remedy = "has a meaning for s3:// and az:// only: leave it out"
            raise ConfigError("endpoint", self.endpoint, remedy)
        if target.service is not Service.S3 and self.region is not None:
            raise ConfigError("region", self.region, "has a meaning for s3:// only: leave it out")
        for name in ("capacity_bytes", "ttl_s"):
            if target.service is Service.HTTP and getattr(self, name) is not None:
                remedy = "cannot be kept where nothing can be listed: leave it out, or use the server's own life cycle"
                raise ConfigError(name, getattr(self, name), remedy)
        if self.endpoint is not None:
            server = parse_server("endpoint", self.endpoint, is_http_allowed=self.allow_http)
            object.__setattr__(self, "endpoint", server)
        require_tls(self.ca_file, self.endpoint or self.url)

    def list_reach(self) -> dict[str, object]:
        """Return the settings that it takes to reach the objects, without those that have their default. Pure."""
        default = {
            "prefix": DEFAULT_PREFIX,
            "endpoint": None,
            "region": None,
            "allow_http": False,
            "ca_file": None,
        }
        reach = {name: getattr(self, name) for name, value in default.items() if getattr(self, name) != value}
        return {"url": self.url, **reach}


def require_tls(ca_file: Path | None, server: str) -> None:
    """Refuse certificates for a server that is not reached by TLS. Pure.

    Raises:
        ConfigError: there are some.
    """
    if ca_file is not None and server.startswith(("http:", "file:", "memory:")):
        remedy = "has no effect without TLS: use https://, or leave it out"
        raise ConfigError("ca_file", str(ca_file), remedy)


def require_capacity(settings: ObjSettings, block_bytes: int) -> None:
    """Refuse a capacity that cannot be kept.

    Raises:
        ConfigError: it is too small; the message has the least.
    """
    capacity_bytes = settings.capacity_bytes
    if capacity_bytes is not None and capacity_bytes < MIN_CAPACITY_BLOCKS * block_bytes:
        remedy = f"must be at least {MIN_CAPACITY_BLOCKS} blocks of {block_bytes} bytes, or left out"
        raise ConfigError("capacity_bytes", capacity_bytes, remedy)
