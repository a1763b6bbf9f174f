"""``kvtier why``: where prompts came from, why the rest was computed, and what to do.

It reads the latest requests of a running engine, or those of a recording, or it simulates a trace and takes
its records.
"""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvtier import __version__
from kvtier.cli import traces
from kvtier.cli.output import command_line, make_table
from kvtier.cli.place.options import parse_duration
from kvtier.cli.simulate import options
from kvtier.cli.simulate.command import show_progress
from kvtier.cli.simulate.machine import EngineOptions, HostOptions, make_machine
from kvtier.cli.traces import Reading, choose_memory, open_trace
from kvtier.errors import ConfigError, UnknownNameError
from kvtier.input_files import is_file
from kvtier.misses import RequestRecord
from kvtier.observe.audit import explain_audit
from kvtier.observe.control import MAX_RECORDS
from kvtier.observe.control_client import EngineConnection, choose_instance
from kvtier.observe.control_client import read_records as read_engine_records
from kvtier.observe.why import Situation, WhyReport, explain_records
from kvtier.sim.formats.kvtier import read_records
from kvtier.sim.simulate import simulate
from kvtier.sim.trace import Trace

NUM_NAMED = 3
"""Requests that are named where none has the id that was asked for."""

OWN_PARAMETERS = frozenset({"source", "is_json", "is_simulated", "since", "request"})
"""Parameters of the command that have a meaning without ``--simulate``."""


Since = Annotated[
    str | None,
    typer.Option(
        help="Only requests that began within this time before the last one, such as 10m.", show_default=False
    ),
]
RequestId = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Only requests whose id is this or begins with it.", show_default=False),
]


def why(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID | TRACE]",
            help="An engine, by its instance or process id, or a recording of kvtier (record_trace). "
            "Not needed where one engine runs. With --simulate any trace.",
            show_default=False,
        ),
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    is_simulated: Annotated[
        bool,
        typer.Option(
            "--simulate", help="Simulate a trace, and explain that; the options below are kvtier simulate's."
        ),
    ] = False,
    since: Since = None,
    request: RequestId = None,
    trace_format: traces.TraceFormat = None,
    block_tokens: traces.BlockTokens = None,
    time_unit: traces.TimeUnit = None,
    example: traces.Example = None,
    seed: traces.Seed = 0,
    device: options.Device = None,
    host: options.Host = None,
    tier: options.Tiers = None,
    tier_setting: options.TierSettings = None,
    policy: Annotated[
        str, typer.Option(help="Eviction policy of host memory; also package.module:Class.")
    ] = options.DEFAULT_POLICY,
    store_threshold: options.StoreThreshold = 0,
    load_if: options.LoadIfText = options.DEFAULT_LOAD_IF,
    hints: options.Hints = options.DEFAULT_HINTS,
    hint_noise: options.HintNoiseText = "",
    kv_bytes: options.KVBytes = options.DEFAULT_KV_BYTES,
    state_bytes: options.StateBytes = None,
    state_interval: options.StateInterval = None,
    prefill: options.Prefill = None,
    decode: options.Decode = options.DEFAULT_DECODE,
    max_running: options.MaxRunning = options.DEFAULT_MAX_RUNNING,
    requests: traces.Requests = None,
) -> None:
    """Say why prompt tokens were computed, and what to do about it.

    Exit status 1 when nothing is known: no engine runs, or no request has begun.

    Raises:
        ControlError: several engines run and none is named, or the engine cannot be reached.
        UnknownNameError: there is neither such an engine nor such a file.
        TraceError: the recording or the trace cannot be read.
        ConfigError: a value of the simulation is not valid, or is given without ``--simulate``.
    """
    if is_simulated:
        name, trace = open_trace(
            source, Reading(trace_format, block_tokens, time_unit), example, seed, requests
        )
        device, host = choose_memory(example, device, host)
        engine = EngineOptions(device, kv_bytes, max_running, prefill, decode, state_bytes, state_interval)
        memory = HostOptions(host, tier, tier_setting, policy, store_threshold, load_if, hints, hint_noise)
        report = explain_simulation(name, trace, engine, memory, ChosenRequests(since, request))
    else:
        require_simulation(context)
        report = explain_source(source, ChosenRequests(since, request))
    show(report, command_line(context, "why"), is_json=is_json)
    if not report.num_requests:
        raise typer.Exit(1)


class ChosenRequests:
    """Which requests a report is about.

    Args:
        since: a time such as "10m", before the last request; None: all.
        request: what their ids begin with; None: all.

    Raises:
        ConfigError: ``since`` is no time.
    """

    def __init__(self, since: str | None = None, request: str | None = None) -> None:
        self._since_s = None if since is None else parse_duration("--since", since)
        self._request = request

    def choose(self, records: Sequence[RequestRecord]) -> Sequence[RequestRecord]:
        """Return those of ``records``.

        Raises:
            UnknownNameError: none has the id; the message names the last ones.
        """
        if self._since_s is not None and records:
            begin_s = max(record.began_s for record in records) - self._since_s
            records = [record for record in records if record.began_s >= begin_s]
        if self._request is None or not records:
            return records
        chosen = [record for record in records if record.req_id.startswith(self._request)]
        if not chosen:
            latest = [record.req_id for record in records[-NUM_NAMED:]]
            raise UnknownNameError("request", self._request, latest)
        return chosen


