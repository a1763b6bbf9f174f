"""``kvtier simulate``: replay a trace with several policies and sizes, print a comparison and write its files."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.cli.option_names import naming_options
from kvtier.cli.output import check_writable, make_console, require_plot, write_result
from kvtier.cli.simulate import options
from kvtier.cli.simulate.comparison import Comparison
from kvtier.cli.simulate.options import (
    TRACE_OPTIONS,
    apply_tier_settings,
    blocks_of,
    make_engine,
    make_host,
    parse_hints,
    parse_load_if,
    parse_sweep,
    parse_tier,
    split_names,
    take_first,
)
from kvtier.cli.simulate.report.page import make_page
from kvtier.cli.simulate.table import print_comparison
from kvtier.errors import ConfigError
from kvtier.sim.formats.registry import read_trace
from kvtier.sim.results import Simulation
from kvtier.sim.sweep import Case, plan_cases, run_cases
from kvtier.sim.trace import Trace

NOTHING_SERVED_STATUS = 1


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files to write.

    Attributes:
        json_file: for the numbers; None: not written.
        html_file: for the page; None: not written.
        command: the words of the command line, for the page.
    """

    json_file: Path | None
    html_file: Path | None
    command: tuple[str, ...]

    def check_writable(self) -> None:
        """Check each file before the simulation, so that a wrong path costs no simulation.

        Raises:
            ConfigError: one cannot be written. Its content is kept until ``write``.
            MissingExtraError: matplotlib, for the plots of the page, is not installed.
        """
        if self.html_file is not None:
            require_plot()
        for option, path in (("--json", self.json_file), ("--html", self.html_file)):
            if path is not None:
                check_writable(option, path)

    def write(self, comparison: Comparison) -> None:
        """Write each file.

        Raises:
            ConfigError: one cannot be written.
        """
        if self.json_file is not None:
            write_result("--json", self.json_file, json.dumps(comparison.to_json(), indent=1) + "\n")
        if self.html_file is not None:
            write_result("--html", self.html_file, make_page(comparison, self.command))


def simulate(
    context: typer.Context,
    trace_file: options.TraceFile,
    trace_format: options.TraceFormat = None,
    device: options.Device = "64GiB",
    host: options.Host = "512GiB",
    tier: options.Tiers = None,
    tier_setting: options.TierSettings = None,
    policy: options.Policies = "lru",
    store_threshold: options.StoreThreshold = 0,
    load_if: options.LoadIfText = "always",
    hints: options.Hints = "none",
    hint_noise: options.HintNoiseText = "",
    sweep: options.SweepText = None,
    kv_bytes: options.KVBytes = "128KiB",
    prefill: options.Prefill = 20_000.0,
    decode: options.Decode = 40.0,
    max_running: options.MaxRunning = 64,
    requests: options.Requests = None,
    jobs: options.Jobs = 1,
    json_file: options.JSONFile = None,
    html_file: options.HTMLFile = None,
) -> None:
    """Replay a request trace through kvtier's own managers on simulated time, once without and once per policy.

    Exit status 1 when no request could be served.

    Raises:
        ConfigError: a value is not valid.
        TraceError: the trace cannot be read.
    """
    if jobs < 1:
        raise ConfigError("--jobs", jobs, "must be at least 1")
    with naming_options(TRACE_OPTIONS):
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
    client_hints, noise = parse_hints(hints, hint_noise)
    base = replace(base, client_hints=client_hints, hint_noise=noise)
    swept = parse_sweep(sweep, engine.block_bytes) if sweep else None
    with naming_options({"place to sweep": "--sweep"}):
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
    """Return the given words as a user would type them again."""
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
