"""The registry of trace formats, and reading a trace in its format."""

from collections.abc import Callable
from pathlib import Path

from kvtier.errors import TraceError
from kvtier.registry import Registry
from kvtier.sim.formats.base import TraceFormat
from kvtier.sim.formats.lines import read_lines
from kvtier.sim.trace import Trace, TraceRequest, make_trace

TRACE_FORMATS: Registry[type[TraceFormat]] = Registry(
    "trace format",
    {
        "shared": "kvtier.sim.formats.shared:SharedFormat",
        "mooncake": "kvtier.sim.formats.mooncake:MooncakeFormat",
        "qwen_bailian": "kvtier.sim.formats.qwen_bailian:QwenBailianFormat",
        "kvtier": "kvtier.sim.formats.kvtier:KVTierFormat",
        "kv_events": "kvtier.sim.formats.kv_events:KVEventsFormat",
    },
)
"""Add your own format with ``TRACE_FORMATS.register("mine", "package.module:MyFormat")``."""


def read_trace(path: Path, name: str | None = None, on_request: Callable[[], object] | None = None) -> Trace:
    """Read a trace.

    Args:
        path: the file, plain or compressed with gzip.
        name: its format; None: the first registered one that recognises the first line.
        on_request: called after each request, for a progress bar.

    Raises:
        TraceError: the file cannot be read, is of no known format, has an invalid line, or no request.
        UnknownNameError: the format does not exist.
    """
    format_class = TRACE_FORMATS.resolve(name or detect_format(path))
    requests: list[TraceRequest] = []
    for request in format_class.read(path):
        requests.append(request)
        if on_request is not None:
            on_request()
    if not requests:
        raise TraceError(path, None, "no request", "the trace is empty: give one with at least one request")
    return make_trace(requests, format_class.block_tokens_of(path))


def detect_format(path: Path) -> str:
    """Return the name of the first format that recognises the first line of ``path``.

    Raises:
        TraceError: the file is empty, or no format recognises it.
    """
    line = next(read_lines(path), None)
    if line is None:
        raise TraceError(path, None, "no line", "the trace is empty: give one with at least one request")
    for name in TRACE_FORMATS.names():
        if TRACE_FORMATS.resolve(name).recognises(line):
            return name
    known = ", ".join(TRACE_FORMATS.names())
    raise line.fail(sorted(line.values), f"the format is not recognised, known are {known}: name one of them")
