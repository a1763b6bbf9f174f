"""``kvtier plan TRACE``: what does this traffic need, and what is the cheapest way to provide it?

All arguments are checked before the first replay.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.cli.option_names import naming_options
from kvtier.cli.output import check_writable, make_console, write_result
from kvtier.cli.plan.options import (
    DEFAULT_DTYPE,
    EngineOptions,
    ModelOptions,
    SearchOptions,
    make_plan_request,
)
from kvtier.cli.plan.tables import print_plan
from kvtier.cli.simulate.options import TRACE_OPTIONS, take_first
from kvtier.planning.assumptions import list_assumptions
from kvtier.planning.plan import Plan, PlanRequest, make_plan
from kvtier.planning.prices import read_prices
from kvtier.sim.formats.registry import TRACE_FORMATS, read_trace

GOAL_MISSED_STATUS = 1


def plan(
    trace_file: Annotated[Path, typer.Argument(metavar="TRACE", help="Requests, plain or gzip.")],
    trace_format: Annotated[
        str | None,
        typer.Option("--format", help=f"One of {', '.join(TRACE_FORMATS.names())}; default: detected."),
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
    hit_ratio: Annotated[float | None, typer.Option(help="Goal: share of blocks found, such as 0.3.")] = None,
    ttft_p90: Annotated[str | None, typer.Option(help="Goal: 90th percentile of TTFT, such as 2s.")] = None,
    prices: Annotated[Path | None, typer.Option(help="Your prices; see docs/guide/plan.md.")] = None,
    media: Annotated[str | None, typer.Option(help="Media to buy from, by comma; default: all.")] = None,
    max_tiers: Annotated[int, typer.Option(help="Tiers behind host memory, at most.")] = 1,
    host_max: Annotated[str | None, typer.Option(help="Host memory that the machine can hold.")] = None,
    policy: Annotated[
        str, typer.Option(help="Eviction policy of host memory, or package.module:Class.")
    ] = "lru",
    device: Annotated[str, typer.Option(help="Memory of the device cache.")] = "64GiB",
    prefill: Annotated[float, typer.Option(help="Prompt tokens computed per second.")] = 20_000.0,
    decode: Annotated[float, typer.Option(help="Tokens per second of each answer.")] = 40.0,
    max_running: Annotated[int, typer.Option(help="Requests that run at the same time.")] = 64,
    gpus: Annotated[int, typer.Option(help="GPUs that reach the prefill rate together.")] = 1,
    requests: Annotated[int | None, typer.Option(help="Only the first requests of the trace.")] = None,
    show: Annotated[int, typer.Option(help="Mixes to show, at most.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers as JSON.")] = None,
) -> None:
    """Report what a request trace needs, and find the cheapest mix of tiers that reaches a goal.

    Without --hit-ratio and --ttft-p90 there is no search. Exit status 1 when no mix reaches the goal.

    Raises:
        ConfigError: a value is not valid.
        TraceError: the trace cannot be read.
    """
    model = ModelOptions(config, layers, kv_heads, head_size, dtype, kv_dtype, kv_bytes)
    serving = EngineOptions(device, prefill, decode, max_running, gpus)
    wanted = SearchOptions(policy, hit_ratio, ttft_p90, media, max_tiers, host_max, show)
    price_list = read_prices(prices)
    with naming_options(TRACE_OPTIONS):
        trace = take_first(read_trace(trace_file, trace_format), requests)
    request = make_plan_request(trace, model, serving, wanted, price_list)
    if json_file is not None:
        check_writable("--json", json_file)
    found = run_plan(request, Console(stderr=True))
    print_plan(request, found, make_console())
    if json_file is not None:
        written = {**found.to_json(), "assumptions": list_assumptions(request)}
        write_result("--json", json_file, json.dumps(written, indent=1) + "\n")
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
