"""The format of traces that kvtier records from a running engine, with ids of any block size.

The lines are those of ``kvtier.recording.trace_line``. The file of an engine that was killed may end within a line: the
lines before it are read. Lines are in the order in which requests ended; a trace is sorted by arrival when it is read.
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path

from kvtier.errors import RecordError, TraceError
from kvtier.misses import RequestRecord
from kvtier.recording.trace_line import END_MARK, TRACE_MARK, VERSION, TraceEnd, TraceHeader
from kvtier.sim.formats.base import PrefixChain, TraceFormat
from kvtier.sim.formats.lines import Line, read_lines
from kvtier.sim.formats.mooncake import MS, read_request
from kvtier.sim.trace import TraceRequest


class KVTierFormat(TraceFormat):
    """A header with the block size, a line per request, and an end line if the recording ended in order."""

    block_tokens = 16

    @staticmethod
    def recognises(line: Line) -> bool:
        return TRACE_MARK in line.values

    @classmethod
    def read(cls, path: Path, block_tokens: int, time_unit_s: float | None) -> Iterator[TraceRequest]:
        lines, chain = read_lines(path, may_be_cut=True), PrefixChain()
        _read_header(path, lines)
        for line in lines:
            if END_MARK not in line.values:
                yield read_request(line, block_tokens, chain, time_unit_s or MS)

    @classmethod
    def block_tokens_of(cls, path: Path) -> int:
        return _read_header(path, read_lines(path, may_be_cut=True)).block_tokens


def read_records(path: Path) -> Iterator[RequestRecord]:
    """Yield where the prompt of each request came from, in the order in which they ended.

    A recording has no names of requests: they are called by the numbers of their lines. A request without a record, of
    an older recording or never computed, is left out.

    Raises:
        TraceError: the file cannot be read, or a record is not one.
    """
    lines = read_lines(path, may_be_cut=True)
    _read_header(path, lines)
    for line in lines:
        if END_MARK in line.values or "missed" not in line.values:
            continue
        values = {
            "req_id": f"line {line.number}",
            "began_s": line.seconds("timestamp", unit_s=MS),
            "prompt_tokens": line.whole("input_length"),
            "origins": line.values.get("origins"),
            "missed": line.values["missed"],
            "waited_s": line.seconds("waited", unit_s=MS),
        }
        try:
            yield RequestRecord.from_json(values)
        except RecordError as error:
            raise line.fail(line.values["missed"], f"where the prompt came from: {error.reason}") from error


def read_end(path: Path) -> TraceEnd | None:
    """Return the end line of a recording; None when the recording did not end in order.

    Raises:
        TraceError: the file cannot be read, or its last line is not one of kvtier's.
    """
    lines = deque(read_lines(path, may_be_cut=True), maxlen=1)
    if not lines or END_MARK not in lines[0].values:
        return None
    last = lines[0]
    return TraceEnd(last.whole("requests"), last.whole("dropped"), last.values.get("is_full") is True)


def _read_header(path: Path, lines: Iterator[Line]) -> TraceHeader:
    header = next(lines, None)
    if header is None:
        raise TraceError(path, None, "no line", "the recording has not begun: give one with a request")
    if header.whole(TRACE_MARK) != VERSION:
        remedy = f"this is version {VERSION} of the format: read it with the kvtier that wrote it"
        raise header.fail(header.values[TRACE_MARK], remedy)
    block_tokens = header.whole("block_tokens")
    if block_tokens < 1:
        raise header.fail(block_tokens, "block_tokens must be at least 1")
    return TraceHeader(block_tokens)
