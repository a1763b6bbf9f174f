"""Records the requests of an engine as a trace for the simulator: arrivals, lengths, and which blocks are shared.

It writes no token, no text, and no name of a request or block: a block stands in the trace as a salted id. The
scheduler's thread queues what it knows of a request that has ended. A thread of the recorder makes the ids and writes
the line. When that thread falls behind, requests are dropped and counted, so the scheduler never waits for a disk.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.config import TRACE_VARIABLE, OffloadingConfig
from kvtier.connector.common import StopReason
from kvtier.connector.recording import RequestRecorder
from kvtier.errors import ConfigError
from kvtier.misses import RequestRecord
from kvtier.quantities import parse_bytes
from kvtier.recording.trace_file import TraceFile, create_trace_file
from kvtier.recording.trace_line import TraceEnd, TraceHeader, TraceLine
from kvtier.recording.trace_salt import TraceSalt, draw_salt, read_salt_file

logger = logging.getLogger(__name__)

MAX_BYTES_VARIABLE = "KVTIER_RECORD_MAX_BYTES"
SALT_FILE_VARIABLE = "KVTIER_RECORD_SALT_FILE"
"""Environment variables with the defaults of ``record_max_bytes`` and ``record_salt_file``."""

DEFAULT_MAX_BYTES = 2**30
"""About 50 million block ids. Less ends a recording of long prompts within a day; more may fill a small disk."""

MIN_BYTES = 4096
"""Room for the first and the last line and a few short requests."""

MAX_QUEUED_KEYS = 2**19
"""Queued block names, at about 100 bytes each: some 50 MB. Less drops requests while a disk pauses for a second; more
takes memory from the engine. A request counts as one more than its blocks."""

CLOSE_TIMEOUT_S = 5.0
"""How long an engine's shutdown may wait for a hung disk; lines not written by then are lost."""

END_ROOM_BYTES = 256
"""Bytes reserved for the last line."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """A request that has ended, as the scheduler's thread queues it."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    keys: Sequence[bytes]
    stop: StopReason
    record: RequestRecord | None


