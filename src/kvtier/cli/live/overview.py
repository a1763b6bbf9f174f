"""``kvtier ps``, ``stats`` and ``recent``: which engines run, their numbers, and their last requests."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from kvtier.cli.live.tenants import list_tenants
from kvtier.cli.output import JsonOption, make_console, make_table, print_json
from kvtier.errors import ControlError, NoEngineError
from kvtier.misses import RequestRecord
from kvtier.observe.control_client import (
    EngineConnection,
    Instance,
    choose_instance,
    find_instances,
)
from kvtier.observe.control_wire import list_runtime_folders

InstanceArgument = Annotated[
    str | None,
    typer.Argument(metavar="[ID]", help="Instance or process id; not needed where one engine runs."),
]


def ps(as_json: JsonOption = False) -> None:
    """List this user's engines: id, process, model, engine, uptime, tiers and how full they are.

    Raises:
        NoEngineError: there is none.
    """
    rows = [describe_instance(instance) for instance in find_instances()]
    if as_json:
        print_json(rows)
    elif rows:
        make_console().print(make_instance_table(rows))
    if not rows:
        raise NoEngineError(list_runtime_folders())


def stats(instance_id: InstanceArgument = None, as_json: JsonOption = False) -> None:
    """Print every counter and gauge of a running engine, by dotted name.

    Raises:
        ControlError: the engine cannot be reached.
    """
    instance = choose_instance(instance_id)
    numbers, is_stepping = read_stats(instance)
    if as_json:
        tenants = list_tenants(numbers, instance.description)
        by_name = {"tenants": [asdict(tenant) for tenant in tenants]} if tenants else {}
        print_json({"id": instance.id, "is_stepping": is_stepping, "stats": numbers} | by_name)
        return
    state = "stepping" if is_stepping else "idle, or in a long step"
    table = make_table(f"{instance.id}, {state}", ["counter or gauge"], ["now"])
    for name in sorted(numbers):
        table.add_row(name, format_number(numbers[name]))
    make_console().print(table)


def recent(
    instance_id: InstanceArgument = None,
    num_records: Annotated[int, typer.Option("-n", min=1, max=1000, help="How many.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Print where the prompts of the last requests came from, and why the rest was computed; newest last.

    Raises:
        ControlError: the engine cannot be reached.
    """
    instance = choose_instance(instance_id)
    with EngineConnection(instance.path) as connection:
        sent = connection.ask("recent", n=num_records)["records"]
    records = [RequestRecord.from_json(values) for values in sent]
    if as_json:
        print_json([record.to_json() for record in records])
        return
    if not records:
        typer.echo(f"kvtier: {instance.id} has not begun a request yet")
        return
    make_console().print(make_record_table(instance.id, records))


def read_stats(instance: Instance) -> tuple[dict[str, float], bool]:
    """Return an engine's numbers, and whether a step has published them.

    Raises:
        ControlError: the engine cannot be reached.
    """
    with EngineConnection(instance.path) as connection:
        reply = connection.ask("stats")
    return reply["stats"], bool(reply["is_stepping"])


def describe_instance(instance: Instance) -> dict[str, Any]:  # Any: JSON
    """Return what ``ps`` prints of an engine; without its fill when the engine does not give its numbers."""
    row = {**instance.description, "socket": str(instance.path)}
    row.pop("ok", None)
    try:
        numbers, row["is_stepping"] = read_stats(instance)
    except ControlError as error:
        return row | {"fill": {}, "error": str(error)}
    return row | {"fill": read_fill(numbers), "tier_states": describe_tiers(numbers)}


def read_fill(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """Return how full host memory is (a ratio), and how many blocks each tier has indexed. Pure.

    Returns:
        By "host" and "<type>"; None where a tier does not say.
    """
    capacity = numbers.get("primary.capacity_blocks") or 1.0
    fill: dict[str, float | None] = {"host": numbers.get("primary.held_blocks", 0.0) / capacity}
    for position, name in list_tiers(numbers):
        prefix = f"tier.{position}.{name}."
        own = (numbers.get(prefix + counter) for counter in ("indexed_blocks", "blocks"))
        fill[name] = next((number for number in own if number is not None), None)
    return fill


def describe_tiers(numbers: Mapping[str, float]) -> list[str]:
    """Return each tier with its blocks, how full it is, and what is wrong with it, in the order of lookups. Pure."""
    described = []
    for position, name in list_tiers(numbers):
        prefix = f"tier.{position}.{name}."
        own = (numbers.get(prefix + counter) for counter in ("indexed_blocks", "blocks"))
        num_blocks = next((number for number in own if number is not None), None)
        capacity = numbers.get(f"{prefix}capacity_blocks", numbers.get(f"{prefix}max_blocks"))
        text = name if num_blocks is None else f"{name} {format_number(num_blocks)} blocks"
        if num_blocks is not None and capacity:
            text += f", {100 * num_blocks / capacity:.0f} % full"
        if numbers.get(f"{prefix}out_of_service"):
            text += ", out of service"
        elif numbers.get(f"{prefix}breaker_open"):
            text += ", left out: breaker open"
        described.append(text)
    return described


def list_tiers(numbers: Mapping[str, float]) -> list[tuple[int, str]]:
    """Return position and type of each tier that has numbers, in the order of lookups. Pure."""
    parts = (name.split(".") for name in numbers if name.startswith("tier."))
    return sorted({(int(part[1]), part[2]) for part in parts if len(part) > 3 and part[1].isdigit()})


def make_instance_table(rows: Iterable[Mapping[str, Any]]) -> Table:  # Any: JSON
    """Return the table of ``ps``."""
    table = make_table("", ["id", "pid", "model", "engine", "up", "host memory", "tiers", "metrics"], [])
    for row in rows:
        host = row["fill"].get("host")
        tiers = row.get("tier_states") or row["tiers"]
        table.add_row(
            Text(str(row["id"])),
            str(row["pid"]),
            Text(str(row["model"])),
            Text(str(row["engine"])),
            format_age(float(row["uptime_s"])),
            "?" if host is None else f"{100 * host:.0f} % full",
            Text("; ".join(tiers) or "none"),
            Text(str(row.get("metrics") or "-")),
        )
    return table


def make_record_table(instance_id: str, records: Sequence[RequestRecord]) -> Table:
    """Return the table of ``recent``."""
    table = make_table(f"{instance_id}: last {len(records)} requests", ["began", "request"], ["prompt"])
    for heading in ("found", "computed, and why"):
        table.add_column(heading, overflow="fold")
    for record in records:
        found = [f"{number:,} {origin}" for origin, number in record.tokens_by_origin.items()]
        missed = [describe_run(run.num_tokens, run.miss.cause.value, run.miss.tier) for run in record.missed]
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(record.began_s)),
            Text(record.req_id),
            f"{record.num_prompt_tokens:,}",
            Text(", ".join(found) or "-"),
            Text(", ".join(missed) or "-"),
        )
    return table


def describe_run(num_tokens: int, cause: str, tier: str) -> str:
    """Return tokens that were computed for one cause, as text. Pure."""
    return f"{num_tokens:,} {cause}" + (f" ({tier})" if tier else "")


def format_number(number: float | None) -> str:
    """Return a counter or gauge as text, "?" for none. Pure."""
    if number is None:
        return "?"
    return f"{number:,.0f}" if float(number).is_integer() else f"{number:,.4g}"


def format_age(age_s: float) -> str:
    """Return a duration in its two largest units. Pure."""
    minutes, seconds = divmod(int(age_s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
