"""The tier's own settings.

No connection is opened here; whether the server is there is seen by ``check_reachable``. Of the file system only
whether ``ca_file`` exists is read.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.settings import flag, seconds, seconds_up_to, setting, whole
from kvtier.tiering.kit.blobs.settings import MAX_THREADS, BlobSettings
from kvtier.tiering.valkey.endpoint import PASSWORD_VARIABLE, USERNAME_VARIABLE, Endpoint, parse_endpoint

DEFAULT_TTL_S = 86_400.0
"""Seconds after its last use that a block is kept. A day brings back tomorrow's conversations; without an expiry,
blocks that can never be found again, of an older model or from before a reset, would fill a server that evicts
nothing, and a server that evicts only what expires (``volatile-*``) could not evict ours."""

MAX_TTL_S = 10 * 365 * 86_400.0

DEFAULT_TIMEOUT_S = 2.0
"""Seconds without a single byte after which a server counts as hung. A local one answers in milliseconds; much
less would time out on one that writes a snapshot, more keeps slots reserved behind one that is gone."""

MAX_TIMEOUT_S = 60.0

DEFAULT_NUM_THREADS = 4
"""Threads that move blocks, each with a connection to each node in use. One leaves the link idle while it checks
sums; many more wait for the same server, which serves one command at a time."""


def parse_url(name: str, value: object) -> Endpoint:
    """Return where the server is; credentials that the URL lacks come from the environment.

    Raises:
        ConfigError: it cannot be used; the message does not repeat it.
    """
    del name  # the parser of the endpoint knows it
    return parse_endpoint(value, os.environ)


def parse_ttl(name: str, value: object) -> float | None:
    """Return seconds until a block expires, None when it never does. Pure.

    Raises:
        ConfigError: a time that cannot work.
    """
    ttl_s = 0.0 if value is None else seconds(name, value)
    if ttl_s > MAX_TTL_S or 0 < ttl_s < 1:
        raise ConfigError(name, value, "must be at least a second and at most ten years, or 0 for no expiry")
    return ttl_s or None


def parse_ca_file(name: str, value: object) -> str:
    """Return the path of a file with certificates; ``~`` is the home directory.

    Raises:
        ConfigError: it is no path.
    """
    if not isinstance(value, str | Path) or not str(value):
        raise ConfigError(name, value, "must be the path of a file with certificates")
    return str(Path(value).expanduser())


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeySettings(BlobSettings):
    """What the user set for the tier; each field says what it is. The server has a capacity of its own.

    Raises:
        ConfigError: two settings do not fit together, or ``ca_file`` is no file.
    """

    capacity_bytes: None = field(default=None, init=False)
    url: Endpoint = field(
        metadata=setting(
            parse_url,
            "`redis://`, `valkey://`, with TLS `rediss://`, `valkeys://`; set user and password in the environment, "
            f"{USERNAME_VARIABLE} and {PASSWORD_VARIABLE}",
        )
    )
    cluster: bool = field(
        default=False, metadata=setting(flag, "`true` if the server is a node of a cluster")
    )
    ttl_s: float | None = field(
        default=DEFAULT_TTL_S,
        metadata=setting(
            parse_ttl,
            "a block expires a day after its last use, even if no engine runs any more; 0 keeps it",
            unit="seconds",
        ),
    )
    renew_ttl: bool = field(
        default=True,
        metadata=setting(
            flag,
            "each use restarts `ttl_s`; `false` counts it from the store, for "
            "[retention](tenants.md#how-long-blocks-live)",
        ),
    )
    timeout_s: float = field(
        default=DEFAULT_TIMEOUT_S,
        metadata=setting(
            seconds_up_to(MAX_TIMEOUT_S),
            "a server that sends no byte for this long counts as hung",
            unit="seconds",
        ),
    )
    ca_file: str | None = field(
        default=None, metadata=setting(parse_ca_file, "the system's certificates", unit="path")
    )
    num_threads: int = field(
        default=DEFAULT_NUM_THREADS,
        metadata=setting(
            whole(1, MAX_THREADS), "connections that move blocks; more wait for the same network"
        ),
    )

    def list_reach(self) -> dict[str, object]:
        # Without the credentials, which the URL may have.
        host = f"[{self.url.address.host}]" if ":" in self.url.address.host else self.url.address.host
        scheme = "rediss" if self.url.is_tls else "redis"
        database = f"/{self.url.database}" if self.url.database else ""
        reach: dict[str, object] = {"url": f"{scheme}://{host}:{self.url.address.port}{database}"}
        if self.cluster:
            reach["cluster"] = True
        return reach if self.ca_file is None else reach | {"ca_file": self.ca_file}

    def __post_init__(self) -> None:
        if self.cluster and self.url.database:
            raise ConfigError("url", f".../{self.url.database}", "a cluster is used with database 0 only")
        if not (self.renew_ttl or self.ttl_s):
            remedy = (
                "has no effect with ttl_s=0, with which blocks do not expire: leave it out, or give ttl_s"
            )
            raise ConfigError("renew_ttl", self.renew_ttl, remedy)
        if self.ca_file is None:
            return
        if not self.url.is_tls:
            raise ConfigError(
                "ca_file", self.ca_file, "has no effect without TLS: use rediss:// or valkeys://"
            )
        if not Path(self.ca_file).is_file():
            remedy = "is no file: name one with the certificate authority's certificate"
            raise ConfigError("ca_file", self.ca_file, remedy)
