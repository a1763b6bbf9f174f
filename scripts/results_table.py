"""Write the tables of a page of results from what ``kvtier bench --out FOLDER`` has kept.

A table has four columns: what, measured, bar or peer, met. One line is one measurement: the median of ours, the median
of each contestant and the median ratio of ours to it, and whether the bar is reached. What stands between the two
marks of the page is replaced, everything else stays. Nothing is measured here and no number is typed.

    python -m scripts.results_table RUN docs/results/intel-xeon.md --date 2026-11-22
    python -m scripts.results_table RUN docs/results/intel-xeon.md --first-token docs/results/first-token.json
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
OURS = "ours"
FIRST_TOKEN_TOKENS = 4096
"""Length of the prompt whose times to first token are kept for the picture."""

Document = Mapping[str, Any]  # Any: JSON of the benchmarks


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the page; return 1 when it or the run is not as expected."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="the folder given to `kvtier bench --out`")
    parser.add_argument("page", type=Path, help="the page with the two marks")
    parser.add_argument("--date", type=date.fromisoformat, help="of the run; by default of its newest file")
    parser.add_argument("--first-token", type=Path, help="also keep the times to first token here, as JSON")
    options = parser.parse_args(arguments)
    try:
        suites = read_run(options.run)
        day = options.date or date.fromtimestamp(
            max(path.stat().st_mtime for path in json_files(options.run))
        )
        page = options.page.read_text(encoding="utf-8")
        texts = {options.page: replace_measured(page, tables_of(suites, day))}
        if options.first_token is not None:
            texts[options.first_token] = json.dumps(first_tokens_of(suites, day), indent=1) + "\n"
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
    except (OSError, ValueError, KeyError) as error:
        print(f"{options.run}, {options.page}: {error!r}", file=sys.stderr)
        return 1
    return 0


def json_files(folder: Path) -> list[Path]:
    """Return the files of a run, by name."""
    return sorted(path for path in folder.iterdir() if path.suffix == ".json")


def read_run(folder: Path) -> list[Document]:
    """Return what each suite of a run has kept, by name.

    Raises:
        ValueError: the folder has no JSON file, or one that no benchmark has written.
    """
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in json_files(folder)]
    if not documents or not all("measurements" in document for document in documents):
        raise ValueError(f"{folder} has no files of `kvtier bench --out`")
    return documents


def replace_measured(page: str, tables: str) -> str:
    """Return ``page`` with other tables between its marks. Pure.

    Raises:
        ValueError: it does not have both marks, in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page must have {BEGIN} and, after it, {END}")
    return f"{before}{BEGIN}\n\n{tables}\n{END}{after}"


def tables_of(suites: Sequence[Document], day: date) -> str:
    """Return the machine, a count of the bars, and one table for each suite. Pure."""
    bars = [line["bar"] for suite in suites for line in suite["measurements"] if line["bar"] is not None]
    num_met = sum(bar["is_met"] is True for bar in bars)
    num_measured = sum(bar["is_met"] is not None for bar in bars)
    parts = [machine_table(suites[0]["machine"], day), f"Bars met: {num_met} of {num_measured}.\n"]
    return "\n".join([*parts, *(suite_section(suite) for suite in suites)])


def machine_table(machine: Mapping[str, Any], day: date) -> str:  # Any: JSON
    """Return what was measured on, and when. Pure."""
    # A kernel's own suffix says nothing about the numbers, and a load nothing beyond its first digit.
    shown = {
        "system": lambda text: re.sub(r"^(\w+-\d+\.\d+)\S*?(-x86_64|-aarch64)?(-with\S*)?$", r"\1\2\3", text),
        "load": "{:.1f}".format,
    }
    rows = [("date", day.isoformat())]
    rows += [(name, shown.get(name, str)(value)) for name, value in machine.items()]
    return "| machine | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows)


def suite_section(suite: Document) -> str:
    """Return a heading, the notes of the run, and the table of one suite. Pure."""
    lines = [f"## {suite['suite']}", "", f"`kvtier bench {suite['suite']}`", ""]
    lines += ["| what | measured | bar or peer | met |", "|---|---:|---|---|"]
    lines += [f"| {' | '.join(cells_of(measurement))} |" for measurement in suite["measurements"]]
    if suite["notes"]:
        lines += ["", "```text", *suite["notes"], "```"]
    return "\n".join(lines).rstrip() + "\n"


def cells_of(measurement: Document) -> tuple[str, str, str, str]:
    """Return the four cells of a measurement. Pure."""
    unit, bar = measurement["unit"], measurement["bar"]
    medians = measurement["medians"]
    others = [
        f"{name} {format_number(medians[name])} {unit}: {ratio['median']:.2f}{_bar_mark(name, bar)}"
        for name, ratio in measurement["ratios"].items()
    ]
    if bar is not None and bar["against"] is None:
        side = "at least" if measurement["better"] == "higher" else "at most"
        others.insert(0, f"{side} {bar['value']:g} {unit}")
    met = "" if bar is None else {True: "yes", False: "**no**", None: "not measured"}[bar["is_met"]]
    return what_of(measurement["labels"]), f"{format_number(medians[OURS])} {unit}", "; ".join(others), met


def what_of(labels: Mapping[str, str | int]) -> str:
    """Return the labels of a measurement as words. Pure."""
    return ", ".join(
        f"{value:,} {name}" if isinstance(value, int) else value
        for name, value in labels.items()
        if value != ""
    )


def format_number(value: float) -> str:
    """Return a value with about four digits. Pure."""
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 3
    return f"{value:,.{digits}f}"


def first_tokens_of(suites: Sequence[Document], day: date) -> dict[str, object]:
    """Return the times to first token of one length by where the prompt came from, ms. Pure.

    Raises:
        ValueError: the run has no full suite ``engine``.
    """
    lines = {
        line["labels"]["prompt from"]: line["medians"]
        for suite in suites
        if suite["suite"] == "engine"
        for line in suite["measurements"]
        if line["labels"].get("tokens") == FIRST_TOKEN_TOKENS
    }
    if not {"host", "fs"} <= lines.keys():
        raise ValueError(f"no times to first token of {FIRST_TOKEN_TOKENS} tokens: run `kvtier bench engine`")
    host, machine = lines["host"], suites[0]["machine"]
    times_ms = {
        "computed": host["computed"],
        "device": host["device"],
        "host": host[OURS],
        "fs": lines["fs"][OURS],
    }
    return {
        "tokens": FIRST_TOKEN_TOKENS,
        "date": day.isoformat(),
        "commit": machine.get("commit", "unknown"),
        "processor": machine.get("processor", "unknown"),
        "ms": times_ms,
    }


def _bar_mark(name: str, bar: Mapping[str, Any] | None) -> str:  # Any: JSON
    return f" (bar {bar['value']:.3g})" if bar is not None and bar["against"] == name else ""


if __name__ == "__main__":
    sys.exit(main())
