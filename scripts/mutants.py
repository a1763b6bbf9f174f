"""Plants each bug of ``mutant_table`` in a copy of the source and says what has found it: the storm, or a suite.

    python -m scripts.mutants                 all of them; minutes
    python -m scripts.mutants --only pinned   those whose name has the word
    python -m scripts.mutants --seed 7        the storm from another seed on
    python -m scripts.mutants --record        all of them, and docs/results/data/mutants.json has the table

The storm runs until a law is broken or ``--operations`` are done, over the one tier whose code has the bug if it is a
tier's. A bug that it does not find goes to its suite. The
status is 1 when a bug survives both, or the storm finds fewer than ``--least``.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.mutant_table import MUTANTS, Mutant

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "kvtier"
STORM_TIMEOUT_S = 900.0
"""A mutant that hangs the storm itself has been found."""

SUITE_TIMEOUT_S = 600.0
RECORD = ROOT / "docs" / "results" / "data" / "mutants.json"
HEAD = "| mutant | killed by | after |\n|---|---|---|"
_BROKEN = re.compile(r"BROKEN after (\d+) operations")


class Verdict(NamedTuple):
    """What became of one mutant.

    Attributes:
        killed_by: "storm", "suite", or "" when it survives.
        detail: after how many operations, and the law that was broken.
    """

    killed_by: str
    detail: str


def count_places(mutant: Mutant) -> int:
    """Return how often the mutant's text stands in its file, the one that is farthest from the right 1."""
    text = (SOURCE / mutant.path).read_text(encoding="utf-8")
    return max((text.count(old) for old, _ in mutant.edits()), key=lambda num: abs(num - 1))


def plant(mutant: Mutant, source: Path) -> None:
    """Plant the bug in a copy of the source.

    Raises:
        ValueError: its text is not there exactly once.
    """
    path = source / mutant.path
    text = path.read_text(encoding="utf-8")
    for old, new in mutant.edits():
        if text.count(old) != 1:
            raise ValueError(f"{mutant.path}: {old[:80]!r} is not there exactly once: plant the bug anew")
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def judge(mutant: Mutant, seed: int, num_operations: int) -> Verdict:
    """Run the storm, and the suite if need be, on a copy of the source with the bug."""
    with tempfile.TemporaryDirectory(prefix="kvtier-mutant-") as folder:
        source = Path(folder) / "kvtier"
        shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
        plant(mutant, source)
        path = os.pathsep.join([folder, str(ROOT)])
        environ = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        verdict = _storm(
            environ, [*_tiers_of(mutant), "--seed", str(seed), "--operations", str(num_operations)]
        )
        return verdict if verdict.killed_by or not mutant.suite else _suite(environ, folder, mutant.suite)


def _tiers_of(mutant: Mutant) -> list[str]:
    """Return the options that send the storm over the one tier whose code has the bug, if it is a tier's."""
    if mutant.path == "tiering/valkey/cluster.py":
        return ["--tiers", "cluster"]
    found = re.match(r"tiering/(packs|obj|valkey|mooncake)/", mutant.path)
    return ["--tiers", "fs" if found[1] == "packs" else found[1]] if found else []


def _storm(environ: dict[str, str], options: list[str]) -> Verdict:
    command = [sys.executable, "-m", "tests.storm", "--shrink-seconds", "0", *options]
    try:
        found = subprocess.run(  # noqa: S603  # this interpreter, its own arguments
            command, env=environ, capture_output=True, text=True, timeout=STORM_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Verdict("storm", "hangs")
    broken = _BROKEN.search(found.stdout)
    if broken is None:
        return Verdict("" if found.returncode == 0 else "storm", (found.stdout + found.stderr)[-200:])
    lines = (found.stdout + found.stderr).splitlines()
    law = next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)), "")
    kind, _, what = law.partition(":")
    return Verdict("storm", f"{int(broken[1])} operations: {kind.rpartition('.')[2]}:{what[:80]}")


def _suite(environ: dict[str, str], folder: str, suite: str) -> Verdict:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *suite.split()]
    command += ["-o", f"pythonpath={folder} {ROOT}", "-m", "not (traces or walks)"]
    try:
        found = subprocess.run(  # noqa: S603  # this interpreter, its own arguments
            command,
            env=environ,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SUITE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Verdict("suite", f"{suite} hangs")
    failed = next((line for line in found.stdout.splitlines() if line.startswith("FAILED")), "")
    return Verdict("suite" if found.returncode == 1 else "", failed[7:90])


def main(arguments: Sequence[str]) -> int:
    """Print the table of mutants and what has found them; return the status of the command."""
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="part of the names")
    parser.add_argument("--seed", type=int, default=1, help="the storm's first seed")
    parser.add_argument("--operations", type=int, default=60_000, help="operations of the storm at most")
    parser.add_argument("--least", type=int, default=15, help="bugs that the storm must find")
    parser.add_argument(
        "--record", action="store_true", help=f"write the table into {RECORD.relative_to(ROOT)}"
    )
    options = parser.parse_args(arguments)
    verdicts: list[tuple[Mutant, Verdict]] = []
    print(HEAD, flush=True)
    for mutant in MUTANTS:
        if options.only not in mutant.name:
            continue
        verdict = judge(mutant, options.seed, options.operations)
        verdicts.append((mutant, verdict))
        print(render_row(mutant, verdict), flush=True)
    by_storm = sum(verdict.killed_by == "storm" for _, verdict in verdicts)
    survivors = sum(not verdict.killed_by for _, verdict in verdicts)
    print(f"{len(verdicts)} mutants, {by_storm} killed by the storm, {survivors} survive")
    if options.record and not options.only:
        text = json.dumps(make_record(verdicts, options.seed, options.operations), indent=1)
        RECORD.write_text(text + "\n", encoding="utf-8")
    return int(survivors > 0 or (not options.only and by_storm < options.least))


def render_row(mutant: Mutant, verdict: Verdict) -> str:
    """Return a line of the table. Pure."""
    detail = verdict.detail.replace("|", "/").replace("<", "").replace(">", "").replace("\n", " ")
    return f"| {mutant.name} | {verdict.killed_by or 'SURVIVES'} | {detail} |"


def make_record(
    verdicts: Sequence[tuple[Mutant, Verdict]], seed: int, num_operations: int
) -> dict[str, object]:
    """Return what is kept of a run over all mutants. Pure."""
    return {
        "first_seed": seed,
        "operations_at_most": num_operations,
        "num_planted": len(verdicts),
        "num_killed_by_storm": sum(verdict.killed_by == "storm" for _, verdict in verdicts),
        "num_survivors": sum(not verdict.killed_by for _, verdict in verdicts),
        "mutants": [
            {"name": mutant.name, "killed_by": verdict.killed_by, "after": verdict.detail}
            for mutant, verdict in verdicts
        ],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
