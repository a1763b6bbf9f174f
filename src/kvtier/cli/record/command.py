"""``kvtier record``: run a command with recording on, or listen to vLLM's KV events; then describe the recording."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import typer

from kvtier.cli.output import STDERR_FD, JsonOption, print_json
from kvtier.cli.record.child import run_command
from kvtier.config import TRACE_VARIABLE
from kvtier.errors import ConfigError, TraceError
from kvtier.quantities import parse_capacity
from kvtier.recording.recorder import (
    MAX_BYTES_VARIABLE,
    MIN_BYTES,
    SALT_FILE_VARIABLE,
)
from kvtier.recording.trace_file import MAX_NUMBER, TraceFile, numbered
from kvtier.recording.trace_line import TraceEnd
from kvtier.recording.trace_salt import draw_salt, read_salt_file
from kvtier.sim.formats.kvtier import KVTierFormat, read_end

DEFAULT_MAX_SIZE = "1GiB"
"""The default of the recorder."""

NOTHING_RECORDED_STATUS = 1

FileReport = dict[str, str | int | None]
"""What ``--json`` says of a file that was recorded."""


def find_recordings(out: Path) -> list[Path]:
    """Return the existing files of a recording, in the order of their numbers."""
    names = (numbered(out, number) for number in range(1, MAX_NUMBER + 1))
    return [path for path in names if path.exists()]


def is_ended_without_requests(path: Path) -> bool:
    """Return whether a recording is complete and has no request.

    A recording without an end line may belong to an engine that still runs.

    Raises:
        TraceError: it cannot be read, or its last line is not one of kvtier's.
    """
    end = read_end(path)
    return end is not None and not (end.num_requests or end.num_dropped)


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording of one engine.

    Attributes:
        path: the file.
        num_requests: requests in it.
        block_tokens: tokens of a block.
        end: its last line; None: its engine did not end in order.
    """

    path: Path
    num_requests: int
    block_tokens: int
    end: TraceEnd | None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a recording.

        Raises:
            TraceError: it has not begun, or is damaged.
        """
        block_tokens = KVTierFormat.block_tokens_of(path)
        num_requests = sum(1 for _ in KVTierFormat.read(path, block_tokens, None))
        return cls(path, num_requests, block_tokens, read_end(path))

    def describe(self) -> Iterator[str]:
        """Yield a description for the user, and the command that simulates it."""
        yield f"{self.num_requests:,} requests are in {self.path}, blocks of {self.block_tokens} tokens"
        if self.end is None:
            yield "its engine did not end in order: the last requests may be missing"
        elif self.end.is_full:
            yield "the file has reached its limit: later requests are not in it"
        if self.end is not None and self.end.num_dropped:
            yield f"{self.end.num_dropped:,} requests were dropped"
        if self.num_requests:
            yield f"kvtier simulate {self.path}"

    def to_json(self) -> FileReport:
        """Return the same for programs."""
        return {
            "path": str(self.path),
            "requests": self.num_requests,
            "block_tokens": self.block_tokens,
            "has_end": self.end is not None,
            "is_full": self.end is not None and self.end.is_full,
            "dropped": None if self.end is None else self.end.num_dropped,
        }


def record(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new file; gzip if it ends in .gz.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND ...", help="Command that starts an engine with kvtier."),
    ] = None,
    kv_events: Annotated[
        str | None,
        typer.Option("--kv-events", metavar="ENDPOINT", help="Listen to vLLM's KV events instead."),
    ] = None,
    bind: Annotated[bool, typer.Option("--bind", help="vLLM connects to ENDPOINT.")] = False,
    seconds: Annotated[float | None, typer.Option(min=0, help="Stop after this time.")] = None,
    batches: Annotated[int | None, typer.Option(min=1, help="Stop after this many batches.")] = None,
    max_size: Annotated[str, typer.Option(help="Size limit of OUT.")] = DEFAULT_MAX_SIZE,
    salt_file: Annotated[
        Path | None, typer.Option(help="Secret that salts the ids; default: random and not kept.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Record the requests of a running engine: time, lengths, shared blocks. No text, salted ids.

    Runs COMMAND with recording on in each of its kvtier connectors and returns its exit status, or 1 when nothing was
    recorded. With --kv-events it listens to a running vLLM until Ctrl-C. With --json the output of COMMAND goes to
    stderr, and stdout has the exit status and each file that was recorded.

    Raises:
        ConfigError: an argument is not valid.
    """
    if (kv_events is None) == (not command):
        raise ConfigError("record", str(out), "give either -- COMMAND ... or --kv-events ENDPOINT")
    if kv_events is None and (bind or seconds is not None or batches is not None):
        raise ConfigError("record", str(out), "--bind, --seconds and --batches go with --kv-events")
    max_bytes = parse_capacity("--max-size", max_size)
    if max_bytes < MIN_BYTES:
        raise ConfigError("--max-size", max_size, f"must be at least {MIN_BYTES}: no request would fit")
    out = out.absolute()
    _require_new(out)
    status, files = (
        _run(out, command or [], max_bytes, salt_file, stdout=STDERR_FD if as_json else None)
        if kv_events is None
        else _listen(out, kv_events, max_bytes, salt_file, is_bound=bind, seconds=seconds, batches=batches)
    )
    if as_json:
        print_json({"status": status, "files": files})
    raise typer.Exit(status)


