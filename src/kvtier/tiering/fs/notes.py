"""What the processes of a directory tell each other: ``ROOT/<process>.notes``, which the process has locked.

The first part is the process's state in JSON behind a checksum, written with one call: one that is read while it is
written is not taken. Behind it is a ring of the blocks that the process has read from packs of others, whose owners
evict by it; uses may be lost or wrong, and cost a hit at most. A file without a lock is that of a dead process.
Everything in the files is bounded and checked: another program may have written them.
"""

import fcntl
import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.tiering.fs.system_calls import (
    PRIVATE_MODE,
    REAL_CALLS,
    SystemCalls,
    open_regular,
    transfer,
    try_lock,
)

NOTES_SUFFIX = ".notes"

STATE_BYTES = 8192
"""Length of the first part: what it may hold at most takes about 5,000 bytes."""

MAX_DAMAGED = 64
"""Damaged blocks that are named, the last ones. More take more room; an owner looks at them once a second."""

MAX_PURGES = 32
"""Purges that are named as done. Their requests are gone after some seconds."""

MAX_USES = 4096
"""Uses in the ring, 12 bytes each. With fewer, more are lost when a process reads many blocks between two polls."""

MAX_NEIGHBOURS = 256
"""Processes whose notes are read, an open file each."""

MAX_HOST_CHARS = 64

MAX_ATTEMPTS = 4
"""Tries to lock a file that others look at as it is made. Fewer leave it to them for a second; more spend time behind a
process that is stopped as it looks."""

VERSION = 1

_MAGIC = b"KVTNOTES"
_HEAD = struct.Struct("<8sI16s")
_USE = struct.Struct("<8sI")
_NUMBER = struct.Struct("<Q")
_RING_OFFSET = STATE_BYTES + _NUMBER.size
_RING_BYTES = MAX_USES * _USE.size
_FILE = re.compile(r"([0-9a-z]{1,32})\.notes")
_ID = re.compile(r"[0-9a-f]{1,32}")
_LIMIT = 2.0**63

Use = tuple[bytes, int]
"""The first 8 bytes of a pack's id, and a slot."""


class WantNote(NamedTuple):
    """A process lacks room.

    Attributes:
        namespace: name of the one for which it wants a pack.
        since_s: since when, seconds since 1970.
        oldest_used_s: when its own oldest block was last used; None where it has none.
    """

    namespace: str
    since_s: float
    oldest_used_s: float | None


@dataclass(frozen=True, slots=True)
class NotesState:
    """What a process says of itself.

    Attributes:
        namespace: name of the one that it uses.
        capacity_bytes: what it allows all packs to take.
        oldest_used_s: when its oldest block was last used, seconds since 1970; None where it has none.
        wants: whether it lacks room.
        damaged: blocks of others that it could not use: the pack's id in hex, and the slot.
        purges: ids of the requests that it has carried out.
        pid: its process id.
        host: its host's name.
    """

    namespace: str
    capacity_bytes: int
    oldest_used_s: float | None = None
    wants: WantNote | None = None
    damaged: tuple[tuple[str, int], ...] = ()
    purges: tuple[str, ...] = ()
    pid: int = 0
    host: str = ""

    def pack(self) -> bytes:
        """Return the first part of the file."""
        document = {
            "version": VERSION,
            "namespace": self.namespace,
            "capacity_bytes": self.capacity_bytes,
            "oldest_used_s": self.oldest_used_s,
            "wants": None if self.wants is None else list(self.wants),
            "damaged": self.damaged[-MAX_DAMAGED:],
            "purges": self.purges[-MAX_PURGES:],
            "pid": self.pid,
            "host": self.host,
        }
        data = json.dumps(document, separators=(",", ":")).encode()
        # INVARIANT: what a process says fits, for each part of it has a limit.
        assert len(data) <= STATE_BYTES - _HEAD.size, "the notes are too long"
        return seal_notes(data)

    @classmethod
    def unpack(cls, page: bytes) -> "NotesState | None":
        """Return what the first part of a file says; None where it is torn, of another version or impossible."""
        if len(page) < _HEAD.size:
            return None
        magic, length, digest = _HEAD.unpack_from(page)
        data = page[_HEAD.size : _HEAD.size + length]
        if magic != _MAGIC or length > STATE_BYTES or _digest(data) != digest:
            return None
        try:
            return _parse(json.loads(data))
        except (ValueError, TypeError, KeyError, RecursionError):
            return None


class Neighbour(NamedTuple):
    """Another process.

    Attributes:
        process: its name.
        state: what it says.
        uses: blocks that it has read since the last poll.
    """

    process: str
    state: NotesState
    uses: Sequence[Use]


