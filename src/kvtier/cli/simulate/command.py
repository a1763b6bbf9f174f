"""``kvtier simulate TRACE``: how much would host memory and tiers help this traffic, under which policy?

It parses, calls and prints. Everything that can be wrong with the arguments is found before a simulation begins.
"""

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.cli.option_names import said_of
from kvtier.cli.simulate import arguments
from kvtier.cli.simulate.comparison import Comparison
from kvtier.cli.simulate.options import (
    TRACE_OPTIONS,
    blocks_of,
    make_engine,
    make_host,
    parse_load_if,
    parse_tier,
    split_names,
    take_first,
)
from kvtier.cli.simulate.output import Outputs
from kvtier.cli.simulate.sweep_option import parse_sweep
from kvtier.cli.simulate.table import print_comparison
from kvtier.cli.simulate.tier_setting import apply_tier_settings
from kvtier.cli.tables import make_console
from kvtier.errors import ConfigError
from kvtier.sim.formats.registry import read_trace
from kvtier.sim.results import Simulation
from kvtier.sim.sweep import Case, plan_cases, run_cases
from kvtier.sim.trace import Trace

NOTHING_SERVED_STATUS = 1


def simulate(
    context: typer.Context,
    trace_file: arguments.TraceFile,
    trace_format: arguments.TraceFormat = None,
    device: arguments.Device = "64GiB",
    host: arguments.Host = "512GiB",
    tier: arguments.Tiers = None,
    tier_setting: arguments.TierSettings = None,
    policy: arguments.Policies = "lru",
    store_threshold: arguments.StoreThreshold = 0,
    load_if: arguments.LoadIfText = "always",
    sweep: arguments.SweepText = None,
    kv_bytes: arguments.KVBytes = "128KiB",
    prefill: arguments.Prefill = 20_000.0,
    decode: arguments.Decode = 40.0,
    max_running: arguments.MaxRunning = 64,
    requests: arguments.Requests = None,
    jobs: arguments.Jobs = 1,
    json_file: arguments.JSONFile = None,
    html_file: arguments.HTMLFile = None,
) -> None:
    """Replay a request trace through kvtier's own managers on simulated time, once without and once per policy.

    Exit status 1 when no request could be served.

    Raises:
        ConfigError: a value that cannot work.
        TraceError: the trace cannot be read.
    """
    if jobs < 1:
        raise ConfigError("--jobs", jobs, "must be at least 1")
    with said_of(TRACE_OPTIONS):
        trace = take_first(read_trace(trace_file, trace_format), requests)
    engine = make_engine(
        trace, device=device, kv_size=kv_bytes, max_running=max_running, prefill=prefill, decode=decode
    )
    policies = split_names(policy)
    tiers = [parse_tier(text, engine.block_bytes) for text in tier or ()]
    base = make_host(
        policies,
        blocks_of("--host", host, engine.block_bytes),
        apply_tier_settings(tiers, tier_setting or (), engine.block_bytes),
        store_threshold,
        parse_load_if(load_if),
    )
    swept = parse_sweep(sweep, engine.block_bytes) if sweep else None
    with said_of({"place to sweep": "--sweep"}):
        cases = plan_cases(engine, base, policies, swept)
    outputs = Outputs(json_file, html_file, command_line(context))
    outputs.check_writable()
    progress = Console(stderr=True)
    found = run_all(trace, cases, jobs, progress)
    comparison = Comparison(str(trace_file), trace, engine, base, swept, tuple(cases), tuple(found))
    print_comparison(comparison, make_console())
    with progress.status("writing"):
        outputs.write(comparison)
    if not any(one.total.num_requests for one in found):
        raise typer.Exit(NOTHING_SERVED_STATUS)


def command_line(context: typer.Context) -> tuple[str, ...]:
    """Return the words that were given, as a user would write them again."""
    words = ["kvtier", "simulate"]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        source = context.get_parameter_source(parameter.name or "")
        if source is None or source.name != "COMMANDLINE" or value is None:
            continue
        for one in value if isinstance(value, list | tuple) else [value]:
            is_option = parameter.opts[0].startswith("-")
            words += [parameter.opts[0], str(one)] if is_option else [str(one)]
    return tuple(words)


def run_all(trace: Trace, cases: list[Case], num_processes: int, console: Console) -> list[Simulation]:
    """Simulate each case under one progress bar and return the results in order."""
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{len(cases)} simulations", total=len(cases) * len(trace.requests))

        def note(case: Case, num_requests: int) -> None:
            progress.update(task, advance=num_requests, description=case.label)

        return run_cases(trace, cases, num_processes=num_processes, on_requests=note)