def _require_new(out: Path) -> None:
    if os.path.lexists(out):
        raise ConfigError("OUT", str(out), "exists: name a new file, or move it away")
    if not (out.parent.is_dir() and os.access(out.parent, os.W_OK)):
        remedy = "cannot be created: name a file in an existing folder that is writable"
        raise ConfigError("OUT", str(out), remedy)


def _run(
    out: Path, command: list[str], max_bytes: int, salt_file: Path | None, *, stdout: int | None
) -> tuple[int, list[FileReport]]:
    variables = {TRACE_VARIABLE: str(out), MAX_BYTES_VARIABLE: str(max_bytes)}
    if salt_file is not None:
        read_salt_file(salt_file)
        variables[SALT_FILE_VARIABLE] = str(salt_file.absolute())
    before = find_recordings(out)
    status = run_command(command, {**os.environ, **variables}, stdout)
    recordings = [path for path in find_recordings(out) if path not in before]
    files: list[FileReport] = []
    has_trace = False
    for path in recordings:
        try:
            if is_ended_without_requests(path):
                path.unlink()
                _print_line("nothing is recorded: an engine started and ended without a request")
                continue
            recording = Recording.read(path)
            for line in recording.describe():
                _print_line(line)
            files.append(recording.to_json())
            has_trace = True
        except (
            TraceError
        ) as error:  # perhaps of an engine that died at its start; the other recordings may be whole
            _print_line(str(error))
            files.append({"path": str(path), "error": str(error)})
    if not recordings:
        _print_line(
            "nothing is recorded: no engine with a kvtier connector was started, or its record_trace names a file"
        )
    return status or (0 if has_trace else NOTHING_RECORDED_STATUS), files


def _listen(
    out: Path,
    endpoint: str,
    max_bytes: int,
    salt_file: Path | None,
    *,
    is_bound: bool,
    seconds: float | None,
    batches: int | None,
) -> tuple[int, list[FileReport]]:
    # Its libraries are an extra that the other mode does not need.
    from kvtier.cli.record.listening import ListenOptions, describe_empty_log, describe_log, listen

    salt = draw_salt() if salt_file is None else read_salt_file(salt_file)
    try:
        file = TraceFile(out, max_bytes)
    except OSError as error:
        raise ConfigError("OUT", str(out), f"cannot be created: {error.strerror}") from error
    listening = ListenOptions(endpoint, is_bound, seconds, batches)
    try:
        log = listen(listening, file, salt, _print_line)
    except ConfigError as error:
        if error.setting == "--kv-events":
            out.unlink()  # as below
        raise
    if not log.counts.num_batches:
        # An empty file would only make the next attempt fail.
        out.unlink()
        _print_line(describe_empty_log(log, listening))
        return NOTHING_RECORDED_STATUS, []
    for line in describe_log(log, out):
        _print_line(line)
    if log.counts.num_stored_blocks:
        _print_line(f"kvtier simulate {out}")
    status = 0 if log.counts.num_stored_blocks else NOTHING_RECORDED_STATUS
    return status, [{"path": str(out), "is_full": log.is_full, **log.counts.to_json()}]


def _print_line(line: str) -> None:
    typer.echo(f"kvtier: {line}", err=True)
