"""The fs and the slab tier on a simulated disk: their own files on a real file system, system calls that fail.

A block's bytes pass ``SimDisk``: it loses, tears, misdirects, flips, slows down and refuses them, and lets other
threads run in the middle of a write. The death of a process leaves the directory as it is at that moment: it is
copied, and the threads of the dead process unwind into the old one.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from tests.storm.place import StormPlace, Weather
from tests.storm.secrecy import RAM_DISK, forge

from kvtier.config import OffloadingConfig
from kvtier.tiering.base import SecondaryTierManager, TierSettings
from kvtier.tiering.fs import FSTier, block_file, system
from kvtier.tiering.fs.system import link_open_file
from kvtier.tiering.slab import SlabTier, slab_file

Buffers = Sequence[memoryview]

FILE_BYTES = 4096
"""Bytes of a block's header page; what lies behind them is the row."""

SHORT_S, LONG_S = 0.5, 40.0
"""How long a slow call and a hung one take; the longer is more than a job's time-out."""


class SimDisk:
    """System calls for one place.

    Args:
        place: has the faults.
        slot_bytes: how far a misdirected write goes astray, at least.
        keeps_times: whether files get the simulated time of their last write.
    """

    fault_names = (
        "lost",
        "torn",
        "misdirected",
        "flipped_write",
        "flipped_read",
        "stale",
        "slow",
        "hung",
        "io_error",
        "full",
        "no_files",
    )

    def __init__(self, place: StormPlace, slot_bytes: int, *, keeps_times: bool) -> None:
        self._place = place
        self._weather = place.weather
        self._slot_bytes = slot_bytes
        self._keeps_times = keeps_times
        self._overwritten: dict[tuple[int, int], bytes] = {}
        self.used_fds: dict[int, int] = {}

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """Open a file, or have none left."""
        self._pass()
        if self._place.happens("no_files"):
            raise OSError(errno.EMFILE, "too many open files")
        if flags & (os.O_CREAT | os.O_TMPFILE) and self._place.happens("full"):
            raise OSError(errno.ENOSPC, "no space left on the disk")
        return os.open(path, flags, mode)

    def link(self, fd: int, path: str) -> None:
        """Give an open file its name."""
        self._pass()
        link_open_file(fd, path)

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Write, or say so."""
        place, rng = self._place, self._weather.rng
        self.used_fds[fd] = os.fstat(fd).st_ino
        self._pass()
        if place.happens("io_error"):
            raise OSError(errno.EIO, "the disk refuses")
        if place.happens("full"):
            raise OSError(errno.ENOSPC, "no space left on the disk")
        data = bytearray(b"".join(buffers))
        num_bytes = len(data)
        place.watch(data)
        if place.lies("lost"):
            return num_bytes
        if place.ratios.get("stale"):
            self._remember(fd, offset, num_bytes)
        if place.lies("torn"):
            data = data[: rng.randrange(1, num_bytes + 1)]
        if place.lies("misdirected"):
            offset = max(0, offset + self._slot_bytes * rng.choice([-2, -1, 1, 2]))
            data = data[: max(0, os.fstat(fd).st_size - offset)] if self._slot_bytes > FILE_BYTES else data
        if data and place.lies("flipped_write"):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        self._write(fd, data, offset)
        return num_bytes

    def preadv(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Read, or return something else."""
        place, rng = self._place, self._weather.rng
        self._pass()
        if place.happens("io_error"):
            raise OSError(errno.EIO, "the disk refuses")
        num_bytes = os.preadv(fd, buffers, offset)
        old = self._overwritten.get((fd, offset))
        if old is not None and place.happens("stale"):
            num_bytes = _fill(buffers, old)
        if num_bytes and place.happens("flipped_read"):
            buffer = buffers[-1]
            buffer[rng.randrange(len(buffer))] ^= 1 << rng.randrange(8)
        return num_bytes

    def _pass(self) -> None:
        """Let others run, and time pass."""
        threads = self._weather.threads
        threads.pause()
        if self._place.happens("hung"):
            threads.sleep(LONG_S)
        elif self._place.happens("slow"):
            threads.sleep(SHORT_S)

    def _write(self, fd: int, data: bytearray, offset: int) -> None:
        half = len(data) // 2
        if self._weather.rng.random() < 0.1:
            os.pwrite(fd, data[:half], offset)
            self._weather.threads.pause()
            os.pwrite(fd, data[half:], offset + half)
        else:
            os.pwrite(fd, data, offset)
        if self._keeps_times:
            now_s = self._weather.wall_clock()
            os.utime(fd, (now_s, now_s))

    def _remember(self, fd: int, offset: int, num_bytes: int) -> None:
        if len(self._overwritten) < 64:
            self._overwritten[fd, offset] = os.pread(fd, num_bytes, offset)


