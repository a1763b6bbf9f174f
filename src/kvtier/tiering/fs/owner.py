"""Which process a temporary file or a reservation belongs to, and whether that process is dead.

A process is named by its host, its id and its start time, so that a process
which got a dead one's id is not mistaken for it. The host is a boot of a kernel and a process-id namespace:
process ids of another container mean nothing here, although its boot id is ours.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

FOREIGN_OWNER_IDLE_S = 3600.0
"""Seconds without a sign of life after which an owner on another host counts as dead. Shorter would take a
file from a stalled writer on a network file system; longer keeps the room of crashed ones."""

_NAME = re.compile(r"([0-9a-f]{16})-([0-9]{1,10})-([0-9]{1,19})")
_STARTTIME_FIELD = 19
"""Index of the start time behind the command's closing parenthesis. Source: proc_pid_stat(5), field 22."""


class Owner(NamedTuple):
    """A process, unmistakable among processes that share a directory.

    Attributes:
        host: 16 hex digits for this boot and process-id namespace.
        pid: its process id.
        start_ticks: its start time in clock ticks since boot.
    """

    host: str
    pid: int
    start_ticks: int

    def __str__(self) -> str:
        return f"{self.host}-{self.pid}-{self.start_ticks}"

    def is_dead(self, here: "Owner", idle_s: float) -> bool:
        """Return whether the process has certainly, or from another host presumably, ended.

        Args:
            here: any process of this host.
            idle_s: seconds since the owner's last sign of life.
        """
        if self.host != here.host:
            return idle_s > FOREIGN_OWNER_IDLE_S
        return _start_ticks(self.pid) != self.start_ticks


def current_owner() -> Owner:
    """Return the calling process."""
    pid = os.getpid()
    return Owner(_host(), pid, _start_ticks(pid) or 0)


def parse_owner(text: str) -> Owner | None:
    """Return the owner that ``text`` begins with, None when it names none. Pure."""
    found = _NAME.match(text)
    return Owner(found[1], int(found[2]), int(found[3])) if found else None


def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        namespace = str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        boot, namespace = os.uname().nodename, ""
    return hashlib.sha256(f"{boot}{namespace}".encode()).hexdigest()[:16]


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, None when there is none or only a zombie is left of it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[_STARTTIME_FIELD])
