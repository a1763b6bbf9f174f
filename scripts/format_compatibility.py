"""Lets two commits read what the other one has stored, fs and slab, and says whether they share a format.

    python -m scripts.format_compatibility            this tree and the commit before it
    python -m scripts.format_compatibility v0.1.0     this tree and a release

For each tier and direction one commit stores blocks, the other one looks for them, and the first one looks again. A
format that is shared finds and loads all of them with the right bytes. One that is not must find none, and leave them
alone: the first commit still has each of them afterwards. Anything else fails.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUM_BLOCKS = 64

PROGRAM = f"""
import json
import sys
try:
    from kvtier.testing.tier_driver import TierDriver, content_of, key_of, make_config, make_rows
except ImportError:  # where it stood before
    from kvtier.testing.tier_suite import TierDriver, content_of, key_of, make_config, make_rows
from kvtier.tiering.base import TierSettings
from kvtier.tiering.fs import FSTier
from kvtier.tiering.slab import SlabTier

kind, place, is_writer = sys.argv[1], sys.argv[2], sys.argv[3] == "store"
rows = make_rows()
own = {{"root_dir": place, "capacity_bytes": 2**24}} if kind == "fs" else {{"path": place, "capacity_bytes": 2**21}}
tier = (FSTier if kind == "fs" else SlabTier)(make_config(), rows, TierSettings(), **own)
assert tier.wait_indexed(60), "the index is not complete"
driver = TierDriver(tier, rows)
found = right = wrong = 0
for first in range(0, {NUM_BLOCKS}, 16):
    numbers = list(range(first, first + 16))
    if is_writer:
        assert driver.store(numbers).success, "a block was not stored"
    held = [number for number in numbers if driver.lookup(number)]
    found += len(held)
    if held:
        result = driver.load(held)
        keys = set(result.successful_keys or ())
        for slot, number in enumerate(held):
            if result.success or key_of(number) in keys:
                is_right = bytes(driver.rows[slot]) == bytes(content_of(number))
                right, wrong = right + is_right, wrong + (not is_right)
tier.shutdown(60.0)
print(json.dumps({{"found": found, "right": right, "wrong": wrong}}))
"""


@dataclass(frozen=True)
class Seen:
    """What a commit saw of the blocks.

    Attributes:
        found: blocks that its tier said it has.
        right: loaded with the bytes that were stored.
        wrong: loaded with others.
    """

    found: int
    right: int
    wrong: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Try both tiers in both directions; the status is 1 when a format is neither shared nor left alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "commit", nargs="?", default="HEAD~1", help="the other one; HEAD~1 when it is left out"
    )
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        unpack_commit(given.commit, other)
        sides = {"this tree": ROOT / "src", given.commit: other / "src"}
        verdicts: list[str] = []
        for tier in ("fs", "slab"):
            for first, second in (tuple(sides), tuple(reversed(sides))):
                place = Path(folder) / f"{tier}-{len(verdicts)}"
                seen = [
                    run(sides[first], tier, place, "store"),
                    run(sides[second], tier, place, "look"),
                    run(sides[first], tier, place, "look"),
                ]
                verdicts.append(judge(*seen))
                print(f"{tier}: stored by {first}, read by {second}: {verdicts[-1] or 'FAILED'} {seen}")
    if not all(verdicts):
        sys.exit(1)


def unpack_commit(commit: str, folder: Path) -> None:
    """Put the package of a commit into a folder."""
    command = ["git", "archive", commit, "src"]
    archive = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout  # noqa: S603  # git's own
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")


def run(source: Path, tier: str, place: Path, task: str) -> Seen:
    """Let one commit store or look for the blocks."""
    environment = os.environ | {"PYTHONPATH": str(source)}
    command = [sys.executable, "-c", PROGRAM, tier, str(place), task]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603  # ours
    return Seen(**json.loads(done.stdout))


def judge(stored: Seen, seen: Seen, again: Seen) -> str:
    """Return what the three say of a format; empty when a block is wrong, half found, or gone. Pure."""
    whole = Seen(NUM_BLOCKS, NUM_BLOCKS, 0)
    if stored != whole or again != whole:
        return ""
    return {whole: "shared", Seen(0, 0, 0): "not shared, left alone"}.get(seen, "")


if __name__ == "__main__":
    main()
