"""``kvtier models``: which models of transformers are served correctly, tried one by one.

Each model is built and tried in a process of its own, so that one that crashes, hangs or takes all memory costs its own
row. The processes are forked from one that has imported transformers already. The models are tiny and seeded; the
user's own model is loaded from its folder.
"""

import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.cli.output import check_writable, make_console, make_table, write_result
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.engines.transformers.trial import Trial

MAX_TRIAL_S = 120.0
"""Seconds after which a tiny model counts as hanging; most take two. Models of one's own have no limit."""

MAX_REASON_CHARACTERS = 160

TRIAL_MODULE = "kvtier.engines.transformers.trial"
TINY_MODULE = "kvtier.engines.transformers.tiny_models"


def models(
    model_types: Annotated[
        list[str] | None, typer.Argument(help="Architectures by their name in transformers; all without one.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Try the model of this folder instead, with default settings."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write a page with the table here (.md).")] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Models tried at once.")] = 2,
) -> None:
    """Try which models of transformers are served, and from which tiers, with the answers of plain generate.

    Exit status: 1 when the model of ``--model`` is not served correctly.

    Raises:
        UnknownNameError: transformers has no such architecture.
        ConfigError: ``--model`` is not a folder, or is given together with architectures.
    """
    from kvtier.engines.transformers.tiny_models import list_model_types, require_model_type

    if out is not None:
        check_writable("--out", out)
    if model is not None:
        if model_types:
            raise ConfigError("--model", str(model), "is tried alone: leave out the architectures")
        if not model.is_dir():
            raise ConfigError(
                "--model", str(model), "is not a folder with a model, as save_pretrained writes it"
            )
        rows = try_all([Subject(path=str(model))], 1, max_trial_s=None)
    else:
        for model_type in model_types or ():
            require_model_type(model_type)
        subjects = [Subject(model_type=name) for name in model_types or list_model_types()]
        rows = try_all(subjects, jobs, max_trial_s=MAX_TRIAL_S)
    if as_json:
        typer.echo(json.dumps([row_as_json(row) for row in rows], indent=2))
    else:
        _print(rows)
    if out is not None:
        write_result("--out", out, make_page(rows))
    if model is not None and rows[0].outcome.value != "served":
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class Subject:
    """What one row is about: an architecture, or a folder with a model.

    Attributes:
        model_type: the architecture; empty for a folder.
        path: the folder; empty for an architecture.
    """

    model_type: str = ""
    path: str = ""


def try_all(subjects: Sequence[Subject], jobs: int, max_trial_s: float | None) -> list["Trial"]:
    """Return one row for each subject, in their order, whatever becomes of its process.

    Args:
        subjects: what to try.
        jobs: processes at once.
        max_trial_s: seconds for each; None sets no limit.
    """
    # Threads of the processes would only compete for the cores; the variable is read when torch is imported there.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([TRIAL_MODULE, TINY_MODULE])
    rows: dict[int, Trial] = {}
    waiting = list(enumerate(subjects))
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            index, subject = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=run_one, args=(subject, theirs), daemon=True)
            process.start()
            theirs.close()
            running.append(_Running(index, subject, process, ours, time.monotonic()))
        multiprocessing.connection.wait([one.answer for one in running], timeout=1.0)
        for one in running[:]:
            row = _take_row(one, max_trial_s)
            if row is not None:
                rows[one.index] = row
                running.remove(one)
    return [rows[index] for index in range(len(subjects))]


def run_one(subject: Subject, answer: multiprocessing.connection.Connection) -> None:
    """Try one subject in this process and send its row."""
    from kvtier.engines.transformers.trial import describe_failure

    with Path(os.devnull).open("w") as silent:
        os.dup2(silent.fileno(), sys.stderr.fileno())  # transformers logs what it thinks of tiny models
    try:
        row = _try(subject)
    except Exception as error:  # noqa: BLE001 - foreign code: any model
        row = describe_failure(subject.model_type or subject.path, error)
    answer.send(row)


