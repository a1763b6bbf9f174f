"""The page: its sentences (what was simulated, the simulator's limits, warnings) and its HTML."""

import html
import shlex
from collections.abc import Iterator

from kvtier import __version__
from kvtier.cli.output import format_change
from kvtier.cli.page.charts import BarChart, LineChart
from kvtier.cli.page.document import Document, render_list
from kvtier.cli.page.tables import render_facts, render_headline, render_table
from kvtier.cli.simulate.comparison import Comparison
from kvtier.cli.simulate.options import format_size
from kvtier.cli.simulate.report.plots import (
    plot_first_token,
    plot_hits,
    plot_occupancy,
    plot_origins,
    plot_writes,
)
from kvtier.cli.simulate.report.tables import (
    tabulate_misses,
    tabulate_results,
    tabulate_traffic,
    tabulate_watched,
)
from kvtier.cli.simulate.table import breaker_openings, group_rejected
from kvtier.cli.simulate.verdict import Verdict, chosen_size, make_verdict
from kvtier.cli.traces import describe_rate
from kvtier.config import LoadIf
from kvtier.sim.clients import ClientHints, HintNoise, Honesty
from kvtier.sim.sweep import WITHOUT
from kvtier.sim.tier import TierModel


def list_facts(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yield names and values of what was simulated. Pure."""
    trace, engine, host = comparison.trace, comparison.engine, comparison.host
    block_bytes = engine.block_bytes

    def memory(num_blocks: int) -> str:
        return f"{num_blocks:,} blocks, {format_size(num_blocks * block_bytes)}"

    yield "command", shlex.join(comparison.command)
    yield "kvtier", __version__
    yield "trace", comparison.trace_name
    yield "requests", f"{len(trace.requests):,} in {trace.duration_s:,.0f} s"
    yield (
        "blocks",
        (
            f"{trace.num_accesses:,} of {trace.block_tokens} tokens and {format_size(block_bytes)}, "
            f"{trace.num_unique_blocks:,} of them unique ({format_size(trace.num_unique_blocks * block_bytes)})"
        ),
    )
    if engine.states is not None:
        interval = engine.states.interval_tokens
        where = (
            "after each block" if interval is None else f"each {interval:,} tokens and at the end of a prompt"
        )
        yield "states", f"kept {where}, in a block of their own"
    yield "bytes a token", format_size(block_bytes / engine.block_tokens)
    yield "device", memory(engine.num_device_blocks)
    speed = f"{host.speed.read_bytes_per_s / 1e9:g} GB/s each way"
    yield "host", f"{memory(host.num_blocks)}, {speed}" if host.num_blocks else "none"
    for tier in host.tiers:
        yield f"tier {tier.name}", f"{memory(tier.num_blocks)}, {_describe_tier(tier)}"
    is_chosen = host.load_if is LoadIf.FASTER
    loaded = "a hit that would be faster to compute is computed" if is_chosen else "every hit is loaded"
    yield "load_if", f"{host.load_if.value}: {loaded}"
    if host.client_hints is not ClientHints.NONE:
        yield "hints", f"{host.client_hints.value}, {_describe_noise(host.hint_noise)}"
    if host.store_threshold > 1:
        yield "stored", f"blocks from access {host.store_threshold} on"
    if comparison.sweep is not None:
        sizes = ", ".join(size.label for size in comparison.sweep.sizes)
        yield "swept", f"{comparison.sweep.place}: {sizes} instead of the above"
    rate = f"{engine.prefill_tokens_per_s:,.0f} prompt tokens per second, all requests together"
    yield "prefill", describe_rate(engine.prefill_tokens_per_s) if comparison.is_rate_derived else rate
    yield "decode", f"{engine.decode_tokens_per_s:,.0f} tokens per second for each running request"
    yield "running", f"at most {engine.max_running} requests at the same time"


def _describe_noise(noise: HintNoise) -> str:
    """Return how wrong clients are, in words. Pure."""
    if noise.honesty is not Honesty.HONEST:
        return f"{noise.liar_share:.0%} of the tenants say what is {noise.honesty.value}"
    return (
        f"wrong for {noise.wrong_share:.0%} of the requests, silent in {noise.silent_share:.0%} of the sessions, "
        f"times off by a factor of {noise.time_factor:g}"
    )


def list_limits() -> Iterator[str]:
    """Yield the assumptions of the simulator and what they mean for its numbers."""
    yield (
        "The production connector, managers and policies decide what is found, loaded, stored, promoted, cascaded and "
        "evicted. The engine and the speed of links follow the rules below."
    )
    yield (
        "Requests arrive at the trace's times, however long answers take. Prompts are computed in turn at the "
        "prefill rate; answers are generated at the decode rate, independent of prompts. No request is pre-empted."
    )
    yield (
        "A link has a bandwidth, a latency and a number of concurrent transfers. There are no other users, no file "
        "system and no checksums."
    )
    yield (
        "Only full blocks are stored, and at least one token of a prompt is computed. Answers have no ids in a trace "
        "and are not stored. A trace with long blocks has coarser hits than an engine with short ones."
    )
    yield "Device memory, host memory and tiers are empty at the beginning; the numbers include that."
    yield (
        '"Not computed" counts prompt tokens. "At most" is Belady\'s bound: one memory with the blocks of device, host '
        "and tiers together, without transfer times, that knows when each block is needed next. Its requests come in "
        "the order in which this simulation admitted them; where several share a point of the plot it is the highest. "
        "No policy exceeds it; none is expected to reach it."
    )
    yield "A simulation is deterministic: equal input gives equal numbers."


def list_warnings(comparison: Comparison) -> Iterator[str]:
    """Yield warnings about the numbers. Pure."""
    found = comparison.by_label
    if saturated := comparison.saturated:
        effect = (
            "times describe the queue and not the cache" if comparison.has_times else "no times are shown"
        )
        yield (
            f"The engine is saturated ({', '.join(saturated)}): requests queue far longer than a prompt takes, so "
            f"{effect}."
        )
    for num_rejected, labels in group_rejected(found).items():
        yield f"{num_rejected:,} requests need more device blocks than there are and were skipped ({labels})."
    for label, one in found.items():
        for tier, number in breaker_openings(one).items():
            yield f"{label}: {tier} was overloaded {number} times and skipped for some seconds each."


def list_headline(comparison: Comparison, verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Yield the headline numbers and what they are. Pure."""
    if verdict.policy is None:
        return
    if verdict.policy != WITHOUT:
        yield f"{verdict.fewer_ratio:.0%}", "fewer prompt tokens computed"
    if verdict.median_first_token_s is not None:
        yield format_change(*verdict.median_first_token_s).replace("->", "→"), "median time to first token"
    best = next(
        one for case, one in comparison.pairs(chosen_size(comparison)) if case.policy == verdict.policy
    )
    for tier in best.tiers:
        yield f"{best.hit_ratio(tier.name):.1%}", f"of prompt tokens loaded from {tier.name}"
    if best.at_most_ratio is not None:
        yield (
            f"{best.at_most_ratio:.1%}",
            f"not computed at most, by any policy ({best.not_computed_ratio:.1%} here)",
        )


def make_page(comparison: Comparison) -> str:
    """Return the page.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    document, verdict = Document(f"kvtier simulate: {comparison.trace_name}"), make_verdict(comparison)
    text = f'<p class="verdict">{html.escape(verdict.text)}</p>'
    document.add("", text, render_headline(list_headline(comparison, verdict)))
    document.add("Warnings", render_list(list_warnings(comparison)), kind="warnings")
    document.add(
        "Results", document.figure(plot_hits(comparison)), render_table(tabulate_results(comparison))
    )
    size = chosen_size(comparison)
    charts: list[LineChart | BarChart] = [plot_origins(comparison, size)]
    if comparison.has_times:
        charts.append(plot_first_token(comparison, size))
    charts += [plot_writes(comparison, size), plot_occupancy(comparison, size)]
    heading = f"With {size.label} of {comparison.swept_place}" if size else "Details"
    document.add(heading, *map(document.figure, charts))
    missed = tabulate_misses(comparison)
    document.add("Why tokens were computed", render_table(missed) if missed else "")
    traffic = tabulate_traffic(comparison)
    document.add("Traffic", render_table(traffic) if traffic.rows else "")
    watched = tabulate_watched(comparison)
    document.add("Counters", render_table(watched) if watched else "")
    document.add("What was simulated", render_facts(list_facts(comparison)))
    document.add("What the numbers mean", render_list(list_limits()))
    return document.render()


def _describe_tier(tier: TierModel) -> str:
    speed, settings = tier.speed, tier.settings
    wanted = settings.admission
    admission = f", admission {wanted.min_reuse_probability:g} in {wanted.horizon_s:g} s" if wanted else ""
    read, write = speed.read_bytes_per_s / 1e9, speed.write_bytes_per_s / 1e9
    return (
        f"reads {read:g} GB/s, writes {write:g} GB/s, {speed.latency_s * 1e3:g} ms, {speed.num_streams} at a time, "
        f"ordered by {tier.cache_policy}, cascade {settings.cascade.value}, "
        f"store_threshold {settings.store_threshold}, fill {'on' if settings.fill else 'off'}, "
        f"job_timeout_s {settings.job_timeout_s:g}{admission}"
    )
