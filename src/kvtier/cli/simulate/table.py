"""Shows simulations of one trace side by side, one row each. It computes nothing but shares and differences."""

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from kvtier.sim.results import DEVICE, Simulation
from kvtier.sim.trace import Trace


def print_simulations(trace: Trace, found: Mapping[str, Simulation], console: Console) -> None:
    """Print the tables and the lines that sum them up."""
    console.print(make_hit_table(found))
    if traffic := make_traffic_table(found):
        console.print(traffic)
    for line in summarise(trace, found):
        console.print(line, highlight=False, soft_wrap=True)


def make_hit_table(found: Mapping[str, Simulation]) -> Table:
    """Return where prompt tokens came from and what that did to the first token. Pure."""
    tiers = _tier_names(found)
    table = Table(title="Prompt tokens by origin, seconds to first token", box=box.SIMPLE, padding=(0, 1))
    table.add_column("policy")
    headings = (DEVICE, *tiers, "computed", "p50", "p90", "p99", "queue p90")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, one in found.items():
        ratios = [one.hit_ratio(source) for source in (DEVICE, *tiers)]
        first = one.total.first_token
        times_s = (first.p50_s, first.p90_s, first.p99_s, one.total.queue.p90_s)
        shares = [f"{ratio:.1%}" for ratio in (*ratios, 1 - sum(ratios))]
        table.add_row(name, *shares, *(f"{time_s:.2f}" for time_s in times_s))
    return table


def make_traffic_table(found: Mapping[str, Simulation]) -> Table | None:
    """Return what each tier wrote and read; None without tiers. Pure."""
    rows = [
        (
            name,
            tier.name,
            f"{tier.capacity_blocks:,}",
            f"{tier.written_bytes / 1e12:.2f}",
            f"{tier.writes_per_unique_block:.2f}",
            f"{tier.read_bytes / 1e12:.2f}",
            f"{tier.busy_ratio:.0%}",
        )
        for name, one in found.items()
        for tier in one.tiers
    ]
    if not rows:
        return None
    table = Table(title="Traffic of each tier", box=box.SIMPLE, padding=(0, 1))
    table.add_column("policy")
    table.add_column("tier")
    for heading in ("blocks", "written TB", "per unique block", "read TB", "link busy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def summarise(trace: Trace, found: Mapping[str, Simulation]) -> Iterator[str]:
    """Yield what the tables leave out, in sentences. Pure."""
    yield (
        f"{len(trace.requests):,} requests in {trace.duration_s:,.0f} s, {trace.num_accesses:,} blocks of "
        f"{trace.block_tokens} tokens, {trace.num_unique_blocks:,} of them unique"
    )
    for name, one in found.items():
        if one.num_saved_tokens:
            share = one.num_saved_tokens / one.total.num_prompt_tokens
            yield f"{name}: {one.num_saved_tokens:,} tokens loaded instead of computed ({share:.1%})"
        if one.num_rejected:
            yield f"{name}: {one.num_rejected} requests need more device blocks than there are"
    for name, one in found.items():
        for counter, value in one.counters.items():
            if counter.endswith(".breaker_openings") and value:
                tier = counter.split(".")[2]
                yield f"{name}: {tier} was overloaded {value:.0f} times and left out for some seconds each"
    yield "without: the same engine with its own prefix cache, nothing behind it"


def _tier_names(found: Mapping[str, Simulation]) -> Sequence[str]:
    """Return host memory and the tiers behind it, in the order in which they are asked. Pure."""
    return list(dict.fromkeys(tier.name for one in found.values() for tier in one.tiers))
