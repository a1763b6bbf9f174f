"""How many bytes each tenant keeps in a directory that several processes share, where tenants have quotas.

A table in the directory has what is on the disk, by tenant. Each process keeps its own changes in memory and adds them
to the table about once a second, when they are more than a small share of the capacity, before it evicts, and when it
ends; most stores write no file for it. What is being written counts in its own process alone. A recount takes what a
walk found and adds what changed in the table meanwhile.

The table decides only whose blocks leave first, never how much is stored. It may be wrong by what a killed process did
in its last second, or by what was written during a recount, until the next recount.
"""

import fcntl
import os
import struct
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.tiering.fs.shared_usage import lock_file, open_shared_file
from kvtier.tiering.kit.health import OutageLog

MAX_TENANTS = 65_536
"""Tenants in the table, those with the most bytes; more would make it longer than 1 MiB."""

MAX_RECENT_BLOCKS = 32_768
"""Blocks that this tier has written since the last walk, remembered by key, about 100 bytes each; without quotas none.
Fewer leave a tenant without known blocks until the next walk."""

MAX_TAKEN_BLOCKS = 1_024
"""Of these, how many are taken at once: the evictor asks the file system about each, while writers wait for room."""

UNREPORTED_SHARE = 64
"""A tier adds its changes to the table when they are more than this part of its capacity, without waiting for the
second. A smaller part writes the table more often; a larger one lets other processes take more from a wrong tenant."""

_MAGIC = b"KVTT"
_VERSION = 2
_HEAD = struct.Struct("<4sHxxI")
_ENTRY = struct.Struct("<QQ")
_CHECKSUM = struct.Struct("<I")

MAX_TABLE_BYTES = _HEAD.size + MAX_TENANTS * _ENTRY.size + _CHECKSUM.size

Excesses = Callable[[Mapping[int, int]], dict[int, int]]
"""Returns by how many bytes tenants are beyond their quotas, given what each keeps; those who are, by number."""


class TenantTable(NamedTuple):
    """What is on the disk, by tenant.

    Attributes:
        num_bytes: by the tenant's number, none of them zero.
        is_counted: False before the first recount.
    """

    num_bytes: Mapping[int, int] = MappingProxyType({})
    is_counted: bool = False

    def changed(self, changes: Mapping[int, int]) -> "TenantTable":
        """Return the table after so many bytes more or less of each tenant. Pure."""
        sums = dict(self.num_bytes)
        for number, num_bytes in changes.items():
            sums[number] = sums.get(number, 0) + num_bytes
        return self._replace(num_bytes={number: total for number, total in sums.items() if total > 0})

    def recounted(self, found_bytes: Mapping[int, int], begun: "TenantTable") -> "TenantTable":
        """Return the table after a walk that found so much and began with the table ``begun``. Pure."""
        changes = Counter(self.num_bytes)
        changes.subtract(begun.num_bytes)
        return TenantTable(found_bytes, is_counted=True).changed(changes)

    def pack(self) -> bytes:
        """Return its form on disk; nothing where it is not counted. Pure."""
        if not self.is_counted:
            return b""
        entries = sorted(self.num_bytes.items(), key=lambda entry: -entry[1])[:MAX_TENANTS]
        body = _HEAD.pack(_MAGIC, _VERSION, len(entries)) + b"".join(_ENTRY.pack(*entry) for entry in entries)
        return body + _CHECKSUM.pack(zlib.crc32(body))


def unpack_table(text: bytes) -> TenantTable:
    """Return the table in ``text``, or an uncounted empty one when it is none or damaged. Pure."""
    if len(text) < _HEAD.size:
        return TenantTable()
    magic, version, num_entries = _HEAD.unpack_from(text)
    body_bytes = _HEAD.size + num_entries * _ENTRY.size
    if magic != _MAGIC or version != _VERSION or len(text) < body_bytes + _CHECKSUM.size:
        return TenantTable()
    if _CHECKSUM.unpack_from(text, body_bytes)[0] != zlib.crc32(text[:body_bytes]):
        return TenantTable()
    return TenantTable(dict(_ENTRY.iter_unpack(text[_HEAD.size : body_bytes])), is_counted=True)


