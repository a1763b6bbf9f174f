"""``kvtier top``: where prompt tokens come from now, why the others are computed, and how the tiers do.

A frame is made of two readings of the engine's counters: totals are those of the second, rates what lies between.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

import typer
from rich import box
from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvtier.cli.live.audit import describe_blocks
from kvtier.cli.live.overview import InstanceArgument, format_age, format_number, list_tiers
from kvtier.cli.live.tenants import TenantState, draw_tenants, list_tenants
from kvtier.cli.output import JsonOption, make_console, print_json
from kvtier.misses import MISSED_TOKENS
from kvtier.observe.audit import describe_saved, read_saved
from kvtier.observe.control_client import EngineConnection, Instance, choose_instance

ORIGIN = "connector.prompt_tokens."
COMPUTED = "computed"

BREAKER = "breaker"
TRAFFIC_COLUMNS = ("blocks", "full", "read", "write")
HEALTH_COLUMNS = ("loads at", "queued", "pending", BREAKER)
WIDE_COLUMNS = 1000
"""Wider than any table of tiers."""

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

Numbers = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Share:
    """Prompt tokens of one kind.

    Attributes:
        name: the origin or the cause.
        num_tokens: since the engine's start.
        ratio: of all prompt tokens.
        per_s: between the two readings.
    """

    name: str
    num_tokens: int
    ratio: float
    per_s: float


@dataclass(frozen=True, slots=True)
class TierState:
    """One tier; None where it does not say.

    Attributes:
        name: its type, "host" for host memory.
        num_blocks: blocks of this engine that it holds.
        capacity_blocks: the most it can hold.
        read_bytes_per_s: towards the device.
        write_bytes_per_s: away from it.
        measured_bytes_per_s: how fast its loads were.
        num_queued_blocks: blocks that wait for one of its threads.
        num_pending_blocks: blocks that it is still to get.
        state: "closed", "open" or "out of service": its circuit breaker; empty for host memory.
    """

    name: str
    num_blocks: float | None = None
    capacity_blocks: float | None = None
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    measured_bytes_per_s: float | None = None
    num_queued_blocks: float | None = None
    num_pending_blocks: float | None = None
    state: str = ""


@dataclass(frozen=True, slots=True)
class Frame:
    """What one screen shows.

    Attributes:
        title: the engine.
        is_stepping: whether the engine makes steps now.
        origins: where prompt tokens came from, computed ones last.
        causes: why tokens were computed, the most first.
        tiers: host memory first, then by the order of lookups.
        num_requests: requests that the engine has begun or that wait.
        num_waiting: those that wait for a tier.
        num_open_jobs: copies between device and host memory that have not ended.
        audit: what the audit says: blocks that were compared, then what loaded tokens save; empty without one.
        tenants: what each tenant of requests keeps and may keep; empty where the engine has none.
    """

    title: str
    is_stepping: bool
    origins: list[Share]
    causes: list[Share]
    tiers: list[TierState]
    num_requests: float
    num_waiting: float
    num_open_jobs: float
    audit: list[str] = field(default_factory=list)
    tenants: list[TenantState] = field(default_factory=list)


def top(
    instance_id: InstanceArgument = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, max=60.0, help="Seconds between two frames.")
    ] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Watch a running engine: origins of prompt tokens, causes of computed ones, tiers, queues; Ctrl-C ends it.

    Raises:
        ControlError: the engine cannot be reached, or has ended.
    """
    instance = choose_instance(instance_id)
    frames = watch(instance, interval_s)
    if as_json:
        for frame in frames:
            print_json(asdict(frame))
            if once:
                return
    if once:
        make_console().print(draw(next(frames)))
        return
    with Live(console=make_console(), screen=True, auto_refresh=False) as live:
        for frame in frames:
            live.update(draw(frame), refresh=True)


