"""``kvtier why``: where the prompts of a recording came from, why the rest was computed, and what to do."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvtier.cli.output import make_table
from kvtier.observe.why import Situation, WhyReport, explain_records
from kvtier.sim.formats.kvtier import read_records


def why(
    trace: Annotated[
        Path | None,
        typer.Argument(help="A recording of kvtier (record_trace).", show_default=False),
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say why prompt tokens were computed, and what to do about it.

    Exit status 1 when nothing is known: no engine, or no request.
    """
    if trace is None:
        report = explain_records([], Situation(has_engine=False))
    else:
        report = explain_records(list(read_records(trace)), Situation(f"recording {trace.name}"))
    if is_json:
        typer.echo(json.dumps(report.to_json(), indent=1))
    else:
        print_report(report, Console())
    if not report.num_requests:
        raise typer.Exit(1)


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
