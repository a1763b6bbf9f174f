"""``kvtier bench NAME``: measure kvtier on this machine against the machine's own speed and against its peers.

The benchmarks are part of the source tree, beside the package, and are loaded from there. An installed package without
that tree raises an error that says where to get it.
"""

import importlib
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

import kvtier
from kvtier.cli.output import JsonOption, print_json, stdout_to_stderr
from kvtier.errors import ConfigError

SOURCE_TREE = Path(kvtier.__file__).resolve().parents[2]
"""The source tree, when the package runs from one."""

ALL = "all"
MARKER = Path("benchmarks", "harness", "__init__.py")


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(help="Which, or all; without a name they are listed.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and rounds.")] = False,
    folder: Annotated[Path | None, typer.Option("--dir", help="Write files below this folder.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Keep NAME.json and NAME.svg here.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--compare",
            metavar="FOLDER_A FOLDER_B",
            help="Measure nothing; show how far two saved runs agree.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure kvtier on this machine. Prints tables: kvtier, the floor, peers, ratios and bars.

    With --json the tables go to stderr.

    Raises:
        ConfigError: the benchmark or the saved run does not exist, or the source tree is missing.
    """
    if compare is not None:
        _compare(*compare, as_json=as_json)
        return
    suites = _load("benchmarks.suites")
    if not names:
        _list(suites, as_json=as_json)
        return
    chosen = []
    for name in [suite.name for suite in suites.SUITES] if names == [ALL] else names:
        try:
            chosen.append(suites.find_suite(name))
        except KeyError as error:
            raise ConfigError("NAME", name, str(error.args[0])) from error
    run = partial(
        _load("benchmarks.harness.run").run_suites, chosen, is_quick=quick, folder=folder, out_folder=out
    )
    if not as_json:
        run()
        return
    with stdout_to_stderr():
        documents = run()
    print_json({"runs": documents})


def _list(suites: ModuleType, *, as_json: bool) -> None:
    if as_json:
        print_json({"suites": [{"name": suite.name, "summary": suite.summary} for suite in suites.SUITES]})
        return
    for suite in suites.SUITES:
        typer.echo(f"{suite.name:10} {suite.summary}")


def _compare(first: Path, second: Path, *, as_json: bool) -> None:
    agreement = _load("benchmarks.harness.agreement")
    try:
        comparison = agreement.compare_folders(first, second)
    except (OSError, ValueError) as error:
        raise ConfigError("--compare", f"{first} {second}", str(error)) from error
    if as_json:
        print_json(comparison.to_json())
        return
    for line in agreement.lines_of(comparison):
        typer.echo(line)


def _load(module: str) -> ModuleType:
    if not (SOURCE_TREE / MARKER).exists():
        remedy = "benchmarks come with the source: clone it, then `make venv` and run kvtier from there"
        raise ConfigError("bench", str(SOURCE_TREE), remedy)
    if str(SOURCE_TREE) not in sys.path:
        sys.path.insert(0, str(SOURCE_TREE))
    return importlib.import_module(module)
