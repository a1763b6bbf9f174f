"""``kvtier simulate``: replay a trace with several policies and sizes, print a comparison and write its files."""

from dataclasses import replace
from functools import partial
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.cli import traces
from kvtier.cli.option_names import naming_options
from kvtier.cli.output import Outputs, command_line, make_console
from kvtier.cli.simulate import options
from kvtier.cli.simulate.comparison import Comparison
from kvtier.cli.simulate.options import (
    apply_tier_settings,
    blocks_of,
    make_engine,
    make_host,
    parse_hints,
    parse_load_if,
    parse_sweep,
    parse_tier,
    split_names,
)
from kvtier.cli.simulate.report.page import make_page
from kvtier.cli.simulate.table import print_comparison
from kvtier.cli.simulate.verdict import make_verdict
from kvtier.cli.traces import choose_memory, open_trace
from kvtier.errors import ConfigError
from kvtier.sim.results import Simulation
from kvtier.sim.sweep import Case, plan_cases, run_cases
from kvtier.sim.trace import Trace

NOTHING_SERVED_STATUS = 1


def simulate(
    context: typer.Context,
    trace_file: traces.TraceFile = None,
    trace_format: traces.TraceFormat = None,
    example: traces.Example = None,
    seed: traces.Seed = 0,
    device: options.Device = None,
    host: options.Host = None,
    tier: options.Tiers = None,
    tier_setting: options.TierSettings = None,
    policy: options.Policies = "lru",
    store_threshold: options.StoreThreshold = 0,
    load_if: options.LoadIfText = "always",
    hints: options.Hints = "none",
    hint_noise: options.HintNoiseText = "",
    sweep: options.SweepText = None,
    kv_bytes: options.KVBytes = "128KiB",
    prefill: options.Prefill = None,
    decode: options.Decode = 40.0,
    max_running: options.MaxRunning = 64,
    requests: traces.Requests = None,
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
    check_jobs(jobs)
    trace_name, trace = open_trace(trace_file, trace_format, example, seed, requests)
    device_size, host_size = choose_memory(example, device, host)
    engine = make_engine(
        trace, device=device_size, kv_size=kv_bytes, max_running=max_running, prefill=prefill, decode=decode
    )
    policies = split_names(policy)
    parsed = [parse_tier(text, engine.block_bytes) for text in tier or ()]
    tiers = apply_tier_settings(parsed, tier_setting or (), engine.block_bytes)
    host_blocks = blocks_of("--host", host_size, engine.block_bytes)
    base = make_host(policies, host_blocks, tiers, store_threshold, parse_load_if(load_if))
    client_hints, noise = parse_hints(hints, hint_noise)
    base = replace(base, client_hints=client_hints, hint_noise=noise)
    swept = parse_sweep(sweep, engine.block_bytes) if sweep else None
    with naming_options({"place to sweep": "--sweep"}):
        cases = plan_cases(engine, base, policies, swept)
    (outputs := Outputs(json_file, html_file)).check_writable()
    found = run_all(trace, cases, jobs, progress := Console(stderr=True))
    comparison = Comparison(
        trace_name,
        trace,
        engine,
        base,
        swept,
        tuple(cases),
        tuple(found),
        command_line(context, "simulate"),
        is_rate_derived=prefill is None,
    )
    show(comparison, outputs, progress)
    if not any(one.total.num_requests for one in found):
        raise typer.Exit(NOTHING_SERVED_STATUS)


def check_jobs(num_processes: int) -> None:
    """Refuse fewer processes than one.

    Raises:
        ConfigError: there are none.
    """
    if num_processes < 1:
        raise ConfigError("--jobs", num_processes, "must be at least 1")


def show(comparison: Comparison, outputs: Outputs, progress: Console) -> None:
    """Print a comparison and write its files."""
    print_comparison(comparison, make_console())
    with progress.status("writing"):
        outputs.write(partial(to_json, comparison), partial(make_page, comparison))


def to_json(comparison: Comparison) -> dict[str, Any]:  # Any: JSON
    """Return inputs, verdict and results as JSON objects. Pure."""
    verdict = make_verdict(comparison).to_json()
    return {**comparison.inputs_to_json(), "verdict": verdict, **comparison.results_to_json()}


def run_all(trace: Trace, cases: list[Case], num_processes: int, console: Console) -> list[Simulation]:
    """Simulate each case under one progress bar and return the results in order."""
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{len(cases)} simulations", total=len(cases) * len(trace.requests))

        def note(case: Case, num_requests: int) -> None:
            progress.update(task, advance=num_requests, description=case.label)

        return run_cases(trace, cases, num_processes=num_processes, on_requests=note)
