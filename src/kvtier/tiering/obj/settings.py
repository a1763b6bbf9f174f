"""The tier's own settings.

No connection is opened here and no credentials are read: the client takes those from the environment, and a setting
that carries some is refused without being repeated.
"""

import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.settings import choice, flag, setting, text
from kvtier.tiering.kit.blobs.settings import BlobSettings
from kvtier.tiering.obj.target import Service, StoreTarget, parse_server, parse_target, parse_url

DEFAULT_PREFIX = "kvtier"


class ConditionalPut(Enum):
    """Whether the store is asked to write only where nothing is: tried once, always, or never."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjSettings(BlobSettings):
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
    conditional_put: ConditionalPut = field(
        default=ConditionalPut.AUTO,
        metadata=setting(
            choice(ConditionalPut),
            "tried once; a server that does not know `If-None-Match` (501) is asked before each store whether the "
            'block is there, as with `"never"`; `"always"` fails there',
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
        if self.endpoint is not None:
            server = parse_server("endpoint", self.endpoint, is_http_allowed=self.allow_http)
            object.__setattr__(self, "endpoint", server)
        require_tls(self.ca_file, self.endpoint or self.url)


def require_tls(ca_file: Path | None, server: str) -> None:
    """Refuse certificates for a server that is not reached by TLS. Pure.

    Raises:
        ConfigError: there are some.
    """
    if ca_file is not None and server.startswith(("http:", "file:", "memory:")):
        remedy = "has no effect without TLS: use https://, or leave it out"
        raise ConfigError("ca_file", str(ca_file), remedy)