def watch(
    instance: Instance, interval_s: float, pause: Callable[[float], None] = time.sleep
) -> Iterator[Frame]:
    """Yield a frame after each interval, without end.

    Raises:
        ControlError: the engine has ended.
    """
    with EngineConnection(instance.path) as connection:
        before: Numbers = connection.ask("stats")["stats"]
        before_s = time.monotonic()
        while True:
            pause(interval_s)
            reply = connection.ask("stats")
            now_s = time.monotonic()
            age_s = time.time() - float(instance.description.get("started_s", time.time()))
            title = " · ".join(
                str(part)
                for part in (
                    instance.id,
                    instance.description.get("model", ""),
                    instance.description.get("engine", ""),
                    f"process {instance.pid}",
                    f"up {format_age(age_s)}",
                )
                if part
            )
            passed_s = max(1e-3, now_s - before_s)
            frame = make_frame(title, before, reply["stats"], passed_s, is_stepping=reply["is_stepping"])
            yield replace(frame, tenants=list_tenants(reply["stats"], instance.description))
            before, before_s = reply["stats"], now_s


def make_frame(title: str, before: Numbers, now: Numbers, passed_s: float, *, is_stepping: bool) -> Frame:
    """Return the frame of two readings. Pure.

    Args:
        title: the engine.
        before: the first reading.
        now: the second.
        passed_s: seconds between them.
        is_stepping: whether a step has published the second.
    """
    origins, origins_before = sum_by_name(now, ORIGIN), sum_by_name(before, ORIGIN)
    causes, causes_before = sum_by_name(now, MISSED_TOKENS), sum_by_name(before, MISSED_TOKENS)
    origins[COMPUTED], origins_before[COMPUTED] = sum(causes.values()), sum(causes_before.values())
    num_tokens = sum(origins.values())

    def share(name: str, number: float, earlier: float) -> Share:
        return Share(
            name, int(number), number / num_tokens if num_tokens else 0.0, (number - earlier) / passed_s
        )

    return Frame(
        title,
        is_stepping,
        [share(name, number, origins_before.get(name, 0.0)) for name, number in origins.items()],
        sorted(
            (share(name, number, causes_before.get(name, 0.0)) for name, number in causes.items()),
            key=lambda one: -one.num_tokens,
        ),
        [
            read_host(before, now, passed_s),
            *(
                read_tier(f"tier.{position}.{name}.", name, before, now, passed_s)
                for position, name in list_tiers(now)
            ),
        ],
        now.get("connector.requests", 0.0),
        now.get("waiting_requests", 0.0),
        now.get("connector.open_jobs", 0.0),
        list_audit_lines(now),
    )


def list_audit_lines(now: Numbers) -> list[str]:
    """Return what the audit says, a line each. Pure."""
    if not now.get("audit.requests"):
        return []
    lines = [describe_blocks(now)]
    for saved in read_saved(now):
        hits = f"hits of {saved.length:,} tokens or more in {saved.tier}"
        lines.append(f"{hits}: a thousand tokens save {describe_saved(saved)}")
    return lines


def sum_by_name(numbers: Numbers, prefix: str) -> dict[str, float]:
    """Return the counters that begin with ``prefix`` by the rest of their names. Pure."""
    return {name.removeprefix(prefix): number for name, number in numbers.items() if name.startswith(prefix)}


def read_host(before: Numbers, now: Numbers, passed_s: float) -> TierState:
    """Return the state of host memory. Pure."""
    return TierState(
        "host",
        now.get("primary.held_blocks"),
        now.get("primary.capacity_blocks"),
        rate_of("connector.load_bytes", before, now, passed_s),
        rate_of("connector.store_bytes", before, now, passed_s),
    )


def read_tier(prefix: str, name: str, before: Numbers, now: Numbers, passed_s: float) -> TierState:
    """Return the state of a secondary tier. Pure."""
    state = "closed"
    if now.get(f"{prefix}out_of_service"):
        state = "out of service"
    elif now.get(f"{prefix}breaker_open"):
        state = "open"
    return TierState(
        name,
        now.get(f"{prefix}indexed_blocks", now.get(f"{prefix}blocks")),
        now.get(f"{prefix}capacity_blocks", now.get(f"{prefix}max_blocks")),
        rate_of(f"{prefix}loaded_bytes", before, now, passed_s),
        rate_of(f"{prefix}stored_bytes", before, now, passed_s),
        now.get(f"{prefix}load_bytes_per_s") or None,
        now.get(f"{prefix}queued_blocks"),
        now.get(f"{prefix}pending_blocks"),
        state,
    )


