"""The client's side of control sockets: finds this user's engines, and exchanges lines with one of them."""

import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvtier.errors import ControlError, NoEngineError, UnknownNameError
from kvtier.misses import RequestRecord
from kvtier.observe.control_wire import (
    MAX_REPLY_BYTES,
    SUFFIX,
    Message,
    decode,
    encode,
    is_dead,
    list_runtime_folders,
    locked_folder,
    read_peer_uid,
    short_path,
)
from kvtier.redaction import shorten

HELLO_S = 3.0
"""Seconds within which an engine says who it is. Its thread needs milliseconds; a machine under load more."""

MAX_NUMBER = 1e300
"""Numbers beyond it come from no engine, and cannot be calculated with."""

RECONNECTS = 3
"""How often a client connects again for one request. More than once, as other clients may take its place again."""

MARGIN_S = 5.0
"""Seconds beyond a command's own time-out after which the engine's thread counts as hung."""


Check = Callable[[object], bool]
"""Whether a field of a reply is what an engine answers."""


def is_number(value: object) -> bool:
    """Return whether a value is a finite number of JSON. Pure."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def is_count(value: object) -> bool:
    """Return whether a value is a whole number of at least zero. Pure."""
    return isinstance(value, int) and is_number(value) and value >= 0


def is_flag(value: object) -> bool:
    """Return whether a value is true or false. Pure."""
    return isinstance(value, bool)


def is_counts(value: object) -> bool:
    """Return whether a value is an object of counts. Pure."""
    return isinstance(value, Mapping) and all(map(is_count, value.values()))


def is_numbers(value: object) -> bool:
    """Return whether a value is an object of numbers; null is one that JSON does not have. Pure."""
    return isinstance(value, Mapping) and all(one is None or is_number(one) for one in value.values())


def is_texts(value: object) -> bool:
    """Return whether a value is an object of texts. Pure."""
    return isinstance(value, Mapping) and all(map(is_text, value.values()))


def is_list(value: object) -> bool:
    """Return whether a value is a list. Pure."""
    return isinstance(value, list)


def is_text(value: object) -> bool:
    """Return whether a value is a text. Pure."""
    return isinstance(value, str)


FIELDS: Mapping[str, Mapping[str, Check]] = {
    "stats": {"stats": is_numbers, "is_stepping": is_flag},
    "recent": {"records": is_list},
    "pin": dict.fromkeys(("num_blocks", "num_ready", "num_pinned", "limit"), is_count),
    "unpin": {"num_blocks": is_count},
    "prefetch": dict.fromkeys(("num_blocks", "num_ready"), is_count),
    "purge": {"num_purged": is_counts, "num_in_use": is_counts, "unable": is_texts},
    "resume": {"was_stopped": is_flag},
}
"""What clients read of the reply to each command."""

HELLO_FIELDS: Mapping[str, Check] = {
    **dict.fromkeys(("id", "engine", "model", "metrics"), is_text),
    "pid": is_count,
    "started_s": is_number,
    "tiers": is_list,
}
"""What clients read of an engine's description, where it is there."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A living engine.

    Attributes:
        path: its socket.
        description: what it says of itself; see ``kvtier.observe.control.describe_engine``.
    """

    path: Path
    description: Mapping[str, Any]  # Any: JSON

    @property
    def id(self) -> str:
        """Its instance id."""
        return str(self.description.get("id", self.path.stem))

    @property
    def pid(self) -> int:
        """Its process."""
        return int(self.description.get("pid", 0))


class EngineConnection:
    """A connection to a living engine; a context manager.

    Args:
        path: its socket.
        timeout_s: seconds until it must accept.
        clock: seconds, monotonic.

    Raises:
        ControlError: nothing accepts there, or the socket is another user's.
    """

    def __init__(
        self, path: Path, timeout_s: float = HELLO_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._clock = clock
        try:
            self._connect(timeout_s)
        except OSError as error:
            raise ControlError(f"no engine answers at {path}: {error.strerror or error}") from error

    def _connect(self, timeout_s: float) -> None:
        path = self._path
        self._received = bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # With a time-out of Python's a full backlog would be an error at once instead of a wait.
            seconds, rest = divmod(max(0.001, timeout_s), 1.0)
            limit = struct.pack("ll", int(seconds), int(rest * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            with short_path(path) as name:
                self._socket.connect(name)
            uid = read_peer_uid(self._socket)
        except OSError:
            self._socket.close()
            raise
        if uid != os.geteuid():
            self._socket.close()
            raise ControlError(f"the process at {path} belongs to user {uid}")

    def ask(self, command: str, timeout_s: float = HELLO_S, **arguments: object) -> Message:
        """Send a request and return its reply.

        Args:
            command: what the engine is to do.
            timeout_s: seconds that the engine has for it.
            arguments: of the command.

        Raises:
            ControlError: the engine refuses, does not answer in time or as an engine does, or closes the connection.
        """
        reply = decode(self._send(encode({"do": command, "timeout_s": timeout_s, **arguments}), timeout_s))
        if reply.get("ok") is not True:
            raise ControlError(str(reply.get("error", "the engine refuses and gives no reason")))
        for name, is_good in FIELDS.get(command, {}).items():
            if not is_good(reply.get(name)):
                raise ControlError(
                    f"the process at {self._path} does not answer {command!r} as an engine of this version does: "
                    f"{name} is {shorten(reply.get(name))}; use the kvtier that the engine runs"
                )
        if command == "stats":
            reply["stats"] = {name: number for name, number in reply["stats"].items() if number is not None}
        return reply

    def _send(self, request: bytes, timeout_s: float) -> bytearray:
        """Send a request and return the reply's line; connect again where the engine has hung up meanwhile.

        An engine with many clients hangs up on those that ask for nothing.
        """
        try:
            line = self._exchange(request, timeout_s)
            for _ in range(RECONNECTS):
                if line is not None:
                    break
                self.close()
                self._connect(HELLO_S)
                line = self._exchange(request, timeout_s)
        except TimeoutError as error:
            raise ControlError(f"the engine at {self._path} has not answered in {timeout_s:g} s") from error
        except OSError as error:
            raise ControlError(f"the engine at {self._path} has ended: {error.strerror or error}") from error
        if line is None:
            raise ControlError(
                f"the engine at {self._path} hangs up on this request, {RECONNECTS + 1} times: it drops what is no "
                "request, and has many clients"
            )
        return line

    def close(self) -> None:
        """Hang up; idempotent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(self, request: bytes, timeout_s: float) -> bytearray | None:
        """Send a request and return the line that the engine sends; None when it has hung up."""
        end_s = self._clock() + timeout_s + MARGIN_S
        self._socket.settimeout(timeout_s + MARGIN_S)
        # An engine that refuses a client says why and hangs up at once: its line is there to be read.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(request)
        while b"\n" not in self._received:
            if len(self._received) > MAX_REPLY_BYTES:
                raise ControlError(f"the engine at {self._path} sends more than {MAX_REPLY_BYTES} bytes")
            self._socket.settimeout(max(0.001, end_s - self._clock()))
            try:
                data = self._socket.recv(2**16)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line


