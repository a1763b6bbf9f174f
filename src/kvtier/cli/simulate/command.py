"""``kvtier simulate TRACE``: how much would host memory and tiers help this traffic, under which policy?

It parses, calls and prints. Everything that can be wrong with the arguments is found before a simulation begins.
"""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.cli.simulate.options import (
    TIER_FORM,
    Scenario,
    blocks_of,
    make_engine,
    make_scenarios,
    parse_tier,
    take_first,
)
from kvtier.cli.simulate.table import print_simulations
from kvtier.errors import ConfigError
from kvtier.sim.formats.registry import TRACE_FORMATS, read_trace
from kvtier.sim.model import EngineModel
from kvtier.sim.results import Simulation
from kvtier.sim.simulate import simulate as run_simulation
from kvtier.sim.trace import Trace

NOTHING_SERVED_STATUS = 1

PLAIN_COLUMNS = 200
"""Width where the output is no terminal: rich would take 80 columns there and cut numbers. A program that reads the
rows loses nothing by more; with a handful of tiers they have about 120."""


def simulate(
    trace_file: Annotated[Path, typer.Argument(metavar="TRACE", help="Requests, plain or gzip.")],
    trace_format: Annotated[
        str | None,
        typer.Option("--format", help=f"One of {', '.join(TRACE_FORMATS.names())}; else it is found."),
    ] = None,
    device: Annotated[str, typer.Option(help="Memory of the device cache.")] = "64GiB",
    host: Annotated[str, typer.Option(help="Host memory behind it.")] = "512GiB",
    tier: Annotated[
        list[str] | None, typer.Option(help=f"A tier behind that, any number: {TIER_FORM}.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Eviction policies of host memory, by comma.")] = "lru",
    store_threshold: Annotated[int, typer.Option(help="Accesses before a block is stored.")] = 0,
    kv_bytes: Annotated[
        str,
        typer.Option("--kv-bytes-per-token", help="Keys and values of a token, all layers and devices."),
    ] = "128KiB",
    prefill: Annotated[float, typer.Option(help="Prompt tokens computed in a second.")] = 20_000.0,
    decode: Annotated[float, typer.Option(help="Tokens a second of each answer.")] = 40.0,
    max_running: Annotated[int, typer.Option(help="Requests that run at the same time.")] = 64,
    requests: Annotated[int | None, typer.Option(help="Only the first requests of the trace.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers as JSON.")] = None,
) -> None:
    """Replay a request trace through kvtier's own managers on simulated time, once without and once per policy.

    Exit status 1 when no request could be served.

    Raises:
        ConfigError: a value that cannot work.
        TraceError: the trace cannot be read.
    """
    trace = take_first(read_trace(trace_file, trace_format), requests)
    engine = make_engine(
        trace,
        device=device,
        kv_size=kv_bytes,
        max_running=max_running,
        prefill=prefill,
        decode=decode,
    )
    scenarios = make_scenarios(
        [name.strip() for name in policy.split(",") if name.strip()],
        blocks_of("--host", host, engine.block_bytes),
        [parse_tier(text, engine.block_bytes) for text in tier or ()],
        store_threshold,
    )
    if json_file is not None:
        check_writable(json_file)
    found = run_all(trace, engine, scenarios, Console(stderr=True))
    print_simulations(trace, engine, found, make_console())
    if json_file is not None:
        write_json(json_file, found)
    if not any(one.total.num_requests for one in found.values()):
        raise typer.Exit(NOTHING_SERVED_STATUS)


def run_all(
    trace: Trace, engine: EngineModel, scenarios: list[Scenario], console: Console
) -> dict[str, Simulation]:
    """Simulate each scenario under a progress bar of its own and return the results by name."""
    columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found: dict[str, Simulation] = {}
    with Progress(*columns, console=console) as progress:
        for scenario in scenarios:
            task = progress.add_task(scenario.name, total=len(trace.requests))
            found[scenario.name] = run_simulation(
                trace, engine, scenario.host, on_request=partial(progress.advance, task)
            )
    return found


def make_console() -> Console:
    """Return the console of the tables: as wide as the terminal, or wide enough for what is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_COLUMNS)


def check_writable(path: Path) -> None:
    """Open the file of the results before there are any, so that a wrong path costs no simulation.

    Raises:
        ConfigError: it cannot be written. What it holds stays until there are results.
    """
    try:
        path.open("a").close()
    except OSError as error:
        remedy = f"cannot be written ({error.strerror}): give a file in an existing directory"
        raise ConfigError("--json", str(path), remedy) from error


def write_json(path: Path, found: dict[str, Simulation]) -> None:
    """Write the results.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps({name: one.to_json() for name, one in found.items()}, indent=1) + "\n")
    except OSError as error:
        raise ConfigError("--json", str(path), f"cannot be written: {error.strerror}") from error
