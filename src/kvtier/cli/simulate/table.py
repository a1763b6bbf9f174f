"""Shows simulations of one trace side by side in a terminal."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from kvtier.cli.output import make_table, print_line
from kvtier.cli.simulate.comparison import Comparison
from kvtier.cli.simulate.options import format_size
from kvtier.cli.simulate.verdict import make_verdict
from kvtier.cli.traces import describe_rate
from kvtier.sim.results import DEVICE, HOST, Simulation

NOTHING = "-"
"""Stands for a missing measurement."""

NOT_LOADED = "connector.not_loaded_tokens."
"""Prefix of the counters of tokens that were found in a tier but computed, which was faster."""

BOUND_NOTE = (
    "at most: Belady's bound, device, host and tiers as one memory that is managed with knowledge of the future; "
    "no policy can exceed it"
)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the verdict, the tables and a summary."""
    print_line(console, make_verdict(comparison).text)
    for table in make_tables(comparison):
        console.print(table)
    for line in summarise(comparison):
        print_line(console, line)


def make_tables(comparison: Comparison) -> list[Table]:
    """Return one table for a sweep, else one for each kind of number. Pure."""
    if comparison.sweep is not None:
        return [make_sweep_table(comparison)]
    found = comparison.by_label
    times = make_time_table(found) if comparison.has_times else None
    tables = [make_hit_table(found), make_miss_table(found), times, make_traffic_table(found)]
    return [table for table in tables if table is not None]


def make_sweep_table(comparison: Comparison) -> Table:
    """Return hits and times, one row per size and policy. Pure."""
    sources = (DEVICE, *_tier_names(comparison.by_label))
    place = comparison.sweep.place if comparison.sweep else ""
    times = ("p50", "p90") if comparison.has_times else ()
    headings = ("not computed", "at most", *sources, *times, "served")
    names = (f"{place} size", "policy")
    title = f"Prompt tokens not computed{', and seconds to first token' if times else ''}"
    table = make_table(title, names, headings)
    for case, one in zip(comparison.cases, comparison.found, strict=True):
        ratios = [
            one.not_computed_ratio,
            one.at_most_ratio or 0.0,
            *(one.hit_ratio(source) for source in sources),
        ]
        numbers = [f"{ratio:.1%}" for ratio in ratios]
        if times:
            numbers += [f"{one.total.first_token.p50_s:.2f}", f"{one.total.first_token.p90_s:.2f}"]
        if not one.total.num_requests:
            numbers = [NOTHING] * len(numbers)
        size = case.size.label if case.size else NOTHING
        table.add_row(size, case.policy, *numbers, f"{one.total.num_requests:,}")
    return table


def make_hit_table(found: Mapping[str, Simulation]) -> Table:
    """Return where prompt tokens came from. Pure."""
    sources = (DEVICE, *_tier_names(found))
    headings = (*sources, "not computed", "at most")
    table = make_table("Prompt tokens by origin", ("policy",), headings)
    for name, one in found.items():
        ratios = [one.hit_ratio(source) for source in sources]
        shares = [f"{ratio:.1%}" for ratio in (*ratios, one.not_computed_ratio, one.at_most_ratio or 0.0)]
        table.add_row(name, *(shares if one.total.num_requests else [NOTHING] * len(shares)))
    return table


def make_miss_table(found: Mapping[str, Simulation]) -> Table | None:
    """Return why prompt tokens were computed, one row per cause; None when no simulation has offloading. Pure."""
    missed = {name: one.missed_tokens for name, one in found.items() if one.missed_tokens}
    if not missed:
        return None
    causes = sorted(
        dict.fromkeys(cause for tokens in missed.values() for cause in tokens),
        key=lambda cause: -max(tokens.get(cause, 0) for tokens in missed.values()),
    )
    table = make_table("Prompt tokens computed, by cause", ("cause",), tuple(missed))
    for cause in causes:
        shares = [
            tokens.get(cause, 0) / found[name].total.num_prompt_tokens for name, tokens in missed.items()
        ]
        table.add_row(cause.replace(".", " "), *(f"{share:.1%}" for share in shares))
    return table


def make_time_table(found: Mapping[str, Simulation]) -> Table:
    """Return times to first token, and how many requests were served. Pure."""
    headings = ("p50", "p90", "p99", "queue p90", "served", "rejected")
    table = make_table("Seconds to first token", ("policy",), headings)
    for name, one in found.items():
        first = one.total.first_token
        times_s = [
            f"{time_s:.2f}" for time_s in (first.p50_s, first.p90_s, first.p99_s, one.total.queue.p90_s)
        ]
        if not one.total.num_requests:
            times_s = [NOTHING] * len(times_s)
        table.add_row(name, *times_s, f"{one.total.num_requests:,}", f"{one.num_rejected:,}")
    return table


