"""``kvtier record OUT --kv-events ENDPOINT``: writes what a running vLLM publishes until it is told to end."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier.cli.demo.signals import ended_like_interrupted
from kvtier.cli.record.event_batch import decode_batch
from kvtier.cli.record.event_log import EventLog
from kvtier.cli.record.subscriber import Subscriber
from kvtier.connector.trace_file import TraceFile
from kvtier.connector.trace_salt import TraceSalt
from kvtier.errors import ConfigError, EventMessageError

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
) -> EventLog:
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
    log = EventLog(file, salt)
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


def describe_log(log: EventLog, path: Path) -> Iterator[str]:
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


def describe_silence(log: EventLog, listening: Listening) -> str:
    """Return what the user should know of a log without a batch. Pure."""
    if log.is_full:
        return "nothing is recorded: the first batch is larger than --max-size"
    return (
        f"nothing was heard from {listening.endpoint}, nothing is recorded: an engine publishes when it is asked "
        "something, and was started with --kv-events-config '{\"enable_kv_cache_events\": true, ...}'"
    )


def _hear(
    listening: Listening, log: EventLog, tell: Callable[[str], object], clock: Callable[[], float]
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
    subscriber: Subscriber, listening: Listening, log: EventLog, clock: Callable[[], float]
) -> Iterator[list[bytes]]:
    """Yield messages until the log has what was asked for or the time is over."""
    end_s = float("inf") if listening.max_s is None else clock() + listening.max_s
    max_batches = float("inf") if listening.max_batches is None else listening.max_batches
    while log.counts.num_batches < max_batches and not log.is_full and (left_s := end_s - clock()) > 0:
        parts = subscriber.receive(min(POLL_S, left_s))
        if parts is not None:
            yield parts
