"""The command of the storm: which seeds are run, what is printed, how a failure is reported."""

import argparse
import hashlib
import random
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.storm.episode import (
    EPISODE_OPERATIONS,
    PLACES,
    Episode,
    Outcome,
    command_of,
    run_episode,
    shrink,
)


def main(arguments: Sequence[str]) -> int:
    """Run storms; return 0 when every law has held, 1 when one was broken.

    Args:
        arguments: those of the command line.
    """
    options = _parse(arguments)
    first_seed = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    print(f"storm: commit {commit()}, seed {first_seed}", flush=True)
    began_s, wall_s = time.process_time(), time.monotonic()
    whole, seen, num_operations, seed = hashlib.sha256(), Counter[str](), 0, first_seed
    num_faulted = num_struck = 0
    while True:
        episode = Episode(seed, options.episode, options.keep, options.faults, options.tiers)
        outcome = run_episode(episode, on_operation=_print_operation if options.verbose else None)
        whole.update(outcome.digest.encode())
        seen += outcome.seen
        num_operations += outcome.num_operations
        num_faulted += outcome.num_faulted
        num_struck += outcome.num_struck
        if outcome.error is not None:
            _report(episode, outcome, num_operations, shrink_s=options.shrink_seconds)
            return 1
        seed += 1
        is_over = time.monotonic() - wall_s >= 60 * options.minutes if options.minutes else True
        if (num_operations >= options.operations and is_over) or options.keep is not None:
            break
    cpu_s = time.process_time() - began_s
    print(f"storm: {num_operations} operations, seeds {first_seed} to {seed - 1}, no law broken")
    print(f"storm: {num_faulted} were done under faults, in {num_struck} one struck")
    hourly = " and ".join(f"{3600 * num / cpu_s:.0f}" for num in (num_faulted, num_struck))
    print(
        f"storm: {num_operations / cpu_s:.0f} operations a second of processor time, {hourly} of these an hour"
    )
    print(f"storm: digest {whole.hexdigest()[:16]}")
    if options.summary:
        for name, num in sorted(seen.items()):
            print(f"  {num:8d} {name}")
    return 0


def commit() -> str:
    """Return the commit of this source, "unknown" where there is none."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],  # noqa: S607  # the one on the path
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def _report(episode: Episode, outcome: Outcome, num_operations: int, shrink_s: float) -> None:
    assert outcome.error is not None
    print(
        f"storm: BROKEN after {num_operations} operations, seed {episode.seed}, operation {outcome.failed_at}"
    )
    traceback.print_exception(outcome.error)
    print(f"storm: replay with  {command_of(replace(episode))}", flush=True)
    if shrink_s:
        shorter = shrink(episode, outcome, max_seconds=shrink_s)
        print(f"storm: shortest found, {len(shorter.numbers())} operations:  {command_of(shorter)}")


def _print_operation(number: int, name: str) -> None:
    print(f"  {number} {name}", flush=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description=__doc__)
    parser.add_argument(
        "--seed", type=int, help="the first seed; each episode takes the next one; a fresh one by default"
    )
    parser.add_argument("--minutes", type=float, default=0.0, help="run for so long at least")
    parser.add_argument("--operations", type=int, default=1, help="do so many operations at least")
    parser.add_argument("--episode", type=int, default=EPISODE_OPERATIONS, help="operations of an episode")
    parser.add_argument("--tiers", type=_names, default=tuple(PLACES), help="tiers to draw from, with commas")
    parser.add_argument("--keep", type=_numbers, help="do these operations of one episode alone: 0-7,9")
    parser.add_argument("--faults", type=_faults, help="set these faults alone, with commas; none for none")
    parser.add_argument(
        "--shrink-seconds", type=float, default=60.0, help="look so long for a shorter failure"
    )
    parser.add_argument("--summary", action="store_true", help="print how often what has happened")
    parser.add_argument("--verbose", action="store_true", help="print each operation before it is done")
    return parser.parse_args(arguments)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in PLACES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: expected some of {', '.join(PLACES)}")
    return names


def _faults(text: str) -> frozenset[str]:
    return frozenset() if text == "none" else frozenset(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)
