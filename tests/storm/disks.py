"""The disk tier on a simulated disk: its own files on a real file system, system calls that fail.

Slots and journals pass ``SimDisk``: it loses, tears, misdirects, flips, slows down and refuses what is written, and
lets other threads run in the middle of a write. The death of a process leaves the directory as it is at that moment:
it is copied, and the threads of the dead process unwind into the old one.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from tests.storm.place import StormPlace, Weather
from tests.storm.secrecy import RAM_DISK, forge

from kvtier.config import OffloadingConfig
from kvtier.tiering.base import SecondaryTierManager, TierSettings
from kvtier.tiering.fs import FSTier, pack
from kvtier.tiering.fs.pack_header import SLOTS_OFFSET, PackGeometry, PackHeader, disk_bytes_of
from kvtier.tiering.fs.system_calls import REAL_CALLS, SystemCalls

Buffers = Sequence[memoryview]

FILE_BYTES = 4096
"""Bytes of a block's header page; what lies behind them is the row."""

SHORT_S, LONG_S = 0.5, 40.0
"""How long a slow call and a hung one take; the longer is more than a job's time-out."""


CLOCK_SHIFTS_S = (0.0, 0.0, -3e9, -100.0, 3600.0, 1e8)
"""How far the wall clock of a process may be off."""


