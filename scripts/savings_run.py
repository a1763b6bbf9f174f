"""Do a real vLLM's numbers of what loading saves hold, and does it leave a slow disk alone?

    python -m scripts.savings_run                   needs vLLM; ten minutes
    python -m scripts.savings_run --runs 4 --only slow

Every hit comes from a disk whose system calls take as long as a rate says.

- *interval*: a fresh engine computes one hit in five and gives its 95 % interval. Beside it a second engine without an
  audit serves the same prompts by turns loaded, computed alone, and computed and stored, as a request with
  ``skip_load`` is. The audit compares while it computes, which costs about as much as storing or less, so the truth is
  the range of the two differences. Of those older ones count less, as the engine's do. Every mean has an error: the
  engine's may be as far from that range as its own and the range's error explain.
- *slow*: after how many requests at 5 MB/s fewer than a fifth is loaded, and after how many at the machine's rate
  more than four fifths are again; in each run other requests are drawn.

Exit status 1 when a disk is not left within 200 requests, or not used again.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from math import inf, sqrt
from pathlib import Path

from tests.e2e.vllm.checkpoints import save_llama
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.slow_disk import (
    COMPUTED,
    COMPUTED_AND_STORED,
    HIT_TOKENS,
    NUM_PROMPTS,
    ONE_TOKEN,
    SLOW_BYTES_PER_S,
    SlowDiskBench,
    make_options,
)

from kvtier.connector.control_arm import HALF_LIFE, DecayingMean, SavedInterval

RATES = (inf, 20e6)
"""Bytes a second of the disks of the interval: one that pays and one that does not."""

NUM_LIVE = 150
"""Requests of a run that the audited engine serves."""

LIVE_PER_TRIPLE = 5
"""Of these for each triple of the other engine: both see the machine as busy."""

AUDIT_RATIO = 0.2
ROUND_REQUESTS = 1 / AUDIT_RATIO + 1 / (1 - AUDIT_RATIO) - 1
"""Requests, on average, until both kinds have come."""

MAX_REQUESTS = 200
US = 1e6
NORMAL_975 = 1.96
"""The 97.5 % quantile of the normal distribution."""


def main() -> int:
    """Run both parts; return 1 when a slow disk was kept or a recovered one left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10, help="engines of each rate and part")
    parser.add_argument("--only", choices=("interval", "slow"), help="one part")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtier-") as folder:
        model = str(save_llama(Path(folder) / "model"))
        if arguments.only != "slow":
            for rate in RATES:
                run_interval(model, Path(folder), rate, arguments.runs)
        if arguments.only != "interval":
            try:
                run_slow(model, Path(folder), arguments.runs)
            except AssertionError as error:
                print(f"not within {MAX_REQUESTS} requests: {error}")
                return 1
    return 0


def run_interval(model: str, folder: Path, bytes_per_s: float, num_runs: int) -> None:
    """Print for each run the interval and the other engine's two means, then how many agree."""
    num_agreeing = 0
    with EngineProcess(make_options(model, folder / f"triples-{bytes_per_s:g}")) as other:
        triples = SlowDiskBench(other)
        triples.set_rate(bytes_per_s)
        for seed in range(num_runs):
            settings = {"audit_ratio": AUDIT_RATIO, "audit_seed": seed}
            with EngineProcess(
                make_options(model, folder / f"live-{bytes_per_s:g}-{seed}", **settings)
            ) as engine:
                live = SlowDiskBench(engine)
                live.set_rate(bytes_per_s)
                alone, stored = (DecayingMean(HALF_LIFE * ROUND_REQUESTS / LIVE_PER_TRIPLE) for _ in range(2))
                for saved_alone_s, saved_stored_s in serve_both(live, triples):
                    alone.add(saved_alone_s)
                    stored.add(saved_stored_s)
                found = live.saved()
            agrees = agree(found, alone, stored)
            num_agreeing += agrees
            print(
                f"interval, {bytes_per_s:g} B/s, run {seed}: {US * found.low_s:.1f} to {US * found.high_s:.1f} us a "
                f"token of {found.num_loaded} loaded and {found.num_computed} computed; beside it {describe(alone)} "
                f"alone, {describe(stored)} with storing: {'they agree' if agrees else 'they DISAGREE'}",
                flush=True,
            )
    print(f"interval, {bytes_per_s:g} B/s: {num_agreeing} of {num_runs} agree", flush=True)


def describe(mean: DecayingMean) -> str:
    """Return a mean of seconds and its standard error in microseconds. Pure."""
    return f"{US * mean.mean:.1f} (+- {US * sqrt(mean.variance_of_mean):.1f})"


def agree(found: SavedInterval, alone: DecayingMean, stored: DecayingMean) -> bool:
    """Return whether an interval is no further from the range of two means than chance explains. Pure."""
    middle_s, reach_s = (found.low_s + found.high_s) / 2, (found.high_s - found.low_s) / 2
    low, high = sorted((alone, stored), key=lambda each: each.mean)
    nearest = low if middle_s < low.mean else high
    distance_s = max(low.mean - middle_s, middle_s - high.mean)
    return distance_s <= sqrt(reach_s**2 + NORMAL_975**2 * nearest.variance_of_mean)


def serve_both(live: SlowDiskBench, triples: SlowDiskBench) -> Iterator[tuple[float, float]]:
    """Serve a run, and beside it yield the seconds per token that each triple saves: computed alone, and stored."""
    kinds = [ONE_TOKEN, COMPUTED, COMPUTED_AND_STORED]
    for number in range(NUM_LIVE):
        live.serve()
        if number % LIVE_PER_TRIPLE == 0:
            # Each comes first, second and last as often. The other prompts lie between them, so that host memory
            # does not hold the prompt any more; they are loaded, as most of the live requests are.
            kinds = kinds[1:] + kinds[:1]
            took_s = []
            for sampling in kinds:
                took_s.append(triples.serve(sampling).took_s)
                for _ in range(NUM_PROMPTS - 1):
                    triples.serve()
            loaded_s, alone_s, stored_s = (
                took_s[kinds.index(kind)] for kind in (ONE_TOKEN, COMPUTED, COMPUTED_AND_STORED)
            )
            yield (alone_s - loaded_s) / HIT_TOKENS, (stored_s - loaded_s) / HIT_TOKENS


def run_slow(model: str, folder: Path, num_runs: int) -> None:
    """Print after how many requests the engine leaves a slow disk, and comes back.

    Raises:
        AssertionError: it does not within ``MAX_REQUESTS``.
    """
    for seed in range(num_runs):
        settings = {"load_if": "faster", "audit_ratio": 1 / 50, "audit_seed": seed}
        with EngineProcess(make_options(model, folder / f"slow-{seed}", **settings)) as engine:
            bench = SlowDiskBench(engine)
            bench.serve_until(lambda share: share > 0.8, MAX_REQUESTS)
            bench.set_rate(SLOW_BYTES_PER_S)
            num_left = bench.serve_until(lambda share: share < 0.2, MAX_REQUESTS)
            bench.set_rate(inf)
            num_back = bench.serve_until(lambda share: share > 0.8, MAX_REQUESTS)
        print(f"slow, run {seed}: left after {num_left} requests, used again after {num_back}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
