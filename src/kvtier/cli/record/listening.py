"""Hears what vLLM publishes about its KV blocks, over ZeroMQ.

It decodes nothing. vLLM listens itself where its endpoint has a wildcard, and connects where it is a plain address; the
subscriber does the other thing.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from kvtier.cli.demo.signals import ended_like_interrupted
from kvtier.cli.record.event_log import KVEventLog, decode_batch
from kvtier.errors import ConfigError, EventMessageError
from kvtier.recording.trace_file import TraceFile
from kvtier.recording.trace_salt import TraceSalt

MAX_MESSAGE_BYTES = 256 * 2**20
"""Of one step's events. Larger ones are no publisher's; a peer that sends them is cut off."""

MAX_QUEUED_MESSAGES = 10_000
"""Batches that wait here while the disk is slow; what comes beyond is lost, and counted as missing."""


class Subscriber:
    """A socket that hears one endpoint, as a context manager.

    Args:
        endpoint: such as ``tcp://127.0.0.1:5557``.
        is_bound: whether to listen there and let vLLM connect.

    Raises:
        ConfigError: there is no such endpoint.
    """

    def __init__(self, endpoint: str, *, is_bound: bool) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            (self._socket.bind if is_bound else self._socket.connect)(endpoint)
        except zmq.ZMQError as error:
            self.close()
            remedy = f"cannot be {'listened on' if is_bound else 'connected to'} ({error.strerror})"
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


POLL_S = 0.5
"""How often the end is looked for while nothing is heard."""


@dataclass(frozen=True, slots=True)
class Listening:
    """What to hear.

    Attributes:
        endpoint: vLLM's publisher.
        is_bound: whether vLLM connects to it.
        max_s: ends after so many seconds; None goes on.
        max_batches: ends after so many batches; None goes on.
    """

    endpoint: str
    is_bound: bool
    max_s: float | None
    max_batches: int | None


def listen(
    listening: Listening,
    file: TraceFile,
    salt: TraceSalt,
    tell: Callable[[str], object],
    clock: Callable[[], float] = time.monotonic,
) -> KVEventLog:
    """Write batches until a limit is reached or the user interrupts; return the log, which is closed.

    Args:
        listening: what to hear, and how long.
        file: where to.
        salt: makes the ids.
        tell: takes a line for the user.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the endpoint is none, or the disk is full.
    """
    log = KVEventLog(file, salt)
    try:
        try:
            _hear(listening, log, tell, clock)
        except KeyboardInterrupt:
            tell("interrupted")
        finally:
            log.close()
    except OSError as error:
        raise ConfigError("OUT", str(file.path), f"cannot be written: {error.strerror}") from error
    return log


def describe_log(log: KVEventLog, path: Path) -> Iterator[str]:
    """Yield what the user should know of a log. Pure."""
    counts = log.counts
    yield f"{counts.num_batches:,} batches with {counts.num_stored_blocks:,} stored blocks are in {path}"
    if log.is_full:
        yield "the file has reached its limit: later batches are not in it"
    if counts.first_sequence:
        yield f"the first batch heard is number {counts.first_sequence:,}: what came before is not in the log"
    if counts.num_missing_batches:
        yield f"{counts.num_missing_batches:,} batches were published in between and not heard"
    if counts.num_restarts:
        yield f"the publisher began anew {counts.num_restarts} times"
    if counts.num_foreign_batches:
        yield f"{counts.num_foreign_batches:,} batches of other replicas than {counts.rank} are left out"
    if counts.num_left_out_events:
        yield f"{counts.num_left_out_events:,} events of unknown kind or shape are left out"


def describe_silence(log: KVEventLog, listening: Listening) -> str:
    """Return what the user should know of a log without a batch. Pure."""
    if log.is_full:
        return "nothing is recorded: the first batch is larger than --max-size"
    return (
        f"nothing was heard from {listening.endpoint}, nothing is recorded: an engine publishes when it is asked "
        "something, and was started with --kv-events-config '{\"enable_kv_cache_events\": true, ...}'"
    )


def _hear(
    listening: Listening, log: KVEventLog, tell: Callable[[str], object], clock: Callable[[], float]
) -> None:
    with (
        Subscriber(listening.endpoint, is_bound=listening.is_bound) as subscriber,
        ended_like_interrupted(),
    ):
        tell(f"listening to {listening.endpoint}; Ctrl-C ends the recording")
        for parts in _messages(subscriber, listening, log, clock):
            try:
                log.take(decode_batch(parts))
            except EventMessageError as error:
                tell(str(error))


def _messages(
    subscriber: Subscriber, listening: Listening, log: KVEventLog, clock: Callable[[], float]
) -> Iterator[list[bytes]]:
    """Yield messages until the log has what was asked for or the time is over."""
    end_s = float("inf") if listening.max_s is None else clock() + listening.max_s
    max_batches = float("inf") if listening.max_batches is None else listening.max_batches
    while log.counts.num_batches < max_batches and not log.is_full and (left_s := end_s - clock()) > 0:
        parts = subscriber.receive(min(POLL_S, left_s))
        if parts is not None:
            yield parts