def make_traffic_table(found: Mapping[str, Simulation]) -> Table | None:
    """Return what was written to and read from each tier; None without tiers. Pure."""
    rows = [
        (
            name,
            tier.name,
            f"{tier.capacity_blocks:,}",
            f"{tier.written_bytes / 1e9:,.1f}",
            f"{tier.writes_per_unique_block:.2f}",
            f"{tier.read_bytes / 1e9:,.1f}",
            f"{tier.busy_ratio:.1%}",
        )
        for name, one in found.items()
        for tier in one.tiers
    ]
    if not rows:
        return None
    headings = ("blocks", "written GB", "writes per unique block", "read GB", "link busy")
    # A word a line: with two tiers of long capacities the table fits a terminal of 80 columns.
    numbers = tuple(heading.replace(" ", "\n") for heading in headings)
    table = make_table("Traffic of host memory and each tier", ("policy", "tier"), numbers)
    for row in rows:
        table.add_row(*row)
    return table


def summarise(comparison: Comparison) -> Iterator[str]:
    """Yield what the tables omit, in sentences. Pure."""
    trace, found = comparison.trace, comparison.by_label
    yield (
        f"{len(trace.requests):,} requests in {trace.duration_s:,.0f} s, {trace.num_accesses:,} blocks of "
        f"{trace.block_tokens} tokens, {trace.num_unique_blocks:,} of them unique"
    )
    yield f"simulated: {_describe_memory(comparison)}"
    for name, one in found.items():
        if one.num_loaded_tokens and comparison.sweep is None:
            share = one.num_loaded_tokens / one.total.num_prompt_tokens
            yield f"{name}: {one.num_loaded_tokens:,} tokens loaded instead of computed ({share:.1%})"
    for name, one in found.items():
        for tier, num_tokens in not_loaded_tokens(one).items():
            yield f"{name}: {num_tokens:,} tokens found in {tier} and computed, which was faster"
    for num_rejected, names in group_rejected(found).items():
        yield f"{names}: {num_rejected} requests need more device blocks than there are"
    for name, one in found.items():
        for tier, number in breaker_openings(one).items():
            yield f"{name}: {tier} was overloaded {number} times and skipped for some seconds each"
    yield from describe_saved_time(make_verdict(comparison).saved_s)
    yield "without: the same engine with its own prefix cache only"
    yield BOUND_NOTE
    if comparison.is_rate_derived:
        yield f"prefill: {describe_rate(comparison.engine.prefill_tokens_per_s)}"
    if saturated := comparison.saturated:
        effect = "times describe the queue" if comparison.has_times else "no times are shown"
        yield (
            f"warning: the engine is saturated ({', '.join(saturated)}): requests queue far longer than a prompt "
            f"takes, so {effect}; "
            "use more --prefill, --device or --max-running, or fewer --requests"
        )


def _describe_memory(comparison: Comparison) -> str:
    """Return what each place holds and what a token takes, in words. Pure."""
    engine, host, sweep = comparison.engine, comparison.host, comparison.sweep
    places = {DEVICE: engine.num_device_blocks, HOST: host.num_blocks}
    places |= {tier.name: tier.num_blocks for tier in host.tiers}
    sizes = {place: format_size(num * engine.block_bytes) if num else "none" for place, num in places.items()}
    if sweep is not None:
        sizes[sweep.place] = ", ".join(size.label for size in sweep.sizes)
    parts = "; ".join(f"{place} {size}" for place, size in sizes.items())
    token_bytes = engine.block_bytes / engine.block_tokens
    return f"{parts}; {format_size(token_bytes)} a token, {format_size(engine.block_bytes)} a block"


def describe_saved_time(saved_s: float | None) -> Iterator[str]:
    """Yield what all requests together wait less; nothing where no times are known. Pure."""
    if saved_s is not None:
        less = "less" if saved_s >= 0 else "more"
        yield f"all requests together wait {abs(saved_s):,.1f} s {less} for their first tokens"


def group_rejected(found: Mapping[str, Simulation]) -> dict[int, str]:
    """Return the number of rejected requests -> the simulations; empty when no request was rejected. Pure."""
    numbers = sorted({one.num_rejected for one in found.values() if one.num_rejected})
    if len(numbers) == 1 and all(one.num_rejected for one in found.values()):
        return {numbers[0]: "all"}
    return {
        number: ", ".join(name for name, one in found.items() if one.num_rejected == number)
        for number in numbers
    }


def breaker_openings(one: Simulation) -> dict[str, int]:
    """Return how often each overloaded tier was skipped. Pure."""
    ending = ".breaker_openings"
    return {
        counter.split(".")[2]: int(value)
        for counter, value in one.counters.items()
        if counter.endswith(ending) and value
    }


def not_loaded_tokens(one: Simulation) -> dict[str, int]:
    """Return the tokens of each tier that were computed although they were found. Pure."""
    return {
        counter.removeprefix(NOT_LOADED): int(value)
        for counter, value in one.counters.items()
        if counter.startswith(NOT_LOADED) and value
    }


def _tier_names(found: Mapping[str, Simulation]) -> Sequence[str]:
    """Return host memory and the tiers behind it, in the order of lookups. Pure."""
    return list(dict.fromkeys(tier.name for one in found.values() for tier in one.tiers))
