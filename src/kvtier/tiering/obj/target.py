"""Where the objects are: what a URL and a prefix say, checked.

A URL that carries credentials is refused without being repeated.
"""

import re
from dataclasses import dataclass
from enum import Enum
from urllib.parse import SplitResult, urlsplit

from kvtier.errors import ConfigError

MAX_PREFIX_CHARACTERS = 512
"""Stores allow names of 1,024 bytes; ours add 120 to the prefix."""


class Service(Enum):
    """What kind of store is behind a URL; the values are its schemes."""

    S3 = "s3"
    GCS = "gs"
    AZURE = "az"
    HTTP = "http"
    FILE = "file"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class StoreTarget:
    """Where the objects are.

    Attributes:
        service: the kind of store.
        bucket: its bucket or container; the URL of a web server, the absolute directory of a file store, empty
            for memory.
        root: what the names of objects begin with, without slashes at the ends.
    """

    service: Service
    bucket: str
    root: str


def parse_target(url: object, prefix: object, *, is_http_allowed: bool) -> StoreTarget:
    """Return where a URL points.

    Args:
        url: as the user wrote it.
        prefix: what the names of objects begin with, behind the URL's own path.
        is_http_allowed: whether the URL of a web server may be an unencrypted one.

    Raises:
        ConfigError: no such service, no bucket, credentials in it, or a prefix that some store would encode.
    """
    parts = _split("url", url, 'must be a URL such as "s3://bucket"')
    try:
        service = Service("http" if parts.scheme == "https" else parts.scheme)
    except ValueError:
        known = ", ".join(f"{member.value}://" for member in Service)
        raise ConfigError("url", url, f"must begin with one of {known}") from None
    own = _parse_prefix("prefix", prefix)
    if service is Service.HTTP:
        server = parse_server("url", f"{parts.scheme}://{parts.netloc}", is_http_allowed=is_http_allowed)
        return StoreTarget(service, server, _join(_parse_prefix("url", parts.path), own))
    if service is Service.FILE:
        if parts.netloc or not parts.path.strip("/"):
            raise ConfigError("url", url, "must name a directory, as in file:///var/kvtier")
        return StoreTarget(service, parts.path, own)
    if service is Service.MEMORY:
        if parts.netloc or parts.path.strip("/"):
            raise ConfigError("url", url, "memory:// has no name: no other process can reach it")
        return StoreTarget(service, "", own)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}", parts.netloc):
        raise ConfigError("url", url, f"must name a bucket, as in {service.value}://bucket")
    return StoreTarget(service, parts.netloc, _join(_parse_prefix("url", parts.path), own))


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)


def _parse_prefix(setting: str, value: object) -> str:
    text = value.strip("/") if isinstance(value, str) else None
    # Only what no store and no client encodes, so that a listed name is the name that was given.
    is_sound = text is not None and all(
        re.fullmatch(r"[A-Za-z0-9._=-]+", part) and part.strip(".") for part in text.split("/") if text
    )
    if text is None or not is_sound or len(text) > MAX_PREFIX_CHARACTERS:
        raise ConfigError(
            setting, value, "must be parts of letters, digits and ._=- with a slash between them"
        )
    return text


def parse_server(setting: str, value: object, *, is_http_allowed: bool) -> str:
    """Return the URL of a server, without a slash at its end.

    Raises:
        ConfigError: it is none, carries credentials, or is unencrypted and must not be.
    """
    parts = _split(setting, value, 'must be a URL such as "https://host:port"')
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise ConfigError(setting, value, 'must be a URL such as "https://host:port", without a path')
    if parts.scheme == "http" and not is_http_allowed:
        remedy = "sends blocks unencrypted: use https, or set allow_http for a server on this machine"
        raise ConfigError(setting, value, remedy)
    return f"{parts.scheme}://{parts.netloc}"


def parse_url(setting: str, value: object) -> str:
    """Return a URL without credentials.

    Raises:
        ConfigError: it is none, or carries credentials; the message does not repeat them.
    """
    _split(setting, value, 'must be a URL such as "s3://bucket" or "https://host:port"')
    return str(value)


def _split(setting: str, value: object, remedy: str) -> SplitResult:
    try:
        parts = urlsplit(value) if isinstance(value, str) else None
    except ValueError:
        parts = None
    if parts is None or not parts.scheme:
        raise ConfigError(setting, value, remedy)
    # An @ anywhere: a password with a slash in it does not end where a host would.
    if "@" in str(value) or parts.query or parts.fragment:
        remedy = "carries credentials or a query: take both out, credentials come from the environment"
        raise ConfigError(setting, value, remedy)
    return parts
