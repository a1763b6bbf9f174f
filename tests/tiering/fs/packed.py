"""Directories of packs for tests, a clock that stands still, and system calls that fail when a test says so."""

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvtier.tiering.fs.directory import PackDirectory
from kvtier.tiering.fs.pack import Pack
from kvtier.tiering.fs.records import Change, Kind, Records, names_of
from kvtier.tiering.fs.system_calls import REAL_CALLS, SystemCalls
from kvtier.tiering.kit.backend import allocate_pages
from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES

NAMESPACE = bytes(range(16)).hex()
OTHER_NAMESPACE = bytes(range(1, 17)).hex()
ROW_BYTES = 4096
CAPACITY_BYTES = 2**20
SLOT_BYTES = HEADER_PAGE_BYTES + ROW_BYTES


class Clock:
    """Seconds that pass when a test, or who waits, says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.num_pauses = 0

    def __call__(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        """Let time pass."""
        self.num_pauses += 1
        self.now_s += seconds


class Faults:
    """Numbers the system's calls, and lets one of them fail.

    Args:
        at: number of the call that fails, from 0; None: none does.
        code: the number of its error.
    """

    def __init__(self, at: int | None = None, code: int = errno.EIO) -> None:
        self.num_calls = 0
        self.failed = ""
        self._at = at
        self._code = code
        named: dict[str, Any] = {
            one.name: self._around(one.name) for one in fields(SystemCalls)
        }  # Any: each its own
        self.calls = SystemCalls(**named)

    def _around(self, name: str) -> Callable[..., Any]:  # Any: whichever call it is
        real = getattr(REAL_CALLS, name)

        def call(*arguments: object) -> object:
            number, self.num_calls = self.num_calls, self.num_calls + 1
            if number == self._at:
                self.failed = name
                raise OSError(self._code, os.strerror(self._code))
            return real(*arguments)

        return call


def make_directory(root: Path, *, is_ready: bool = True, **options: object) -> PackDirectory:
    """Return a directory of packs of small blocks, as one process sees it."""
    defaults = {"row_bytes": ROW_BYTES, "capacity_bytes": CAPACITY_BYTES, "process": "here"}
    directory = PackDirectory(root, **(defaults | options))  # type: ignore[arg-type]  # a test's own options
    if is_ready:
        directory.make_ready()
    return directory


def create(directory: PackDirectory, namespace_name: str = NAMESPACE) -> Pack:
    """Make a pack, for which there must be room."""
    pack = directory.create(namespace_name, directory.capacity_bytes, may_remove=False)
    assert pack is not None
    return pack


def stored(slot: int, name: bytes | None = None) -> Change:
    """Return the record of a block in a slot; its name and its times are made of the slot."""
    return Change(Kind.STORED, slot, name or b"block %05d" % slot, 1000 + slot, 2000 + slot)


def changes_of(records: Records) -> list[Change]:
    """Return records as changes."""
    columns = [records[name].tolist() for name in ("kind", "slot", "stored_s", "used_s")]
    return [
        Change(Kind(kind), slot, name, stored_s, used_s)
        for name, kind, slot, stored_s, used_s in zip(names_of(records), *columns, strict=True)
    ]


def slot_of(content: bytes) -> list[memoryview]:
    """Return the buffers of a slot full of some bytes."""
    (buffer,) = allocate_pages(1, SLOT_BYTES)
    buffer[:] = (content * SLOT_BYTES)[:SLOT_BYTES]
    return [buffer]


def read_slot(pack: Pack, slot: int) -> bytes:
    """Return the bytes of a slot, fewer where the pack was cut."""
    buffers = slot_of(b"?")
    num_bytes = pack.read(slot, buffers)
    return bytes(buffers[0][:num_bytes])


def used_on_disk(root: Path) -> int:
    """Return what all files below a directory take of the disk."""
    return sum(path.lstat().st_blocks * 512 for path in root.rglob("*") if path.is_file())


@contextmanager
def no_file_stays_open(folder: Path) -> Iterator[None]:
    """Fail when files below a folder are open afterwards that were not before."""
    before = open_files(folder)
    yield
    assert not open_files(folder) - before


def open_files(folder: Path) -> Counter[str]:
    """Return the files below a folder that this process has open."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            targets.append(str(link.readlink()))
    return Counter(target for target in targets if target.startswith(str(folder)))
