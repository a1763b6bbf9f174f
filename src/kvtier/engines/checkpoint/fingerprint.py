"""The fingerprint of a checkpoint: BLAKE3 over every byte of every file that decides what it computes.

A few threads read the files in pieces. Reading and hashing release the interpreter's lock, so the engine's start goes
on meanwhile. A file's digest is BLAKE3 of its pieces' digests, the fingerprint BLAKE3 of names and digests. XXH3 would
be three times as fast, but the fingerprint separates tenants: a checkpoint with a chosen fingerprint must be
infeasible.

Source: BLAKE3 is described at https://github.com/BLAKE3-team/BLAKE3-specs.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from kvtier.engines.checkpoint.digest_cache import DigestCache, default_cache_path
from kvtier.engines.checkpoint.files import (
    REMEDY,
    CheckpointFile,
    FileStamp,
    find_files,
    has_weights,
    require_unchanged,
    stamp_of,
)
from kvtier.errors import FingerprintError
from kvtier.limits import count_usable_cores
from kvtier.quantities import size_in_words

logger = logging.getLogger(__name__)

PREFIX = "blake3-of-every-byte:"
"""Marks a fingerprint, so that it never equals a revision that a user has named."""

PIECE_BYTES = 64 << 20
"""Bytes that a thread hashes as one piece. Larger leave threads idle at the end; smaller only open files more often."""

READ_BYTES = 1 << 20
"""Bytes of one read: small enough to be hashed from the processor's cache."""

MAX_THREADS = 8
"""Threads of one fingerprint, and at most half of the cores, because loading and compiling need the others. Eight hash
faster than disks read."""

PROGRESS_INTERVAL_S = 10.0
"""Time between two log lines while a start waits for its fingerprint."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The name of a checkpoint.

    Attributes:
        text: the fingerprint; empty when the checkpoint holds no weights.
        files: the files that it covers.
        num_bytes: bytes of these files.
        num_read_bytes: how many of them were read; the digests of the others were cached.
    """

    text: str
    files: tuple[CheckpointFile, ...]
    num_bytes: int
    num_read_bytes: int


def fingerprint_checkpoint(place: Path, label: str = "") -> Fingerprint:
    """Return the fingerprint of the model or adapter in a folder or file. Blocks, with progress in the log.

    Raises:
        FingerprintError: a file cannot be read, or changed meanwhile.
    """
    return FingerprintJob(place, label or str(place)).wait()


def digest_buffers(parts: Iterable[bytes | memoryview]) -> str:
    """Return BLAKE3 of weights in memory, in hex. Blocks; all cores may take part."""
    hasher = blake3(max_threads=blake3.AUTO)
    for part in parts:
        hasher.update(part)
    digest: str = hasher.hexdigest()
    return digest


