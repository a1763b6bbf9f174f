"""Where a server is and who we are to it, out of a URL that may hold a password.

It connects to nothing. A URL that cannot be read is never shown: a password with an unescaped character in it is
exactly what makes a URL unreadable.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from kvtier.errors import ConfigError

HAS_TLS = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}
DEFAULT_PORT = 6379

USERNAME_VARIABLE = "KVTIER_VALKEY_USERNAME"
PASSWORD_VARIABLE = "KVTIER_VALKEY_PASSWORD"  # noqa: S105  # the name of a variable, not a password
"""Where credentials come from that do not stand in the URL."""

HIDDEN = "(not shown, it may hold a password)"


class Address(NamedTuple):
    """Where one server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What it takes to connect, as the user gave it; its representation shows no credentials.

    Attributes:
        address: of the server, or of one node of a cluster.
        is_tls: whether the connection is encrypted and the server's certificate checked.
        database: number of the database.
        username: empty for the default user.
        password: empty for none.
    """

    address: Address
    is_tls: bool = False
    database: int = 0
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)


def parse_endpoint(url: object, environ: Mapping[str, str]) -> Endpoint:
    """Read a URL such as ``rediss://user:password@host:6379/0``. Pure.

    Args:
        url: scheme redis, valkey, rediss or valkeys; user, password, port and database may be left out.
        environ: has the user or password when the URL lacks them.

    Raises:
        ConfigError: it is no such URL; the message does not repeat it.
    """
    if not isinstance(url, str):
        raise _refusal("must be text")
    parts, port = _split(url)
    if parts.scheme not in HAS_TLS:
        raise _refusal(f"must begin with one of {', '.join(f'{scheme}://' for scheme in HAS_TLS)}")
    if not parts.hostname:
        raise _refusal("names no host")
    if parts.query or parts.fragment:
        raise _refusal("takes nothing behind ? or #: write special characters of a password as %XX")
    username = unquote(parts.username or "") or environ.get(USERNAME_VARIABLE, "")
    password = unquote(parts.password or "") or environ.get(PASSWORD_VARIABLE, "")
    if username and not password:
        raise _refusal(f"names a user without a password: give it there or in {PASSWORD_VARIABLE}")
    address = Address(parts.hostname, port)
    return Endpoint(address, HAS_TLS[parts.scheme], _parse_database(parts), username, password)


def _split(url: str) -> tuple[SplitResult, int]:
    try:
        parts = urlsplit(url)
        port = DEFAULT_PORT if parts.port is None else parts.port
        (parts.hostname or "").encode("idna")  # a name that cannot be asked for would fail at each connection
    except ValueError:
        # The original names a piece of the URL, which may be one of the password.
        raise _refusal(
            "cannot be read: check host and port, write special characters of a password as %XX"
        ) from None
    return parts, port


def _parse_database(parts: SplitResult) -> int:
    text = parts.path.strip("/")
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise _refusal("may name a database by its number only, as in redis://host/0")
    return int(text)


def _refusal(remedy: str) -> ConfigError:
    return ConfigError("url", HIDDEN, remedy)