class TenantUsage:
    """One tier's access to the table of its directory.

    Mutable are the table as it was read last, this tier's changes that are not in it yet, what it is writing, and what
    it has written since the last walk; ``_lock`` guards them. The file is guarded by its ``flock``.

    Args:
        path: the table.
        file_mode: permissions of it when it is made.
        block_bytes: length of a block's file.
        excesses: compares with the quotas.
        outage: says once that the table cannot be changed.
        unreported_bytes: how much this tier may have changed, stores and removals together, that is not in the table.
    """

    def __init__(
        self,
        path: Path,
        file_mode: int,
        block_bytes: int,
        excesses: Excesses,
        outage: OutageLog,
        unreported_bytes: int,
    ) -> None:
        self._path = path
        self._file_mode = file_mode
        self._block_bytes = block_bytes
        self._excesses = excesses
        self._outage = outage
        self._unreported_bytes = unreported_bytes
        self._lock = threading.Lock()
        self._table = TenantTable()
        self._unwritten: Counter[int] = Counter()
        self._in_flight: Counter[int] = Counter()
        self._recent: deque[OffloadKey] = deque(maxlen=MAX_RECENT_BLOCKS)

    @property
    def is_counted(self) -> bool:
        """Whether the table that was read last says what there is."""
        with self._lock:
            return self._table.is_counted

    @property
    def has_changes(self) -> bool:
        """Whether this tier has changed something that is not in the file yet."""
        with self._lock:
            return any(self._unwritten.values())

    @contextmanager
    def counting(self, keys: Collection[OffloadKey]) -> Iterator[list[OffloadKey]]:
        """Count blocks as being written; the caller adds those that were to the list that this gives.

        Thread: any; blocks at the end, when there is much that the table does not have yet.
        """
        written: list[OffloadKey] = []
        in_flight = self._count(keys)
        with self._lock:
            self._in_flight.update(in_flight)
        try:
            yield written
        finally:
            finished = self._count(written)
            with self._lock:  # once: in between, what is written would be nowhere
                self._in_flight.subtract(in_flight)
                self._unwritten.update(finished)
                self._recent.extend(written)
                is_due = sum(map(abs, self._unwritten.values())) > self._unreported_bytes
            if is_due:
                self.refresh()

    def remove(self, number: int | None, num_bytes: int) -> None:
        """Count a tenant's bytes as gone from the disk; None where no name tells whose they are. Thread: any."""
        if number is not None and num_bytes:
            with self._lock:
                self._unwritten[number] -= num_bytes

    def take_recent(self, numbers: Collection[int]) -> list[OffloadKey]:
        """Return and forget what this tier has written of some tenants, first written first. Thread: any."""
        taken: list[OffloadKey] = []
        with self._lock:
            if not self._recent:
                return taken
            kept: list[OffloadKey] = []
            for key in self._recent:
                is_taken = len(taken) < MAX_TAKEN_BLOCKS and get_offload_tenant(key) in numbers
                (taken if is_taken else kept).append(key)
            self._recent = deque(kept, maxlen=MAX_RECENT_BLOCKS)
        return taken

    def forget_recent(self) -> None:
        """Forget what this tier has written: a walk that begins finds it. Thread: any."""
        with self._lock:
            self._recent.clear()

    def refresh(self) -> None:
        """Add this tier's changes to the table, and read those of the others. Thread: any; blocks."""
        self._update(lambda table: table)

    def recount(self, found_bytes: Mapping[int, int], begun: TenantTable) -> None:
        """Correct the table after a walk that began with the table ``begun``. Thread: the evictor's; blocks."""
        self._update(lambda table: table.recounted(found_bytes, begun))

    def begin_recount(self) -> TenantTable:
        """Return the table as it is before a walk. Thread: the evictor's; blocks."""
        self.refresh()
        return self._table

    def on_disk(self) -> dict[int, int]:
        """Return what each tenant has on the disk, as far as this tier knows. Thread: any."""
        return self._held()[0]

    def plan_evictions(self) -> tuple[dict[int, int], int]:
        """Return by how much tenants are beyond their quotas on the disk, and how much of what is written is beyond.

        Thread: any.
        """
        on_disk, held = self._held()
        excesses = self._excesses(held)
        of_disk = {
            number: min(excess, on_disk[number]) for number, excess in excesses.items() if number in on_disk
        }
        return of_disk, sum(excesses.values()) - sum(of_disk.values())

    def list_near(self) -> list[int]:
        """Return which tenants keep or write more than half of their quotas, the most beyond it first. Thread: any."""
        doubled = {number: 2 * num_bytes for number, num_bytes in self._held()[1].items()}
        excesses = self._excesses(doubled)
        return sorted(excesses, key=lambda number: -excesses[number])

    def _held(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return what each tenant has on the disk, and the same with what is being written."""
        with self._lock:
            on_disk = self._table.changed(self._unwritten)
            held = on_disk.changed(self._in_flight)
        return dict(on_disk.num_bytes), dict(held.num_bytes)

    def _count(self, keys: Iterable[OffloadKey]) -> dict[int, int]:
        num_blocks = Counter(map(get_offload_tenant, keys))
        return {number: num * self._block_bytes for number, num in num_blocks.items()}

    def _update(self, change: Callable[[TenantTable], TenantTable]) -> None:
        is_written = False
        try:
            fd = open_shared_file(self._path, self._file_mode)
            try:
                if lock_file(fd):
                    with self._lock:
                        changes = dict(self._unwritten)
                    table = change(unpack_table(os.pread(fd, MAX_TABLE_BYTES, 0)).changed(changes))
                    text = table.pack()
                    if text:
                        os.pwrite(fd, text, 0)
                    # Before the file is unlocked: of two threads the one that read last has the last word, and no
                    # change is added twice.
                    with self._lock:
                        self._table = table
                        self._unwritten.subtract(changes)
                        self._unwritten = Counter(
                            {number: num for number, num in self._unwritten.items() if num}
                        )
                    is_written = True
            finally:
                with suppress(OSError):
                    # Closing alone would not do: a child that was forked meanwhile has the same lock.
                    fcntl.flock(fd, fcntl.LOCK_UN)
                os.close(fd)
        except (FileNotFoundError, NotADirectoryError):
            is_written = False  # the directory was removed: the evictor makes it again
        except OSError as error:
            self._outage.on_failure("tenants", f"the bytes of tenants cannot be counted: {error}")
        if is_written and self._outage.is_out:
            self._outage.on_success("tenants")


def forget_table(path: Path) -> None:
    """Have tiers count the bytes of tenants again, before they evict next: blocks are gone, and not by one of them."""
    path.unlink(missing_ok=True)
