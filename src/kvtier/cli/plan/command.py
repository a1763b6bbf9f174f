"""``kvtier plan TRACE``: what does this traffic need, and what is the cheapest way to provide it?

All arguments are checked before the first replay.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.cli import traces
from kvtier.cli.output import Outputs, command_line, make_console
from kvtier.cli.plan.options import (
    DEFAULT_DTYPE,
    EngineOptions,
    ModelOptions,
    SearchOptions,
    make_plan_request,
)
from kvtier.cli.plan.page import make_page
from kvtier.cli.plan.run import PlanRun
from kvtier.cli.plan.tables import print_plan
from kvtier.cli.simulate.options import Device, HTMLFile, JSONFile, Prefill, StateBytes, StateInterval
from kvtier.cli.traces import choose_memory, open_trace
from kvtier.planning.plan import Plan, PlanRequest, make_plan
from kvtier.planning.prices import read_prices

EXAMPLE_MODEL = "Llama-3.1-8B"
"""The model of made-up traffic when none is described."""

GOAL_MISSED_STATUS = 1


def plan(
    context: typer.Context,
    trace_file: traces.TraceFile = None,
    trace_format: traces.TraceFormat = None,
    example: traces.Example = None,
    seed: traces.Seed = 0,
    model: Annotated[
        str | None,
        typer.Option(help=f"A well-known model or its folder; default with --example: {EXAMPLE_MODEL}."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="The model's config.json.")] = None,
    layers: Annotated[int | None, typer.Option(help="Or: its number of layers with a KV cache.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Its KV heads.")] = None,
    head_size: Annotated[int | None, typer.Option(help="Numbers in a head.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"Type of keys and values with --layers; default: {DEFAULT_DTYPE}.")
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Type of keys and values, such as fp8.")] = None,
    kv_bytes: Annotated[
        str | None, typer.Option("--kv-bytes-per-token", help="Or: size of a token's keys and values.")
    ] = None,
    state_bytes: StateBytes = None,
    state_interval: StateInterval = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel workers of the engine.")] = 1,
    hit_ratio: Annotated[float | None, typer.Option(help="Goal: share of blocks found, such as 0.3.")] = None,
    ttft_p90: Annotated[str | None, typer.Option(help="Goal: 90th percentile of TTFT, such as 2s.")] = None,
    prices: Annotated[Path | None, typer.Option(help="Your prices; see docs/guide/plan.md.")] = None,
    media: Annotated[str | None, typer.Option(help="Media to buy from, by comma; default: all.")] = None,
    max_tiers: Annotated[int, typer.Option(help="Tiers behind host memory, at most.")] = 1,
    host_max: Annotated[str | None, typer.Option(help="Host memory that the machine can hold.")] = None,
    policy: Annotated[
        str, typer.Option(help="Eviction policy of host memory, or package.module:Class.")
    ] = "lru",
    device: Device = None,
    prefill: Prefill = None,
    decode: Annotated[float, typer.Option(help="Tokens per second of each answer.")] = 40.0,
    max_running: Annotated[int, typer.Option(help="Requests that run at the same time.")] = 64,
    gpus: Annotated[int, typer.Option(help="GPUs that reach the prefill rate together.")] = 1,
    requests: traces.Requests = None,
    show: Annotated[int, typer.Option(help="Mixes to show, at most.")] = 5,
    json_file: JSONFile = None,
    html_file: HTMLFile = None,
) -> None:
    """Report what a request trace needs, and find the cheapest mix of tiers that reaches a goal.

    Without --hit-ratio and --ttft-p90 there is no search. Exit status 1 when no mix reaches the goal.

    Raises:
        ConfigError: a value is not valid.
        TraceError: the trace cannot be read.
    """
    sizes = (kv_bytes, state_bytes, state_interval, tp)
    described = ModelOptions(model, config, layers, kv_heads, head_size, dtype, kv_dtype, *sizes)
    if example is not None and not described.is_given:
        described = replace(described, name=EXAMPLE_MODEL)
    wanted = SearchOptions(policy, hit_ratio, ttft_p90, media, max_tiers, host_max, show)
    trace_name, trace = open_trace(trace_file, trace_format, example, seed, requests)
    device_size, _ = choose_memory(example, device, None)
    serving = EngineOptions(device_size, prefill, decode, max_running, gpus)
    request = make_plan_request(trace, described, serving, wanted, read_prices(prices))
    outputs = Outputs(json_file, html_file)
    outputs.check_writable()
    found = run_plan(request, Console(stderr=True))
    run = PlanRun(request, found, trace_name, command_line(context, "plan"), is_rate_derived=prefill is None)
    print_plan(run, make_console(is_stderr=outputs.are_numbers_printed))
    outputs.write(run.to_json, partial(make_page, run))
    if found.is_reached is False:
        raise typer.Exit(GOAL_MISSED_STATUS)


def run_plan(request: PlanRequest, console: Console) -> Plan:
    """Plan under a progress bar that restarts with each replay."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def begin(what: str) -> Callable[[], object]:
            progress.reset(task, description=what, total=len(request.trace.requests))
            return partial(progress.advance, task)

        return make_plan(request, begin)
