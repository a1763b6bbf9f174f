"""Measures what hints of clients are worth: the table of docs/results/hints.md.

``kvtier.sim.host_replay`` serves a recorded trace through LRU and hazard; simulated clients (``kvtier.sim.clients``)
say of each request whether or when it comes back, with the errors of the row. Each cell with a hint is compared with
an aim: AIM_SHARE of what a prototype gained at the same capacity on ``conversation``, or a loss of at most
MAX_LOSS_POINTS where hints are lies.

    python -m scripts.hint_hits conversation.jsonl.gz > docs/results/hints.md
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvtier.sim.clients import EXACT, ClientHints, HintNoise, Honesty
from kvtier.sim.formats.registry import read_trace
from kvtier.sim.host_replay import HostCache, blocks_of_share, replay_host

PERCENTS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)

AIM_SHARE = 0.9
"""Share of the prototype's gain that must be reached."""

MAX_LOSS_POINTS = 0.5

PROTOTYPE_WITHOUT = (7.98, 10.92, 15.47, 22.76, 29.74, 34.77)
"""What the prototype found without hints, in percent, by capacity."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of clients.

    Attributes:
        label: what they say, in words.
        known: what they know.
        noise: how wrong they are.
        prototype: what the prototype found, in percent, by capacity; None where hints are lies.
    """

    label: str
    known: ClientHints
    noise: HintNoise = EXACT
    prototype: tuple[float, ...] | None = None


CONTINUES, RETURNS = ClientHints.CONTINUES, ClientHints.RETURNS

ROWS = (
    Row(
        "goes on or ends, wrong for 30 %",
        CONTINUES,
        HintNoise(wrong_share=0.3),
        (8.28, 11.64, 16.30, 25.38, 31.14, 34.90),
    ),
    Row(
        "the same, wrong for 20 %",
        CONTINUES,
        HintNoise(wrong_share=0.2),
        (8.94, 12.47, 18.49, 27.87, 32.92, 35.49),
    ),
    Row(
        "the same, right, half of the clients silent",
        CONTINUES,
        HintNoise(silent_share=0.5),
        (9.68, 13.86, 20.71, 29.89, 34.35, 35.98),
    ),
    Row(
        "return time, off by a log-normal factor of two",
        RETURNS,
        HintNoise(time_factor=2),
        (13.44, 19.73, 27.72, 34.72, 35.79, 36.55),
    ),
    Row("return time, right", RETURNS, EXACT, (16.09, 22.60, 28.83, 33.92, 34.75, 36.11)),
    Row("goes on or ends, at random", CONTINUES, HintNoise(honesty=Honesty.RANDOM)),
    Row("return time, at random", RETURNS, HintNoise(honesty=Honesty.RANDOM)),
    Row(
        "return time, at random, no session named",
        RETURNS,
        HintNoise(honesty=Honesty.RANDOM, names_clients=False),
    ),
    Row("return time, hostile", RETURNS, HintNoise(honesty=Honesty.HOSTILE)),
    Row(
        "return time, half of the tenants hostile",
        RETURNS,
        HintNoise(honesty=Honesty.HOSTILE, liar_share=0.5),
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description="Measure what hints of clients are worth.")
    parser.add_argument("trace", type=Path, help="the file of requests")
    parser.add_argument(
        "--jobs", type=int, default=1, help="replays at the same time, each in its own process"
    )
    options = parser.parse_args(arguments)
    cells = [("lru", None), ("hazard", None), *(("hazard", row) for row in ROWS)]
    cells += [("lru", ROWS[number]) for number in (1, 4, 5, 8)]
    with ProcessPoolExecutor(options.jobs) as executor:
        futures = [executor.submit(measure, options.trace, policy, row) for policy, row in cells]
        found = [future.result() for future in futures]
    print(PREFACE)
    print("| policy and hints |", *(f"{percent:g} % |" for percent in PERCENTS))
    print("|---|", *("---:|" for _ in PERCENTS))
    for (policy, row), values in zip(cells, found, strict=True):
        print_row("no hint" if row is None else row.label, policy, values)
    print(CHECKS)
    for (policy, row), values in zip(cells, found, strict=True):
        if row is not None and policy == "hazard":
            print("\n".join(check_row(row, values, found[1])))


def measure(path: Path, policy: str, row: Row | None = None) -> tuple[float, ...]:
    """Return the hit ratio in percent at each capacity."""
    trace = read_trace(path)
    hints, noise = (ClientHints.NONE, EXACT) if row is None else (row.known, row.noise)
    caches = (
        HostCache(blocks_of_share(trace, percent / 100), policy, client_hints=hints, hint_noise=noise)
        for percent in PERCENTS
    )
    return tuple(100 * replay_host(trace, cache).hit_ratio for cache in caches)


def check_row(row: Row, found: Sequence[float], without: Sequence[float]) -> list[str]:
    """Return a line of the second table for each capacity. Pure."""
    lines = []
    for number, percent in enumerate(PERCENTS):
        gained = found[number] - without[number]
        least = (
            -MAX_LOSS_POINTS
            if row.prototype is None
            else AIM_SHARE * (row.prototype[number] - PROTOTYPE_WITHOUT[number])
        )
        met = "yes" if gained >= least else "no"
        lines.append(f"| {row.label}, {percent:g} % | {gained:+.2f} | {least:+.2f} | {met} |")
    return lines


def print_row(label: str, policy: str, values: Sequence[float]) -> None:
    """Print one line of the first table."""
    print(f"| {policy}: {label} |", *(f"{value:.2f} |" for value in values))


PREFACE = """# What hints are worth

[Hints of clients](../guide/hints.md) on the public trace `conversation`, host memory in % of its 182,790 unique blocks,
replayed as [the simulator](../guide/simulate.md#the-host-alone) says. A request goes on when a later one begins with at
least half of its blocks; its return time is the time until then. This page is written by a command:

```
python -m scripts.hint_hits conversation.jsonl.gz > docs/results/hints.md
```
"""

CHECKS = f"""
The aim is {AIM_SHARE:g} of what a prototype gained over hazard without hints, or a loss of at most {MAX_LOSS_POINTS:g}
points where hints are lies. A row of the prototype had seven classes of return times; kvtier has nine.

| what | measured, points | aim | met |
|---|---:|---:|---|"""


if __name__ == "__main__":
    main()
