"""The registry of trace formats, and reading a trace in its format."""

from collections.abc import Callable
from pathlib import Path

from kvtier.errors import ConfigError, TraceError
from kvtier.registry import Registry
from kvtier.sim.formats.base import TraceFormat
from kvtier.sim.formats.lines import LENGTHS_ONLY, read_lines
from kvtier.sim.trace import Trace, TraceRequest, make_trace

TRACE_FORMATS: Registry[type[TraceFormat]] = Registry(
    "trace format",
    {
        "mooncake": "kvtier.sim.formats.mooncake:MooncakeFormat",
        "qwen_bailian": "kvtier.sim.formats.qwen_bailian:QwenBailianFormat",
        "kvtier": "kvtier.sim.formats.kvtier:KVTierFormat",
        "kv_events": "kvtier.sim.formats.kv_events:KVEventsFormat",
    },
)
"""Add your own format with ``TRACE_FORMATS.register("mine", "package.module:MyFormat")``."""


TIME_UNITS_S = {"s": 1.0, "ms": 0.001}


def read_trace(
    path: Path,
    name: str | None = None,
    on_request: Callable[[], object] | None = None,
    *,
    block_tokens: int | None = None,
    time_unit: str | None = None,
) -> Trace:
    """Read a trace.

    Args:
        path: the file, plain or compressed with gzip or zstd.
        name: its format; None: the first registered one that recognises the first line.
        on_request: called after each request, for a progress bar.
        block_tokens: prompt tokens that one id stands for; None: what the file or else its format says.
        time_unit: "s" or "ms", the unit of its times; None: what its format says.

    Raises:
        ConfigError: the file says another block size, or a value is not valid or not the reader's choice.
        TraceError: the file cannot be read, is of no known format, has an invalid line, or no request.
        UnknownNameError: the format does not exist.
    """
    format_class = TRACE_FORMATS.resolve(name or detect_format(path))
    size, unit_s = _choose_layout(path, format_class, block_tokens, time_unit)
    requests: list[TraceRequest] = []
    for request in format_class.read(path, size, unit_s):
        requests.append(request)
        if on_request is not None:
            on_request()
    if not requests:
        raise TraceError(path, None, "no request", "the trace is empty: give one with at least one request")
    return make_trace(requests, size)


def _choose_layout(
    path: Path, format_class: type[TraceFormat], block_tokens: int | None, time_unit: str | None
) -> tuple[int, float | None]:
    """Return the tokens of a block, and the seconds of a unit of time where one was named.

    Raises:
        ConfigError: the file says another size, or a value is not valid or not the reader's choice.
    """
    if block_tokens is not None and block_tokens < 1:
        raise ConfigError("block_tokens", block_tokens, "must be an integer from 1")
    own_size = format_class.block_tokens_of(path)
    if own_size is not None and block_tokens not in (None, own_size):
        raise ConfigError(
            "block_tokens", block_tokens, f"the file says blocks of {own_size} tokens: leave it out"
        )
    if time_unit is not None and time_unit not in TIME_UNITS_S:
        raise ConfigError("time_unit", time_unit, f"must be {' or '.join(TIME_UNITS_S)}")
    if time_unit is not None and format_class.time_unit_s is None:
        raise ConfigError("time_unit", time_unit, "this format has one unit of time: leave it out")
    unit_s = None if time_unit is None else TIME_UNITS_S[time_unit]
    return own_size or block_tokens or format_class.block_tokens, unit_s


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
    if not {"hash_ids", "events"} & line.values.keys() and len(line.values) > 1:
        raise line.fail(sorted(line.values), f"the file {LENGTHS_ONLY}")
    known = ", ".join(TRACE_FORMATS.names())
    raise line.fail(sorted(line.values), f"the format is not recognised, known are {known}: name one of them")
