"""Purges that a process asks the others of a directory for: ``ROOT/.purge``, a list in JSON.

Each owner reads it once a second, removes what is asked for from its own packs, and names the request in its notes.
The process that asked takes the request out again.
"""

import errno
import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvtier.tiering.packs.directory_lock import DirectoryLock
from kvtier.tiering.packs.system_calls import PRIVATE_MODE, REAL_CALLS, open_regular

FILE_NAME = ".purge"
TEMPORARY_NAME = ".purge.tmp"

MAX_REQUESTS = 32
"""Requests at a time. One stays where its process was killed; more than that many are refused."""

MAX_AGE_S = 600.0
"""Seconds after which a request is dropped, because its process must have been killed: it waits for some seconds."""

MAX_FILE_BYTES = 16 * 1024

_ID = re.compile(r"[0-9a-f]{16}")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")


class PurgeRequest(NamedTuple):
    """What is to be removed.

    Attributes:
        id: 16 hex digits.
        namespace: name of the one whose blocks go; None: all.
        tenant: number of the tenant whose blocks go; None: all.
        since_s: when it was asked for, seconds since 1970.
    """

    id: str
    namespace: str | None
    tenant: int | None
    since_s: float


def make_request(namespace: str | None, tenant: int | None) -> PurgeRequest:
    """Return a request that is asked for now."""
    return PurgeRequest(secrets.token_hex(8), namespace, tenant, time.time())


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
    request_id, namespace, tenant, since_s = found
    is_one = (
        isinstance(request_id, str)
        and _ID.fullmatch(request_id)
        and (namespace is None or (isinstance(namespace, str) and _NAMESPACE.fullmatch(namespace)))
        and (tenant is None or (type(tenant) is int and 0 <= tenant < 2**64))
        and type(since_s) in (int, float)
        and math.isfinite(since_s)
    )
    return PurgeRequest(request_id, namespace, tenant, since_s) if is_one else None


def _change(root: Path, change: Callable[[list[PurgeRequest]], list[PurgeRequest]], file_mode: int) -> None:
    with DirectoryLock(root, file_mode=file_mode).held() as is_held:
        if not is_held:
            raise OSError(errno.EBUSY, "another process keeps the directory's lock", str(root))
        requests = change(read_requests(root, file_mode))
        path, temporary = root / FILE_NAME, root / TEMPORARY_NAME
        if not requests:
            path.unlink(missing_ok=True)
            return
        with suppress(FileNotFoundError):
            temporary.unlink()
        fd = open_regular(REAL_CALLS, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file_mode)
        with os.fdopen(fd, "wb") as file:
            file.write(json.dumps(requests).encode())
        temporary.replace(path)