def list_sockets(folders: Sequence[Path]) -> list[Path]:
    """Return this user's sockets in ``folders``, those of dead processes included."""
    found: list[Path] = []
    for folder in folders:
        with suppress(OSError):
            found += filter(_is_own_socket, sorted(folder.glob(f"*{SUFFIX}")))
    return found


def find_instances(folders: Sequence[Path] | None = None, timeout_s: float = HELLO_S) -> list[Instance]:
    """Return this user's living engines; sockets of dead processes are removed.

    Args:
        folders: where to look; None: every folder that an engine may choose.
        timeout_s: seconds that each engine has to say who it is; one that does not, or not as an
            engine does, is left out.
    """
    found = []
    for path in list_sockets(list_runtime_folders() if folders is None else folders):
        try:
            with EngineConnection(path, timeout_s) as connection:
                reply = connection.ask("hello", timeout_s)
            if all(is_good(reply[name]) for name, is_good in HELLO_FIELDS.items() if name in reply):
                found.append(Instance(path, reply))
        except ControlError:
            _remove_if_dead(path)
    return found


def choose_instance(given: str | None, folders: Sequence[Path] | None = None) -> Instance:
    """Return the engine that a user means.

    Args:
        given: its instance id, its process id, or the beginning of an id; None: the only one.
        folders: as ``find_instances``.

    Raises:
        NoEngineError: there is none.
        ControlError: there are several.
        UnknownNameError: none is called so.
    """
    searched = list_runtime_folders() if folders is None else list(folders)
    instances = find_instances(searched)
    if not instances:
        raise NoEngineError(searched)
    if given is None:
        if len(instances) > 1:
            names = ", ".join(sorted(one.id for one in instances))
            raise ControlError(f"{len(instances)} engines run, name one of them: {names}")
        return instances[0]
    exact = [one for one in instances if given in (one.id, one.path.stem, str(one.pid))]
    meant = exact or [one for one in instances if one.id.startswith(given)]
    if not meant:
        raise UnknownNameError("engine", given, [one.id for one in instances])
    if len(meant) > 1:
        names = ", ".join(f"{one.path.stem} (process {one.pid})" for one in meant)
        raise ControlError(f"{given!r} means {len(meant)} engines, name one of them: {names}")
    return meant[0]


def read_records(path: Path, num_records: int, timeout_s: float = HELLO_S) -> list[RequestRecord]:
    """Return the last records of an engine's requests, oldest first.

    Raises:
        ControlError: the engine cannot be reached.
    """
    with EngineConnection(path) as connection:
        reply = connection.ask("recent", timeout_s, n=num_records)
    return [RequestRecord.from_json(record) for record in reply["records"]]


def _is_own_socket(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:  # Its process has just removed it.
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()


def _remove_if_dead(path: Path) -> None:
    with suppress(OSError, ControlError), locked_folder(path.parent):
        if is_dead(path):
            path.unlink()