class SimDisk:
    """System calls for one place.

    Args:
        place: has the faults.
        slot_bytes: how far a misdirected write goes astray, at least.
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
        "locked",
        "half_appended",
    )

    def __init__(self, place: StormPlace, slot_bytes: int) -> None:
        self._place = place
        self._weather = place.weather
        self._slot_bytes = slot_bytes
        self._overwritten: dict[tuple[int, int], bytes] = {}

    def calls(self) -> SystemCalls:
        """Return what the tier gets for the system."""
        return SystemCalls(
            open=self._open,
            write=self._append,
            pread=self._pread,
            pwritev=self._pwritev,
            preadv=self._preadv,
            truncate=self._truncate,
            fallocate=self._fallocate,
            sync=self._sync,
            sync_folder=self._sync_folder,
            try_lock=self._try_lock,
            rename=self._rename,
            unlink=self._unlink,
        )

    def _open(self, path: str, flags: int, mode: int = 0o600) -> int:
        self._pass()
        if self._place.happens("no_files"):
            raise OSError(errno.EMFILE, "too many open files")
        if flags & os.O_CREAT and self._place.happens("full"):
            raise OSError(errno.ENOSPC, "no space left on the disk")
        return os.open(path, flags, mode)

    def _append(self, fd: int, data: bytes) -> int:
        """Append to a journal, all of it, a part or nothing."""
        place, rng = self._place, self._weather.rng
        self._pass()
        self._refuse(is_growth=True)
        place.watch(data)
        if place.lies("lost"):
            return len(data)
        if place.happens("half_appended"):
            return os.write(fd, data[: rng.randrange(len(data))])
        if place.lies("flipped_write"):
            data = flipped(data, rng.randrange(8 * len(data)))
        num_bytes = os.write(fd, data)
        self._keep_time(fd)
        return num_bytes

    def _pread(self, fd: int, num_bytes: int, offset: int) -> bytes:
        self._pass()
        self._refuse()
        data = os.pread(fd, num_bytes, offset)
        if data and self._place.lies(
            "flipped_read"
        ):  # a record that is not understood is passed over for good
            data = flipped(data, self._weather.rng.randrange(8 * len(data)))
        return data

    def _pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        place, rng = self._place, self._weather.rng
        self._pass()
        self._refuse(is_growth=True)
        data = bytearray(b"".join(buffers))
        num_bytes = len(data)
        place.watch(data)
        if offset < SLOTS_OFFSET:
            self._write(fd, data, offset)  # what says whose a pack is: see Pack.has_other_owner
            return num_bytes
        if place.lies("lost"):
            return num_bytes
        if place.ratios.get("stale"):
            self._remember(fd, offset, num_bytes)
        if place.lies("torn"):
            data = data[: rng.randrange(1, num_bytes + 1)]
        if place.lies("misdirected"):
            offset = max(SLOTS_OFFSET, offset + self._slot_bytes * rng.choice([-2, -1, 1, 2]))
            data = data[: max(0, os.fstat(fd).st_size - offset)]
        if data and place.lies("flipped_write"):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        self._write(fd, data, offset)
        return num_bytes

    def _preadv(self, fd: int, buffers: Buffers, offset: int) -> int:
        place, rng = self._place, self._weather.rng
        self._pass()
        self._refuse()
        num_bytes = os.preadv(fd, buffers, offset)
        old = self._overwritten.get((fd, offset))
        if old is not None and place.happens("stale"):
            num_bytes = _fill(buffers, old)
        if num_bytes and place.happens("flipped_read"):
            buffer = buffers[-1]
            buffer[rng.randrange(len(buffer))] ^= 1 << rng.randrange(8)
        return num_bytes

    def _truncate(self, fd: int, num_bytes: int) -> None:
        self._pass()
        self._refuse()
        os.ftruncate(fd, num_bytes)

    def _fallocate(self, fd: int, mode: int, offset: int, num_bytes: int) -> None:
        self._pass()
        self._refuse(is_growth=True)
        REAL_CALLS.fallocate(fd, mode, offset, num_bytes)
        self._keep_time(fd)

    def _sync(self, fd: int) -> None:
        del fd
        self._pass()
        self._refuse()

    def _sync_folder(self, path: str) -> None:
        del path
        self._pass()
        self._refuse()

    def _try_lock(self, fd: int) -> bool:
        self._pass()
        return not self._place.happens("locked") and REAL_CALLS.try_lock(fd)

    def _rename(self, path: str, new_path: str) -> None:
        self._pass()
        self._refuse()
        Path(path).rename(new_path)

    def _unlink(self, path: str) -> None:
        self._pass()
        self._refuse()
        Path(path).unlink()

    def _refuse(self, *, is_growth: bool = False) -> None:
        """Fail, if the disk is broken or full."""
        if self._place.happens("io_error"):
            raise OSError(errno.EIO, "the disk refuses")
        if is_growth and self._place.happens("full"):
            raise OSError(errno.ENOSPC, "no space left on the disk")

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
        self._keep_time(fd)

    def _keep_time(self, fd: int) -> None:
        """Give a file the simulated time of its last write."""
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


class FSPlace(StormPlace):
    """The disk tier, in a directory that outlives its process."""

    fault_names = SimDisk.fault_names
    can_encrypt: ClassVar[bool] = True
    quota_tier: ClassVar[str] = "fs"
    header_bytes: ClassVar[int] = FILE_BYTES

    def __init__(self, weather: Weather) -> None:
        super().__init__(weather)
        parent = str(RAM_DISK) if RAM_DISK.is_dir() else None
        self._folder = Path(tempfile.mkdtemp(prefix="kvtier-storm-", dir=parent))
        self._life = 0
        self.directory.mkdir()

    @property
    def directory(self) -> Path:
        """What the present process has."""
        return self._folder / str(self._life)

    def build(
        self, config: OffloadingConfig, view: memoryview, settings: TierSettings
    ) -> SecondaryTierManager:
        rng, weather = self.weather.rng, self.weather
        row_bytes = (view.shape or (0, 0))[1]
        num_packs, num_slots = rng.choice([1, 3, 8]), rng.choice([1, 4, 12])
        pack_bytes = disk_bytes_of(PackGeometry(row_bytes, num_slots))
        self.ttl_s = rng.choice([None, None, 20.0, 600.0])
        # Where no block is ever over, a process may run under a clock that was set since the one before.
        shift_s = 0.0 if self.ttl_s is not None else rng.choice(CLOCK_SHIFTS_S)
        return FSTier(
            config,
            view,
            replace(settings, policy=rng.choice(["lru", "lru", "arc", "hazard"])),
            clock=weather.clock,
            wall_clock=lambda: weather.wall_clock() + shift_s,
            calls=SimDisk(self, FILE_BYTES + row_bytes).calls(),
            root_dir=str(self.directory),
            capacity_bytes=num_packs * pack_bytes,
            pack_bytes=pack_bytes,
            allow_shrink=True,
            ttl_s=self.ttl_s,
            durability=rng.choice(["none", "fdatasync"]),
            direct_io=False,
            num_threads=rng.choice([1, 2, 3]),
        )

    def crash(self) -> None:
        old, self._life = self.directory, self._life + 1
        if old.is_dir():
            shutil.copytree(old, self.directory, symlinks=True, copy_function=shutil.copy2)
        else:
            self.directory.mkdir()

    def on_killed(self) -> None:
        old = self._folder / str(self._life - 1)
        close_files_below(old)
        shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        close_files_below(self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)

    def hurt(self) -> None:
        rng = self.weather.rng
        files = sorted(path for path in self.directory.rglob("*") if path.suffix in {".pack", ".index"})
        if not files:
            return
        self.is_honest = False
        path, other = rng.choice(files), rng.choice(files)
        kind = rng.randrange(6)
        try:
            if kind == 0:
                path.unlink()
            elif kind == 1:
                os.truncate(path, rng.randrange(path.stat().st_size + 1))
            elif kind == 2:
                path.write_bytes(other.read_bytes())
            elif kind == 3:
                self._move_block(rng.choice(files), rng.choice(files))
            elif kind == 4 and rng.random() < 0.1:
                shutil.rmtree(self.directory)
            else:
                flip_bit(path, rng.randrange(max(1, path.stat().st_size)), 1 << rng.randrange(8))
        except FileNotFoundError:
            pass

    def _move_block(self, target: Path, source: Path) -> None:
        """Put the block of one slot into another, under that one's name where both are encrypted."""
        rng = self.weather.rng
        targets, sources = list_slots(target), list_slots(source)
        if not targets or not sources:
            return
        offset, num_bytes = rng.choice(targets)
        source_offset, source_bytes = rng.choice(sources)
        if num_bytes != source_bytes:
            return
        content = source.read_bytes()[source_offset : source_offset + num_bytes]
        with target.open("r+b") as file:
            file.seek(offset)
            block = forge(file.read(num_bytes), content)
            file.seek(offset)
            file.write(block)