def show(report: WhyReport, command: Sequence[str], *, is_json: bool) -> None:
    """Print a report, as JSON with the version and the words of the command line."""
    if is_json:
        origin = {"kvtier": __version__, "command": shlex.join(command)}
        typer.echo(json.dumps({**origin, **report.to_json()}, indent=1))
    else:
        print_report(report, Console())


def require_simulation(context: typer.Context) -> None:
    """Refuse an option of a simulation where none is asked for.

    Raises:
        ConfigError: one is given.
    """
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name)
        if name not in OWN_PARAMETERS and given is not None and given.name == "COMMANDLINE":
            remedy = "describes a simulation: add --simulate and a trace, or leave it out"
            raise ConfigError(parameter.opts[0], context.params.get(name), remedy)


def explain_simulation(
    name: str,
    trace: Trace,
    engine_options: EngineOptions,
    host_options: HostOptions,
    chosen: ChosenRequests | None = None,
) -> WhyReport:
    """Simulate a trace and return why its prompts were computed.

    Args:
        name: the trace, for people.
        trace: its requests.
        engine_options: the engine.
        host_options: its memory, with one policy.
        chosen: which of its requests; None: all.

    Raises:
        ConfigError: a value is not valid, or several policies are named.
        UnknownNameError: a policy, tier or setting does not exist.
        NamedClassError: the class that the policy names cannot be used.
    """
    if len(host_options.policies) > 1:
        raise ConfigError(
            "--policy", host_options.policy, "name one policy: kvtier simulate compares several"
        )
    trace, engine, host = make_machine(trace, engine_options, host_options)
    if not host.num_blocks:
        raise ConfigError("--host", host_options.host, "is an engine without offloading: give it host memory")
    records: list[RequestRecord] = []
    with show_progress("1 simulation", len(trace.requests), Console(stderr=True)) as note:
        found = simulate(trace, engine, host, on_request=lambda: note(1, None), on_record=records.append)
    situation = Situation(f"a simulation of {Path(name).name}", num_rejected=found.num_rejected)
    return explain_records(records if chosen is None else chosen.choose(records), situation)


def explain_source(source: str | None, chosen: ChosenRequests) -> WhyReport:
    """Return what is known of a recording, of an engine, or of the only engine that runs.

    Raises:
        ControlError: several engines run and none is named, or the engine cannot be reached.
        UnknownNameError: there is neither such an engine nor such a file.
        TraceError: the recording cannot be read.
    """
    if source is not None and (os.sep in source or is_file(Path(source))):
        trace = Path(source)
        return explain_records(chosen.choose(list(read_records(trace))), Situation(f"recording {trace.name}"))
    instance = choose_instance(source)
    records = read_engine_records(instance.path, MAX_RECORDS)
    with EngineConnection(instance.path) as connection:
        numbers = connection.ask("stats")["stats"]
    num_requests = numbers.get("connector.recorded_requests")
    report = explain_records(
        chosen.choose(records),
        Situation(f"engine {instance.id}", num_requests=None if num_requests is None else int(num_requests)),
    )
    return replace(report, findings=[*explain_audit(numbers), *report.findings])


def print_report(report: WhyReport, console: Console) -> None:
    """Print the tables and the findings."""
    if report.num_requests:
        source = f" of {report.source}" if report.source else ""
        headline = f"{report.num_requests:,} requests{source}, {report.num_prompt_tokens:,} prompt tokens"
        console.print(headline, highlight=False, soft_wrap=True)
        console.print(make_origin_table(report))
    for finding in report.findings:
        console.print(f"- {finding.text}", highlight=False, soft_wrap=True)


def make_origin_table(report: WhyReport) -> Table:
    """Return where prompt tokens came from, and why the rest was computed. Pure."""
    numbers = ("tokens", "share", "requests")
    table = make_table("Prompt tokens by origin and cause", ("origin or cause", "tier"), numbers)
    for origin, num_tokens in sorted(report.tokens_by_origin.items(), key=lambda each: -each[1]):
        table.add_row(f"from {origin}", "", f"{num_tokens:,}", _share(num_tokens, report), "")
    for row in report.causes:
        name = f"{row.cause.value}: {row.reason}" if row.reason else row.cause.value
        table.add_row(
            name, row.tier, f"{row.num_tokens:,}", _share(row.num_tokens, report), f"{row.num_requests:,}"
        )
    return table


def _share(num_tokens: int, report: WhyReport) -> str:
    return f"{num_tokens / max(1, report.num_prompt_tokens):.1%}"
