"""``kvtier simulate``: replay a trace with several policies and sizes, print a comparison and write its files."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from kvtier.cli.simulate.machine import EngineOptions, HostOptions, make_machine
from kvtier.cli.simulate.options import parse_sweep
from kvtier.cli.simulate.report.page import make_page
from kvtier.cli.simulate.table import print_comparison
from kvtier.cli.simulate.verdict import make_verdict
from kvtier.cli.traces import Reading, choose_memory, open_trace
from kvtier.errors import ConfigError
from kvtier.sim.results import Simulation
from kvtier.sim.sweep import Case, plan_cases, run_cases
from kvtier.sim.trace import Trace

NOTHING_SERVED_STATUS = 1


def simulate(
    context: typer.Context,
    trace_file: traces.TraceFile = None,
    trace_format: traces.TraceFormat = None,
    block_tokens: traces.BlockTokens = None,
    time_unit: traces.TimeUnit = None,
    example: traces.Example = None,
    seed: traces.Seed = 0,
    device: options.Device = None,
    host: options.Host = None,
    tier: options.Tiers = None,
    tier_setting: options.TierSettings = None,
    policy: options.Policies = options.DEFAULT_POLICY,
    store_threshold: options.StoreThreshold = 0,
    load_if: options.LoadIfText = options.DEFAULT_LOAD_IF,
    hints: options.Hints = options.DEFAULT_HINTS,
    hint_noise: options.HintNoiseText = "",
    sweep: options.SweepText = None,
    kv_bytes: options.KVBytes = options.DEFAULT_KV_BYTES,
    state_bytes: options.StateBytes = None,
    state_interval: options.StateInterval = None,
    prefill: options.Prefill = None,
    decode: options.Decode = options.DEFAULT_DECODE,
    max_running: options.MaxRunning = options.DEFAULT_MAX_RUNNING,
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
    trace_name, trace = open_trace(
        trace_file, Reading(trace_format, block_tokens, time_unit), example, seed, requests
    )
    device_size, host_size = choose_memory(example, device, host)
    engine_options = EngineOptions(
        device_size, kv_bytes, max_running, prefill, decode, state_bytes, state_interval
    )
    host_options = HostOptions(
        host_size, tier, tier_setting, policy, store_threshold, load_if, hints, hint_noise
    )
    trace, engine, base = make_machine(trace, engine_options, host_options)
    swept = parse_sweep(sweep, engine.block_bytes) if sweep else None
    with naming_options({"place to sweep": "--sweep"}):
        cases = plan_cases(engine, base, host_options.policies, swept)
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
    print_comparison(comparison, make_console(is_stderr=outputs.are_numbers_printed))
    with progress.status("writing"):
        outputs.write(partial(to_json, comparison), partial(make_page, comparison))


def to_json(comparison: Comparison) -> dict[str, Any]:  # Any: JSON
    """Return inputs, verdict and results as JSON objects. Pure."""
    verdict = make_verdict(comparison).to_json()
    return {**comparison.inputs_to_json(), "verdict": verdict, **comparison.results_to_json()}


def run_all(trace: Trace, cases: list[Case], num_processes: int, console: Console) -> list[Simulation]:
    """Simulate each case under one progress bar and return the results in order."""
    title = f"{len(cases)} simulations"
    with show_progress(title, len(cases) * len(trace.requests), console) as advance:

        def note(case: Case, num_requests: int) -> None:
            advance(num_requests, case.label)

        return run_cases(trace, cases, num_processes=num_processes, on_requests=note)


@contextmanager
def show_progress(
    title: str, num_requests: int, console: Console
) -> Iterator[Callable[[int, str | None], None]]:
    """Show a bar of requests, and yield what moves it on by so many, under another title where one is given."""
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=num_requests)

        def advance(num_ended: int, description: str | None) -> None:
            progress.update(task, advance=num_ended, description=description)

        yield advance
