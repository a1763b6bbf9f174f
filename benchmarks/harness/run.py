"""Runs a suite: prints its table line by line, writes the numbers, draws the picture."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.measurement import OURS, Measurement
from benchmarks.harness.picture import write_picture
from benchmarks.harness.suite import Options, Suite
from benchmarks.harness.table import Table
from kvtier.cli.processes import ended_like_interrupted

Document = dict[str, object]
"""A suite's run as JSON."""


def run_suites(
    suites: Sequence[Suite], *, is_quick: bool, folder: Path | None = None, out_folder: Path | None = None
) -> list[Document]:
    """Run suites one after another and return their documents.

    Args:
        suites: the suites.
        is_quick: fewer sizes and rounds.
        folder: folder for files; None: the system's temporary folder.
        out_folder: for NAME.json and NAME.svg of each; created if missing.

    Effects: SIGTERM and SIGHUP end a run like Ctrl-C, so that a suite's files and servers are removed.

    Thread: the main one.

    Raises:
        KeyboardInterrupt: a signal ended the run.
        ImportError, OSError: as in ``run_suite``.
    """
    documents = []
    with ended_like_interrupted():
        for suite in suites:
            json_path = picture_path = None
            if out_folder is not None:
                out_folder.mkdir(parents=True, exist_ok=True)
                json_path, picture_path = out_folder / f"{suite.name}.json", out_folder / f"{suite.name}.svg"
            documents.append(
                run_suite(
                    suite, is_quick=is_quick, folder=folder, json_path=json_path, picture_path=picture_path
                )
            )
    return documents


def run_suite(
    suite: Suite,
    *,
    is_quick: bool = False,
    folder: Path | None = None,
    json_path: Path | None = None,
    picture_path: Path | None = None,
    out: TextIO | None = None,
) -> Document:
    """Run ``suite`` and return its document: machine, notes, and the values of every round.

    Args:
        suite: the suite.
        is_quick: fewer sizes and rounds.
        folder: folder for files; None: the system's temporary folder.
        json_path: for the document.
        picture_path: for the picture, if there is something to draw and matplotlib is installed; its suffix selects
            the format.
        out: for the table; None: standard output.

    Raises:
        ImportError: a library that this suite needs is missing.
        OSError: a file cannot be written.
    """
    machine = describe_machine()
    notes: list[str] = []
    measurements: list[Measurement] = []
    table: Table | None = None
    print(f"{suite.name}: {suite.summary}", file=out)
    for measurement in suite.measure(Options(is_quick, folder, notes.append)):
        if table is None or not table.has_columns_for(measurement):
            table = Table(measurement)
            print(table.head(), file=out)
        print(table.line(measurement), file=out, flush=True)
        measurements.append(measurement)
    for note in notes:
        print(note, file=out)
    document: Document = {
        "suite": suite.name,
        "is_quick": is_quick,
        "machine": machine,
        "notes": notes,
        "measurements": [as_document(measurement) for measurement in measurements],
    }
    if json_path is not None:
        json_path.write_text(json.dumps(document, indent=1) + "\n")
    if picture_path is not None and measurements:
        _draw(suite, measurements, picture_path, out)
    return document


def as_document(measurement: Measurement) -> dict[str, object]:
    """Return a measurement as JSON, with medians and ratios beside the values. Pure."""
    return {
        "labels": dict(measurement.labels),
        "unit": measurement.unit,
        "better": measurement.better.value,
        "values": {name: list(values) for name, values in measurement.values.items()},
        "medians": {name: measurement.median(name) for name in measurement.values},
        "ratios": {
            name: asdict(ratio)
            for name in measurement.values
            if name != OURS and (ratio := measurement.ratio(name)) is not None
        },
        "bar": None if measurement.bar is None else asdict(measurement.bar) | {"is_met": measurement.is_met},
    }


def _draw(suite: Suite, measurements: Sequence[Measurement], path: Path, out: TextIO | None) -> None:
    """Write the picture; a failure must not lose numbers that took minutes."""
    try:
        write_picture(f"{suite.name}: {suite.summary}", measurements, suite.x_label, path)
    except ImportError as error:
        print(f"no picture: {error}; pip install '.[plot]' in kvtier's checkout", file=out)
