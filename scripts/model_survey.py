"""Tries which models of transformers are served correctly, one by one, and writes the table of them.

    python -m scripts.model_survey --out docs/results/models.md
    python -m scripts.model_survey llama qwen3_next mamba2

The models are tiny and seeded. Each is built and tried in a process of its own, so that one that crashes, hangs or
takes all memory costs its own row. The processes are forked from one that has imported transformers already.
"""

import argparse
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.transformers.tiny_models import list_model_types, require_model_type
from tests.engines.transformers.trial import (
    LIBRARY,
    ORIGINS,
    Outcome,
    Trial,
    describe_failure,
    try_architecture,
)

MAX_TRIAL_S = 120.0
"""Seconds after which a model counts as hanging; most take two."""

MAX_REASON_CHARACTERS = 160

TRIAL_MODULE = "tests.engines.transformers.trial"


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the models, print the page and write it if requested; return 1 when an answer differs.

    Raises:
        UnknownNameError: transformers has no such architecture.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", help="architectures by their name in transformers; all without one"
    )
    parser.add_argument("--jobs", type=int, default=2, help="models tried at once")
    parser.add_argument("--out", type=Path, help="write the page to this file")
    given = parser.parse_args(arguments)
    for model_type in given.models:
        require_model_type(model_type)
    rows = try_all(given.models or list_model_types(), given.jobs, MAX_TRIAL_S)
    page = make_page(rows)
    print(page)
    if given.out is not None:
        given.out.write_text(page, encoding="utf-8")
    return 1 if any(row.outcome is Outcome.DIFFERS for row in rows) else 0


def try_all(model_types: Sequence[str], jobs: int, max_trial_s: float) -> list[Trial]:
    """Return one row for each architecture, in their order, whatever becomes of its process.

    Args:
        model_types: the architectures by their names in transformers.
        jobs: processes at once.
        max_trial_s: seconds for each.
    """
    # Threads of the processes would only compete for the cores; the variable is read when torch is imported there.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([TRIAL_MODULE])
    rows: dict[int, Trial] = {}
    waiting = list(enumerate(model_types))
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            index, model_type = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=run_one, args=(model_type, theirs), daemon=True)
            process.start()
            theirs.close()
            running.append(_Running(index, model_type, process, ours, time.monotonic()))
        multiprocessing.connection.wait([one.answer for one in running], timeout=1.0)
        for one in running[:]:
            row = _take_row(one, max_trial_s)
            if row is not None:
                rows[one.index] = row
                running.remove(one)
    return [rows[index] for index in range(len(model_types))]


def run_one(model_type: str, answer: multiprocessing.connection.Connection) -> None:
    """Try one architecture in this process and send its row."""
    with Path(os.devnull).open("w") as silent:
        os.dup2(silent.fileno(), sys.stderr.fileno())  # transformers logs what it thinks of tiny models
    try:
        with tempfile.TemporaryDirectory(prefix="kvtier-models-") as folder:
            row = try_architecture(model_type, Path(folder))
    except Exception as error:  # noqa: BLE001 - foreign code: any model
        row = describe_failure(model_type, error)
    answer.send(row)


def make_page(rows: Sequence[Trial]) -> str:
    """Return the page with the table of models, in Markdown. Pure."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.outcome.value] = counts.get(row.outcome.value, 0) + 1
    lines_of_counts = [
        f"| {outcome} | {num} |" for outcome, num in sorted(counts.items(), key=lambda one: -one[1])
    ]
    served = [row for row in rows if row.outcome is Outcome.SERVED and _equal_from(row) == list(ORIGINS)]
    lines = [
        "# Models that were tried",
        "",
        "Made by `python -m scripts.model_survey --out docs/results/models.md`, on the CPU in float32. It tries every",
        f"architecture that {LIBRARY} offers as a causal language model, once for each class.",
        "",
        "The models are tiny, with random weights; real checkpoints were not tried. Each gets one prompt, answered",
        "four times: computed, from the device, from host memory, and from an fs tier after a restart. *Served* means",
        "that all answers have the tokens of plain `model.generate`.",
        "",
        "| outcome | models |",
        "|---|---:|",
        *lines_of_counts,
        "",
        "## Served",
        "",
        "| cache | model types |",
        "|---|---|",
        f"| keys and values | {_names(row for row in served if not row.state_bytes)} |",
        f"| recurrent states | {_names(row for row in served if row.state_bytes)} |",
        "",
        "## Not served, or not from everywhere",
        "",
        "| model type | outcome | equal from | why |",
        "|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows if row not in served]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class _Running:
    """A trial whose row is awaited."""

    index: int
    model_type: str
    process: Any  # Any: processes of this context have no public type
    answer: multiprocessing.connection.Connection
    began_s: float


def _take_row(one: _Running, max_trial_s: float) -> Trial | None:
    """Return the row of a trial that has ended or lasts too long; None while it goes on."""
    row: Trial | None = None
    try:
        if one.answer.poll():
            row = one.answer.recv()
    except EOFError:
        one.process.join()
        reason = f"its process ended with {one.process.exitcode}: a crash, or no memory"
        row = Trial(one.model_type, Outcome.FAILED, reason)
    if row is None and time.monotonic() - one.began_s > max_trial_s:
        one.process.kill()
        row = Trial(one.model_type, Outcome.FAILED, f"had not ended after {max_trial_s:.0f} s")
    if row is not None:
        one.process.join()
        one.answer.close()
    return row


def _names(rows: Iterable[Trial]) -> str:
    return ", ".join(f"`{row.model_type}`" for row in rows) or "none"


def _equal_from(row: Trial) -> list[str]:
    return [origin for origin, is_equal in row.equal.items() if is_equal and row.found[origin]]


def _cells(row: Trial) -> list[str]:
    reason = " ".join(row.reason.split()).replace("|", "/")
    if len(reason) > MAX_REASON_CHARACTERS:
        reason = reason[: MAX_REASON_CHARACTERS - 1] + "…"
    return [row.model_type, row.outcome.value, ", ".join(_equal_from(row)), reason]


if __name__ == "__main__":
    sys.exit(main())
