"""The traffic of ``kvtier simulate`` and ``kvtier why``: a trace file, or made-up traffic for a beginning."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from kvtier.cli.option_names import naming_options
from kvtier.errors import ConfigError, UnknownNameError
from kvtier.sim.formats.registry import TRACE_FORMATS, read_trace
from kvtier.sim.made_up import make_agents, make_chat
from kvtier.sim.model import BUSY_SHARE, BUSY_STRETCH_S, DEFAULT_PREFILL_TOKENS_PER_S
from kvtier.sim.trace import Trace, make_trace

TRACE_OPTIONS = {"trace format": "--format", "block_tokens": "--block-tokens", "time_unit": "--time-unit"}
"""Names in errors of reading a trace -> the options that set them."""

DEFAULT_DEVICE, DEFAULT_HOST = "64GiB", "512GiB"
"""Memory of the device cache and of the host when nothing is given: a large GPU's, and half of a server's."""


class ExampleTraffic(NamedTuple):
    """Made-up traffic and the memory that its scale asks for.

    Attributes:
        make: makes it from a seed.
        device: memory of the device cache in place of the default.
        host: host memory in place of the default.
    """

    make: Callable[[int], Trace]
    device: str
    host: str


EXAMPLES: Mapping[str, ExampleTraffic] = {
    "chat": ExampleTraffic(make_chat, device="16GiB", host="64GiB"),
    "agents": ExampleTraffic(make_agents, device="48GiB", host="256GiB"),
}
"""By name. An hour of it is less than a busy server has, so its engine has less memory than the default: with that the
device cache alone would find nearly everything."""

TraceFile = Annotated[Path | None, typer.Argument(metavar="[TRACE]", help="Requests, plain, gzip or zstd.")]
TraceFormat = Annotated[
    str | None,
    typer.Option("--format", help=f"One of {', '.join(TRACE_FORMATS.names())}; default: detected."),
]
BlockTokens = Annotated[
    int | None, typer.Option(help="Prompt tokens of a block of the trace; default: its format's.")
]
TimeUnit = Annotated[
    str | None, typer.Option(help="Unit of the trace's times, s or ms; default: its format's.")
]
Example = Annotated[
    str | None, typer.Option(help=f"Made-up traffic instead of a trace: {' or '.join(EXAMPLES)}.")
]
Seed = Annotated[int, typer.Option(help="Seed of --example.")]
Requests = Annotated[int | None, typer.Option(help="Only the first requests of the trace.")]


class Reading(NamedTuple):
    """How to read a trace file, as options say; None: as its format says.

    Attributes:
        format: the format's name; None: detected.
        block_tokens: prompt tokens of a block.
        time_unit: unit of its times.
    """

    format: str | None
    block_tokens: int | None
    time_unit: str | None


def open_trace(
    trace_file: Path | str | None,
    reading: Reading,
    example: str | None,
    seed: int,
    num_requests: int | None,
) -> tuple[str, Trace]:
    """Return a name for users and the requests of a trace file, or of made-up traffic.

    Raises:
        ConfigError: neither a file nor an example is given, or both, or ``num_requests`` is below 1, or a block size
            or a unit of time is not valid.
        UnknownNameError: there is no such example or trace format.
        TraceError: the file cannot be read.
    """
    if (trace_file is None) == (example is None):
        remedy = f"give either a trace file or --example {' or '.join(EXAMPLES)}"
        raise ConfigError("TRACE", None if trace_file is None else str(trace_file), remedy)
    if example is not None:
        if example not in EXAMPLES:
            raise UnknownNameError("traffic for --example", example, EXAMPLES)
        for option, given in {
            "--block-tokens": reading.block_tokens,
            "--time-unit": reading.time_unit,
        }.items():
            if given is not None:
                raise ConfigError(option, given, "is about a trace file: leave it out with --example")
        if seed < 0:
            raise ConfigError("--seed", seed, "must be an integer from 0")
        return f"made-up traffic {example!r}, seed {seed}", take_first(
            EXAMPLES[example].make(seed), num_requests
        )
    assert trace_file is not None, "one of the two is given"
    with naming_options(TRACE_OPTIONS):
        trace = read_trace(
            Path(trace_file), reading.format, block_tokens=reading.block_tokens, time_unit=reading.time_unit
        )
    return str(trace_file), take_first(trace, num_requests)


def choose_memory(example: str | None, device: str | None, host: str | None) -> tuple[str, str]:
    """Return the sizes of device cache and host memory: as given, else of the example, else the defaults. Pure."""
    found = None if example is None else EXAMPLES[example]
    return device or (found.device if found else DEFAULT_DEVICE), host or (
        found.host if found else DEFAULT_HOST
    )


def describe_rate(tokens_per_s: float) -> str:
    """Return how the rate of computing prompts was derived, in a sentence. Pure."""
    at_most = "at most " if tokens_per_s == DEFAULT_PREFILL_TOKENS_PER_S else ""
    return (
        f"{tokens_per_s:,.0f} tokens a second, derived from the trace: without any cache the engine would compute for "
        f"{at_most}{BUSY_SHARE:.0%} of the busiest {BUSY_STRETCH_S / 60:.0f} minutes; --prefill sets what yours reaches"
    )


def take_first(trace: Trace, num_requests: int | None) -> Trace:
    """Return the first requests of ``trace``; None: all. Pure.

    Raises:
        ConfigError: ``num_requests`` is below 1.
    """
    if num_requests is None:
        return trace
    if num_requests < 1:
        raise ConfigError("--requests", num_requests, "must be at least 1")
    return make_trace(trace.requests[:num_requests], trace.block_tokens)
