"""What a recording holds, in words. It reads files that are closed and changes nothing."""

from collections.abc import Iterator
from pathlib import Path

from kvtier.connector.trace_file import MAX_NUMBER, numbered
from kvtier.sim.formats.kvtier import KVTierFormat, read_end


def find_recordings(out: Path) -> list[Path]:
    """Return the files of a recording that exist, in the order of their numbers."""
    names = (numbered(out, number) for number in range(1, MAX_NUMBER + 1))
    return [path for path in names if path.exists()]


def is_ended_without_requests(path: Path) -> bool:
    """Return whether an engine has written a recording to its end and was asked nothing that could be in it.

    One without an end may belong to an engine that still runs.

    Raises:
        TraceError: it cannot be read, or its last line is none that kvtier writes.
    """
    end = read_end(path)
    return end is not None and not (end.num_requests or end.num_dropped)


def describe_recording(path: Path) -> Iterator[str]:
    """Yield what the user should know of a recording, and the command that simulates it.

    Raises:
        TraceError: it has not begun, or is damaged.
    """
    num_requests = sum(1 for _ in KVTierFormat.read(path))
    yield f"{num_requests:,} requests are in {path}, blocks of {KVTierFormat.block_tokens_of(path)} tokens"
    end = read_end(path)
    if end is None:
        yield "its engine did not end in order: requests of its last moment may be missing"
    elif end.is_full:
        yield "the file has reached its limit: later requests are not in it"
    if end is not None and end.num_dropped:
        yield f"{end.num_dropped:,} requests were dropped"
    if num_requests:
        yield f"kvtier simulate {path}"