class OwnNotes:
    """The notes of this process. Thread: one.

    Args:
        root: the directory.
        process: name of this process.
        file_mode: permissions of the file.
        calls: the system.
    """

    def __init__(
        self, root: Path, process: str, *, file_mode: int = PRIVATE_MODE, calls: SystemCalls = REAL_CALLS
    ) -> None:
        self._path = root / f"{process}{NOTES_SUFFIX}"
        self._file_mode = file_mode
        self._calls = calls
        self._num_uses = 0
        self._fd = -1

    def update(self, state: NotesState) -> None:
        """Replace what the file says of this process; it is made the first time, and again where it was removed.

        Raises:
            OSError: the system refused.
        """
        self._hold()
        self._write(replace(state, pid=os.getpid(), host=_host(os.uname().nodename)).pack(), 0)

    def add_uses(self, uses: Sequence[Use]) -> None:
        """Add blocks to the ring; of more than it holds the last.

        Raises:
            OSError: the system refused.
        """
        last = uses[-MAX_USES:]
        first = (self._num_uses + len(uses) - len(last)) % MAX_USES
        data = b"".join(_USE.pack(pack_id, slot) for pack_id, slot in last)
        num_bytes = min(len(data), (MAX_USES - first) * _USE.size)
        for part, offset in ((data[:num_bytes], first * _USE.size), (data[num_bytes:], 0)):
            if part:
                self._write(part, _RING_OFFSET + offset)
        self._num_uses += len(uses)
        self._write(_NUMBER.pack(self._num_uses), STATE_BYTES)

    def close(self) -> None:
        """Remove the file; idempotent."""
        if self._fd >= 0:
            with suppress(OSError):
                if os.path.samestat(os.fstat(self._fd), self._path.lstat()):
                    self._calls.unlink(str(self._path))
            with suppress(OSError):  # closing alone would leave the lock to a child that was forked meanwhile
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close a forked child's copy, whose lock would say that this process lives."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with suppress(OSError):
                os.close(fd)

    def _hold(self) -> None:
        """Make the file and lock it, unless that is done: until it is, others may remove it as a dead process's."""
        for _ in range(MAX_ATTEMPTS):
            if self._fd >= 0 and self._calls.try_lock(self._fd) and os.fstat(self._fd).st_nlink:
                return
            self.close_in_child()
            self._fd = open_regular(self._calls, self._path, os.O_RDWR | os.O_CREAT, self._file_mode)
            self._num_uses = 0

    def _write(self, data: bytes, offset: int) -> None:
        transfer(self._calls.pwritev, self._fd, [memoryview(data)], offset)


@dataclass(slots=True)
class _Open:
    """An open file of another process."""

    fd: int
    num_uses: int | None = None
    state: NotesState | None = None