def row_as_json(row: "Trial") -> dict[str, Any]:  # Any: values of several types
    """Return a row as plain values. Pure."""
    return asdict(row) | {"outcome": row.outcome.value}


def make_page(rows: Sequence["Trial"]) -> str:
    """Return the page with the table of models, in Markdown. Pure."""
    from kvtier.engines.transformers.trial import LIBRARY

    counts: dict[str, int] = {}
    for row in rows:
        counts[row.outcome.value] = counts.get(row.outcome.value, 0) + 1
    lines_of_counts = [
        f"| {outcome} | {num} |" for outcome, num in sorted(counts.items(), key=lambda one: -one[1])
    ]
    lines = [
        "# Models that were tried",
        "",
        "Made by `kvtier models --out docs/results/models.md`, on the CPU in float32. It tries every architecture that",
        f"{LIBRARY} offers as a causal language model, one row for each class.",
        "",
        "The models are tiny, with random weights; real checkpoints were not tried. Each row is one prompt, answered",
        "four times: computed, from the device, from host memory, and from an fs tier after a restart. *Served* means",
        "that all answers have the tokens of plain `model.generate`. Bytes are those of the tiny model.",
        "",
        "| outcome | models |",
        "|---|---:|",
        *lines_of_counts,
        "",
        "| model type | outcome | equal from | bytes of a token | bytes of a state | why |",
        "|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(cells)} |" for cells in map(_cells, rows)]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class _Running:
    """A trial whose row is awaited."""

    index: int
    subject: Subject
    process: Any  # Any: processes of this context have no public type
    answer: multiprocessing.connection.Connection
    began_s: float


def _take_row(one: _Running, max_trial_s: float | None) -> "Trial | None":
    """Return the row of a trial that has ended or lasts too long; None while it goes on."""
    from kvtier.engines.transformers.trial import Outcome, Trial

    name = one.subject.model_type or one.subject.path
    row: Trial | None = None
    try:
        if one.answer.poll():
            row = one.answer.recv()
    except EOFError:
        one.process.join()
        row = Trial(
            name, Outcome.FAILED, f"its process ended with {one.process.exitcode}: a crash, or no memory"
        )
    if row is None and max_trial_s is not None and time.monotonic() - one.began_s > max_trial_s:
        one.process.kill()
        row = Trial(name, Outcome.FAILED, f"had not ended after {max_trial_s:.0f} s")
    if row is not None:
        one.process.join()
        one.answer.close()
    return row


def _try(subject: Subject) -> "Trial":
    from kvtier.engines.transformers.trial import try_architecture, try_folder

    with tempfile.TemporaryDirectory(prefix="kvtier-models-") as folder:
        if subject.path:
            return try_folder(Path(subject.path), Path(folder))
        return try_architecture(subject.model_type, Path(folder))


def _cells(row: "Trial") -> list[str]:
    equal = ", ".join(origin for origin, is_equal in row.equal.items() if is_equal and row.found[origin])
    reason = " ".join(row.reason.split()).replace("|", "/")
    if len(reason) > MAX_REASON_CHARACTERS:
        reason = reason[: MAX_REASON_CHARACTERS - 1] + "…"
    sizes = [str(size) if size else "" for size in (row.token_bytes, row.state_bytes)]
    return [row.model_type, row.outcome.value, equal, *sizes, reason]


def _print(rows: Sequence["Trial"]) -> None:
    headings = ("model", "outcome", "equal from"), ("bytes/token", "bytes/state")
    table = make_table("Models of transformers", *headings)
    table.add_column("why", overflow="fold")
    for row in rows:
        table.add_row(*_cells(row))
    make_console().print(table)
    served = sum(row.outcome.value == "served" for row in rows)
    typer.echo(f"{served} of {len(rows)} served with the answers of plain generate")