class FingerprintJob:
    """Reads a checkpoint in threads of its own, from construction on.

    Mutable are the pieces that are left, their digests and the count of read bytes; a lock guards them. The threads
    are daemons, so a start that fails does not wait for them.

    Args:
        place: the folder or file.
        label: name of the checkpoint in the log.
        cache: digests of earlier starts; None takes the user's cache.
        num_threads: threads that read; 0 takes half of the usable cores, at most ``MAX_THREADS``.
        progress_interval_s: time between two log lines in ``wait``.
    """

    def __init__(
        self,
        place: Path,
        label: str,
        cache: DigestCache | None = None,
        num_threads: int = 0,
        progress_interval_s: float = PROGRESS_INTERVAL_S,
    ) -> None:
        self._place = place
        self._label = label
        self._cache = DigestCache(default_cache_path()) if cache is None else cache
        self._num_threads = num_threads or max(1, min(MAX_THREADS, count_usable_cores() // 2))
        self._progress_interval_s = progress_interval_s
        self._lock = threading.Lock()
        self._left: deque[tuple[CheckpointFile, int]] = deque()
        self._piece_digests: dict[tuple[str, int], bytes] = {}
        self._num_total_bytes = 0
        self._num_read_bytes = 0
        self._error: FingerprintError | None = None
        self._result: Fingerprint | None = None
        self._began_s = time.monotonic()
        self._ended_s = 0.0
        self._is_done = threading.Event()
        threading.Thread(target=self._run, name="kvtier-fingerprint", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return self._is_done.is_set()

    def wait(self) -> Fingerprint:
        """Return the fingerprint once every byte is read.

        Raises:
            FingerprintError: a file cannot be read, or changed meanwhile.
        """
        while not self._is_done.wait(self._progress_interval_s):
            done, total, rate = self._progress()
            logger.info(
                "kvtier reads the fingerprint of %s: %s of %s, %s/s",
                self._label,
                *map(size_in_words, (done, total, rate)),
            )
        if self._error is not None:
            raise self._error
        assert self._result is not None, "a job that is done has a result or an error"
        self._log_end(self._result)
        return self._result

    def _progress(self) -> tuple[int, int, float]:
        with self._lock:
            done, total = self._num_read_bytes, self._num_total_bytes
        end_s = self._ended_s or time.monotonic()
        return done, total, done / max(end_s - self._began_s, 1e-9)

    def _log_end(self, result: Fingerprint) -> None:
        done, _, rate = self._progress()
        num_files = len(result.files)
        files = f"{num_files} {'file' if num_files == 1 else 'files'} of {size_in_words(result.num_bytes)}"
        if not result.num_read_bytes:
            logger.info("kvtier knows the fingerprint of %s from an earlier start: %s", self._label, files)
            return
        logger.info(
            "kvtier has read the fingerprint of %s: %s, %s of them in %.1f s, %s/s",
            self._label,
            files,
            size_in_words(done),
            self._ended_s - self._began_s,
            size_in_words(rate),
        )

    def _run(self) -> None:
        try:
            self._result = self._make()
        except FingerprintError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001  # thread top: wait() raises it in its own thread
            self._error = FingerprintError(self._place, f"{type(error).__name__}: {error}", REMEDY)
        finally:
            self._ended_s = time.monotonic()
            self._is_done.set()

    def _make(self) -> Fingerprint:
        files = find_files(self._place)
        if not has_weights(files):
            return Fingerprint("", files, 0, 0)
        read_since_ns = self._cache.now_ns()
        known = self._cache.find(files)
        unknown = [file for file in files if file.name not in known]
        read = self._read_all(unknown)
        require_unchanged(files)
        self._cache.add([(file, (known | read)[file.name]) for file in files], read_since_ns)
        whole = blake3()
        for file in files:
            whole.update(f"{len(file.name.encode())} {file.name} ".encode() + (known | read)[file.name])
        num_bytes = sum(file.stamp.size_bytes for file in files)
        return Fingerprint(PREFIX + whole.hexdigest(), files, num_bytes, self._num_read_bytes)

    def _read_all(self, files: Sequence[CheckpointFile]) -> dict[str, bytes]:
        pieces = [(file, number) for file in files for number in range(_num_pieces(file.stamp))]
        with self._lock:
            self._num_total_bytes = sum(file.stamp.size_bytes for file in files)
            self._left.extend(pieces)
        threads = [
            threading.Thread(target=self._read_pieces, name=f"kvtier-fingerprint-{number}", daemon=True)
            for number in range(min(self._num_threads, len(pieces)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return {file.name: self._digest_of(file) for file in files}

    def _digest_of(self, file: CheckpointFile) -> bytes:
        digest = blake3(str(file.stamp.size_bytes).encode() + b" ")
        for number in range(_num_pieces(file.stamp)):
            digest.update(self._piece_digests[file.name, number])
        whole: bytes = digest.digest()
        return whole

    def _read_pieces(self) -> None:
        """Read pieces until none is left; the first error stops all threads."""
        view = memoryview(bytearray(READ_BYTES))
        while True:
            with self._lock:
                if not self._left:
                    return
                file, number = self._left.popleft()
            try:
                digest = self._read_piece(file, number, view)
            except FingerprintError as error:
                self._fail(error)
                return
            except Exception as error:  # noqa: BLE001  # thread top: a piece that cannot be read fails the job
                self._fail(FingerprintError(file.path, str(error), REMEDY))
                return
            with self._lock:
                self._piece_digests[file.name, number] = digest

    def _read_piece(self, file: CheckpointFile, number: int, view: memoryview) -> bytes:
        digest = blake3()
        position = number * PIECE_BYTES
        end = min(position + PIECE_BYTES, file.stamp.size_bytes)
        fd = os.open(file.path, os.O_RDONLY)
        try:
            while position < end:
                num_bytes = os.preadv(fd, [view[: end - position]], position)
                if not num_bytes:
                    raise FingerprintError(file.path, "it was shortened while it was read", REMEDY)
                digest.update(view[:num_bytes])
                position += num_bytes
                with self._lock:
                    self._num_read_bytes += num_bytes
            if stamp_of(os.fstat(fd)) != file.stamp:
                raise FingerprintError(file.path, "it changed while it was read", REMEDY)
        finally:
            os.close(fd)
        piece: bytes = digest.digest()
        return piece

    def _fail(self, error: FingerprintError) -> None:
        with self._lock:
            self._error = self._error or error
            self._left.clear()


def _num_pieces(stamp: FileStamp) -> int:
    return -(-stamp.size_bytes // PIECE_BYTES)
