"""Writes ``docs/results/identity.md``: which changes of an engine separate its blocks from another one's.

Each row starts real engines on a tiny model: one stores a prompt, the other one, which differs in one thing, looks for
it. The embedded engine's rows take a minute; ``--vllm`` adds those of real vLLM engines, some 15 minutes, and needs
the environment of ``make bench-peers``, where the keys of vLLM's own file tier and of LMCache are made as well. The
page carries its rows, hidden, so that ``--only TEXT --keep`` can run some again and keep the others.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.identity import changes, matrix
from benchmarks.identity.row import Row, render_table, summarize

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results" / "identity.md"
BEGIN, END = "<!-- made by scripts.identity_matrix -->\n", "<!-- end -->\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the rows and write the page; the status is 1 when a row finds too much or too little."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", action="store_true", help="add the rows of real vLLM engines")
    parser.add_argument("--rows", type=Path, help="keep the rows there as JSON")
    parser.add_argument("--only", metavar="TEXT", help="only rows whose name has this text")
    parser.add_argument(
        "--keep", action="store_true", help="with --only: write the page, with the other rows as they are"
    )
    given = parser.parse_args(arguments)
    rows = []
    for row in _run(given.only, has_vllm=given.vllm):
        rows.append(row)
        print(f"{row.group}: {row.name}: found {row.num_found}, may find {row.num_shared}", flush=True)
        if given.rows is not None:
            given.rows.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if given.only is None:
        write_page(PAGE, rows)
    elif given.keep:
        write_page(PAGE, merge_rows(read_page(PAGE), rows))
    print(summarize(rows))
    if any(row.is_leak or row.is_lost for row in rows):
        sys.exit(1)


def _run(only: str | None, *, has_vllm: bool) -> Iterator[Row]:
    yield from matrix.run_matrix([one for one in changes.list_changes() if only is None or only in one.name])
    if has_vllm:
        from benchmarks.identity import vllm_matrix

        of_vllm = [one for one in vllm_matrix.list_changes() if only is None or only in one.name]
        with tempfile.TemporaryDirectory() as folder:
            yield from vllm_matrix.run_matrix(Path(folder), of_vllm)


def merge_rows(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Return the rows of the page with those that were run again in their places, and new ones behind. Pure."""
    by_name = {(row.group, row.name): row for row in old} | {(row.group, row.name): row for row in new}
    return list(by_name.values())


def read_page(page: Path) -> list[Row]:
    """Return the rows that a page has."""
    found = re.search(re.escape(BEGIN) + r"<!-- (\[.*\]) -->\n", page.read_text(encoding="utf-8"))
    return [Row(**row) for row in json.loads(found[1])] if found else []


def write_page(page: Path, rows: Sequence[Row]) -> None:
    """Put the rows between the page's two marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    hidden = f"<!-- {json.dumps([asdict(row) for row in rows])} -->\n"
    made = f"{BEGIN}{hidden}\n{summarize(rows)}\n\n{render_table(rows)}\n{END}"
    page.write_text(before + made + after, encoding="utf-8")


if __name__ == "__main__":
    main()
