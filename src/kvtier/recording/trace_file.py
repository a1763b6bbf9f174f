"""A file of lines that is private, never overwrites, never exceeds its limit, and is readable up to any crash.

Each line is handed to the kernel before the next one, so a process that is killed leaves whole lines and at most one
cut at the end. A path that ends in ".gz" is compressed; each line is then flushed through the compressor, which costs a
few bytes and keeps the same promise.
"""

import os
import zlib
from pathlib import Path

from kvtier.errors import ConfigError

GZIP_SUFFIX = ".gz"
GZIP_WINDOW = 31
"""What zlib calls its largest window with gzip's frame."""

GZIP_EDGE_BYTES = 64
"""Frame and end of a compressed file take less."""

MAX_NUMBER = 100
"""Files of one name. An engine that is restarted goes on in a new one; one that crashes on and on must not fill a
folder."""


class TraceFile:
    """Lines on their way to a file. Used from one thread at a time.

    Args:
        path: a new file; ".gz" at its end compresses.
        max_bytes: what it may take on the disk.

    Attributes:
        path: the file.
        num_bytes: what it takes so far.

    Raises:
        FileExistsError: there is something of that name.
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd: int | None = os.open(path, flags, 0o600)
        self.path = path
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._zip = zlib.compressobj(wbits=GZIP_WINDOW) if path.suffix == GZIP_SUFFIX else None
        self._is_cut = False

    def has_room(self, num_bytes: int) -> bool:
        """Return whether lines of ``num_bytes`` in all fit, even if they do not get smaller by compression."""
        # Deflate writes what it cannot shrink as it is, in pieces with five bytes in front.
        edge = 0 if self._zip is None else GZIP_EDGE_BYTES + num_bytes // 1000
        return self.num_bytes + num_bytes + edge <= self._max_bytes

    def write(self, line: bytes) -> None:
        """Hand one line, which ends with a line feed, to the kernel; call ``has_room`` before.

        Raises:
            OSError: it cannot be written; the line may be cut, so nothing may be written behind it.
        """
        if self._zip is not None:
            line = self._zip.compress(line) + self._zip.flush(zlib.Z_SYNC_FLUSH)
        self._put(line)

    def close(self) -> None:
        """End the file; idempotent.

        Raises:
            OSError: the end of the compressed data cannot be written; the file is closed all the same.
        """
        if self._fd is None:
            return
        try:
            # Behind a line that is cut the end would be read as the rest of that line: damaged, and not cut.
            if self._zip is not None and not self._is_cut:
                self._put(self._zip.flush())
        finally:
            os.close(self._fd)
            self._fd = None

    def _put(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            try:
                num_written = self._hand_over(rest)
            except OSError:
                self._is_cut = True
                raise
            self.num_bytes += num_written
            rest = rest[num_written:]

    def _hand_over(self, content: memoryview) -> int:
        assert self._fd is not None, "a line was written after the end"
        return os.write(self._fd, content)


def numbered(path: Path, number: int) -> Path:
    """Return the name of file ``number`` of one recording: trace.jsonl, trace.2.jsonl, trace.3.jsonl. Pure."""
    if number == 1:
        return path
    suffixes = "".join(path.suffixes)
    return path.with_name(f"{path.name.removesuffix(suffixes)}.{number}{suffixes}")


def create_trace_file(path: Path, max_bytes: int, setting: str) -> TraceFile:
    """Return a new file of that name, or of the first free number of it.

    Args:
        path: its absolute path.
        max_bytes: what it may take on the disk.
        setting: the setting that an error names.

    Raises:
        ConfigError: the path is not absolute, or no file can be made there.
    """
    if not path.is_absolute():
        raise ConfigError(
            setting, str(path), "must be an absolute path: an engine's processes start anywhere"
        )
    for number in range(1, MAX_NUMBER + 1):
        try:
            return TraceFile(numbered(path, number), max_bytes)
        except FileExistsError:
            continue
        except OSError as error:
            remedy = f"cannot be made ({error.strerror}): name a new file in a folder that may be written to"
            raise ConfigError(setting, str(path), remedy) from error
    raise ConfigError(setting, str(path), f"{MAX_NUMBER} files of this name exist: move them away")
