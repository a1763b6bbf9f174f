"""A private file of lines that never overwrites a file, never exceeds its limit, and stays readable after a crash.

Each line is written to the kernel before the next one, so a process that is killed leaves whole lines and at most one
cut line at the end. A path that ends in ".gz" is compressed. Each line is then flushed through the compressor, which
costs a few bytes and keeps the same promise.
"""

import os
import zlib
from pathlib import Path

from kvtier.errors import ConfigError

GZIP_SUFFIX = ".gz"
GZIP_WINDOW = 31
"""zlib's ``wbits`` for its largest window with gzip's header."""

GZIP_EDGE_BYTES = 64
"""Upper bound of a gzip file's header and trailer."""

MAX_NUMBER = 100
"""Maximum of files of one name. Each start of an engine makes a new one; an engine that crashes in a loop must not fill
the folder."""


class TraceFile:
    """The open file. Used from one thread at a time.

    Args:
        path: a new file; with the ending ".gz" it is compressed.
        max_bytes: maximum of its size.

    Attributes:
        path: the file.
        num_bytes: its size so far.

    Raises:
        FileExistsError: the path exists.
        OSError: the file cannot be made.
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
        """Return whether lines of ``num_bytes`` in all fit, even if compression does not shrink them."""
        # Deflate stores incompressible bytes as they are, in pieces with a header of five bytes.
        edge = 0 if self._zip is None else GZIP_EDGE_BYTES + num_bytes // 1000
        return self.num_bytes + num_bytes + edge <= self._max_bytes

    def write(self, line: bytes) -> None:
        """Write one line, which ends with a line feed; call ``has_room`` before.

        Raises:
            OSError: the line may be cut, so nothing may be written after it.
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
            # After a cut line the trailer would be read as the rest of that line: damaged instead of cut.
            if self._zip is not None and not self._is_cut:
                self._put(self._zip.flush())
        finally:
            os.close(self._fd)
            self._fd = None

    def _put(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            try:
                num_written = self._write_some(rest)
            except OSError:
                self._is_cut = True
                raise
            self.num_bytes += num_written
            rest = rest[num_written:]

    def _write_some(self, content: memoryview) -> int:
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
        max_bytes: maximum of its size.
        setting: the setting that an error names.

    Raises:
        ConfigError: the path is not absolute, or no file can be made there.
    """
    if not path.is_absolute():
        raise ConfigError(
            setting,
            str(path),
            "must be an absolute path: the working directories of an engine's processes differ",
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
