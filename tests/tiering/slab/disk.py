"""A disk that is read and damaged behind the tier's back, and one that dies in the middle of a write."""

import os
from collections.abc import Callable
from pathlib import Path

from tests.tiering.slab.conftest import offset_of

from kvtier.base import OffloadKey
from kvtier.testing.tier_suite import key_of
from kvtier.tiering.kit.envelope import Envelope, unpack
from kvtier.tiering.slab.slab_file import Buffers

PAGE_BYTES = 4096


def envelopes(path: Path, num_slots: int = 64) -> dict[int, Envelope]:
    """Return the slots whose headers are right."""
    data = path.read_bytes()
    found = {slot: unpack(data[offset_of(slot) :]) for slot in range(num_slots)}
    return {slot: envelope for slot, envelope in found.items() if isinstance(envelope, Envelope)}


def slot_of(path: Path, number: int) -> int:
    """Return the only slot with block ``number``."""
    key: OffloadKey = key_of(number)
    (slot,) = [slot for slot, envelope in envelopes(path).items() if envelope.key == key]
    return slot


def change(path: Path, offset: int, content: bytes) -> None:
    """Overwrite a part of the file."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def flip(path: Path, offset: int) -> None:
    """Change one bit of the file."""
    with path.open("rb") as file:
        file.seek(offset)
        byte = file.read(1)[0]
    change(path, offset, bytes([byte ^ 1]))


class CrashCopy:
    """Copies the file as a crash within a write would leave it; the write itself then goes on.

    Args:
        path: the file.
        copy_path: where the copy goes.
    """

    def __init__(self, path: Path, copy_path: Path) -> None:
        self._path = path
        self._copy_path = copy_path
        self._num_writes_to_go = -1
        self._survives: Callable[[int], bool] = bool

    def arm(self, num_writes_to_go: int, survives: Callable[[int], bool]) -> None:
        """Crash in one of the next writes.

        Args:
            num_writes_to_go: writes before that one.
            survives: whether a page of that write, counted from 0, reaches the disk.
        """
        self._num_writes_to_go = num_writes_to_go
        self._survives = survives

    def disarm(self) -> None:
        """Crash now if no write came."""
        if self._num_writes_to_go >= 0:
            self._copy_path.write_bytes(self._path.read_bytes())
            self._num_writes_to_go = -1

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Write, and copy the file as it would be half way."""
        if self._num_writes_to_go == 0:
            self._copy(b"".join(buffers), offset)
        self._num_writes_to_go -= self._num_writes_to_go >= 0
        return os.pwritev(fd, buffers, offset)

    def _copy(self, written: bytes, offset: int) -> None:
        image = bytearray(self._path.read_bytes())
        for number, start in enumerate(range(0, len(written), PAGE_BYTES)):
            if self._survives(number):
                image[offset + start : offset + start + PAGE_BYTES] = written[start : start + PAGE_BYTES]
        self._copy_path.write_bytes(image)