def list_slots(path: Path) -> list[tuple[int, int]]:
    """Return where the slots of a pack begin, and their length; nothing of what is no pack."""
    header = PackHeader.unpack(path.read_bytes()[:FILE_BYTES]) if path.suffix == ".pack" else None
    if header is None:
        return []
    geometry = header.geometry
    return [(geometry.offset_of(slot), geometry.slot_bytes) for slot in range(geometry.num_slots)]


def close_files_below(folder: Path) -> None:
    """Close what this process has open below a folder: the files of a tier that was killed."""
    for link in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            if str(link.readlink()).startswith(f"{folder}/"):
                os.close(int(link.name))


def flipped(data: bytes, at: int) -> bytes:
    """Return bytes with one bit changed. Pure."""
    changed = bytearray(data)
    changed[at // 8] ^= 1 << at % 8
    return bytes(changed)


def flip_bit(path: Path, at: int, mask: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        if byte:
            file.seek(at)
            file.write(bytes([byte[0] ^ mask]))


def file_times(weather: Weather) -> list[tuple[object, str, object]]:
    """Return what to replace while the storm runs, so that files that are touched get simulated times.

    Args:
        weather: has the time.
    """

    class Times:
        """The module ``os``, whose files get simulated times."""

        def __getattr__(self, name: str) -> object:
            return getattr(os, name)

        def utime(self, path: str | int, times: tuple[int, int] | None = None) -> None:
            now_s = weather.wall_clock()
            os.utime(path, times or (now_s, now_s))

    return [(pack, "os", Times())]
