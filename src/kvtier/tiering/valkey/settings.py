"""The tier's own settings, checked and typed.

It opens no connection; whether the server is there is seen by ``check_reachable``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtier.config import SettingsReader
from kvtier.errors import ConfigError
from kvtier.tiering.valkey.endpoint import Endpoint, parse_endpoint

DEFAULT_TTL_S = 86_400.0
"""Seconds after its last use that a block is kept. A day brings back tomorrow's conversations; without an expiry,
blocks that nobody can find any more, of an older model or from before a reset, would fill a server that evicts
nothing, and a server that evicts only what expires (``volatile-*``) could not evict ours."""

MAX_TTL_S = 10 * 365 * 86_400.0

DEFAULT_TIMEOUT_S = 2.0
"""Seconds without a single byte after which a server counts as hung. A local one answers in milliseconds; much
less would give up one that writes a snapshot, more keeps slots reserved behind one that is gone."""

MAX_TIMEOUT_S = 60.0

DEFAULT_NUM_THREADS = 4
"""Threads that move blocks, each with a connection to each node in use. One leaves the link idle while it checks
sums; many more wait for the same server, which serves one command at a time."""

MAX_THREADS = 128


@dataclass(frozen=True, slots=True)
class ValkeySettings:
    """What the user asked of the tier.

    Attributes:
        endpoint: where the server is, and credentials, which are not shown.
        cluster: whether it is a node of a cluster.
        ttl_s: seconds after its last use that a block is kept; None for ever.
        timeout_s: seconds without a byte after which a server counts as hung.
        ca_file: certificates that the server's must be signed by; None takes the system's.
        num_threads: threads that move blocks.
    """

    endpoint: Endpoint
    cluster: bool
    ttl_s: float | None
    timeout_s: float
    ca_file: str | None
    num_threads: int


def parse_settings(
    *,
    url: object,
    cluster: object,
    ttl_s: object,
    timeout_s: object,
    ca_file: object,
    num_threads: object,
    environ: Mapping[str, str],
) -> ValkeySettings:
    """Check the tier's arguments; reads no more of the file system than whether ``ca_file`` is there.

    Args:
        url: as in ``parse_endpoint``.
        cluster: a flag.
        ttl_s: seconds; 0 or None for ever.
        timeout_s: seconds, more than zero.
        ca_file: path of a file with certificates, or None.
        num_threads: from 1 to 128.
        environ: where credentials come from that the URL lacks.

    Raises:
        ConfigError: a value that cannot work.
    """
    read = SettingsReader({"cluster": cluster, "timeout_s": timeout_s, "num_threads": num_threads})
    endpoint = parse_endpoint(url, environ)
    is_cluster = read.flag("cluster", default=False)
    if is_cluster and endpoint.database:
        raise ConfigError("url", f".../{endpoint.database}", "a cluster is used with database 0 only")
    threads = read.whole("num_threads", DEFAULT_NUM_THREADS, minimum=1)
    if threads > MAX_THREADS:
        raise ConfigError("num_threads", threads, f"must be at most {MAX_THREADS}")
    timeout = read.seconds("timeout_s", DEFAULT_TIMEOUT_S)
    if not 0 < timeout <= MAX_TIMEOUT_S:
        raise ConfigError(
            "timeout_s", timeout, f"must be more than 0 and at most {MAX_TIMEOUT_S:.0f} seconds"
        )
    return ValkeySettings(
        endpoint=endpoint,
        cluster=is_cluster,
        ttl_s=_parse_ttl(ttl_s),
        timeout_s=timeout,
        ca_file=_parse_ca_file(ca_file, endpoint),
        num_threads=threads,
    )


def _parse_ttl(value: object) -> float | None:
    ttl_s = SettingsReader({} if value is None else {"ttl_s": value}).seconds("ttl_s", 0.0)
    if ttl_s > MAX_TTL_S or 0 < ttl_s < 1:
        raise ConfigError(
            "ttl_s", value, "must be at least a second and at most ten years, or 0 for no expiry"
        )
    return ttl_s or None


def _parse_ca_file(value: object, endpoint: Endpoint) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | Path) or not str(value):
        raise ConfigError("ca_file", value, "must be the path of a file with certificates")
    if not endpoint.is_tls:
        raise ConfigError("ca_file", str(value), "has no effect without TLS: use rediss:// or valkeys://")
    path = Path(value).expanduser()
    if not path.is_file():
        raise ConfigError(
            "ca_file", str(value), "is no file: name one with the certificate authority's certificate"
        )
    return str(path)
