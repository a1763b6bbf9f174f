"""The tier's own settings.

No connection is opened here; whether the master answers is seen by ``check_reachable``.
"""

import re
from dataclasses import dataclass, field
from enum import Enum

from kvtier.errors import ConfigError
from kvtier.quantities import parse_bytes
from kvtier.settings import Parser, choice, flag, seconds_up_to, setting, whole
from kvtier.tiering.kit.blobs.settings import BlobSettings

SCHEME = "mooncake://"

DEFAULT_LOCAL_HOST = "127.0.0.1"
"""The address at which other processes reach this one. A process that reaches it may read and write registered memory
without a password, so the default does not leave the machine."""

DEFAULT_NUM_REPLICAS = 1
"""Copies of a block. Two survive the death of a provider, take twice the memory and twice the network."""

DEFAULT_TIMEOUT_S = 2.0
"""Seconds for a call to the master, which answers in well under a millisecond. Shorter times out on a busy one;
longer keeps a thread of the tier from its next job for that long when the master hangs."""

DEFAULT_NUM_THREADS = 2
"""Threads that move blocks, a batch each. The client copies on threads of its own: one keeps it busy while another
computes checksums, more only wait."""

LISTENERS = (
    "the Mooncake client opens two listeners on every interface, without authentication, whatever local_host says: any "
    'host that reaches them may read and write blocks and registered memory. Set "allow_any_interface": true on a '
    "private network or behind a firewall, or use valkey with a password and TLS"
)
"""Why the tier refuses to start unless it is allowed to listen, and what to do."""
DEFAULT_ADMIN_PORT = 9003
"""Where a master serves its metrics, unless its --metrics_port says otherwise."""

MAX_TIMEOUT_S = 30.0
"""The library stops waiting for a transfer after 60 seconds without stopping the transfer itself."""

MAX_THREADS = 64
MAX_REPLICAS = 16
MIN_SEGMENT_BYTES = 16 * 2**20
"""The least that is worth contributing: the store allocates in steps of this size."""

SETTINGS_OF_LENDING = frozenset({"segment_bytes", "num_replicas"})
"""What an engine that stores sets, and no command needs to reach its blocks."""

_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9a-fA-F:.]+")


class Protocol(Enum):
    """How bytes travel between machines."""

    TCP = "tcp"
    RDMA = "rdma"


def parse_master(name: str, value: object) -> str:
    """Return ``host:port``, also of ``mooncake://host:port``. Pure.

    Raises:
        ConfigError: it is anything else.
    """
    match = _ADDRESS.fullmatch(value.removeprefix(SCHEME).rstrip("/")) if isinstance(value, str) else None
    if match is None or not 0 < int(match["port"]) < 2**16:
        remedy = 'must be "host:port" of a mooncake_master, for example "10.0.0.5:50051"'
        raise ConfigError(name, value, remedy)
    return match.string


def parse_host(name: str, value: object) -> str:
    """Return a host name or an address without a port. Pure.

    Raises:
        ConfigError: it is anything else.
    """
    if not isinstance(value, str) or _HOST.fullmatch(value) is None:
        remedy = "must be the name or address at which other machines reach this one, without a port"
        raise ConfigError(name, value, remedy)
    return value


def parse_segment(name: str, value: object) -> int:
    """Return the length of a segment; 0 contributes nothing. Pure.

    Raises:
        ConfigError: it is too small, or no number of bytes.
    """
    if value == 0 and not isinstance(value, bool):
        return 0
    segment_bytes = parse_bytes(name, value)
    if segment_bytes < MIN_SEGMENT_BYTES:
        remedy = f"contribute at least {MIN_SEGMENT_BYTES} bytes, or 0 to use the memory of others only"
        raise ConfigError(name, value, remedy)
    return segment_bytes


def refuse(reason: str) -> Parser:
    """Return a parser that refuses every value of a setting that cannot be kept; no value means none."""

    def parse(name: str, value: object) -> None:
        remedy = f"cannot be kept: {reason}; leave it out, or use another tier"
        raise ConfigError(name, value, remedy, max_value_chars=80)

    return parse


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings(BlobSettings):
    """What the user set for the tier; each field says what it is.

    Raises:
        ConfigError: the listeners of the client are not allowed.
    """

    master: str = field(metadata=setting(parse_master, "a mooncake_master", unit="`host:port`"))
    segment_bytes: int = field(
        default=0,
        metadata=setting(
            parse_segment,
            "memory that this engine lends to the store: none unless set; otherwise at least 16 MiB",
            unit="bytes",
        ),
    )
    num_replicas: int = field(
        default=DEFAULT_NUM_REPLICAS,
        metadata=setting(
            whole(1, MAX_REPLICAS),
            "two survive a provider's failure and take twice the memory; with too few providers there are fewer",
            unit=f"1 to {MAX_REPLICAS}",
        ),
    )
    local_host: str = field(
        default=DEFAULT_LOCAL_HOST,
        metadata=setting(
            parse_host,
            "the store has no authentication: other machines get an address only if you set one",
        ),
    )
    protocol: Protocol = field(
        default=Protocol.TCP,
        metadata=setting(choice(Protocol), 'works everywhere; `"rdma"` has not been tested'),
    )
    timeout_s: float = field(
        default=DEFAULT_TIMEOUT_S,
        metadata=setting(
            seconds_up_to(MAX_TIMEOUT_S),
            "a master answers in under a millisecond; keep it below the master's lease of 5 s",
            unit=f"seconds, at most {MAX_TIMEOUT_S:g}",
        ),
    )
    num_threads: int = field(
        default=DEFAULT_NUM_THREADS,
        metadata=setting(
            whole(1, MAX_THREADS),
            "one computes checksums while the other copies",
            unit=f"1 to {MAX_THREADS}",
        ),
    )
    capacity_bytes: None = field(
        default=None,
        metadata=setting(
            refuse("a Mooncake store has the memory that is lent to it, for all who use it"),
            "refused: the store takes what is lent to it, and drops blocks by its own order",
            default_text="none",
        ),
    )
    ttl_s: None = field(
        default=None,
        metadata=setting(
            # Leases and soft pins keep an object in, none out.
            refuse("a Mooncake store drops objects by its own order alone"),
            "refused: the store has no time to live ([retention](tenants.md#how-long-blocks-live))",
            default_text="none",
        ),
    )
    allow_any_interface: bool = field(
        default=False,
        metadata=setting(
            flag,
            "the tier refuses to start without `true`: the client listens on every interface, and any host that "
            "reaches it may read and write registered memory",
        ),
    )
    admin_port: int = field(
        default=DEFAULT_ADMIN_PORT,
        metadata=setting(
            whole(1, 2**16 - 1),
            "the master's own, its `--metrics_port`; only `kvtier inspect`, `verify` and `purge` use it",
            unit="port",
        ),
    )

    def __post_init__(self) -> None:
        if not self.allow_any_interface:
            raise ConfigError("allow_any_interface", self.allow_any_interface, LISTENERS)

    def list_reach(self) -> dict[str, object]:
        reach = BlobSettings.list_reach(self)
        return {name: value for name, value in reach.items() if name not in SETTINGS_OF_LENDING}