def rate_of(name: str, before: Numbers, now: Numbers, passed_s: float) -> float | None:
    """Return how much a counter has grown in a second; None when there is no such counter. Pure."""
    return None if name not in now else (now[name] - before.get(name, 0.0)) / passed_s


def draw(frame: Frame) -> RenderableType:
    """Return a frame as the screen shows it."""
    state = "stepping" if frame.is_stepping else "idle, or in a long step"
    requests = (
        f"{format_number(frame.num_requests)} requests, {format_number(frame.num_waiting)} wait for a tier, "
        f"{format_number(frame.num_open_jobs)} copies under way; {state}"
    )
    return Group(
        Text(frame.title, style="bold"),
        Text(requests),
        draw_shares("prompt tokens from", frame.origins),
        draw_shares("computed because", frame.causes),
        TierTables(frame.tiers),
        *([draw_tenants(frame.tenants)] if frame.tenants else ()),
        *map(Text, frame.audit),
    )


def draw_shares(heading: str, shares: list[Share]) -> Table:
    """Return a table of tokens, with a bar for each share."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column(heading, min_width=22, no_wrap=True)
    for column in ("tokens", "share", "a second"):
        table.add_column(column, justify="right", min_width=8, no_wrap=True)
    table.add_column("", max_width=20)
    for share in shares:
        table.add_row(
            Text(share.name),
            f"{share.num_tokens:,}",
            f"{100 * share.ratio:.1f} %",
            f"{share.per_s:,.0f}",
            Bar(1.0, 0.0, share.ratio, color="cyan"),  # as long as the column allows, so that bars compare
        )
    if not shares:
        table.add_row("none yet", "", "", "", "")
    return table


@dataclass(frozen=True, slots=True)
class TierTables:
    """The tiers in one table, or in two where a narrow terminal would cut its cells."""

    tiers: Sequence[TierState]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """Yield the tables."""
        whole = draw_tiers(self.tiers, (*TRAFFIC_COLUMNS, *HEALTH_COLUMNS))
        if console.measure(whole, options=options.update_width(WIDE_COLUMNS)).maximum <= options.max_width:
            yield whole
        else:
            yield draw_tiers(self.tiers, TRAFFIC_COLUMNS)
            yield draw_tiers(self.tiers, HEALTH_COLUMNS)


def draw_tiers(tiers: Sequence[TierState], columns: Sequence[str]) -> Table:
    """Return a table of tiers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("tier", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="left" if column == BREAKER else "right", no_wrap=True)
    for tier in tiers:
        cells = describe_tier(tier)
        table.add_row(Text(tier.name), *(cells[column] for column in columns))
    return table


def describe_tier(tier: TierState) -> dict[str, Text]:
    """Return what stands in each column about a tier. Pure."""
    full = "-"
    if tier.num_blocks is not None and tier.capacity_blocks:
        full = f"{100 * tier.num_blocks / tier.capacity_blocks:.0f} %"
    return {
        "blocks": Text(format_count(tier.num_blocks)),
        "full": Text(full),
        "read": Text(format_rate(tier.read_bytes_per_s)),
        "write": Text(format_rate(tier.write_bytes_per_s)),
        "loads at": Text(format_rate(tier.measured_bytes_per_s)),
        "queued": Text(format_count(tier.num_queued_blocks)),
        "pending": Text(format_count(tier.num_pending_blocks)),
        BREAKER: Text(tier.state or "-", style="" if tier.state in ("", "closed") else "bold red"),
    }


def format_count(number: float | None) -> str:
    """Return a number as text, "-" for none. Pure."""
    return "-" if number is None else format_number(number)


def format_rate(bytes_per_s: float | None) -> str:
    """Return a bandwidth in binary units, "-" for none. Pure."""
    if bytes_per_s is None:
        return "-"
    exponent = 0
    while abs(bytes_per_s) >= 1024 and exponent < len(BYTE_UNITS) - 1:
        bytes_per_s /= 1024
        exponent += 1
    return f"{bytes_per_s:.{1 if exponent else 0}f} {BYTE_UNITS[exponent]}/s"
