"""What a control socket and its clients agree on: where sockets are, and one JSON object a line.

A socket's name is the engine's instance id. It is in the folder ``kvtier`` of the user's runtime directory, and only
this user can enter that folder. Every process that creates or removes a socket holds a lock on the folder, so that a
socket which refuses a connection belongs to a dead process. Requests are ``{"do": command, ...}``; replies have
``"ok"``, and ``"error"`` where that is false.
"""

import fcntl
import hashlib
import json
import math
import os
import re
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvtier.errors import ControlError
from kvtier.redaction import shorten

FOLDER_NAME = "kvtier"
SUFFIX = ".sock"

MAX_LINE_BYTES = 2**20
"""The longest request: the ids of some hundred thousand tokens. More memory than that is no command."""

MAX_REPLY_BYTES = 2**26
"""The longest reply that a client reads."""

MAX_NAME_BYTES = 60
"""A longer instance id is cut and told apart by its digest: the path of a socket has at most 107 bytes."""

MAX_PATH_BYTES = 107
"""Of Linux."""

LOCK_TRIES = 50
LOCK_PAUSE_S = 0.02
"""How often the folder's lock is tried, and the pause between. Holders keep it for less than a millisecond; an engine
whose folder stays locked starts without a socket after a second."""

Message = dict[str, Any]  # Any: JSON, checked where it is read
"""A request or a reply."""


def list_runtime_folders(environment: Mapping[str, str] = os.environ, uid: int | None = None) -> list[Path]:
    """Return where this user's control folders may be, the preferred one first; none need exist. Pure.

    An engine under a service manager may lack the variables of a shell, so a client looks into each.
    """
    own = os.geteuid() if uid is None else uid
    named = environment.get("XDG_RUNTIME_DIR", "")
    places = [Path(named)] if named.startswith("/") else []
    places += [Path(f"/run/user/{own}"), Path(tempfile.gettempdir()) / f"kvtier-{own}"]
    return [place / FOLDER_NAME for place in dict.fromkeys(places)]


def make_control_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the first control folder that can be used, created with mode 0700 if it is missing.

    Raises:
        ControlError: there is none; the message has the reason for each.
    """
    reasons = []
    *preferred, last = list_runtime_folders(environment)
    for folder in (*preferred, last):
        try:
            if folder is last:  # the only one whose parent is kvtier's own
                _make_private(folder.parent)
            _make_private(folder)
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror or error}")
        else:
            return folder
    raise ControlError(f"no folder for a control socket: {'; '.join(reasons)}")


def _make_private(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"is not a directory of user {os.geteuid()}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError("is not writable")


def make_socket_name(instance_id: str, attempt: int = 0) -> str:
    """Return the name of an engine's socket. Pure.

    Args:
        instance_id: the engine's; characters that do not suit a file name are replaced.
        attempt: 0, and one more for each name that a living engine has already.
    """
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", instance_id).lstrip(".") or "engine"
    if plain != instance_id or len(plain) > MAX_NAME_BYTES:
        digest = hashlib.sha256(instance_id.encode()).hexdigest()[:8]
        plain = f"{plain[: MAX_NAME_BYTES - 9]}-{digest}"
    return f"{plain}-{attempt + 1}{SUFFIX}" if attempt else plain + SUFFIX


@contextmanager
def locked_folder(folder: Path, pause: Callable[[float], None] = time.sleep) -> Iterator[None]:
    """Hold the lock under which sockets are created and removed.

    Raises:
        ControlError: another process keeps it.
        OSError: the folder cannot be opened.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for _ in range(LOCK_TRIES):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pause(LOCK_PAUSE_S)
            else:
                break
        else:
            raise ControlError(f"{folder} stays locked by another process")
        yield
    finally:
        os.close(fd)


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Give a name of ``path`` that fits into a socket's address, while the block runs."""
    if len(os.fsencode(path)) <= MAX_PATH_BYTES:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def is_dead(path: Path) -> bool:
    """Return whether no process listens on the socket at ``path``; call it with the folder locked."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.0)
        try:
            with short_path(path) as name:
                probe.connect(name)
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:  # its backlog is full: it lives
            return False
    return False


def read_peer_uid(connection: socket.socket) -> int:
    """Return the user of the process at the other end of a Unix socket.

    Raises:
        OSError: the kernel does not say.
    """
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)


def encode(message: Mapping[str, Any]) -> bytes:  # Any: JSON
    """Return a message as its line; numbers that JSON does not have become null. Pure."""
    return json.dumps(_finite(message), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode(line: bytes | bytearray) -> Message:
    """Return the message of a line. Pure.

    Raises:
        ControlError: it is not one JSON object.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ControlError(f"a line must be one JSON object, this is {shorten(bytes(line))}") from error
    if not isinstance(message, dict):
        raise ControlError(f"a line must be one JSON object, this is {shorten(message)}")
    return message


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