def _fill(buffers: Buffers, data: bytes) -> int:
    begin = 0
    for buffer in buffers:
        part = data[begin : begin + len(buffer)]
        buffer[: len(part)] = part
        begin += len(part)
    return begin


class DirectoryPlace(StormPlace):
    """A directory that outlives its process."""

    fault_names = SimDisk.fault_names
    can_encrypt: ClassVar[bool] = True

    def __init__(self, weather: Weather) -> None:
        super().__init__(weather)
        parent = str(RAM_DISK) if RAM_DISK.is_dir() else None
        self._folder = Path(tempfile.mkdtemp(prefix="kvtier-storm-", dir=parent))
        self._life = 0
        (self._folder / "0").mkdir()

    @property
    def directory(self) -> Path:
        """What the present process has."""
        return self._folder / str(self._life)

    def crash(self) -> None:
        old, self._life = self.directory, self._life + 1
        shutil.copytree(old, self.directory, symlinks=True, copy_function=shutil.copy2)

    def on_killed(self) -> None:
        shutil.rmtree(self._folder / str(self._life - 1), ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class FSPlace(DirectoryPlace):
    """The fs tier."""

    quota_tier: ClassVar[str] = "fs"
    header_bytes: ClassVar[int] = FILE_BYTES

    def build(
        self, config: OffloadingConfig, view: memoryview, settings: TierSettings
    ) -> SecondaryTierManager:
        rng, weather = self.weather.rng, self.weather
        block_bytes = FILE_BYTES + (view.shape or (0, 0))[1]
        disk = SimDisk(self, 512, keeps_times=True)
        calls = system.SystemCalls(disk.open, disk.pwritev, disk.preadv, disk.link, None)
        self.ttl_s = rng.choice([None, None, 20.0, 600.0])
        return FSTier(
            config,
            view,
            settings,
            clock=weather.clock,
            wall_clock=weather.wall_clock,
            calls=calls,
            root_dir=str(self.directory),
            capacity_bytes=block_bytes * rng.choice([4, 12, 40]),
            shared=rng.random() < 0.5,
            ttl_s=self.ttl_s,
            direct_io=False,
            num_threads=rng.choice([1, 2, 3]),
        )

    def hurt(self) -> None:
        rng = self.weather.rng
        files = sorted(path for path in self.directory.rglob("*.kv"))
        if not files:
            return
        self.is_honest = False
        path = rng.choice(files)
        kind = rng.randrange(5)
        try:
            if kind == 0:
                path.unlink()
            elif kind == 1:
                os.truncate(path, rng.randrange(path.stat().st_size + 1))
            elif kind == 2:
                path.write_bytes(rng.choice(files).read_bytes())
            elif kind == 3:
                path.write_bytes(forge(path.read_bytes(), rng.choice(files).read_bytes()))
            else:
                flip_bit(path, rng.randrange(max(1, path.stat().st_size)), 1 << rng.randrange(8))
        except FileNotFoundError:
            pass


class SlabPlace(DirectoryPlace):
    """The slab tier."""

    quota_tier: ClassVar[str] = "slab"
    header_bytes: ClassVar[int] = FILE_BYTES

    def __init__(self, weather: Weather) -> None:
        super().__init__(weather)
        self._num_slots = weather.rng.choice([4, 12, 40])
        self._disk: SimDisk | None = None
        self._slot_bytes = 0

    def build(
        self, config: OffloadingConfig, view: memoryview, settings: TierSettings
    ) -> SecondaryTierManager:
        rng = self.weather.rng
        if rng.random() < 0.2:
            self._num_slots = rng.choice([4, 12, 40])  # another geometry: the file is emptied
        self._slot_bytes = FILE_BYTES + (view.shape or (0, 0))[1]
        self._disk = disk = SimDisk(self, self._slot_bytes, keeps_times=False)
        calls = slab_file.SystemCalls(pwritev=disk.pwritev, preadv=disk.preadv)
        self.ttl_s = rng.choice([None, None, 20.0, 600.0])
        return SlabTier(
            config,
            view,
            settings,
            clock=self.weather.clock,
            wall_clock=self.weather.wall_clock,
            calls=calls,
            path=str(self.directory / "slab"),
            ttl_s=self.ttl_s,
            capacity_bytes=FILE_BYTES + self._num_slots * self._slot_bytes,
            allow_shrink=True,
            direct_io=False,
            num_threads=rng.choice([1, 2, 3]),
        )

    def on_killed(self) -> None:
        super().on_killed()
        if self._disk is not None:
            for fd, inode in self._disk.used_fds.items():
                with suppress(OSError):  # a process that ended as it should has closed it
                    if os.fstat(fd).st_ino == inode:
                        os.close(fd)
            self._disk.used_fds.clear()

    def hurt(self) -> None:
        rng, path = self.weather.rng, self.directory / "slab"
        if not path.exists():
            return
        self.is_honest = False
        slot_bytes = self._slot_bytes
        first, second = (FILE_BYTES + rng.randrange(self._num_slots) * slot_bytes for _ in range(2))
        with path.open("r+b") as file:
            file.seek(first)
            content = bytearray(file.read(slot_bytes))
            if len(content) < slot_bytes:  # of another geometry, left by a tier that did not start
                return
            kind = rng.randrange(4)
            if kind == 0:
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            elif kind == 1:
                content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
            elif kind == 3:
                file.seek(second)
                content = bytearray(forge(bytes(content), file.read(slot_bytes)))
            file.seek(second if kind == 2 else first)
            file.write(content)


def flip_bit(path: Path, at: int, mask: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        if byte:
            file.seek(at)
            file.write(bytes([byte[0] ^ mask]))


def owner_calls(weather: Weather, life: Callable[[], int]) -> list[tuple[object, str, object]]:
    """Return what to replace while the storm runs, so that a restarted process is another one, at a simulated time.

    Args:
        weather: has the time.
        life: the number of the present process.
    """
    real_pid = os.getpid()
    real_ticks = system._start_ticks  # whose process a file is has no seam of its own

    def start_ticks(pid: int) -> int | None:
        return 1 + life() if pid == real_pid else real_ticks(pid)

    class Times:
        """The module ``os``, whose files get simulated times."""

        def __getattr__(self, name: str) -> object:
            return getattr(os, name)

        def utime(
            self, path: str | int, *, ns: tuple[int, int] | None = None, follow_symlinks: bool = True
        ) -> None:
            if ns is None:
                now_ns = int(weather.wall_clock() * 10**9)
                ns = now_ns, now_ns
            if isinstance(path, int):
                os.utime(path, ns=ns)
            else:
                os.utime(path, ns=ns, follow_symlinks=follow_symlinks)

    return [(system, "_start_ticks", start_ticks), (block_file, "os", Times())]
