"""``kvtier audit``: whether what a running engine loads is right, and what loading saves."""

from collections.abc import Mapping
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from kvtier.cli.live.overview import InstanceArgument, format_number, read_stats
from kvtier.cli.output import JsonOption, make_console, make_table, print_json
from kvtier.errors import ControlError
from kvtier.observe.audit import describe_saved, explain_audit, read_saved
from kvtier.observe.control_client import EngineConnection, choose_instance

WRONG_STATUS = 1
RESUME_TIMEOUT_S = 30.0


def audit(
    instance_id: InstanceArgument = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Load hits again that were stopped because blocks were wrong.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what the audit of a running engine has found: wrong blocks, and the time that loaded tokens save.

    Exit status 1 when a block was wrong.

    Raises:
        ControlError: the engine cannot be reached, audits nothing, or made no step in time.
    """
    instance = choose_instance(instance_id)
    if resume:
        with EngineConnection(instance.path) as connection:
            reply = connection.ask("resume", RESUME_TIMEOUT_S)
        if as_json:
            print_json({"id": instance.id, "was_stopped": reply["was_stopped"]})
            return
        said = "hits are loaded again" if reply["was_stopped"] else "loading was not stopped"
        typer.echo(f"{instance.id}: {said}")
        return
    numbers, _ = read_stats(instance)
    if "audit.requests" not in numbers:
        raise ControlError(f"{instance.id} audits no request: audit_ratio is 0, or its KV cannot be compared")
    if as_json:
        print_json({name: number for name, number in numbers.items() if name.startswith("audit.")})
    else:
        console = make_console()
        console.print(f"{instance.id}: {describe_blocks(numbers)}", highlight=False, soft_wrap=True)
        console.print(make_saved_table(numbers))
        for finding in explain_audit(numbers):
            console.print(f"- {finding.text}", highlight=False, soft_wrap=True)
    if numbers["audit.wrong_blocks"]:
        raise typer.Exit(WRONG_STATUS)


def describe_blocks(numbers: Mapping[str, float]) -> str:
    """Return how many blocks were compared and what came of it. Pure."""
    kinds = ("equal", "close", "wrong", "lost")
    equal, close, wrong, lost = (format_number(numbers.get(f"audit.{kind}_blocks", 0.0)) for kind in kinds)
    return (
        f"{format_number(numbers['audit.requests'])} requests audited; of their blocks {equal} have the same bytes, "
        f"{close} differ as other batches do, {wrong} are wrong, {lost} were not compared"
    )


def make_saved_table(numbers: Mapping[str, float]) -> Table:
    """Return what loaded tokens save, by tier and length."""
    columns = ["hit tokens from", "loaded", "computed", "a thousand tokens save (95 %)"]
    table = make_table("", ["tier"], columns)
    for saved in read_saved(numbers):
        suffix = ", switched off" if saved.is_off else ""
        counts = (f"{saved.length:,}", f"{saved.num_loaded:,}", f"{saved.num_computed:,}")
        table.add_row(Text(saved.tier), *counts, describe_saved(saved) + suffix)
    return table
