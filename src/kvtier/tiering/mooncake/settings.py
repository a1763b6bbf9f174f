"""The tier's own settings, checked and typed.

It opens no connection; whether the master answers is seen by ``check_reachable``.
"""

import re
from dataclasses import dataclass
from enum import Enum

from kvtier.config import SettingsReader, parse_bytes
from kvtier.errors import ConfigError

DEFAULT_LOCAL_HOST = "127.0.0.1"
"""The address that others are told to reach this process at. Whoever reaches it may read and write registered
memory without a password, so it leaves the machine only when somebody says so."""

DEFAULT_NUM_REPLICAS = 1
"""Copies of a block. Two survive the death of a provider, take twice the memory and twice the network."""

DEFAULT_TIMEOUT_S = 2.0
"""Seconds for a call to the master, which answers in well under a millisecond. Shorter gives up on a busy one;
longer keeps a thread of the tier from its next job for that long when the master hangs."""

DEFAULT_NUM_THREADS = 2
"""Threads that move blocks, a batch each. The client copies on threads of its own: one keeps it busy while another
computes checksums, more only wait."""

MAX_TIMEOUT_S = 30.0
"""The library stops waiting for a transfer after 60 seconds without stopping the transfer itself."""

MAX_THREADS = 64
MAX_REPLICAS = 16
MIN_SEGMENT_BYTES = 16 * 2**20
"""The least that is worth contributing: the store allocates in steps of this size."""

_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9a-fA-F:.]+")


class Protocol(Enum):
    """How bytes travel between machines."""

    TCP = "tcp"
    RDMA = "rdma"


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """What the user asked of the tier.

    Attributes:
        master: address of the store's master, ``host:port``.
        segment_bytes: memory that this engine contributes to the store; 0 only uses that of others.
        num_replicas: copies of each block.
        local_host: the address at which other machines reach this process.
        protocol: how bytes travel.
        timeout_s: seconds for a call to the master.
        num_threads: threads that move blocks.
    """

    master: str
    segment_bytes: int
    num_replicas: int
    local_host: str
    protocol: Protocol
    timeout_s: float
    num_threads: int


def parse_settings(
    *,
    master: object,
    segment_bytes: object,
    num_replicas: object,
    local_host: object,
    protocol: object,
    timeout_s: object,
    num_threads: object,
) -> MooncakeSettings:
    """Check the tier's arguments. Pure.

    Args:
        master: text ``host:port``.
        segment_bytes: a number or text such as ``"4GiB"``; 0 contributes nothing.
        num_replicas: from 1 to 16.
        local_host: a host name or an address, without a port.
        protocol: ``"tcp"`` or ``"rdma"``.
        timeout_s: seconds, more than 0.
        num_threads: from 1 to 64.

    Raises:
        ConfigError: a value that cannot work.
    """
    values = {"num_replicas": num_replicas, "protocol": protocol}
    read = SettingsReader(values | {"timeout_s": timeout_s, "num_threads": num_threads})
    own_timeout_s = read.seconds("timeout_s", DEFAULT_TIMEOUT_S)
    if not 0 < own_timeout_s <= MAX_TIMEOUT_S:
        raise ConfigError(
            "timeout_s", timeout_s, f"must be more than 0 and at most {MAX_TIMEOUT_S:g} seconds"
        )
    return MooncakeSettings(
        master=_parse_master(master),
        segment_bytes=_parse_segment(segment_bytes),
        num_replicas=_at_most(read.whole("num_replicas", 1, minimum=1), "num_replicas", MAX_REPLICAS),
        local_host=_parse_host(local_host),
        protocol=read.choice("protocol", Protocol.TCP),
        timeout_s=own_timeout_s,
        num_threads=_at_most(read.whole("num_threads", 1, minimum=1), "num_threads", MAX_THREADS),
    )


def _parse_master(value: object) -> str:
    match = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if match is None or not 0 < int(match["port"]) < 2**16:
        remedy = 'must be "host:port" of a mooncake_master, for example "10.0.0.5:50051"'
        raise ConfigError("master", value, remedy)
    return match.string


def _parse_host(value: object) -> str:
    if not isinstance(value, str) or _HOST.fullmatch(value) is None:
        remedy = "must be the name or address at which other machines reach this one, without a port"
        raise ConfigError("local_host", value, remedy)
    return value


def _parse_segment(value: object) -> int:
    if value == 0 and not isinstance(value, bool):
        return 0
    segment_bytes = parse_bytes("segment_bytes", value)
    if segment_bytes < MIN_SEGMENT_BYTES:
        remedy = f"contribute at least {MIN_SEGMENT_BYTES} bytes, or 0 to use the memory of others only"
        raise ConfigError("segment_bytes", value, remedy)
    return segment_bytes


def _at_most(number: int, setting: str, limit: int) -> int:
    if number > limit:
        raise ConfigError(setting, number, f"must be at most {limit}")
    return number