class OthersNotes:
    """The notes of other processes. Thread: one.

    Args:
        root: the directory.
        process: name of this process, whose notes are not read.
        file_mode: permissions of files, which say whether those of other users count.
        calls: the system.
    """

    def __init__(
        self, root: Path, process: str, *, file_mode: int = PRIVATE_MODE, calls: SystemCalls = REAL_CALLS
    ) -> None:
        self._root = root
        self._file_mode = file_mode
        self._own_name = process
        self._calls = calls
        self._open: dict[str, _Open] = {}
        self._has_dead = False

    def poll(self) -> list[Neighbour]:
        """Return the living processes, and what they have read since the last call."""
        names = set(islice(self._names(), MAX_NEIGHBOURS))
        for name in self._open.keys() - names:
            self._forget(name)
        neighbours = []
        self._has_dead = False
        for name in sorted(names):
            with suppress(OSError):
                found = self._take(name)
                if found is not None and found.state is not None:
                    neighbours.append(Neighbour(name, found.state, self._read_uses(found)))
        return neighbours

    def remove_dead(self, locked: Callable[[], AbstractContextManager[bool]]) -> None:
        """Remove the files of dead processes that the last ``poll`` has met.

        Args:
            locked: holds the directory's lock; gives False when another process keeps it.
        """
        if not self._has_dead:
            return
        with suppress(OSError), locked() as is_held:
            for name in list(self._names()) if is_held else ():
                path = self._root / f"{name}{NOTES_SUFFIX}"
                with suppress(OSError):
                    fd = open_regular(self._calls, path, os.O_RDONLY, self._file_mode)
                    try:
                        if self._calls.try_lock(fd):
                            self._calls.unlink(str(path))
                            self._forget(name)
                    finally:
                        os.close(fd)

    def close(self) -> None:
        """Close the files; idempotent."""
        for name in list(self._open):
            self._forget(name)

    def _names(self) -> Iterator[str]:
        with suppress(OSError), os.scandir(self._root) as entries:
            for entry in entries:
                found = _FILE.fullmatch(entry.name)
                if found is not None and found[1] != self._own_name:
                    yield found[1]

    def _take(self, name: str) -> _Open | None:
        """Return the file of a process with its state as it is now; None where the process is dead.

        Raises:
            OSError: the file is gone, or not one of this user.
        """
        found = self._open.get(name)
        if found is not None and os.fstat(found.fd).st_nlink == 0:
            self._forget(name)
            found = None
        if found is None:
            path = self._root / f"{name}{NOTES_SUFFIX}"
            fd = open_regular(self._calls, path, os.O_RDONLY, self._file_mode)
            found = self._open[name] = _Open(fd)
        if try_lock(found.fd, fcntl.LOCK_SH):
            fcntl.flock(found.fd, fcntl.LOCK_UN)
            self._has_dead = True
            return None
        # One that was being written is taken as it was before.
        found.state = NotesState.unpack(self._calls.pread(found.fd, STATE_BYTES, 0)) or found.state
        return found

    def _read_uses(self, found: _Open) -> list[Use]:
        num_uses = self._read_number(found.fd)
        # What was read before this process looked for the first time is not of use any more.
        num_new = 0 if found.num_uses is None else min(max(0, num_uses - found.num_uses), MAX_USES)
        found.num_uses = num_uses
        if not num_new:
            return []
        ring = self._calls.pread(found.fd, _RING_BYTES, _RING_OFFSET).ljust(_RING_BYTES, b"\0")
        starts = [number % MAX_USES * _USE.size for number in range(num_uses - num_new, num_uses)]
        return [_USE.unpack_from(ring, start) for start in starts]

    def _read_number(self, fd: int) -> int:
        data = self._calls.pread(fd, _NUMBER.size, STATE_BYTES)
        return int.from_bytes(data, "little")

    def _forget(self, name: str) -> None:
        found = self._open.pop(name, None)
        if found is not None:
            with suppress(OSError):
                os.close(found.fd)


def list_capacities(root: Path, file_mode: int) -> list[int]:
    """Return what the living processes of a directory allow all packs to take, in bytes.

    Args:
        root: the directory; it need not exist.
        file_mode: permissions of files in it.
    """
    others = OthersNotes(root, "", file_mode=file_mode)
    try:
        return [one.state.capacity_bytes for one in others.poll()]
    finally:
        others.close()


def seal_notes(data: bytes) -> bytes:
    """Return the first part of a file with its checksum. Pure.

    Args:
        data: the state in JSON.
    """
    return (_HEAD.pack(_MAGIC, len(data), _digest(data)) + data).ljust(STATE_BYTES, b"\0")


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16, usedforsecurity=False).digest()


def _parse(document: Mapping[str, Any]) -> NotesState | None:  # Any: another program may have written it
    """Return what JSON says.

    Raises:
        ValueError: a value is not what it may be.
        TypeError: likewise.
        KeyError: one is missing.
    """
    if document["version"] != VERSION:
        return None
    wants, damaged, purges = document["wants"], document["damaged"], document["purges"]
    return NotesState(
        namespace=_name(document["namespace"]),
        capacity_bytes=_count(document["capacity_bytes"]),
        oldest_used_s=_time(document["oldest_used_s"]),
        wants=None if wants is None else _parse_want(*wants),
        damaged=tuple((_name(pack_id), _count(slot)) for pack_id, slot in damaged[:MAX_DAMAGED]),
        purges=tuple(map(_name, purges[:MAX_PURGES])),
        pid=_count(document["pid"]),
        host=_host(document["host"]),
    )


def _parse_want(namespace: object, since_s: object, oldest_used_s: object) -> WantNote:
    since = _time(since_s)
    if since is None:
        raise ValueError("a want has no time")
    return WantNote(_name(namespace), since, _time(oldest_used_s))


def _name(value: object) -> str:
    """Return an id in hex of an even number of digits."""
    if not isinstance(value, str) or not _ID.fullmatch(value) or len(value) % 2:
        raise ValueError("is no id")
    return value


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LIMIT:
        raise ValueError("is no number")
    return value


def _host(value: object) -> str:
    """Return the name of a host, cut to what a terminal can show."""
    return (
        value[:MAX_HOST_CHARS] if isinstance(value, str) and value.isascii() and value.isprintable() else ""
    )


def _time(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LIMIT:
        raise ValueError("is no time")
    return value
