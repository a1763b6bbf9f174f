"""``kvtier why``: where prompts came from, why the rest was computed, and what to do.

It reads the latest requests of a living engine, or those of a recording.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvtier.cli.output import make_table
from kvtier.observe.audit import explain_audit
from kvtier.observe.control import MAX_RECORDS
from kvtier.observe.control_client import EngineConnection, choose_instance, find_instances
from kvtier.observe.control_client import read_records as read_engine_records
from kvtier.observe.why import Situation, WhyReport, explain_records
from kvtier.sim.formats.kvtier import read_records


def why(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID | TRACE]",
            help="An engine, by its instance or process id, or a recording of kvtier (record_trace). "
            "Not needed where one engine runs.",
            show_default=False,
        ),
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say why prompt tokens were computed, and what to do about it.

    Exit status 1 when nothing is known: no engine, or no request.

    Raises:
        ControlError: several engines run and none is named, or the engine cannot be reached.
        UnknownNameError: there is neither such an engine nor such a file.
        TraceError: the recording cannot be read.
    """
    report = explain_source(source)
    if is_json:
        typer.echo(json.dumps(report.to_json(), indent=1))
    else:
        print_report(report, Console())
    if not report.num_requests:
        raise typer.Exit(1)


def explain_source(source: str | None) -> WhyReport:
    """Return what is known of a recording, of an engine, or of the only engine that runs.

    Raises:
        ControlError: several engines run and none is named, or the engine cannot be reached.
        UnknownNameError: there is neither such an engine nor such a file.
        TraceError: the recording cannot be read.
    """
    if source is not None and (os.sep in source or Path(source).exists()):
        trace = Path(source)
        return explain_records(list(read_records(trace)), Situation(f"recording {trace.name}"))
    if source is None and not find_instances():
        return explain_records([], Situation(has_engine=False))
    instance = choose_instance(source)
    records = read_engine_records(instance.path, MAX_RECORDS)
    with EngineConnection(instance.path) as connection:
        numbers = connection.ask("stats")["stats"]
    num_requests = numbers.get("connector.recorded_requests")
    report = explain_records(
        records,
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
