"""The tier's own settings, checked and typed.

It opens no connection and reads no credentials: those come from the environment, to the client itself, and a
setting that carries some is refused without being repeated.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from kvtier.config import SettingsReader, parse_bytes
from kvtier.errors import ConfigError
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES
from kvtier.tiering.obj.target import Service, StoreTarget, parse_place, parse_server, redacted

DEFAULT_PREFIX = "kvtier"

DEFAULT_NUM_THREADS = 16
"""Requests in flight. A store far away answers each of them slowly and many at once: fewer leave the link idle, many
more hold as many blocks in buffers of the client."""

DEFAULT_BLOCKS_PER_OBJECT = 1
"""Blocks in one object. More need a pointer for each block, as an engine that knows one key only must find it: a store
then makes more requests than with one, and only loads of whole runs make fewer. ``kvtier bench tiers`` has numbers."""

DEFAULT_TIMEOUT_S = 5.0
"""Seconds for a request from its start to the last byte. Shorter fails large blocks on a slow link; longer keeps slots
and threads that much longer when a server hangs."""

MAX_THREADS = 128
MAX_BLOCKS_PER_OBJECT = 64
MIN_CAPACITY_BLOCKS = 64
"""Blocks below which capacity cannot be kept by passes over a listing that each free an eighth."""


@dataclass(frozen=True, slots=True)
class ObjSettings:
    """What the user asked of the tier.

    Attributes:
        place: where the objects are.
        capacity_bytes: what objects of every namespace under the prefix may take; None leaves it to the store.
        blocks_per_object: the most blocks that one object gets.
        timeout_s: seconds for a request.
        num_threads: threads that move blocks, one request each.
        endpoint: URL of the server; None takes the service's own, or what the environment says.
        region: of the bucket; None likewise.
        allow_http: whether blocks may go over the network unencrypted.
        ca_file: PEM file of certificates that are trusted besides the system's.
    """

    place: StoreTarget
    capacity_bytes: int | None
    blocks_per_object: int
    timeout_s: float
    num_threads: int
    endpoint: str | None
    region: str | None
    allow_http: bool
    ca_file: Path | None


def parse_settings(
    *,
    url: object,
    prefix: object,
    capacity_bytes: object,
    blocks_per_object: object,
    timeout_s: object,
    num_threads: object,
    endpoint: object,
    region: object,
    allow_http: object,
    ca_file: object,
    row_bytes: int,
) -> ObjSettings:
    """Check the tier's arguments.

    Args:
        url: ``s3://bucket``, ``gs://bucket``, ``az://container``, ``https://host`` of a server that takes PUT,
            ``file:///directory`` or ``memory://``; a path behind the bucket goes in front of the prefix.
        prefix: what names begin with, for example ``team/kvtier``; may be empty.
        capacity_bytes: a number, text such as ``"8GiB"``, or None.
        blocks_per_object: from 1 to 64.
        timeout_s: seconds, above zero.
        num_threads: from 1 to 128.
        endpoint: URL of a server that speaks the service's protocol, or None.
        region: text or None.
        allow_http: a flag.
        ca_file: path of a PEM file, or None.
        row_bytes: length of a block in the primary tier.

    Raises:
        ConfigError: a value that cannot work.
    """
    values = {"timeout_s": timeout_s, "num_threads": num_threads, "blocks_per_object": blocks_per_object}
    read = SettingsReader(values | {"allow_http": allow_http})
    is_http_allowed = read.flag("allow_http", default=False)
    place = parse_place(url, prefix, is_http_allowed=is_http_allowed)
    _refuse_meaningless(place.service, capacity_bytes, endpoint, region)
    seconds = read.seconds("timeout_s", DEFAULT_TIMEOUT_S)
    if seconds == 0:
        raise ConfigError("timeout_s", timeout_s, "must be above zero: no request ends at once")
    return ObjSettings(
        place=place,
        capacity_bytes=_parse_capacity(capacity_bytes, ENVELOPE_BYTES + row_bytes),
        blocks_per_object=_parse_count(
            read, "blocks_per_object", DEFAULT_BLOCKS_PER_OBJECT, MAX_BLOCKS_PER_OBJECT
        ),
        timeout_s=seconds,
        num_threads=_parse_count(read, "num_threads", DEFAULT_NUM_THREADS, MAX_THREADS),
        endpoint=None
        if endpoint is None
        else parse_server("endpoint", endpoint, is_http_allowed=is_http_allowed),
        region=_parse_region(region),
        allow_http=is_http_allowed,
        ca_file=_parse_ca_file(ca_file),
    )


def _refuse_meaningless(service: Service, capacity_bytes: object, endpoint: object, region: object) -> None:
    if service not in (Service.S3, Service.AZURE) and endpoint is not None:
        raise ConfigError(
            "endpoint", redacted(endpoint), "has a meaning for s3:// and az:// only: leave it out"
        )
    if service is not Service.S3 and region is not None:
        raise ConfigError("region", region, "has a meaning for s3:// only: leave it out")
    if service is Service.HTTP and capacity_bytes is not None:
        raise ConfigError(
            "capacity_bytes", capacity_bytes, "cannot be kept where nothing can be listed: leave it out"
        )


def _parse_capacity(value: object, block_bytes: int) -> int | None:
    if value is None:
        return None
    capacity_bytes = parse_bytes("capacity_bytes", value)
    if capacity_bytes < MIN_CAPACITY_BLOCKS * block_bytes:
        remedy = f"must be at least {MIN_CAPACITY_BLOCKS} blocks of {block_bytes} bytes, or left out"
        raise ConfigError("capacity_bytes", value, remedy)
    return capacity_bytes


def _parse_count(read: SettingsReader, name: str, default: int, maximum: int) -> int:
    count = read.whole(name, default, minimum=1)
    if count > maximum:
        raise ConfigError(name, count, f"must be at most {maximum}")
    return count


def _parse_region(value: object) -> str | None:
    if value is None or (isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9-]{1,64}", value)):
        return value
    raise ConfigError("region", value, 'must be the name of a region, such as "eu-central-1"')


def _parse_ca_file(value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | Path) or not Path(value).is_absolute():
        raise ConfigError("ca_file", value, "must be the absolute path of a PEM file")
    return Path(value)
