"""Purges that a process asks the others of a directory for: ``ROOT/.purge``, a list in JSON.

Each owner reads it once a second, removes what is asked for from its own packs, and names the request in its notes.
The process that asked takes the request out again. It asks for a namespace, for a tenant in it, or for single blocks,
each by its slot and its name: a slot that holds another one by then stays as it is.
"""

import errno
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from kvtier.tiering.fs.directory_lock import DirectoryLock
from kvtier.tiering.fs.pack_header import MAX_SLOTS
from kvtier.tiering.fs.system_calls import PRIVATE_MODE, REAL_CALLS, open_regular, write_whole

FILE_NAME = ".purge"
TEMPORARY_NAME = ".purge.tmp"

MAX_REQUESTS = 32
"""Requests at a time. One stays where its process was killed; more than that many are refused."""

MAX_AGE_S = 600.0
"""Seconds after which a request is dropped, because its process must have been killed: it waits for some seconds."""

ACKNOWLEDGE_S = 10.0
"""Seconds for which a purge waits for the owners of other packs, which look once a second."""

MAX_BLOCKS = 512
"""Single blocks that a request names, about 140 bytes each. Fewer make a purge of many take more rounds of an owner;
more let fewer purges be asked for at a time."""

MAX_FILE_BYTES = 2**20
"""Length of the file: a dozen requests that name as many blocks as they may."""

MAX_TIME_S = 2**53

_ID = re.compile(r"[0-9a-f]{16}")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_PACK_ID = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"(?:[0-9a-f]{2}){1,40}")


class NamedBlock(NamedTuple):
    """A block that is to be removed.

    Attributes:
        pack_id: of the pack that holds it, 32 hex digits.
        slot: the slot that holds it.
        name: what its namespace calls it, in hex.
        used_s: it stays if it was used later than this, seconds since 1970; None: it goes whenever it was used.
    """

    pack_id: str
    slot: int
    name: str
    used_s: int | None = None


class PurgeRequest(NamedTuple):
    """What is to be removed.

    Attributes:
        id: 16 hex digits.
        namespace: name of the one whose blocks go; None: all.
        tenant: number of the tenant whose blocks go; None: all.
        since_s: when it was asked for, seconds since 1970.
        blocks: those that go; None: all of the namespace, or of the tenant.
    """

    id: str
    namespace: str | None
    tenant: int | None
    since_s: float
    blocks: tuple[NamedBlock, ...] | None = None


def make_request(
    namespace: str | None, tenant: int | None, blocks: Iterable[NamedBlock] | None = None
) -> PurgeRequest:
    """Return a request that is asked for now; single blocks may be MAX_BLOCKS at most."""
    named = None if blocks is None else tuple(blocks)
    return PurgeRequest(secrets.token_hex(8), namespace, tenant, time.time(), named)


def write_request(root: Path, request: PurgeRequest, file_mode: int = PRIVATE_MODE) -> None:
    """Ask for a purge.

    Raises:
        OSError: the system refused, too many are asked for, or another process keeps the directory's lock.
    """
    now_s = time.time()

    def add(found: list[PurgeRequest]) -> list[PurgeRequest]:
        living = [one for one in found if abs(now_s - one.since_s) < MAX_AGE_S]
        if len(living) >= MAX_REQUESTS:
            raise OSError(
                errno.EBUSY, f"{len(living)} purges are asked for: wait until they are done", str(root)
            )
        return [*living, request]

    _change(root, add, file_mode)


def drop_request(root: Path, request_id: str, file_mode: int = PRIVATE_MODE) -> None:
    """Take a request out.

    Raises:
        OSError: the system refused, or another process keeps the directory's lock.
    """
    _change(root, lambda found: [one for one in found if one.id != request_id], file_mode)


def read_requests(root: Path, file_mode: int = PRIVATE_MODE) -> list[PurgeRequest]:
    """Return what is asked for; what is no request is left out."""
    try:
        with os.fdopen(open_regular(REAL_CALLS, root / FILE_NAME, os.O_RDONLY, file_mode), "rb") as file:
            return parse_requests(file.read(MAX_FILE_BYTES))
    except OSError:
        return []


def parse_requests(data: bytes) -> list[PurgeRequest]:
    """Return the requests in a file. Pure."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return []
    requests = [_parse(one) for one in found[:MAX_REQUESTS]] if isinstance(found, list) else []
    return [one for one in requests if one is not None]


def _parse(found: object) -> PurgeRequest | None:
    if not isinstance(found, list) or len(found) != len(PurgeRequest._fields):
        return None
    request_id, namespace, tenant, since_s, blocks = found
    is_one = (
        _matches(_ID, request_id)
        and (namespace is None or _matches(_NAMESPACE, namespace))
        and (tenant is None or _is_below(2**64, tenant))
        and type(since_s) in (int, float)
        and abs(since_s) < MAX_TIME_S
        and (blocks is None or (isinstance(blocks, list) and len(blocks) <= MAX_BLOCKS))
    )
    if not is_one:
        return None
    named = None if blocks is None else tuple(one for one in map(_parse_block, blocks) if one is not None)
    return PurgeRequest(request_id, namespace, tenant, since_s, named)


def _parse_block(found: object) -> NamedBlock | None:
    if not isinstance(found, list) or len(found) != len(NamedBlock._fields):
        return None
    pack_id, slot, name, used_s = found
    is_one = (
        _matches(_PACK_ID, pack_id)
        and _is_below(MAX_SLOTS, slot)
        and _matches(_NAME, name)
        and (used_s is None or _is_below(2**64, used_s))
    )
    return NamedBlock(pack_id, slot, name, used_s) if is_one else None


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_below(end: int, value: object) -> bool:
    return type(value) is int and 0 <= value < end


def _change(root: Path, change: Callable[[list[PurgeRequest]], list[PurgeRequest]], file_mode: int) -> None:
    with DirectoryLock(root, file_mode=file_mode).held() as is_held:
        if not is_held:
            raise OSError(errno.EBUSY, "another process keeps the directory's lock", str(root))
        requests = change(read_requests(root, file_mode))
        path = root / FILE_NAME
        if not requests:
            path.unlink(missing_ok=True)
            return
        data = json.dumps(requests, separators=(",", ":")).encode()
        if len(data) > MAX_FILE_BYTES:
            raise OSError(errno.EBUSY, "too much is asked for: wait until it is done", str(path))
        write_whole(root / TEMPORARY_NAME, path, data, file_mode)
