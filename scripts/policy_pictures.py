"""Draws the hits of each eviction policy on a recorded trace, over the capacity, for docs/concepts/policies.md.

Equal counts give equal files. With ``--csv`` the ratios are written too, and read from there if the file exists: a
replay of all policies takes minutes.

    python -m scripts.policy_pictures conversation.jsonl.gz docs/pictures/policies-conversation.svg
"""

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvtier.cpu.policies import CACHE_POLICIES
from kvtier.sim.bound import count_belady_hits
from kvtier.sim.host_replay import HostCache, blocks_of_share, replay_host
from kvtier.sim.trace import Trace
from scripts.policy_hits import list_accesses, read_blocks

PERCENTS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
BOUND = "Belady"
COLOURS = {
    BOUND: "#000000",
    "hazard": "#c03030",
    "lru": "#1f6fb4",
    "arc": "#2e8b57",
}
"""In the order of the legend."""

DIGITS = 4
"""Digits of a ratio in percent: a block in a million."""

SIZE_INCHES = (8.0, 4.8)

Ratios = Mapping[str, Sequence[float]]
"""By policy and for the bound: hits in percent, one for each of PERCENTS."""


def main() -> None:
    """Count, or read earlier counts, and draw."""
    parser = argparse.ArgumentParser(description="Draw the hits of each eviction policy on a trace.")
    parser.add_argument("trace", type=Path, help="the file of requests")
    parser.add_argument("picture", type=Path, help="the file to write, .svg")
    parser.add_argument("--csv", type=Path, help="file that keeps the ratios")
    options = parser.parse_args()
    if options.csv is not None and options.csv.exists():
        ratios = read_ratios(options.csv)
    else:
        ratios = count_ratios(read_blocks(options.trace, parser))
        if options.csv is not None:
            write_ratios(ratios, options.csv)
    draw(options.trace.name.split(".")[0], ratios, options.picture)


def count_ratios(trace: Trace) -> Ratios:
    """Replay ``trace`` with every policy at every capacity."""
    capacities = [blocks_of_share(trace, percent / 100) for percent in PERCENTS]
    accesses = list_accesses(trace)
    found = {BOUND: [count_belady_hits(accesses, capacity) for capacity in capacities]}
    for policy in CACHE_POLICIES.names():
        found[policy] = [replay_host(trace, HostCache(capacity, policy)).num_hits for capacity in capacities]
    # With the digits of the file, so that a picture of the file's ratios is the same.
    return {
        name: [round(100 * hits / trace.num_accesses, DIGITS) for hits in row] for name, row in found.items()
    }


def write_ratios(ratios: Ratios, path: Path) -> None:
    """Write a line for each policy."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(
            [name, *(f"{ratio:.{DIGITS}f}" for ratio in row)] for name, row in ratios.items()
        )


def read_ratios(path: Path) -> Ratios:
    """Read the output of ``write_ratios``."""
    with path.open(newline="") as file:
        return {name: [float(value) for value in values] for name, *values in csv.reader(file)}


def draw(title: str, ratios: Ratios, path: Path) -> None:
    """Write a line for each policy, the capacity on a logarithmic axis."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    for name in sorted(ratios, key=list(COLOURS).index):
        style = "--" if name == BOUND else "-"
        axes.plot(PERCENTS, ratios[name], style, marker="o", markersize=3, color=COLOURS[name], label=name)
    axes.set_xscale("log")
    axes.set_xticks(PERCENTS, [f"{percent:g}" for percent in PERCENTS])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.set_title(f"{title}: blocks found of 100 asked for, each prefix up to its first miss")
    axes.set_xlabel("capacity in percent of the unique blocks")
    axes.set_ylabel("%")
    axes.legend(fontsize=8)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