class TraceRecorder(RequestRecorder):
    """Writes a line for each request that ends. Its methods are for the scheduler's thread.

    The scheduler's thread alone changes arrivals and the counts of queued and dropped requests; the recorder's thread
    alone changes the file and the counts of written requests. Each reads the other's counts, which only grow, so there
    is no lock.

    Args:
        file: the trace file; the recorder closes it.
        block_tokens: tokens of a block.
        salt: makes the ids of blocks.
        clock: seconds, monotonic.
        max_queued_keys: block names that may be queued.

    Raises:
        OSError: the first line cannot be written.
    """

    def __init__(
        self,
        file: TraceFile,
        block_tokens: int,
        salt: TraceSalt,
        clock: Callable[[], float] = time.monotonic,
        max_queued_keys: int = MAX_QUEUED_KEYS,
    ) -> None:
        self._file = file
        self._block_tokens = block_tokens
        self._salt = salt
        self._clock = clock
        self._max_queued_keys = max_queued_keys
        self._began_s = clock()
        self._arrivals_s: dict[str, float] = {}
        self._queue: queue.SimpleQueue[_Ended | None] = queue.SimpleQueue()
        self._num_queued_keys = 0
        self._num_dequeued_keys = 0
        self._num_dropped = 0
        self._num_written = 0
        self._num_unwritten = 0
        self._has_ended = False
        self._is_closed = False
        file.write(TraceHeader(block_tokens).to_line())
        self._thread = threading.Thread(target=self._run, name="kvtier-recorder", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def on_arrival(self, req_id: str) -> None:
        self._arrivals_s.setdefault(req_id, max(0.0, self._clock() - self._began_s))

    def on_end(
        self,
        req_id: str,
        num_prompt_tokens: int,
        num_output_tokens: int,
        keys: Sequence[bytes],
        stop: StopReason = StopReason.UNKNOWN,
        record: RequestRecord | None = None,
    ) -> None:
        arrival_s = self._arrivals_s.pop(req_id, None)
        if arrival_s is None:
            return
        num_blocks = num_prompt_tokens // self._block_tokens
        of_prompt = tuple(keys[:num_blocks])
        num_queued = self._num_queued_keys - self._num_dequeued_keys
        is_over = self._has_ended or self._is_closed
        # A reader would refuse the whole trace if a request lacked a block of its prompt.
        if is_over or len(of_prompt) < num_blocks or num_queued > self._max_queued_keys:
            self._num_dropped += 1
            return
        self._num_queued_keys += _weight(of_prompt)
        self._queue.put(_Ended(arrival_s, num_prompt_tokens, num_output_tokens, of_prompt, stop, record))

    def forget(self, req_id: str) -> None:
        self._arrivals_s.pop(req_id, None)

    def stats(self) -> dict[str, float]:
        return {
            "recorder.requests": float(self._num_written),
            "recorder.dropped_requests": float(self._num_dropped + self._num_unwritten),
            "recorder.bytes": float(self._file.num_bytes),
        }

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (ended := self._queue.get()) is not None:
            self._num_dequeued_keys += _weight(ended.keys)
            if self._has_ended:
                self._num_unwritten += 1
            else:
                self._write(ended)
        if not self._has_ended:
            self._end(is_full=False)

    def _write(self, ended: _Ended) -> None:
        ids = tuple(map(self._salt.id_of, ended.keys))
        line = TraceLine(
            ended.arrival_s, ended.num_prompt_tokens, ended.num_output_tokens, ids, ended.stop, ended.record
        ).to_line()
        if not self._file.has_room(len(line) + END_ROOM_BYTES):
            self._num_unwritten += 1
            logger.warning("the recording has reached record_max_bytes and ends: %s", self.path)
            self._end(is_full=True)
            return
        try:
            self._file.write(line)
        except OSError as error:
            self._num_unwritten += 1
            self._end_with_error(error)
        else:
            self._num_written += 1

    def _end(self, *, is_full: bool) -> None:
        """Write the last line and close the file."""
        num_dropped = self._num_dropped + self._num_unwritten
        self._has_ended = True
        try:
            self._file.write(TraceEnd(self._num_written, num_dropped, is_full).to_line())
            self._file.close()
        except OSError as error:
            self._end_with_error(error)

    def _end_with_error(self, error: OSError) -> None:
        """End without a last line, because nothing after a line that may be cut can be read."""
        self._has_ended = True
        logger.warning("the recording ends, its file cannot be written (%s): %s", error.strerror, self.path)
        try:
            self._file.close()
        except OSError:
            logger.debug("the end of %s cannot be written either", self.path)

    def __repr__(self) -> str:
        return f"TraceRecorder({self.path}, {self._num_written} requests)"


def open_recorder(
    config: OffloadingConfig,
    environment: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.monotonic,
) -> TraceRecorder | None:
    """Return a recorder if a setting or the environment enables it, else None; the setting has precedence.

    Args:
        config: the engine's configuration; the blocks of its first KV group are recorded.
        environment: the process's variables.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the file cannot be made, its limit is too small, or the salt cannot be read.
    """
    settings = config.settings
    path = settings.record_trace or environment.get(TRACE_VARIABLE)
    if not path:
        return None
    salt_file = settings.record_salt_file or environment.get(SALT_FILE_VARIABLE)
    salt = read_salt_file(Path(salt_file)) if salt_file else draw_salt()
    max_bytes = settings.record_max_bytes
    if max_bytes is None:
        max_bytes = parse_bytes(MAX_BYTES_VARIABLE, environment.get(MAX_BYTES_VARIABLE, DEFAULT_MAX_BYTES))
    setting = "record_trace" if settings.record_trace else TRACE_VARIABLE
    if max_bytes < MIN_BYTES:
        raise ConfigError(
            "record_max_bytes", max_bytes, f"must be at least {MIN_BYTES}: no request would fit"
        )
    file = create_trace_file(Path(path), max_bytes, setting)
    block_tokens = config.groups[0].block_size_tokens * config.block_size_factor
    try:
        recorder = TraceRecorder(file, block_tokens, salt, clock)
    except OSError as error:
        raise ConfigError(setting, path, f"cannot be written: {error.strerror}") from error
    logger.info("recording requests, without text and with salted ids, to %s", file.path)
    return recorder


def _weight(keys: Sequence[bytes]) -> int:
    return len(keys) + 1
