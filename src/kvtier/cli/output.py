"""What several commands print and write: tables of numbers, a console wide enough for them, checks, result files."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvtier.cli.page.figures import require_plotly
from kvtier.errors import ConfigError

PLAIN_COLUMNS = 200
"""Width where the output is not a terminal. Rich would take 80 columns and cut numbers; rows have about 120 with a
handful of tiers."""


STDOUT_FD, STDERR_FD = 1, 2

STDOUT = Path("-")
"""The file of ``--json`` that stands for stdout; tables go to stderr then."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


class CheckResult(Enum):
    """Result of a check."""

    GOOD = "ok"
    NOTE = "note"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's report.

    Attributes:
        subject: what was checked.
        result: how the check ended.
        found: what was found and, if it is not good, what to do.
    """

    subject: str
    result: CheckResult
    found: str


def make_console(*, is_stderr: bool = False) -> Console:
    """Return a console for tables: as wide as the terminal, or ``PLAIN_COLUMNS`` where there is none.

    Args:
        is_stderr: whether it writes to stderr, because the numbers go to stdout.
    """
    console = Console(stderr=is_stderr)
    return console if console.is_terminal else Console(width=PLAIN_COLUMNS, stderr=is_stderr)


def print_json(value: object) -> None:
    """Print a value as JSON on stdout, for programs."""
    typer.echo(json.dumps(value, indent=1))


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Let what the block and the processes that it starts write to stdout go to stderr."""
    sys.stdout.flush()
    with redirect_stdout(sys.stderr):
        kept = os.dup(STDOUT_FD)
        os.dup2(STDERR_FD, STDOUT_FD)
        try:
            yield
        finally:
            os.dup2(kept, STDOUT_FD)
            os.close(kept)


def print_line(console: Console, text: str) -> None:
    """Print a sentence: on a terminal broken between words, elsewhere as one line, for programs that search it."""
    console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def make_table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    """Return a table without rows. Pure."""
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1))
    for heading in names:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def command_line(context: typer.Context, command: str) -> tuple[str, ...]:
    """Return the given words as a user would type them again."""
    words = ["kvtier", command]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        source = context.get_parameter_source(parameter.name or "")
        if source is None or source.name != "COMMANDLINE" or value is None:
            continue
        for one in value if isinstance(value, list | tuple) else [value]:
            is_option = parameter.opts[0].startswith("-")
            words += [parameter.opts[0], str(one)] if is_option else [str(one)]
    return tuple(words)


def check_writable(option: str, path: Path) -> None:
    """Check that a result file can be written, before there are results.

    Raises:
        ConfigError: it cannot be written. Its content is kept until ``write_result``.
    """
    try:
        # O_NONBLOCK: opening a pipe that nothing reads would block.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        os.close(os.open(path, flags, 0o666))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no name of a file"
        remedy = f"cannot be written ({reason}): give a file in an existing directory"
        raise ConfigError(option, str(path), remedy) from error


def write_result(option: str, path: Path, text: str) -> None:
    """Write a result file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        # A word of the command line may have bytes that are no text.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(option, str(path), f"cannot be written: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files that a command writes.

    Attributes:
        json_file: for the numbers; ``STDOUT``: printed; None: not written.
        html_file: for the page; None: not written.
    """

    json_file: Path | None
    html_file: Path | None

    @property
    def are_numbers_printed(self) -> bool:
        """Whether stdout gets the numbers, and stderr the tables."""
        return self.json_file == STDOUT

    def check_writable(self) -> None:
        """Check each file before there are results, so that a wrong path costs none.

        Raises:
            ConfigError: one cannot be written. Its content is kept until ``write``.
            MissingExtraError: plotly, for the plots of the page, is not installed.
        """
        if self.html_file is not None:
            require_plotly()
        for option, path in (("--json", self.json_file), ("--html", self.html_file)):
            if path is not None and not (option == "--json" and self.are_numbers_printed):
                check_writable(option, path)

    def write(self, to_json: Callable[[], object], make_page: Callable[[], str]) -> None:
        """Write each file.

        Raises:
            ConfigError: one cannot be written.
        """
        if self.are_numbers_printed:
            print_json(to_json())
        elif self.json_file is not None:
            write_result("--json", self.json_file, json.dumps(to_json(), indent=1) + "\n")
        if self.html_file is not None:
            write_result("--html", self.html_file, make_page())


def format_change(before_s: float, after_s: float) -> str:
    """Return two times with one unit, such as "2.37 -> 1.51 s"; times below a second are in milliseconds. Pure."""
    if max(before_s, after_s) < 1:
        return f"{before_s * 1e3:.0f} -> {after_s * 1e3:.0f} ms"
    return f"{before_s:.2f} -> {after_s:.2f} s"
