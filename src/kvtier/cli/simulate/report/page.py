"""The page: its sentences (what was simulated, the simulator's limits, warnings) and its HTML."""

import base64
import hashlib
import html
import importlib.metadata
import shlex
from collections.abc import Iterator, Sequence
from importlib.resources import files

from kvtier.cli.simulate.comparison import Comparison
from kvtier.cli.simulate.options import format_size
from kvtier.cli.simulate.report.plots import (
    BarChart,
    LineChart,
    plot_first_token,
    plot_hits,
    plot_occupancy,
    plot_origins,
    plot_writes,
)
from kvtier.cli.simulate.report.svg import draw
from kvtier.cli.simulate.report.tables import (
    render_facts,
    render_table,
    tabulate_results,
    tabulate_traffic,
    tabulate_watched,
)
from kvtier.cli.simulate.table import breaker_openings, group_rejected, is_saturated
from kvtier.config import LoadIf
from kvtier.sim.clients import ClientHints, HintNoise, Honesty
from kvtier.sim.sweep import Size
from kvtier.sim.tier import TierModel

STYLE_FILE, SCRIPT_FILE = "page.css", "page.js"


def list_facts(comparison: Comparison, command: Sequence[str], version: str) -> Iterator[tuple[str, str]]:
    """Yield names and values of what was simulated. Pure."""
    trace, engine, host = comparison.trace, comparison.engine, comparison.host
    block_bytes = engine.block_bytes

    def memory(num_blocks: int) -> str:
        return f"{num_blocks:,} blocks, {format_size(num_blocks * block_bytes)}"

    yield "command", shlex.join(command)
    yield "kvtier", version
    yield "trace", comparison.trace_name
    yield "requests", f"{len(trace.requests):,} in {trace.duration_s:,.0f} s"
    yield (
        "blocks",
        (
            f"{trace.num_accesses:,} of {trace.block_tokens} tokens and {format_size(block_bytes)}, "
            f"{trace.num_unique_blocks:,} of them unique ({format_size(trace.num_unique_blocks * block_bytes)})"
        ),
    )
    yield "device", memory(engine.num_device_blocks)
    yield "host", f"{memory(host.num_blocks)}, {host.speed.read_bytes_per_s / 1e9:g} GB/s each way"
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
    yield "prefill", f"{engine.prefill_tokens_per_s:,.0f} prompt tokens per second, all requests together"
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
    if saturated := [label for label, one in found.items() if is_saturated(comparison.engine, one)]:
        yield (
            f"The engine is saturated ({', '.join(saturated)}): requests queue far longer than a prompt takes, so "
            "times describe the queue and not the cache."
        )
    for num_rejected, labels in group_rejected(found).items():
        yield f"{num_rejected:,} requests need more device blocks than there are and were skipped ({labels})."
    for label, one in found.items():
        for tier, number in breaker_openings(one).items():
            yield f"{label}: {tier} was overloaded {number} times and skipped for some seconds each."


def make_page(comparison: Comparison, command: Sequence[str]) -> str:
    """Return the page.

    Args:
        comparison: inputs and results.
        command: the words of the command line.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    style, script = _read(STYLE_FILE), _read(SCRIPT_FILE)
    title = html.escape(f"kvtier simulate: {comparison.trace_name}")
    version = importlib.metadata.version("kvtier")
    body = "\n".join(_sections(comparison, command, version))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_content_policy(script)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{title}</h1></header>
<main>
{body}
</main>
<footer><p>Made by kvtier {html.escape(version)}. This page loads no other file.</p></footer>
<script>{script}</script>
</body>
</html>
"""


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


def _sections(comparison: Comparison, command: Sequence[str], version: str) -> Iterator[str]:
    warnings = "".join(f"<li>{html.escape(text)}</li>" for text in list_warnings(comparison))
    if warnings:
        yield f'<section class="warnings"><h2>Warnings</h2><ul>{warnings}</ul></section>'
    hits = plot_hits(comparison)
    figure = _figure(hits) if hits else ""
    yield f"<section><h2>Results</h2>{render_table(tabulate_results(comparison))}{figure}</section>"
    sizes: Sequence[Size | None] = comparison.sweep.sizes if comparison.sweep else [None]
    for number, size in enumerate(sizes):
        yield _details(comparison, size, number)
    watched = tabulate_watched(comparison)
    if watched:
        yield f"<section><h2>Counters</h2>{render_table(watched)}</section>"
    yield f"<section><h2>What was simulated</h2>{render_facts(list_facts(comparison, command, version))}</section>"
    limits = "".join(f"<li>{html.escape(text)}</li>" for text in list_limits())
    yield f"<section><h2>What the numbers mean</h2><ul>{limits}</ul></section>"


def _details(comparison: Comparison, size: Size | None, number: int) -> str:
    """Return the plots and the traffic of one size; all sizes but the first are collapsed."""
    name = str(number)
    charts: list[LineChart | BarChart] = [
        plot_origins(comparison, size, name),
        plot_first_token(comparison, size, name),
        plot_writes(comparison, size, name),
        plot_occupancy(comparison, size, name),
    ]
    content = "".join(_figure(chart) for chart in charts)
    traffic = render_table(tabulate_traffic(comparison, size, name))
    if size is None or comparison.sweep is None:
        return f"<section><h2>Details</h2>{content}{traffic}</section>"
    heading = html.escape(f"Details for {comparison.sweep.place} of {size.label}")
    is_open = " open" if number == 0 else ""
    return f"<details{is_open}><summary><h2>{heading}</h2></summary>{content}{traffic}</details>"


def _figure(chart: LineChart | BarChart) -> str:
    caption = f"<strong>{html.escape(chart.title)}.</strong> {html.escape(chart.description)}"
    return f"<figure>{draw(chart)}<figcaption>{caption}</figcaption></figure>"


def _content_policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _read(name: str) -> str:
    return (files("kvtier.cli.simulate.report") / name).read_text(encoding="utf-8")
