"""Receives the KV events that vLLM publishes over ZeroMQ and writes them to a log.

vLLM binds its socket when its endpoint has a wildcard and connects otherwise; the subscriber does the opposite.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from kvtier.cli.processes import ended_like_interrupted
from kvtier.cli.record.event_log import KVEventLog, decode_batch
from kvtier.errors import ConfigError, EventMessageError
from kvtier.recording.trace_file import TraceFile
from kvtier.recording.trace_salt import TraceSalt

MAX_MESSAGE_BYTES = 256 * 2**20
"""Size limit for the events of one step. A peer that sends more is not a publisher and is disconnected."""

MAX_QUEUED_MESSAGES = 10_000
"""Batches queued while the disk is slow; further ones are lost and counted as missing."""

POLL_S = 0.5
"""Seconds between checks for the end of the recording while no message arrives."""


class Subscriber:
    """A socket that receives from one endpoint, as a context manager.

    Args:
        endpoint: such as ``tcp://127.0.0.1:5557``.
        is_bound: whether this side binds the endpoint and vLLM connects.

    Raises:
        ConfigError: the endpoint is not valid.
    """

    def __init__(self, endpoint: str, *, is_bound: bool) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            (self._socket.bind if is_bound else self._socket.connect)(endpoint)
        except (zmq.ZMQError, ValueError) as error:  # a ValueError: half a surrogate pair
            self.close()
            # The library's text repeats the endpoint.
            reason = zmq.strerror(error.errno or 0) if isinstance(error, zmq.ZMQError) else "no text"
            remedy = f"cannot be {'bound' if is_bound else 'connected to'} ({reason})"
            raise ConfigError(
                "--kv-events", endpoint, f"{remedy}: give one such as tcp://127.0.0.1:5557"
            ) from error

    def receive(self, timeout_s: float) -> list[bytes] | None:
        """Return the parts of the next message; None when none comes within ``timeout_s``."""
        if not self._socket.poll(max(0, int(timeout_s * 1000))):
            return None
        return self._socket.recv_multipart()

    def close(self) -> None:
        """Stop listening; idempotent."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """What to receive, and for how long.

    Attributes:
        endpoint: vLLM's publisher.
        is_bound: whether vLLM connects to it.
        max_s: time limit in seconds; None: no limit.
        max_batches: limit of batches; None: no limit.
    """

    endpoint: str
    is_bound: bool
    max_s: float | None
    max_batches: int | None


def listen(
    listening: ListenOptions,
    file: TraceFile,
    salt: TraceSalt,
    print_line: Callable[[str], object],
    clock: Callable[[], float] = time.monotonic,
) -> KVEventLog:
    """Write batches until a limit is reached or the user interrupts; return the log, which is closed.

    Args:
        listening: what to receive, and for how long.
        file: the log.
        salt: makes the ids.
        print_line: prints a line for the user.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the endpoint is not valid, or the disk is full.
    """
    log = KVEventLog(file, salt)
    try:
        try:
            _receive(listening, log, print_line, clock)
        except KeyboardInterrupt:
            print_line("interrupted")
        finally:
            log.close()
    except OSError as error:
        raise ConfigError("OUT", str(file.path), f"cannot be written: {error.strerror}") from error
    return log


def describe_log(log: KVEventLog, path: Path) -> Iterator[str]:
    """Yield a description of a log for the user. Pure."""
    counts = log.counts
    yield f"{counts.num_batches:,} batches with {counts.num_stored_blocks:,} stored blocks are in {path}"
    if log.is_full:
        yield "the file has reached its limit: later batches are not in it"
    if counts.first_sequence:
        yield f"the first batch received is number {counts.first_sequence:,}: earlier ones are not in the log"
    if counts.num_missing_batches:
        yield f"{counts.num_missing_batches:,} batches in between were published and not received"
    if counts.num_restarts:
        yield f"the publisher restarted {counts.num_restarts} times"
    if counts.num_other_rank_batches:
        yield f"{counts.num_other_rank_batches:,} batches of other replicas than {counts.rank} were skipped"
    if counts.num_skipped_events:
        yield f"{counts.num_skipped_events:,} events of unknown kind or shape were skipped"


def describe_empty_log(log: KVEventLog, listening: ListenOptions) -> str:
    """Return why a log has no batch, for the user. Pure."""
    if log.is_full:
        return "nothing is recorded: the first batch is larger than --max-size"
    return (
        f"nothing was received from {listening.endpoint}, nothing is recorded: an engine publishes while it serves "
        "requests, if started with --kv-events-config '{\"enable_kv_cache_events\": true, ...}'"
    )


def _receive(
    listening: ListenOptions, log: KVEventLog, print_line: Callable[[str], object], clock: Callable[[], float]
) -> None:
    with (
        Subscriber(listening.endpoint, is_bound=listening.is_bound) as subscriber,
        ended_like_interrupted(),
    ):
        print_line(f"listening to {listening.endpoint}; Ctrl-C ends the recording")
        for parts in _messages(subscriber, listening, log, clock):
            try:
                log.add(decode_batch(parts))
            except EventMessageError as error:
                print_line(str(error))


def _messages(
    subscriber: Subscriber, listening: ListenOptions, log: KVEventLog, clock: Callable[[], float]
) -> Iterator[list[bytes]]:
    """Yield messages until the log is complete or the time is over."""
    end_s = float("inf") if listening.max_s is None else clock() + listening.max_s
    max_batches = float("inf") if listening.max_batches is None else listening.max_batches
    while log.counts.num_batches < max_batches and not log.is_full and (left_s := end_s - clock()) > 0:
        parts = subscriber.receive(min(POLL_S, left_s))
        if parts is not None:
            yield parts
